"""When which fault strikes: the plan is walked as the run's step and the clock move on.

Faults of one node keep their order: one that cannot be done yet holds back those behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from simnet.scenario import Action, Fault

Apply = Callable[[str, Action], bool]
"""Does an action to a node by name; False when it has to be tried again."""


class FaultPlan:
    """The faults still to come, a queue for each node."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._queues: dict[str, deque[Fault]] = {}
        for fault in faults:
            self._queues.setdefault(fault.node, deque()).append(fault)

    def strike(self, apply: Apply, *, step: int, elapsed_s: float) -> list[Fault]:
        """Apply every fault that is due; those that were applied, in the order in which they were."""
        done = []
        for queue in self._queues.values():
            while queue and _due(queue[0], step, elapsed_s) and apply(queue[0].node, queue[0].action):
                done.append(queue.popleft())
        return done

    def will_join(self, node: str) -> bool:
        """Whether a node that is gone is meant to come back."""
        return any(fault.action == "join" for fault in self._queues.get(node, ()))


def _due(fault: Fault, step: int, elapsed_s: float) -> bool:
    if fault.at_step is not None:
        return step >= fault.at_step
    return fault.at_s is not None and elapsed_s >= fault.at_s

"""Striking the faults of a plan: it is walked as the run's step and the clock move on.

Faults of one node keep their order: one that cannot be done yet holds back those behind it, and one that lasts a
while is undone before the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Literal, Protocol

from simnet.scenario import Action, Fault
from simnet.timeline import UNDO, undone

Struck = Literal["struck", "not yet", "missed"]
"""What came of a fault: done; to be tried again; or nothing, as its node was not there."""
Apply = Callable[[Fault], Struck]
"""Does to a node what a fault says."""
_UNDOING: Final = frozenset(UNDO.values()) - frozenset(UNDO)


class Deed(Protocol):
    """A fault that is planned, or the mark of one that struck."""

    @property
    def action(self) -> Action: ...

    @property
    def seconds(self) -> float | None: ...


def undoes(deed: Deed) -> bool:
    """Whether it takes a fault back, rather than being one: a clock goes back to what it was by `clock` too."""
    return deed.action in _UNDOING or (deed.action == "clock" and not deed.seconds)


class FaultPlan:
    """The faults still to come, a queue for each node."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.missed: list[Fault] = []
        """Those whose moment came when their node was not there: they were left out, and are not undone."""
        self._queues: dict[str, deque[Fault]] = {}
        for fault in faults:
            self._queues.setdefault(fault.node, deque()).append(fault)

    def strike(self, apply: Apply, *, step: int, elapsed_s: float) -> list[Fault]:
        """Apply every fault that is due; those that were applied, in the order in which they were."""
        done = []
        for queue in self._queues.values():
            while queue and _due(queue[0], step, elapsed_s) and (struck := apply(queue[0])) != "not yet":
                fault = queue.popleft()
                if struck == "missed":
                    self.missed.append(fault)
                    continue
                done.append(fault)
                self._begin(fault, queue, elapsed_s)
        return done

    def will_join(self, node: str) -> bool:
        """Whether a node that is gone is meant to come back: also one for which there is no room, once there is."""
        return any(fault.action in ("join", "disk-free") for fault in self._queues.get(node, ()))

    def _begin(self, fault: Fault, queue: deque[Fault], elapsed_s: float) -> None:
        if fault.action == "restart":
            queue.appendleft(Fault(node=fault.node, action="join", at_s=elapsed_s))
        elif fault.for_s is not None:
            queue.appendleft(undone(fault, at_s=elapsed_s + fault.for_s))


def _due(fault: Fault, step: int, elapsed_s: float) -> bool:
    if fault.at_step is not None:
        return step >= fault.at_step
    return fault.at_s is not None and elapsed_s >= fault.at_s

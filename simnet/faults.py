"""Striking the faults of a plan: it is walked as the run's step and the clock move on.

Faults of one node keep their order: one that cannot be done yet holds back those behind it, and one that lasts a
while is undone before the next.
"""

from __future__ import annotations

from collections import Counter, deque
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
        self.struck = 0
        """How many of those that were planned struck; what undoes one is not counted."""
        self._queues: dict[str, deque[Fault]] = {}
        self._left_out: list[Fault] = []
        """Those of the missed that were planned, to the end."""
        self._undoing: dict[str, Fault] = {}
        """What has to be taken back at a node before anything else happens to it."""
        for fault in faults:
            self._queues.setdefault(fault.node, deque()).append(fault)
        self.planned = sum(map(len, self._queues.values()))

    def strike(self, apply: Apply, *, step: int, elapsed_s: float) -> list[Fault]:
        """Apply every fault that is due; those that were applied, in the order in which they were."""
        done = []
        for node in self._queues:
            while (fault := self._next(node)) and _due(fault, step, elapsed_s) and (came := apply(fault)) != "not yet":
                planned = self._take(node)
                if came == "missed":
                    self.missed.append(fault)
                    self._left_out += [fault] if planned else []
                    continue
                done.append(fault)
                if planned:
                    self._begin(fault, elapsed_s)
        return done

    @property
    def waiting(self) -> list[Fault]:
        """Those that were planned and whose turn has not come."""
        return [fault for queue in self._queues.values() for fault in queue]

    @property
    def undoing(self) -> list[Fault]:
        """What would still take back those that struck."""
        return list(self._undoing.values())

    def shortfalls(self) -> list[str]:
        """What was planned and has not come about, for people."""
        said = []
        if never := [*self._left_out, *self.waiting]:
            said.append(f"{len(never)} of {self.planned} planned faults never struck: {_whose(never)}")
        if undoing := self.undoing:
            said.append(f"struck and was not undone by the end: {_whose(undoing)}")
        return said

    def will_join(self, node: str) -> bool:
        """Whether a node that is gone is meant to come back: also one for which there is no room, once there is."""
        return any(one.node == node and one.action in ("join", "disk-free") for one in (*self.undoing, *self.waiting))

    def _next(self, node: str) -> Fault | None:
        queue = self._queues[node]
        return self._undoing.get(node) or (queue[0] if queue else None)

    def _take(self, node: str) -> bool:
        """Take the next one away; whether it was planned, rather than to undo one that was."""
        if self._undoing.pop(node, None):
            return False
        self._queues[node].popleft()
        return True

    def _begin(self, fault: Fault, elapsed_s: float) -> None:
        self.struck += 1
        if fault.action == "restart":
            self._undoing[fault.node] = Fault(node=fault.node, action="join", at_s=elapsed_s)
        elif fault.for_s is not None:
            self._undoing[fault.node] = undone(fault, at_s=elapsed_s + fault.for_s)


def _whose(faults: list[Fault]) -> str:
    counts = Counter(fault.node for fault in faults)
    return ", ".join(f"{node} ({count})" if count > 1 else node for node, count in counts.items())


def _due(fault: Fault, step: int, elapsed_s: float) -> bool:
    if fault.at_step is not None:
        return step >= fault.at_step
    return fault.at_s is not None and elapsed_s >= fault.at_s

"""Whether a trainer has had time enough for what it owes by its ledger (protocol.duties): evictions, reinstatements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from protocol.identity import PeerId
from protocol.ledger import LedgerState

GRACE_STEPS: Final = 2
GRACE_ENTRIES: Final = 200
"""Trained steps, or entries, after the ground, whichever come first. Nodes do it with the next entry."""


@dataclass(frozen=True)
class Undone:
    """Something that the trainer has not done: since which entry, and whether the grace is over."""

    kind: str
    contributor: PeerId
    what: str
    entry: int
    overdue: bool


def left(state: LedgerState, *, over: bool = False) -> Iterator[Undone]:
    """In ledger order. `over`: the trainer has signed that nothing follows, so there is no grace."""
    for duty in state.owed():
        steps, entries = len(state.trained) - duty.trained, state.length - duty.entry - 1
        if duty.kind == "eviction":
            what = f"a quorum of hard verdicts, and {duty.contributor} is not evicted"
        else:
            what = f"an appeal of {duty.contributor} was granted, and it is not reinstated"
        overdue = over or steps >= GRACE_STEPS or entries >= GRACE_ENTRIES
        yield Undone(f"{duty.kind}-due", duty.contributor, what, duty.entry, overdue)

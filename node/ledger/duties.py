"""What a trainer owes by its ledger's own rules, and whether it was done: evictions and reinstatements.

The rules say which entries may stand there; that one is missing, only somebody who waits for it can see. Grounds
against a contributor that is evicted already ask for nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.ledger import LedgerState, LedgerSubmission
from protocol.records import Eviction, Verdict

GRACE_STEPS: Final = 2
GRACE_ENTRIES: Final = 200
"""Trained steps, or entries, after the ground, whichever come first. Nodes do it with the next entry."""


@dataclass(frozen=True)
class Duty:
    """Something that the trainer has not done: since which entry, and whether the grace is over."""

    kind: str
    what: str
    entry: int
    overdue: bool


@dataclass(frozen=True)
class _Ground:
    """Number of the entry that gave it, the steps that were trained then, and the submission."""

    entry: int
    trained: int
    submission: bytes


class Duties:
    """Tell it of every verdict and eviction that the rules took; `left` is what is missing at the end."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self._evict: dict[PeerId, list[_Ground]] = {}
        self._granted: dict[bytes, _Ground] = {}
        """By appeal."""

    def verdict(self, entry: Signed[Verdict], number: int) -> None:
        record = entry.record
        ground = _Ground(number, len(self._state.trained), record.submission)
        if record.appeal:  # an answer grants or refuses, and gives no ground against anybody
            if record.outcome == "accept":
                self._granted[record.appeal] = ground
        elif record.outcome == "reject" and record.hard:
            one = self._state.submissions[record.submission]
            contributor = self._state.contributors.get(one.author)
            if contributor is not None and contributor.standing == "active" and self._is_ground(one):
                self._evict.setdefault(one.author, []).append(ground)

    def eviction(self, record: Eviction) -> None:
        self._evict.pop(PeerId(record.contributor), None)

    def left(self, *, over: bool = False) -> Iterator[Duty]:
        """In no particular order. `over`: the trainer has signed that nothing follows, so there is no grace."""
        for peer, grounds in self._evict.items():
            for ground in grounds:
                if self._is_ground(self._state.submissions[ground.submission]):
                    what = f"a quorum of hard verdicts, and {peer} is not evicted"
                    yield self._duty("eviction-due", what, ground, over)
                    break
        for appeal, ground in self._granted.items():
            peer = self._state.appeals[appeal].author
            one = self._state.contributors.get(peer)
            if one is not None and one.standing == "evicted" and one.evicted_for == ground.submission:
                what = f"an appeal of {peer} was granted, and it is not reinstated"
                yield self._duty("reinstatement-due", what, ground, over)

    def _is_ground(self, one: LedgerSubmission) -> bool:
        hard = sum(signed.record.outcome == "reject" and signed.record.hard for signed in one.verdicts.values())
        return one.state == "rejected" and hard >= self._state.manifest.quorum

    def _duty(self, kind: str, what: str, ground: _Ground, over: bool) -> Duty:
        steps, entries = len(self._state.trained) - ground.trained, self._state.length - ground.entry - 1
        return Duty(kind, what, ground.entry, over or steps >= GRACE_STEPS or entries >= GRACE_ENTRIES)

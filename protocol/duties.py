"""What a trainer owes by the ledger's rules: evictions and reinstatements that verdicts ask for and no entry has made.

The rules of protocol.ledger say what may stand in a ledger, this says what is missing from it. Both who writes and who
audits ask here: a trainer enters what it owes, after a crash too, and an audit names what it left out. Grounds against
a contributor that is evicted already ask for nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from protocol.identity import PeerId

DutyKind = Literal["eviction", "reinstatement"]


@dataclass(frozen=True)
class Duty:
    """One entry that the trainer owes, and what it must name."""

    kind: DutyKind
    contributor: PeerId
    submission: bytes
    verdict: bytes
    """Id of the hard verdict with which the quorum was reached, or of the answer that completes those
    which grant the appeal."""
    appeal: bytes
    """Id of the appeal; empty for an eviction."""
    entry: int
    """Number of the verdict's entry."""
    trained: int
    """Steps that were trained then."""


@dataclass
class Duties:
    """The ledger's state tells it of what asks for a consequence, and of the consequences."""

    _evictions: dict[PeerId, list[Duty]] = field(default_factory=dict)
    _reinstatements: dict[PeerId, Duty] = field(default_factory=dict)

    def owed(self) -> list[Duty]:
        """In ledger order, at most one for each contributor."""
        first = [grounds[0] for grounds in self._evictions.values()]
        return sorted([*first, *self._reinstatements.values()], key=lambda duty: duty.entry)

    def add(self, duty: Duty) -> None:
        """A verdict asks for a consequence."""
        if duty.kind == "eviction":
            self._evictions.setdefault(duty.contributor, []).append(duty)
        else:
            self._reinstatements[duty.contributor] = duty

    def overturned(self, peer: PeerId, submission: bytes) -> None:
        """A rejection does not stand any more, so it is no ground for an eviction."""
        left = [duty for duty in self._evictions.get(peer, ()) if duty.submission != submission]
        if left:
            self._evictions[peer] = left
        else:
            self._evictions.pop(peer, None)

    def evicted(self, peer: PeerId) -> None:
        self._evictions.pop(peer, None)

    def reinstated(self, peer: PeerId) -> None:
        self._reinstatements.pop(peer, None)

"""Breaches that an audit finds, and whom it may accuse of each: who did it, and nobody for what only follows.

An entry that is not taken leaves a hole, and what builds on it is refused after it, whoever wrote that. The order of
entries is the trainer's word, and only as far as a head that it signed names this copy's tip: a breach beyond that is
shown against nobody, for whoever keeps a copy can leave out, repeat and reorder.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec

from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.ledger import LedgerState, about
from protocol.records import Batch, Trained, Verdict

MAX_BREACHES: Final = 1000
"""Shown; all are counted."""
MAX_TEXT_CHARS: Final = 500
_OWN: Final = frozenset(
    {
        *("wrong-author", "wrong-run", "over-cap", "over-tokens", "mismatch", "policy-back"),
        *("protocol", "not-allowed", "no-invite", "invite", "work"),
    }
)
"""Rules that an entry's author breaks wherever the entry stands."""
_SIGNED: Final = frozenset({"draw"})
"""Rules that it breaks by what the ledger was when it signed, so that the order matters."""
_ELSEWHERE: Final = "the head that drew is of another ledger than this one, so it is shown against nobody"
_UNCOVERED: Final = "no head of the trainer's that is at hand covers this, so it is shown against nobody"


class Breach(msgspec.Struct, frozen=True):
    """Something that should not be: at which entry, what kind, by whom, and in words."""

    kind: str
    who: str
    what: str
    entry: int | None = None
    follows: int | None = None
    """The entry before it without which this may be none."""


class Breaches:
    """All that was found, counted by kind; the first ones in words."""

    def __init__(self) -> None:
        self.found: list[Breach] = []
        self.counts: Counter[str] = Counter()
        self.following: Counter[str] = Counter()
        """What may only follow from those, by kind."""
        self._until: dict[int, int] = {}
        """By place in `found`: entries that must be as the trainer signed them for the accusation to stand."""

    def add(
        self,
        kind: str,
        who: PeerId | None,
        what: str,
        *,
        entry: int | None = None,
        until: int = 0,
        follows: int | None = None,
    ) -> None:
        """`until`: the accusation stands if so many entries are as the trainer signed them."""
        (self.counts if follows is None else self.following)[kind] += 1
        if len(self.found) >= MAX_BREACHES:
            return
        if follows is not None:
            who, what = None, f"{what[: MAX_TEXT_CHARS - 60]}; may follow from entry {follows}"
        elif until:
            self._until[len(self.found)] = until
        self.found.append(Breach(kind, str(who) if who else "", what[:MAX_TEXT_CHARS], entry, follows))

    def close(self, confirmed: int) -> None:
        """So many entries are as the trainer signed them."""
        for place, until in self._until.items():
            one = self.found[place]
            if until > confirmed and one.who:
                what = f"{one.what[: MAX_TEXT_CHARS - len(_UNCOVERED) - 2]}; {_UNCOVERED}"
                self.found[place] = msgspec.structs.replace(one, who="", what=what)


class Holes:
    """Entries that the replay did not take, and what is no longer known because of them."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self.trainer = state.manifest.trainer_id
        self._everything: int | None = None
        """Since this entry."""
        self._peers: dict[PeerId, int] = {}
        """By contributor: the first entry that is missing of those about it."""

    def add(self, entry: Signed[Any] | None, number: int) -> None:
        """An entry was not taken; None where nobody knows what it was. Of batches and steps everybody's work hangs."""
        if entry is None or isinstance(entry.record, Batch | Trained):
            self._everything = number if self._everything is None else self._everything
            return
        for peer in self._touched(entry):
            self._peers.setdefault(peer, number)

    def before(self, entry: Signed[Any]) -> int | None:
        """The entry without which this one may have been refused; None where that one is whole."""
        if self._everything is not None:
            return self._everything
        if isinstance(entry.record, Batch):
            return self._before_batch(entry.record)
        return min((hole for peer in self._touched(entry) if (hole := self._peers.get(peer)) is not None), default=None)

    def about(self, peer: PeerId) -> int | None:
        """The same for what the ledger makes of a contributor."""
        return self._peers.get(peer) if self._everything is None else self._everything

    def _before_batch(self, batch: Batch) -> int | None:
        for key in batch.submissions:
            one = self._state.submissions.get(key)
            hole = min(self._peers.values(), default=None) if one is None else self._peers.get(one.author)
            if hole is not None:
                return hole
        return None

    def _touched(self, entry: Signed[Any]) -> set[PeerId]:
        peers = {about(entry)}
        if isinstance(entry.record, Verdict) and (one := self._state.submissions.get(entry.record.submission)):
            peers.add(one.author)
        return {peer for peer in peers if peer is not None}


def refused(
    breaches: Breaches,
    holes: Holes,
    entry: Signed[Any],
    kind: str,
    message: str,
    *,
    number: int,
    elsewhere: bool = False,
) -> None:
    """The rules refuse an entry. Whoever keeps them may not put such a one in its place: that is the trainer's doing,
    unless its author breaks a rule wherever it stands. `elsewhere`: its author kept the rules of another ledger, for
    all that is known, of which the trainer has signed a head; that fork is the breach, and this one nobody's.
    """
    if elsewhere:
        breaches.add(kind, None, f"{message}; {_ELSEWHERE}", entry=number, follows=holes.before(entry))
        return holes.add(entry, number)
    who = entry.author if kind in _OWN | _SIGNED else holes.trainer
    what = message if who == entry.author else f"{message}; its author is {entry.author}"
    follows = None if kind in _OWN else holes.before(entry)
    breaches.add(kind, who, what, entry=number, until=0 if kind in _OWN else number + 1, follows=follows)
    holes.add(entry, number if follows is None else follows)

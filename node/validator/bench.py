"""Which submissions a validator judges: m of the n in the manifest, drawn by the beacon, the others standing by.

Whoever stands by steps in where verdicts contradict each other, where one could not tell, or where too few came within
some heads; it is dismissed once a quorum agrees. Judging more than is due is never wrong, so whoever cannot know does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from node.ledger.memory import looked_at
from node.validator.docket import OpenCase
from node.validator.draws import PATIENCE_S, Draws
from protocol.draw import beacon_of, is_first_after, judges
from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.ledger import LedgerState
from protocol.records import Head, Manifest, Submission, Verdict

REPLACE_HEADS: Final = 15
"""So many heads after the beacon an absent judge is replaced; the next one as many later."""
MAX_VOTES: Final = 1 << 16

Turn = Literal["now", "later", "never"]


def judging_kinds(manifest: Manifest) -> list[str]:
    """What a validator follows in feeds: others' verdicts too, where there are more validators than judge."""
    shares = len(manifest.validators) > manifest.quorum
    return [Submission.KIND, Verdict.KIND] if shares else [Submission.KIND]


@dataclass(frozen=True)
class _Heard:
    """What another validator's verdict says, before the ledger has it."""

    outcome: str
    contributor: bytes
    step: int
    excused: bool
    """Accepted without the costly checks: whether the ledger takes that, its evidence has yet to show."""


class Bench:
    """One validator's view of who judges what."""

    def __init__(self, own: PeerId, ledger: LedgerState, draws: Draws) -> None:
        self._own = own
        self._ledger = ledger
        self._draws = draws
        self._validators = ledger.manifest.validator_ids
        self._quorum = ledger.manifest.quorum
        self._votes: OrderedDict[bytes, dict[PeerId, _Heard]] = OrderedDict()

    @property
    def shares(self) -> bool:
        """Whether there are more validators than judge each submission."""
        return len(self._validators) > self._quorum

    def heard(self, verdict: Signed[Verdict]) -> None:
        """Another validator has judged a submission."""
        record = verdict.record
        if verdict.author != self._own and not record.appeal:
            votes = self._votes.setdefault(record.submission, {})
            if verdict.author not in votes or votes[verdict.author].outcome == "undecided":
                excused = record.outcome == "accept" and not record.draw.drawn
                votes[verdict.author] = _Heard(record.outcome, record.contributor, record.step, excused)
            if len(self._votes) > MAX_VOTES:
                self._votes.popitem(last=False)

    def turn(self, case: OpenCase, *, waited_s: float) -> Turn:
        """Whether this validator judges a submission now, perhaps later, or has no need to any more."""
        if not self.shares:
            return "now"
        entered = self._entered(case)
        heard = {peer: one for peer, one in self._heard(case).items() if entered.get(peer) in (None, "undecided")}
        votes = list((entered | {peer: one.outcome for peer, one in heard.items()}).values())
        agreed = max(votes.count("accept"), votes.count("reject")) >= self._quorum
        if agreed and not any(one.excused for one in heard.values()):
            return "never"
        beacon = self._draws.beacon(case.receipt.record.head_sequence)
        if beacon is None:
            return "now" if waited_s > PATIENCE_S else "later"
        if not is_first_after(beacon.record, case.receipt.record):
            return "now"
        if agreed and self._draws.heads_since(beacon.record.sequence) < REPLACE_HEADS:
            return "later"  # the ledger will say so, unless a verdict does not hold
        return "now" if self._is_called(case, beacon, len(votes)) else "later"

    def _is_called(self, case: OpenCase, beacon: Signed[Head], votes: int) -> bool:
        order = judges(beacon_of(beacon), case.submission.id, self._validators)
        behind = order.index(self._own) - self._quorum
        if behind < 0:
            return True
        absent = self._draws.heads_since(beacon.record.sequence) // REPLACE_HEADS
        return behind < absent or behind <= votes - self._quorum

    def _entered(self, case: OpenCase) -> dict[PeerId, str]:
        known = looked_at(self._ledger.submissions, case.submission.id)
        return {} if known is None else {one.author: one.record.outcome for one in list(known.verdicts.values())}

    def _heard(self, case: OpenCase) -> Mapping[PeerId, _Heard]:
        """Without those that contradict the submission itself: no ledger counts them."""
        author, step = case.submission.author.public_key, case.submission.record.step
        votes = self._votes.get(case.submission.id, {})
        return {peer: one for peer, one in votes.items() if (one.contributor, one.step) == (author, step)}

"""Which submissions a validator judges: m of the n in the manifest, drawn by the beacon, the others standing by.

Whoever stands by steps in where verdicts contradict each other, where one could not tell, or where too few came within
some heads; it is dismissed once a quorum agrees. Judging more than is due is never wrong, so whoever cannot know does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, Literal

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


class Bench:
    """One validator's view of who judges what."""

    def __init__(self, own: PeerId, ledger: LedgerState, draws: Draws) -> None:
        self._own = own
        self._ledger = ledger
        self._draws = draws
        self._validators = ledger.manifest.validator_ids
        self._quorum = ledger.manifest.quorum
        self._votes: OrderedDict[bytes, dict[PeerId, str]] = OrderedDict()

    @property
    def shares(self) -> bool:
        """Whether there are more validators than judge each submission."""
        return len(self._validators) > self._quorum

    def heard(self, verdict: Signed[Verdict]) -> None:
        """Another validator has judged a submission."""
        if verdict.author != self._own and not verdict.record.appeal:
            votes = self._votes.setdefault(verdict.record.submission, {})
            if votes.get(verdict.author, "undecided") == "undecided":
                votes[verdict.author] = verdict.record.outcome
            if len(self._votes) > MAX_VOTES:
                self._votes.popitem(last=False)

    def turn(self, case: OpenCase, *, waited_s: float) -> Turn:
        """Whether this validator judges a submission now, perhaps later, or has no need to any more."""
        if not self.shares:
            return "now"
        votes = list(self._votes_on(case.submission.id).values())
        if max(votes.count("accept"), votes.count("reject")) >= self._quorum:
            return "never"
        beacon = self._draws.beacon(case.receipt.record.head_sequence)
        if beacon is None:
            return "now" if waited_s > PATIENCE_S else "later"
        if not is_first_after(beacon.record, case.receipt.record):
            return "now"
        return "now" if self._is_called(case, beacon, len(votes)) else "later"

    def _is_called(self, case: OpenCase, beacon: Signed[Head], votes: int) -> bool:
        order = judges(beacon_of(beacon), case.submission.id, self._validators)
        behind = order.index(self._own) - self._quorum
        if behind < 0:
            return True
        absent = self._draws.heads_since(beacon.record.sequence) // REPLACE_HEADS
        return behind < absent or behind <= votes - self._quorum

    def _votes_on(self, submission: bytes) -> Mapping[PeerId, str]:
        known = self._ledger.submissions.get(submission)
        entered = {} if known is None else {one.author: one.record.outcome for one in known.verdicts.values()}
        return entered | self._votes.get(submission, {})

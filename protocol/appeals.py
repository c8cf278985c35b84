"""Getting a rejection judged once more: the ledger's rules for appeals and their answers.

Once for each verdict, one at a time for each contributor, within the validity window, and answered by a validator that
has not decided about the submission before. Whoever was wrong to appeal waits as long as a window is before the next
one. Where none of those who are left can tell, the appeal ends, and may be filed once more.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn

from protocol.envelope import Signed
from protocol.errors import LedgerError
from protocol.identity import PeerId
from protocol.ledger_memory import LedgerSubmission
from protocol.records import Appeal, Verdict
from protocol.standing import Contributor

MAX_FILINGS: Final = 2
"""Against one verdict: the second only where nobody could tell at the first."""
AppealState = Literal["open", "granted", "refused", "undecided"]


@dataclass
class LedgerAppeal:
    """One appeal's life in the ledger."""

    record: Appeal
    author: PeerId
    place: int
    """Number of its entry."""
    state: AppealState = "open"
    """`undecided`: every validator that was left could not tell."""
    answer: bytes = b""
    """Id of the verdict that granted or refused it."""
    ended_step: int = 0
    """Steps that were trained when it ended undecided."""


@dataclass
class Appeals:
    """The appeals of one run."""

    window_steps: int
    """As long as credits take to mature."""
    validators: Set[PeerId]
    cases: dict[bytes, LedgerAppeal] = field(default_factory=dict)
    """By the appeal's id."""
    _filed: dict[bytes, list[bytes]] = field(default_factory=dict)
    """By verdict that was appealed against: the appeals, one or two."""
    _open: dict[PeerId, bytes] = field(default_factory=dict)
    """By contributor: its appeal that nobody has answered."""

    def open_ids(self) -> list[bytes]:
        """Appeals that wait for an answer, in ledger order."""
        return sorted(self._open.values(), key=lambda appeal: self.cases[appeal].place)

    def check(
        self, entry: Signed[Appeal], submission: LedgerSubmission | None, contributor: Contributor, *, trained: int
    ) -> None:
        """Raise LedgerError unless this may be the next entry, with so many steps trained."""
        record = entry.record
        if submission is None:
            _refuse("unknown-submission", "an appeal about a submission that is not in the ledger")
        if submission.author != entry.author:
            _refuse("not-yours", f"only {submission.author.short}, who handed it in, may appeal")
        before = [self.cases[key] for key in self._filed.get(record.verdict, ())]
        if entry.id in self.cases or len(before) >= MAX_FILINGS or any(one.state != "undecided" for one in before):
            _refuse("duplicate-appeal", "this verdict was appealed against before")
        rejections = {one.id for one in submission.rejections()}
        if submission.state != "rejected" or submission.settled_step is None or record.verdict not in rejections:
            _refuse("not-rejected", f"the submission is {submission.state}, and the verdict none that rejects it")
        if entry.author in self._open:
            _refuse("appeal-open", f"another appeal by {entry.author.short} waits for its answer: one at a time")
        since = max([submission.settled_step, *(one.ended_step for one in before)])
        if trained - since > self.window_steps:
            _refuse("too-late", f"it was rejected more than {self.window_steps} steps ago")
        if trained < contributor.next_appeal:
            _refuse("too-soon", f"an appeal was refused before; the next one is after step {contributor.next_appeal}")
        if self.validators <= submission.decided():
            _refuse("nobody-left", "every validator of this run has decided about the submission")

    def may_come(self, submission: LedgerSubmission, *, trained: int) -> bool:
        """Whether a validator may yet have to judge a submission for an appeal: one that is open, or could be filed."""
        if submission.state != "rejected" or submission.settled_step is None:
            return False
        filed = [self._filed.get(one.id, []) for one in submission.rejections()]
        cases = [self.cases[appeal] for each in filed for appeal in each]
        since = max([submission.settled_step, *(one.ended_step for one in cases)])
        return any(one.state == "open" for one in cases) or trained - since <= self.window_steps

    def add(self, entry: Signed[Appeal], place: int) -> None:
        """Take one in that was checked."""
        self.cases[entry.id] = LedgerAppeal(entry.record, entry.author, place)
        self._filed.setdefault(entry.record.verdict, []).append(entry.id)
        self._open[entry.author] = entry.id

    def asked(self, verdict: Verdict) -> LedgerAppeal:
        """The appeal that a verdict may answer. Raises LedgerError."""
        case = self.cases.get(verdict.appeal)
        if case is None or case.record.submission != verdict.submission:
            _refuse("appeal", "the verdict answers an appeal that is not in the ledger, or about something else")
        if case.state != "open":
            _refuse("appeal", f"the verdict answers an appeal that was {case.state} before")
        if verdict.outcome == "accept" and not verdict.draw.drawn:
            _refuse("draw", "the verdict grants an appeal without the costly checks")
        return case

    def close(self, case: LedgerAppeal, answer: Signed[Verdict]) -> None:
        """An answer that decides it."""
        case.state = "granted" if answer.record.outcome == "accept" else "refused"
        case.answer = answer.id
        del self._open[case.author]

    def could_not_tell(self, appeal: bytes, submission: LedgerSubmission, *, trained: int) -> None:
        """One more validator answers so: the appeal ends where that was the last one left."""
        case, asked = self.cases[appeal], self.validators - submission.decided()
        if all(peer in submission.verdicts and submission.verdicts[peer].record.appeal == appeal for peer in asked):
            case.state, case.ended_step = "undecided", trained
            del self._open[case.author]

    @property
    def wait_steps(self) -> int:
        """Trained steps after a refused appeal before the same contributor may make another one."""
        return max(1, self.window_steps)


def _refuse(rule: str, message: str) -> NoReturn:
    raise LedgerError(message, rule=rule)

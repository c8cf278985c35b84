"""Getting a rejection judged once more: the ledger's rules for appeals and their answers.

Once for each submission, one at a time for each contributor, within the validity window, and answered by validators
that have not decided about the submission before: as many must agree as for a verdict, or all that were left by its
judges where these are fewer. Answers are to the submission: those to an appeal that ended without a decision count on.
None stays open for longer than a window. Whoever was wrong to appeal waits as long before the next one.
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
"""About one submission, whichever verdict is named: the second only where nobody decided at the first."""
AppealState = Literal["open", "granted", "refused", "undecided"]


@dataclass
class LedgerAppeal:
    """One appeal's life in the ledger."""

    record: Appeal
    author: PeerId
    place: int
    """Number of its entry."""
    filed_step: int
    """Steps that were trained when it was filed."""
    state: AppealState = "open"
    """`undecided`: of those who were left not enough agreed, and no others remained to be asked, or time ran out."""
    answer: bytes = b""
    """Id of the verdict with which enough agreed, so that it granted or refused it."""
    ended_step: int = 0
    """Steps that were trained when it ended, however it did."""


@dataclass(frozen=True)
class Tally:
    """What the validators that did not judge a submission at first say of it."""

    needed: int
    """So many must say the same."""
    accepts: int
    rejects: int
    left: int
    """How many may yet answer."""

    @property
    def state(self) -> AppealState:
        """What becomes of an appeal."""
        if self.accepts >= self.needed:
            return "granted"
        if self.rejects >= self.needed:
            return "refused"
        return "open" if self.missing <= self.left else "undecided"

    @property
    def missing(self) -> int:
        """Answers that it takes at the least to decide."""
        return self.needed - max(self.accepts, self.rejects)

    @property
    def may_grant(self) -> bool:
        """Whether those who are left can still grant it."""
        return self.accepts + self.left >= self.needed


@dataclass
class Appeals:
    """The appeals of one run."""

    window_steps: int
    """As long as credits take to mature."""
    validators: Set[PeerId]
    quorum: int
    """So many validators must agree for a verdict."""
    cases: dict[bytes, LedgerAppeal] = field(default_factory=dict)
    """By the appeal's id."""
    _filed: dict[bytes, list[bytes]] = field(default_factory=dict)
    """By submission: the appeals, one or two."""
    _by_author: dict[PeerId, list[bytes]] = field(default_factory=dict)
    """By contributor: its appeals, in ledger order."""
    _open: dict[PeerId, bytes] = field(default_factory=dict)
    """By contributor: its appeal that waits for answers."""

    def open_ids(self) -> list[bytes]:
        """Appeals that wait for answers, in ledger order."""
        return sorted(self._open.values(), key=lambda appeal: self.cases[appeal].place)

    def by(self, author: PeerId) -> list[bytes]:
        """A contributor's appeals, in ledger order."""
        return list(self._by_author.get(author, ()))

    def tally(self, submission: LedgerSubmission, appeal: bytes = b"") -> Tally:
        """How the answers about a rejected submission stand; who could not tell on `appeal` is not left for that one.

        How many are needed is the same at each of its appeals, so that nobody makes himself the only one who is left.
        """
        said = [one.record for one in list(submission.verdicts.values())]
        decided = [record for record in said if record.outcome != "undecided"]
        answers = [record.outcome for record in decided if record.appeal]
        unsure = sum(record.outcome == "undecided" and bool(appeal) and record.appeal == appeal for record in said)
        beside_judges = len(self.validators) - (len(decided) - len(answers))
        return Tally(
            needed=max(1, min(self.quorum, beside_judges)),
            accepts=answers.count("accept"),
            rejects=answers.count("reject"),
            left=beside_judges - len(answers) - unsure,
        )

    def once_more(self, appeal: bytes, submission: LedgerSubmission, *, trained: int) -> bool:
        """Whether there may be another appeal: nobody decided at the first one, and others may yet."""
        case = self.cases[appeal]
        first = case.state == "undecided" and len(self._about(case.record.submission)) < MAX_FILINGS
        in_time = self._waited(case.record.submission, submission, trained=trained) <= self.window_steps
        return first and in_time and self.tally(submission).may_grant

    def check(
        self, entry: Signed[Appeal], submission: LedgerSubmission | None, contributor: Contributor, *, trained: int
    ) -> None:
        """Raise LedgerError unless this may be the next entry, with so many steps trained."""
        record = entry.record
        if submission is None:
            _refuse("unknown-submission", "an appeal about a submission that is not in the ledger")
        if submission.author != entry.author:
            _refuse("not-yours", f"only {submission.author.short}, who handed it in, may appeal")
        before = self._about(record.submission)
        if entry.id in self.cases or len(before) >= MAX_FILINGS or any(one.state != "undecided" for one in before):
            _refuse("duplicate-appeal", "there was an appeal about this submission before")
        rejections = {one.id for one in submission.rejections()}
        if submission.state != "rejected" or submission.settled_step is None or record.verdict not in rejections:
            _refuse("not-rejected", f"the submission is {submission.state}, and the verdict none that rejects it")
        if entry.author in self._open:
            _refuse("appeal-open", f"another appeal by {entry.author.short} waits for its answer: one at a time")
        if self._waited(record.submission, submission, trained=trained) > self.window_steps:
            _refuse("too-late", f"it was rejected more than {self.window_steps} steps ago")
        if trained < contributor.next_appeal:
            _refuse("too-soon", f"an appeal was refused before; the next one is after step {contributor.next_appeal}")
        if not (tally := self.tally(submission)).may_grant:
            what = f"{tally.needed - tally.accepts} more must accept, and {tally.left} are left that have not decided"
            _refuse("nobody-left", f"too few validators of this run could still be asked: {what}")

    def may_come(self, key: bytes, submission: LedgerSubmission, *, trained: int) -> bool:
        """Whether a validator may yet have to judge a submission for an appeal: one that is open, or could be filed."""
        if submission.state != "rejected" or submission.settled_step is None:
            return False
        states = [one.state for one in self._about(key)]
        if "open" in states:
            return True
        may_file = len(states) < MAX_FILINGS and "refused" not in states
        in_time = may_file and self._waited(key, submission, trained=trained) <= self.window_steps
        return in_time and self.tally(submission).may_grant

    def _about(self, submission: bytes) -> list[LedgerAppeal]:
        return [self.cases[appeal] for appeal in self._filed.get(submission, ())]

    def _waited(self, key: bytes, submission: LedgerSubmission, *, trained: int) -> int:
        """Trained steps in which its author could have appealed and did not: those in which another appeal of the same
        author was open are none, since there is one at a time."""
        since = max([submission.settled_step or 0, *(one.ended_step for one in self._about(key))])
        waited = trained - since
        for case in (self.cases[appeal] for appeal in self._by_author.get(submission.author, ())):
            end = trained if case.state == "open" else case.ended_step
            waited -= max(0, end - max(since, case.filed_step))
        return waited

    def add(self, entry: Signed[Appeal], place: int, *, trained: int) -> None:
        """Take one in that was checked."""
        self.cases[entry.id] = LedgerAppeal(entry.record, entry.author, place, trained)
        self._filed.setdefault(entry.record.submission, []).append(entry.id)
        self._by_author.setdefault(entry.author, []).append(entry.id)
        self._open[entry.author] = entry.id

    def expire(self, *, trained: int) -> None:
        """One more step is trained: what nobody decided for as long as a window is ends without a decision."""
        for author, appeal in list(self._open.items()):
            case = self.cases[appeal]
            if trained - case.filed_step >= self.wait_steps:
                case.state, case.ended_step = "undecided", trained
                del self._open[author]

    def require_open(self, verdict: Verdict) -> None:
        """Raise LedgerError unless a verdict may answer the appeal that it names."""
        case = self.cases.get(verdict.appeal)
        if case is None or case.record.submission != verdict.submission:
            _refuse("appeal", "the verdict answers an appeal that is not in the ledger, or about something else")
        if case.state != "open":
            _refuse("appeal", f"the verdict answers an appeal that was {case.state} before")
        if verdict.outcome == "accept" and not verdict.draw.drawn:
            _refuse("draw", "the verdict grants an appeal without the costly checks")

    def answered(self, answer: Signed[Verdict], submission: LedgerSubmission, *, trained: int) -> LedgerAppeal:
        """One more answer, which the submission has by now: enough agree with it, or another is needed, or none is left
        that could be asked."""
        case = self.cases[answer.record.appeal]
        case.state = self.tally(submission, answer.record.appeal).state
        if case.state != "open":
            del self._open[case.author]
            case.ended_step = trained
            case.answer = answer.id if case.state != "undecided" else b""
        return case

    @property
    def wait_steps(self) -> int:
        """Trained steps for which an appeal is open at most, and after a refused one until its author's next one."""
        return max(1, self.window_steps)


def _refuse(rule: str, message: str) -> NoReturn:
    raise LedgerError(message, rule=rule)

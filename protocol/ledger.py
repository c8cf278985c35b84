"""The ledger's rules: which entries may follow which, and what they make of each contributor.

An append-only chain of envelopes. The trainer sequences them, authors sign them, and its head names the chain's tip:
tip of nothing is the run id, and each entry makes tip' = SHA-256(tip ‖ entry id). Replaying the entries gives every
node the same standing and credits. Nothing here reads a clock or a file; node.ledger stores it. A new kind of entry is
a record, a rule (a method of LedgerState) and a line in RULES.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

from protocol.admissions import Admissions
from protocol.appeals import Appeals, LedgerAppeal, Tally
from protocol.balances import FOR_GOOD
from protocol.batches import fault_of
from protocol.draw import TrackRecord, opening_heads_once, prove_undrawn
from protocol.duties import Duties, Duty, DutyKind
from protocol.envelope import Record, Signed, open_envelope, open_one_of
from protocol.errors import LedgerError, ProtocolError, WrongRunError
from protocol.identity import PeerId
from protocol.ledger_memory import BatchSubmissions, SubmissionState
from protocol.ledger_memory import LedgerMemory as LedgerMemory
from protocol.ledger_memory import LedgerSubmission as LedgerSubmission
from protocol.records import (
    Admission,
    Appeal,
    Batch,
    Eviction,
    Manifest,
    Reinstatement,
    Submission,
    Trained,
    Verdict,
)
from protocol.shelf import Shelf
from protocol.standing import Contributor

STEPS_AHEAD: Final = 1
"""A relay takes work for one step after the one that it knows of, whose batches are all in the ledger."""


def next_tip(tip: bytes, entry_id: bytes) -> bytes:
    """The chain's tip after one more entry."""
    return hashlib.sha256(tip + entry_id).digest()


def open_entry(data: bytes, *, signature_checked: bool = False) -> Signed[Any]:
    """Open an envelope of whichever kind the ledger takes. Raises ProtocolError."""
    opened = open_one_of(data, ENTRY_KINDS, signature_checked=signature_checked)
    if isinstance(opened, str):
        raise LedgerError(f"the ledger takes no {opened[:40]!r}", rule="kind")
    return opened


def about(entry: Signed[Any]) -> PeerId | None:
    """The contributor that an entry is about; None where it is about the run."""
    if isinstance(entry.record, Submission | Admission | Appeal):
        return entry.author
    key = getattr(entry.record, "contributor", None)
    return PeerId(key) if key is not None else None


class LedgerState:
    """Replays entries. `apply` either changes the state or raises and leaves it as it was."""

    def __init__(
        self,
        run_id: bytes,
        manifest: Manifest,
        *,
        operator: PeerId | None = None,
        memory: LedgerMemory | None = None,
        signatures_checked: bool = False,
    ) -> None:
        """A run's ledger before its first entry. `operator` signed the manifest: the trainer unless given.

        With `signatures_checked` none is checked here, those within entries included: other processes did it.
        """
        memory = memory or LedgerMemory()
        self.run_id = run_id
        self.manifest = manifest
        self._validators, self._trainer = manifest.validator_ids, manifest.trainer_id
        self.length = 0
        self.tip = run_id
        self._tips = memory.tips
        self._settle_memory = memory.settle
        self._tips.add(run_id)
        self.contributors: dict[PeerId, Contributor] = {}
        self.submissions = memory.submissions
        self.committed = memory.committed
        self.batches: Mapping[int, tuple[bytes, ...]] = BatchSubmissions(memory.committed)
        """Submissions of each step's batch; the entries are in `committed`."""
        self.trained = memory.trained
        self._files = memory.files
        self.shelf = Shelf(manifest.batch, self.submissions, self.contributors, self.trained)
        """Accepted work that is in no batch."""
        self.unaccepted: dict[bytes, None] = {}
        """Submissions that are not accepted, or not yet, in ledger order."""
        self._hard: dict[bytes, bytes] = {}
        """By hard verdict: the submission it rejects."""
        self._admissions = Admissions(run_id, manifest.admission, operator or self._trainer)
        self._appeals = Appeals(manifest.credits.maturity_steps, frozenset(self._validators), manifest.quorum)
        self._duties = Duties()
        self._maturing: set[PeerId] = set()
        """Contributors with credits that are not mature."""
        self.work_checked = False
        """True while entries are replayed whose proofs of work this machine has checked before."""
        self._signatures_checked = signatures_checked
        self._opens = opening_heads_once(partial(open_envelope, signature_checked=signatures_checked))

    @property
    def evicted(self) -> set[PeerId]:
        return {peer for peer, one in self.contributors.items() if one.standing == "evicted"}

    @property
    def appeals(self) -> Mapping[bytes, LedgerAppeal]:
        """All appeals, by id."""
        return self._appeals.cases

    def open_appeals(self) -> list[bytes]:
        """Appeals that wait for validators that have not decided about the submission, in ledger order."""
        return self._appeals.open_ids()

    def appeals_by(self, author: PeerId) -> list[bytes]:
        """A contributor's appeals, in ledger order."""
        return self._appeals.by(author)

    def appeal_tally(self, appeal: bytes) -> Tally:
        """How the answers to an appeal that is in the ledger stand, those to an earlier one included."""
        return self._appeals.tally(self.submissions[self.appeals[appeal].record.submission], appeal)

    def may_appeal_again(self, appeal: bytes) -> bool:
        """Whether there may be another appeal about the same work by now, as this one was undecided."""
        submission = self.submissions[self.appeals[appeal].record.submission]
        return self._appeals.once_more(appeal, submission, trained=len(self.trained))

    def admitted(self, peer: PeerId) -> bool:
        """Whether this key may hand in work, as far as admission goes; in a run that asks for none, everybody."""
        return self._admissions.admits(peer)

    def check_admission(self, entry: Signed[Admission], *, work: bool = True) -> None:
        """Raise ProtocolError unless this could be the next entry. `work`: hash its proof, some tens of ms."""
        self._require_run(entry)
        now_ms = self.committed_at_ms(len(self.batches))
        self._admissions.check(entry, now_ms=now_ms, work=work, opens=self._opens)

    def check_appeal(self, entry: Signed[Appeal]) -> None:
        """Raise ProtocolError unless this could be the next entry."""
        self._require_run(entry)
        submission = self.submissions.get(entry.record.submission)
        contributor = self.contributors.get(entry.author) or Contributor()
        self._appeals.check(entry, submission, contributor, trained=len(self.trained))

    def may_be_appealed(self, submission: bytes) -> bool:
        """Whether a submission's file may yet be needed: an appeal about it is open, or could still be filed."""
        known = self.submissions.get(submission)
        return known is not None and self._appeals.may_come(submission, known, trained=len(self.trained))

    def owed(self) -> list[Duty]:
        """Evictions and reinstatements that the trainer owes, in ledger order."""
        return self._duties.owed()

    def apply(self, data: bytes) -> Signed[Any]:
        """Check one entry against the rules and take it in.

        Raises LedgerError (its `rule` says which), or another ProtocolError if the envelope itself is bad.
        """
        entry = open_entry(data, signature_checked=self._signatures_checked)
        self.take(entry)
        return entry

    def take(self, entry: Signed[Any]) -> None:
        """The same with an entry that was opened. Raises ProtocolError."""
        self._require_run(entry)
        self._settle_memory()  # it may raise, so before anything is changed
        RULES[type(entry.record)](self, entry)
        self.pass_over(entry.id)

    def _require_run(self, entry: Signed[Any]) -> None:
        if entry.record.run_id != self.run_id:
            raise WrongRunError(f"a {entry.record.KIND} of another run")

    def pass_over(self, entry_id: bytes) -> None:
        """Count an entry into the chain and make nothing of it: for audits, which go on after one that is refused."""
        self.tip = next_tip(self.tip, entry_id)
        self._tips.add(self.tip)
        self.length += 1  # after the tip: other threads look up those below it

    def tip_at(self, length: int) -> bytes | None:
        """The tip after the first `length` entries; None when there are fewer."""
        return self._tips[length] if 0 <= length <= self.length else None

    def committed_at_ms(self, step: int) -> int:
        """When the batch before a step's was signed, or the run: the step cannot have opened earlier."""
        before = self.committed.get(step - 1)
        return self.manifest.issued_at_ms if before is None else before.issued_at_ms

    def next_index(self, author: PeerId, step: int) -> int:
        """The submission index that must come next."""
        contributor = self.contributors.get(author)
        return contributor.steps.next_index(step) if contributor else 0

    def policy_fault(self, author: PeerId, record: Submission) -> str:
        """Why a submission that is not in the ledger may not name its policy; empty if it may.

        Policies never go back from one submission to the next, by step and index, in whatever order they come. The
        policy is a part of the seed: who could choose among several would take the best of as many draws.
        """
        contributor = self.contributors.get(author)
        return contributor.steps.policy_fault(record) if contributor else ""

    def record(self, author: PeerId, length: int) -> TrackRecord:
        """What the first `length` entries make of a contributor's work. Raises LedgerError before they are replayed."""
        if length > self.length:
            _refuse("unknown-entry", f"entry {length} was not replayed yet; there are {self.length}")
        contributor = self.contributors.get(author)
        return contributor.history.at(length) if contributor else TrackRecord()

    # Rules, one a kind. Each checks everything first and only then changes anything.

    def _admission(self, entry: Signed[Admission]) -> None:
        self.check_admission(entry, work=not self.work_checked)
        self._admissions.add(entry, self.length)
        self.contributors.setdefault(entry.author, Contributor()).admitted_at = self.length

    def _submission(self, entry: Signed[Submission]) -> None:
        """An id covers author, step and index, and an index that was taken never comes next again: so a submission
        whose index comes next is none that is here, however old, and need not be looked for."""
        record = entry.record
        contributor = self.contributors.get(entry.author) or Contributor()
        if not self.admitted(entry.author):
            _refuse("not-admitted", f"{entry.author.short} was not admitted to this run")
        if contributor.standing == "evicted":
            _refuse("evicted", f"{entry.author.short} is evicted: {contributor.reason}")
        expected = contributor.steps.next_index(record.step)
        if record.index != expected and entry.id in self.submissions:
            _refuse("duplicate", "this submission is already in the ledger")
        if self._file_of(entry) in self._files:
            _refuse("duplicate-file", "its author submitted this rollout file before")
        if record.index >= self.manifest.rollout.max_submissions_per_step:
            _refuse("over-cap", f"index {record.index} is over the cap of submissions a step")
        fault = self.manifest.bounds_fault(rollouts=record.rollouts, output_tokens=record.output_tokens)
        if fault:
            _refuse("over-tokens", fault)
        if record.step > len(self.batches) + STEPS_AHEAD:
            _refuse("future", f"step {record.step}; the ledger is at step {len(self.batches)}")
        if record.index != expected:
            _refuse("not-contiguous", f"index {record.index} at step {record.step}; expected {expected}")
        fault = self.policy_fault(entry.author, record)
        if fault:
            _refuse("policy-back", fault)
        self.contributors.setdefault(entry.author, contributor).steps.add(record)
        self.submissions[entry.id] = LedgerSubmission(record, entry.author, self.length)
        self.unaccepted[entry.id] = None
        self._files.add(self._file_of(entry))

    @staticmethod
    def _file_of(entry: Signed[Submission]) -> bytes:
        """A file is its author's: seeds name key and step, so that a copy is no work of anybody else's. Were the hash
        alone to count, whoever signed for it first would keep the honest author out."""
        return hashlib.sha256(entry.author.public_key + entry.record.sha256).digest()

    def _verdict(self, entry: Signed[Verdict]) -> None:
        entry.require_author(*self._validators)
        record = entry.record
        submission = self.submissions.get(record.submission)
        if submission is None:
            _refuse("unknown-submission", "a verdict about a submission that is not in the ledger")
        if submission.was_judged_by(entry.author, record):
            _refuse("duplicate-verdict", f"{entry.author.short} has already judged this submission")
        if submission.state in ("accepted", "rejected") and not record.appeal:
            _refuse("settled", f"the submission is {submission.state}; who has not judged it is kept for an appeal")
        if record.contributor != submission.author.public_key or record.step != submission.record.step:
            _refuse("mismatch", "the verdict names another contributor or step than the submission")
        if record.outcome == "accept" and not record.draw.drawn:
            self._require_undrawn(record)
        if record.appeal:
            self._appeals.require_open(record)
        submission.verdicts.pop(entry.author, None)
        submission.verdicts[entry.author] = entry
        if record.outcome == "reject" and record.hard and not record.appeal:
            self._hard[entry.id] = record.submission
        if record.appeal:
            self._answer(submission, entry)
        else:
            self._count(submission, record)
            if entry.id in self._hard and self.contributors[submission.author].standing == "active":
                self._owe_if(self._hard_rejection(submission.author, entry.id), "eviction", entry)

    def _require_undrawn(self, verdict: Verdict) -> None:
        try:
            prove_undrawn(verdict, self.manifest, record_at=self.record, opens=self._opens)
        except ProtocolError as error:
            _refuse("draw", f"accepted without the costly checks, and nothing excuses that: {error.message}")

    def _count(self, submission: LedgerSubmission, latest: Verdict) -> None:
        votes = [verdict.record.outcome for verdict in submission.verdicts.values()]
        contributor = self.contributors[submission.author]
        if votes.count("accept") >= self.manifest.quorum:
            self._settle(latest.submission, "accepted")
            self.shelf.put(latest.submission)
            contributor.history.add(self.length + 1, accepted=True)
            self._pay(submission)
        elif votes.count("reject") >= self.manifest.quorum:
            self._settle(latest.submission, "rejected")
            label = _label(latest)
            contributor.rejected[label] = contributor.rejected.get(label, 0) + 1
            contributor.history.add(self.length + 1, accepted=False)
        elif {"accept", "reject"} <= set(votes):
            submission.state = "disputed"
        elif latest.outcome == "undecided":
            submission.state = "undecided"

    def _settle(self, key: bytes, state: SubmissionState) -> None:
        submission = self.submissions[key]
        submission.state = state
        if state == "accepted":
            self.unaccepted.pop(key, None)
        submission.settled_at, submission.settled_step = self.length + 1, len(self.trained)

    def _pay(self, submission: LedgerSubmission) -> None:
        """Credits for work that was just accepted. While its author is evicted they wait for a reinstatement."""
        contributor = self.contributors[submission.author]
        contributor.accepted += 1
        amount = self.manifest.credits.of(submission.record.output_tokens)
        due = len(self.trained) + self.manifest.credits.maturity_steps
        if contributor.standing == "active":
            contributor.balance.earn(amount, due=due)
            self._ripen(submission.author)
        else:
            contributor.balance.withhold(amount, due=due)

    def _ripen(self, peer: PeerId) -> None:
        """Make mature what is due by now."""
        trained = len(self.trained)
        balance = self.contributors[peer].balance
        balance.advance(trained if trained < self.manifest.batch.total_steps else FOR_GOOD)
        (self._maturing.add if balance.maturing else self._maturing.discard)(peer)

    def _appeal(self, entry: Signed[Appeal]) -> None:
        self.check_appeal(entry)
        self._appeals.add(entry, self.length, trained=len(self.trained))

    def _answer(self, submission: LedgerSubmission, answer: Signed[Verdict]) -> None:
        case = self._appeals.answered(answer, submission, trained=len(self.trained))
        if case.state == "refused":
            self.contributors[case.author].next_appeal = len(self.trained) + self._appeals.wait_steps
        elif case.state == "granted":
            self._grant(case, submission, answer)

    def _grant(self, case: LedgerAppeal, submission: LedgerSubmission, answer: Signed[Verdict]) -> None:
        contributor = self.contributors[case.author]
        label = _label(submission.rejections()[self.manifest.quorum - 1].record)
        contributor.rejected[label] -= 1
        if not contributor.rejected[label]:
            del contributor.rejected[label]
        contributor.history.overturn(submission.settled_at or 0, self.length + 1)
        self._settle(case.record.submission, "accepted")
        submission.appeal = answer.record.appeal
        self._pay(submission)
        self._duties.overturned(case.author, case.record.submission)
        self._owe_if(self._is_ground(case), "reinstatement", answer)

    def _owe_if(self, due: bool, kind: DutyKind, verdict: Signed[Verdict]) -> None:
        record, peer = verdict.record, PeerId(verdict.record.contributor)
        if due:
            trained = len(self.trained)
            self._duties.add(Duty(kind, peer, record.submission, verdict.id, record.appeal, self.length, trained))

    def _batch(self, entry: Signed[Batch]) -> None:
        entry.require_author(self._trainer)
        record = entry.record
        if record.step != len(self.batches):
            _refuse("step", f"a batch for step {record.step}; the next one is {len(self.batches)}")
        if len(set(record.submissions)) != len(record.submissions):
            _refuse("duplicate", "a batch names a submission twice")
        for key in record.submissions:
            submission = self.submissions.get(key)
            fault = "not in the ledger" if submission is None else self.shelf.why_unusable(submission, record.step)
            if fault is not None:
                _refuse("unusable", f"submission {key.hex()[:12]} cannot be trained at step {record.step}: {fault}")
        waited_s = (record.issued_at_ms - self.committed_at_ms(record.step)) / 1e3
        fault = fault_of(self.manifest, record, waited_s=waited_s)
        if fault:
            _refuse("short", f"the batch of step {record.step} is not what this run trains on: {fault}")
        self.shelf.take(record)
        self.committed[record.step] = record

    def _trained(self, entry: Signed[Trained]) -> None:
        entry.require_author(self._trainer)
        step = entry.record.step
        if step != len(self.trained) or step not in self.batches:
            _refuse(
                "step", f"step {step} cannot be trained now: {len(self.trained)} is next, {len(self.batches)} batches"
            )
        self.trained[step] = entry.record
        self._appeals.expire(trained=len(self.trained))
        for peer in list(self._maturing):
            self._ripen(peer)

    def _eviction(self, entry: Signed[Eviction]) -> None:
        entry.require_author(self._trainer)
        peer = PeerId(entry.record.contributor)
        contributor = self.contributors.get(peer)
        if contributor is None or contributor.standing == "evicted":
            _refuse("standing", f"{peer.short} is not an active contributor")
        if not self._hard_rejection(peer, entry.record.verdict):
            _refuse("no-ground", f"no quorum of hard verdicts justifies evicting {peer.short}")
        contributor.standing = "evicted"
        contributor.reason = entry.record.reason
        contributor.evicted_for, contributor.evicted_step = self._hard[entry.record.verdict], len(self.trained)
        contributor.balance.forfeit()
        self._duties.evicted(peer)
        self._maturing.discard(peer)

    def _reinstatement(self, entry: Signed[Reinstatement]) -> None:
        entry.require_author(self._trainer)
        record, peer = entry.record, PeerId(entry.record.contributor)
        contributor = self.contributors.get(peer)
        if contributor is None or contributor.standing != "evicted":
            _refuse("standing", f"{peer.short} is not an evicted contributor")
        case = self.appeals.get(record.appeal)
        if case is None or case.author != peer or case.answer != record.verdict or not self._is_ground(case):
            _refuse("no-ground", f"no granted appeal against what evicted {peer.short} justifies its return")
        contributor.standing = "active"
        contributor.reason, contributor.evicted_for, contributor.evicted_step = "", b"", None
        contributor.balance.restore()
        self._duties.reinstated(peer)
        self._ripen(peer)

    def _is_ground(self, case: LedgerAppeal) -> bool:
        """Whether an appeal was granted that takes away what its author was evicted for."""
        contributor = self.contributors[case.author]
        evicted = contributor.standing == "evicted"
        return evicted and case.state == "granted" and case.record.submission == contributor.evicted_for

    def _hard_rejection(self, peer: PeerId, verdict_id: bytes) -> bool:
        """Whether a verdict is one of a quorum of hard ones. Answers to appeals are none: who appeals risks no more."""
        submission = self.submissions.get(self._hard.get(verdict_id, b""))
        if submission is None or submission.author != peer or submission.state != "rejected":
            return False
        said = [one.record for one in submission.verdicts.values() if not one.record.appeal]
        return sum(one.outcome == "reject" and one.hard for one in said) >= self.manifest.quorum


def _label(rejection: Verdict) -> str:
    """The check that failed, by which rejections are counted."""
    return rejection.reason.partition(":")[0] or "unnamed"


def _refuse(rule: str, message: str) -> NoReturn:
    raise LedgerError(message, rule=rule)


RULES: Final[Mapping[type[Record], Callable[[LedgerState, Signed[Any]], None]]] = {
    Admission: LedgerState._admission,
    Submission: LedgerState._submission,
    Verdict: LedgerState._verdict,
    Batch: LedgerState._batch,
    Trained: LedgerState._trained,
    Eviction: LedgerState._eviction,
    Appeal: LedgerState._appeal,
    Reinstatement: LedgerState._reinstatement,
}
ENTRY_KINDS: Final[Mapping[str, type[Record]]] = {kind.KIND: kind for kind in RULES}

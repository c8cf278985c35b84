"""The ledger's rules: which entries may follow which, and what they make of each contributor.

An append-only chain of envelopes. The trainer sequences them, authors sign them, and its head names the chain's tip:
tip of nothing is the run id, and each entry makes tip' = SHA-256(tip ‖ entry id). Replaying the entries gives every
node the same standing and credits. Nothing here reads a clock or a file; node.ledger_file stores it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NoReturn

from protocol.batches import fault_of
from protocol.draw import TrackRecord, prove_undrawn
from protocol.envelope import Record, Signed, kind_of, open_envelope
from protocol.errors import LedgerError, ProtocolError, WrongRunError
from protocol.identity import PeerId
from protocol.records import Batch, Eviction, Manifest, Submission, Trained, Verdict

ENTRY_KINDS: dict[str, type[Record]] = {kind.KIND: kind for kind in (Submission, Verdict, Batch, Trained, Eviction)}

SubmissionState = Literal["pending", "accepted", "rejected", "undecided"]


def next_tip(tip: bytes, entry_id: bytes) -> bytes:
    """The chain's tip after one more entry."""
    return hashlib.sha256(tip + entry_id).digest()


def open_entry(data: bytes) -> Signed[Any]:
    """Open an envelope of whichever kind the ledger takes. Raises ProtocolError."""
    kind = kind_of(data)
    if kind not in ENTRY_KINDS:
        raise LedgerError(f"the ledger takes no {kind[:40]!r}", rule="kind")
    return open_envelope(data, ENTRY_KINDS[kind])


@dataclass
class Contributor:
    """What the ledger knows of one contributor."""

    standing: Literal["active", "evicted"] = "active"
    reason: str = ""
    accepted: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    credits: int = 0
    """Output tokens of accepted work; an eviction forfeits them."""
    next_index: dict[int, int] = field(default_factory=dict)
    """By step: the submission index that must come next."""
    policies: list[tuple[int, int, int]] = field(default_factory=list)
    """Step, and the checkpoint steps of its first and its latest submission; by rising step."""
    history: list[tuple[int, TrackRecord]] = field(default_factory=list)
    """Its record after each entry that changed it, by the ledger's length with that entry."""


@dataclass
class LedgerSubmission:
    """One submission's life in the ledger."""

    record: Submission
    author: PeerId
    state: SubmissionState = "pending"
    verdicts: dict[PeerId, Signed[Verdict]] = field(default_factory=dict)
    used_in: int | None = None
    """The step whose batch it is in."""


class LedgerState:
    """Replays entries. `apply` either changes the state or raises and leaves it as it was."""

    def __init__(self, run_id: bytes, manifest: Manifest) -> None:
        self.run_id = run_id
        self.manifest = manifest
        self.length = 0
        self.tip = run_id
        self._tips = [run_id]
        self.contributors: dict[PeerId, Contributor] = {}
        self.submissions: dict[bytes, LedgerSubmission] = {}
        self.batches: dict[int, tuple[bytes, ...]] = {}
        self.committed: dict[int, Batch] = {}
        """The entries of `batches`."""
        self.trained: dict[int, Trained] = {}
        self._files: set[bytes] = set()
        self._rules: dict[str, Callable[[Signed[Any]], None]] = {
            Submission.KIND: self._submission,
            Verdict.KIND: self._verdict,
            Batch.KIND: self._batch,
            Trained.KIND: self._trained,
            Eviction.KIND: self._eviction,
        }

    @property
    def evicted(self) -> set[PeerId]:
        return {peer for peer, one in self.contributors.items() if one.standing == "evicted"}

    def apply(self, data: bytes) -> Signed[Any]:
        """Check one entry against the rules and take it in.

        Raises LedgerError (its `rule` says which), or another ProtocolError if the envelope itself is bad.
        """
        entry = open_entry(data)
        if entry.record.run_id != self.run_id:
            raise WrongRunError(f"a {entry.record.KIND} of another run")
        self._rules[entry.record.KIND](entry)
        self.length += 1
        self.tip = next_tip(self.tip, entry.id)
        self._tips.append(self.tip)
        return entry

    def tip_at(self, length: int) -> bytes | None:
        """The tip after the first `length` entries; None when there are fewer."""
        return self._tips[length] if 0 <= length <= self.length else None

    def usable(self, step: int) -> list[bytes]:
        """Accepted submissions that a batch for `step` may hold, in ledger order."""
        return [key for key, one in self.submissions.items() if self._why_unusable(one, step) is None]

    def stale(self, step: int) -> list[bytes]:
        """Accepted submissions that no batch from `step` on can use any more: dropped, never trained."""
        oldest = step - self.manifest.batch.max_staleness
        waiting = ((key, one) for key, one in self.submissions.items() if one.state == "accepted")
        return [key for key, one in waiting if one.used_in is None and one.record.checkpoint_step < oldest]

    def committed_at_ms(self, step: int) -> int:
        """When the batch before a step's was signed, or the run: the step cannot have opened earlier."""
        before = self.committed.get(step - 1)
        return self.manifest.issued_at_ms if before is None else before.issued_at_ms

    def next_index(self, author: PeerId, step: int) -> int:
        contributor = self.contributors.get(author)
        return contributor.next_index.get(step, 0) if contributor else 0

    def policy_fault(self, author: PeerId, record: Submission) -> str:
        """Why a submission that is not in the ledger may not name its policy; empty if it may.

        Policies never go back from one submission to the next, by step and index, in whatever order they come. The
        policy is a part of the seed: who could choose among several would take the best of as many draws.
        """
        policies = self.contributors.get(author, Contributor()).policies
        place = bisect_right(policies, record.step, key=itemgetter(0))
        if place and record.checkpoint_step < (latest := policies[place - 1])[2]:
            return (
                f"checkpoint {record.checkpoint_step} after checkpoint {latest[2]}, which it used at step {latest[0]}"
            )
        if place < len(policies) and record.checkpoint_step > (following := policies[place])[1]:
            return f"checkpoint {record.checkpoint_step} before {following[1]}, which it used at step {following[0]}"
        return ""

    def record(self, author: PeerId, length: int) -> TrackRecord:
        """What the first `length` entries make of a contributor's work. Raises LedgerError before they are replayed."""
        if length > self.length:
            _refuse("unknown-entry", f"entry {length} was not replayed yet; there are {self.length}")
        contributor = self.contributors.get(author)
        history = contributor.history if contributor else []
        known = bisect_right(history, length, key=itemgetter(0))
        return history[known - 1][1] if known else TrackRecord()

    # Rules, one a kind. Each checks everything first and only then changes anything.

    def _submission(self, entry: Signed[Submission]) -> None:
        record = entry.record
        contributor = self.contributors.get(entry.author, Contributor())
        if contributor.standing == "evicted":
            _refuse("evicted", f"{entry.author.short} is evicted: {contributor.reason}")
        if entry.id in self.submissions:
            _refuse("duplicate", "this submission is already in the ledger")
        if record.sha256 in self._files:
            _refuse("duplicate-file", "this rollout file was submitted before")
        if record.index >= self.manifest.rollout.max_submissions_per_step:
            _refuse("over-cap", f"index {record.index} is over the cap of submissions a step")
        expected = contributor.next_index.get(record.step, 0)
        if record.index != expected:
            _refuse("not-contiguous", f"index {record.index} at step {record.step}; expected {expected}")
        fault = self.policy_fault(entry.author, record)
        if fault:
            _refuse("policy-back", fault)
        self.contributors.setdefault(entry.author, contributor).next_index[record.step] = expected + 1
        _remember_policy(contributor, record)
        self.submissions[entry.id] = LedgerSubmission(record, entry.author)
        self._files.add(record.sha256)

    def _verdict(self, entry: Signed[Verdict]) -> None:
        entry.require_author(*self.manifest.validator_ids)
        record = entry.record
        submission = self.submissions.get(record.submission)
        if submission is None:
            _refuse("unknown-submission", "a verdict about a submission that is not in the ledger")
        if entry.author in submission.verdicts:
            _refuse("duplicate-verdict", f"{entry.author.short} has already judged this submission")
        if record.contributor != submission.author.public_key or record.step != submission.record.step:
            _refuse("mismatch", "the verdict names another contributor or step than the submission")
        if record.outcome == "accept" and not record.draw.drawn:
            self._require_undrawn(record)
        submission.verdicts[entry.author] = entry
        if submission.state in ("pending", "undecided"):
            self._count(submission, record)

    def _require_undrawn(self, verdict: Verdict) -> None:
        try:
            prove_undrawn(verdict, self.manifest, record_at=self.record)
        except ProtocolError as error:
            _refuse("draw", f"accepted without the costly checks, and nothing excuses that: {error.message}")

    def _count(self, submission: LedgerSubmission, latest: Verdict) -> None:
        votes = [verdict.record.outcome for verdict in submission.verdicts.values()]
        contributor = self.contributors[submission.author]
        if votes.count("accept") >= self.manifest.quorum:
            submission.state = "accepted"
            contributor.accepted += 1
            self._remember(contributor, accepted=True)
            if contributor.standing == "active":
                contributor.credits += submission.record.output_tokens
        elif votes.count("reject") >= self.manifest.quorum:
            submission.state = "rejected"
            label = latest.reason.partition(":")[0] or "unnamed"
            contributor.rejected[label] = contributor.rejected.get(label, 0) + 1
            self._remember(contributor, accepted=False)
        elif latest.outcome == "undecided":
            submission.state = "undecided"

    def _remember(self, contributor: Contributor, *, accepted: bool) -> None:
        before = contributor.history[-1][1] if contributor.history else TrackRecord()
        if accepted:
            after = TrackRecord(before.accepted + 1, before.rejected, before.streak + 1)
        else:
            after = TrackRecord(before.accepted, before.rejected + 1)
        contributor.history.append((self.length + 1, after))

    def _batch(self, entry: Signed[Batch]) -> None:
        entry.require_author(self.manifest.trainer_id)
        record = entry.record
        if record.step != len(self.batches):
            _refuse("step", f"a batch for step {record.step}; the next one is {len(self.batches)}")
        if len(set(record.submissions)) != len(record.submissions):
            _refuse("duplicate", "a batch names a submission twice")
        for key in record.submissions:
            submission = self.submissions.get(key)
            fault = "not in the ledger" if submission is None else self._why_unusable(submission, record.step)
            if fault is not None:
                _refuse("unusable", f"submission {key.hex()[:12]} cannot be trained at step {record.step}: {fault}")
        waited_s = (record.issued_at_ms - self.committed_at_ms(record.step)) / 1e3
        fault = fault_of(self.manifest, record, waited_s=waited_s)
        if fault:
            _refuse("short", f"the batch of step {record.step} is not what this run trains on: {fault}")
        for key in record.submissions:
            self.submissions[key].used_in = record.step
        self.batches[record.step] = record.submissions
        self.committed[record.step] = record

    def _why_unusable(self, submission: LedgerSubmission, step: int) -> str | None:
        if submission.state != "accepted":
            return submission.state
        if submission.used_in is not None:
            return f"already trained at step {submission.used_in}"
        if self.contributors[submission.author].standing == "evicted":
            return "its contributor is evicted"
        policy = submission.record.checkpoint_step
        if not step - self.manifest.batch.max_staleness <= policy <= step:
            return f"its policy is checkpoint {policy}"
        return None

    def _trained(self, entry: Signed[Trained]) -> None:
        entry.require_author(self.manifest.trainer_id)
        step = entry.record.step
        if step != len(self.trained) or step not in self.batches:
            _refuse(
                "step", f"step {step} cannot be trained now: {len(self.trained)} is next, {len(self.batches)} batches"
            )
        self.trained[step] = entry.record

    def _eviction(self, entry: Signed[Eviction]) -> None:
        entry.require_author(self.manifest.trainer_id)
        peer = PeerId(entry.record.contributor)
        contributor = self.contributors.get(peer)
        if contributor is None or contributor.standing == "evicted":
            _refuse("standing", f"{peer.short} is not an active contributor")
        if not self._hard_rejection(peer, entry.record.verdict):
            _refuse("no-ground", f"no quorum of hard verdicts justifies evicting {peer.short}")
        contributor.standing = "evicted"
        contributor.reason = entry.record.reason
        contributor.credits = 0

    def _hard_rejection(self, peer: PeerId, verdict_id: bytes) -> bool:
        for submission in self._rejected_of(peer):
            hard = [one for one in submission.verdicts.values() if one.record.outcome == "reject" and one.record.hard]
            if len(hard) >= self.manifest.quorum and any(one.id == verdict_id for one in hard):
                return True
        return False

    def _rejected_of(self, peer: PeerId) -> Iterable[LedgerSubmission]:
        return (one for one in self.submissions.values() if one.author == peer and one.state == "rejected")


def _remember_policy(contributor: Contributor, record: Submission) -> None:
    policies = contributor.policies
    place = bisect_right(policies, record.step, key=itemgetter(0))
    if place and policies[place - 1][0] == record.step:
        policies[place - 1] = (record.step, policies[place - 1][1], record.checkpoint_step)
    else:
        policies.insert(place, (record.step, record.checkpoint_step, record.checkpoint_step))


def _refuse(rule: str, message: str) -> NoReturn:
    raise LedgerError(message, rule=rule)

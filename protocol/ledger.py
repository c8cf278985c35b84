"""The ledger's rules: which entries may follow which, and what they make of each contributor.

An append-only chain of envelopes. The trainer sequences them, authors sign them, and its head names the chain's tip:
tip of nothing is the run id, and each entry makes tip' = SHA-256(tip ‖ entry id). Replaying the entries gives every
node the same standing and credits. Nothing here reads a clock or a file; node.ledger stores it. A new kind of entry is
a record, a rule (a method of LedgerState) and a line in RULES.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NoReturn, Protocol

from protocol.batches import fault_of
from protocol.draw import TrackRecord, prove_undrawn
from protocol.envelope import Opener, Record, Signed, kind_of, open_envelope
from protocol.errors import LedgerError, ProtocolError, WrongRunError
from protocol.identity import PeerId
from protocol.records import Batch, Eviction, Manifest, Submission, Trained, Verdict
from protocol.standing import Contributor

SubmissionState = Literal["pending", "accepted", "rejected", "undecided"]
TIP_BYTES: Final = 32


def next_tip(tip: bytes, entry_id: bytes) -> bytes:
    """The chain's tip after one more entry."""
    return hashlib.sha256(tip + entry_id).digest()


def open_entry(data: bytes, *, signature_checked: bool = False) -> Signed[Any]:
    """Open an envelope of whichever kind the ledger takes. Raises ProtocolError."""
    kind = kind_of(data)
    if kind not in ENTRY_KINDS:
        raise LedgerError(f"the ledger takes no {kind[:40]!r}", rule="kind")
    return open_envelope(data, ENTRY_KINDS[kind], signature_checked=signature_checked)


def about(entry: Signed[Any]) -> PeerId | None:
    """The contributor that an entry is about; None where it is about the run."""
    if isinstance(entry.record, Submission):
        return entry.author
    key = getattr(entry.record, "contributor", None)
    return PeerId(key) if key is not None else None


@dataclass
class LedgerSubmission:
    """One submission's life in the ledger."""

    record: Submission
    author: PeerId
    place: int = 0
    """Number of its entry."""
    state: SubmissionState = "pending"
    verdicts: dict[PeerId, Signed[Verdict]] = field(default_factory=dict)
    used_in: int | None = None
    """The step whose batch it is in."""


class Digests(Protocol):
    """A set of hashes that only grows."""

    def __contains__(self, digest: object, /) -> bool: ...

    def add(self, digest: bytes, /) -> None: ...


@dataclass
class LedgerMemory:
    """What grows with the ledger. Ordinary collections, or others that put most of it on a disk (for audits)."""

    submissions: MutableMapping[bytes, LedgerSubmission] = field(default_factory=dict)
    files: Digests = field(default_factory=set[bytes])
    committed: MutableMapping[int, Batch] = field(default_factory=dict)
    trained: MutableMapping[int, Trained] = field(default_factory=dict)


class _Batches(Mapping[int, tuple[bytes, ...]]):
    """The submissions of each step's batch, read from the entries."""

    def __init__(self, committed: Mapping[int, Batch]) -> None:
        self._committed = committed

    def __getitem__(self, step: int) -> tuple[bytes, ...]:
        return self._committed[step].submissions

    def __iter__(self) -> Iterator[int]:
        return iter(self._committed)

    def __len__(self) -> int:
        return len(self._committed)


class LedgerState:
    """Replays entries. `apply` either changes the state or raises and leaves it as it was."""

    def __init__(
        self,
        run_id: bytes,
        manifest: Manifest,
        *,
        memory: LedgerMemory | None = None,
        signatures_checked: bool = False,
    ) -> None:
        """With `signatures_checked` none is checked here, those within entries included: other processes did it."""
        memory = memory or LedgerMemory()
        self.run_id = run_id
        self.manifest = manifest
        self._validators, self._trainer = manifest.validator_ids, manifest.trainer_id
        self.length = 0
        self.tip = run_id
        self._tips = bytearray(run_id)
        self.contributors: dict[PeerId, Contributor] = {}
        self.submissions = memory.submissions
        self.committed = memory.committed
        self.batches: Mapping[int, tuple[bytes, ...]] = _Batches(memory.committed)
        """Submissions of each step's batch; the entries are in `committed`."""
        self.trained = memory.trained
        self._files = memory.files
        self._waiting: dict[bytes, int] = {}
        """Accepted submissions that are in no batch, and the number of their entry."""
        self._stale: dict[bytes, tuple[int, int]] = {}
        """Those that no batch can hold any more: number of the entry, and policy."""
        self._hard: dict[bytes, bytes] = {}
        """By hard verdict: the submission it rejects."""
        self._signatures_checked = signatures_checked
        self._opens: Opener = partial(open_envelope, signature_checked=True) if signatures_checked else open_envelope

    @property
    def evicted(self) -> set[PeerId]:
        return {peer for peer, one in self.contributors.items() if one.standing == "evicted"}

    def apply(self, data: bytes) -> Signed[Any]:
        """Check one entry against the rules and take it in.

        Raises LedgerError (its `rule` says which), or another ProtocolError if the envelope itself is bad.
        """
        entry = open_entry(data, signature_checked=self._signatures_checked)
        if entry.record.run_id != self.run_id:
            raise WrongRunError(f"a {entry.record.KIND} of another run")
        RULES[type(entry.record)](self, entry)
        self.pass_over(entry.id)
        return entry

    def pass_over(self, entry_id: bytes) -> None:
        """Count an entry into the chain and make nothing of it: for audits, which go on after one that is refused."""
        self.tip = next_tip(self.tip, entry_id)
        self._tips += self.tip
        self.length += 1  # last: other threads look up tips below it

    def tip_at(self, length: int) -> bytes | None:
        """The tip after the first `length` entries; None when there are fewer."""
        start = length * TIP_BYTES
        return bytes(self._tips[start : start + TIP_BYTES]) if 0 <= length <= self.length else None

    def usable(self, step: int) -> list[bytes]:
        """Accepted submissions that a batch for `step` may hold, in ledger order."""
        waiting = sorted(self._waiting, key=self._waiting.__getitem__)
        return [key for key in waiting if self._why_unusable(self.submissions[key], step) is None]

    def stale(self, step: int) -> list[bytes]:
        """Accepted submissions that no batch from `step` on can use any more: dropped, never trained."""
        oldest = step - self.manifest.batch.max_staleness
        found = [(place, key) for key, (place, policy) in self._stale.items() if policy < oldest]
        found += [(place, key) for key, place in self._waiting.items() if self._policy_of(key) < oldest]
        return [key for _, key in sorted(found)]

    def _policy_of(self, submission: bytes) -> int:
        return self.submissions[submission].record.checkpoint_step

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
        expected = contributor.steps.next_index(record.step)
        if record.index != expected:
            _refuse("not-contiguous", f"index {record.index} at step {record.step}; expected {expected}")
        fault = self.policy_fault(entry.author, record)
        if fault:
            _refuse("policy-back", fault)
        self.contributors.setdefault(entry.author, contributor).steps.add(record)
        self.submissions[entry.id] = LedgerSubmission(record, entry.author, self.length)
        self._files.add(record.sha256)

    def _verdict(self, entry: Signed[Verdict]) -> None:
        entry.require_author(*self._validators)
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
        if record.outcome == "reject" and record.hard:
            self._hard[entry.id] = record.submission
        if submission.state in ("pending", "undecided"):
            self._count(submission, record)

    def _require_undrawn(self, verdict: Verdict) -> None:
        try:
            prove_undrawn(verdict, self.manifest, record_at=self.record, opens=self._opens)
        except ProtocolError as error:
            _refuse("draw", f"accepted without the costly checks, and nothing excuses that: {error.message}")

    def _count(self, submission: LedgerSubmission, latest: Verdict) -> None:
        votes = [verdict.record.outcome for verdict in submission.verdicts.values()]
        contributor = self.contributors[submission.author]
        if votes.count("accept") >= self.manifest.quorum:
            submission.state = "accepted"
            self._waiting[latest.submission] = submission.place
            contributor.accepted += 1
            contributor.history.add(self.length + 1, accepted=True)
            if contributor.standing == "active":
                contributor.credits += submission.record.output_tokens
        elif votes.count("reject") >= self.manifest.quorum:
            submission.state = "rejected"
            label = latest.reason.partition(":")[0] or "unnamed"
            contributor.rejected[label] = contributor.rejected.get(label, 0) + 1
            contributor.history.add(self.length + 1, accepted=False)
        elif latest.outcome == "undecided":
            submission.state = "undecided"

    def _batch(self, entry: Signed[Batch]) -> None:
        entry.require_author(self._trainer)
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
            del self._waiting[key]
        self.committed[record.step] = record
        self._drop_stale(record.step + 1)

    def _drop_stale(self, step: int) -> None:
        oldest = step - self.manifest.batch.max_staleness
        for key, place in list(self._waiting.items()):
            policy = self._policy_of(key)
            if policy < oldest:
                self._stale[key] = (place, policy)
                del self._waiting[key]

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
        entry.require_author(self._trainer)
        step = entry.record.step
        if step != len(self.trained) or step not in self.batches:
            _refuse(
                "step", f"step {step} cannot be trained now: {len(self.trained)} is next, {len(self.batches)} batches"
            )
        self.trained[step] = entry.record

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
        contributor.credits = 0

    def _hard_rejection(self, peer: PeerId, verdict_id: bytes) -> bool:
        submission = self.submissions.get(self._hard.get(verdict_id, b""))
        if submission is None or submission.author != peer or submission.state != "rejected":
            return False
        hard = [one for one in submission.verdicts.values() if one.record.outcome == "reject" and one.record.hard]
        return len(hard) >= self.manifest.quorum


def _refuse(rule: str, message: str) -> NoReturn:
    raise LedgerError(message, rule=rule)


RULES: Final[Mapping[type[Record], Callable[[LedgerState, Signed[Any]], None]]] = {
    Submission: LedgerState._submission,
    Verdict: LedgerState._verdict,
    Batch: LedgerState._batch,
    Trained: LedgerState._trained,
    Eviction: LedgerState._eviction,
}
ENTRY_KINDS: Final[Mapping[str, type[Record]]] = {kind.KIND: kind for kind in RULES}

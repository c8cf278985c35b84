"""The relay's desk: what it knows of its run, and the rules by which it takes records in.

Starts with the run's address alone; the manifest comes from the operator's signature, the head and the way to the
origin from the trainer's. All of it is kept on disk before it is acted on, so a restarted relay serves at once. Rules
that need the rollouts themselves are the validators' business; the door refuses what can be refused from the record.
Safe to call from the HTTP thread and from trio's: one lock, short sections.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from node.clock import now_ms
from node.ledger.log import LedgerLog
from node.ledger.memory import live_ledger
from node.ledger.witness import DIRECTORY as FORKS
from node.ledger.witness import HEAD_FILE, ForkWitness
from node.relay.store import RelayStore, duplicate_index
from protocol.constants import MAX_CLOCK_SKEW_S
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import (
    ClockError,
    DataDirError,
    ProtocolError,
    RefusedError,
    StaleRecordError,
    WrongAuthorError,
    WrongRunError,
)
from protocol.identity import Identity, PeerId
from protocol.manifest import max_file_bytes
from protocol.records import Head, Manifest, OriginNotice, Receipt, Submission, Verdict
from protocol.run import RunAddress
from protocol.segments import SegmentInfo

log = logging.getLogger(__name__)

KEEP_FILE_STEPS: Final = 32
"""Rollout files stay this many steps after their policy fell out of the window, for audits; for appeals as long as
credits mature, if that is longer, and as long as an appeal is open or may still be filed."""


class RelayDesk:
    """What one relay knows and decides. Every method may raise ProtocolError, RefusedError or DataDirError."""

    def __init__(
        self,
        run: RunAddress,
        identity: Identity,
        *,
        store: RelayStore,
        ledger_path: Path,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self.run = run
        self.peer_id = identity.peer_id
        self.manifest: Signed[Manifest] | None = None
        self.head: Signed[Head] | None = None
        self.notice: Signed[OriginNotice] | None = None
        self.ledger: LedgerLog | None = None
        self.witness: ForkWitness | None = None
        self.evicted: frozenset[PeerId] = frozenset()
        self._identity = identity
        self._store = store
        self._ledger_path = ledger_path
        self._clock = clock
        self._lock = threading.RLock()
        self._listeners: list[Callable[[], None]] = []
        self._restore()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a callback called after every change, from whichever thread made it; it must not block."""
        self._listeners.append(listener)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    # What the operator and the trainer say.

    def accept_manifest(self, data: bytes) -> Signed[Manifest]:
        """Learn what the run is. Raises ProtocolError unless the run's address names this manifest."""
        with self._lock:
            manifest = self._open_manifest(data)
            if self.manifest is None:
                self._store.set_document("manifest", data)
                self._take_manifest(manifest)
        self._changed()
        return manifest

    def accept_origin(self, manifest_data: bytes, notice_data: bytes, head_data: bytes) -> int:
        """Learn from the trainer where checkpoints come from, with all that a new relay needs to trust it.

        Everything is checked before anything is kept. Returns the sequence of the newest head held afterwards.
        """
        with self._lock:
            manifest = self._open_manifest(manifest_data)
            notice = self._open_notice(notice_data, manifest)
            head = self._open_head(head_data, manifest)
            self._refuse_fork(head)
            self.accept_manifest(manifest_data)
            self._store.set_document("notice", notice_data)
            self.notice = notice
            if self.head is None or head.record.sequence > self.head.record.sequence:
                self._keep_head(head)
            sequence = self._require_head().record.sequence
        self._changed()
        return sequence

    def accept_head(self, data: bytes) -> int:
        """Replace the head by a higher one; the same one again is fine. Returns its sequence.

        Raises StaleRecordError for any other one: a head never goes back. RefusedError `no-origin` asks the trainer for
        an origin notice first: a head is of no use while its checkpoint cannot be had.
        """
        with self._lock:
            head = self._open_head(data, self.require_manifest())
            if self.notice is None:
                raise RefusedError(
                    "this relay has no origin notice yet", code="no-origin", hint="POST /v1/origin first"
                )
            self._refuse_fork(head)
            held = self.head
            if held is not None and head.id != held.id and head.record.sequence <= held.record.sequence:
                raise StaleRecordError(
                    f"head {head.record.sequence} is not newer than head {held.record.sequence}, which this relay has",
                    hint="continue from the trainer's own data directory: it remembers the last sequence it signed",
                )
            if held is None or head.id != held.id:
                self._keep_head(head)
        self._changed()
        return head.record.sequence

    def extend_ledger(self, entries: list[bytes], head: Signed[Head]) -> None:
        """Take in the entries that lead from the mirror's end to a head's tip. Raises ProtocolError otherwise."""
        self.require_manifest()
        if self.ledger is not None:
            self.ledger.extend(entries, length=head.record.ledger_length, tip=head.record.ledger_tip)
        self.ledger_extended()

    def ledger_extended(self) -> None:
        """The mirror took in entries. It takes no lock, for that may last; readers see whole entries."""
        if self.ledger is not None:
            self.evicted = frozenset(self.ledger.state.evicted)
        self._changed()

    def ledger_entries(self, start: int, limit: int) -> list[bytes]:
        """Up to `limit` entries of the mirror from number `start` on."""
        return [] if self.ledger is None else self.ledger.entries(start, limit)

    def segments(self, first: int) -> list[SegmentInfo]:
        """Full segments of the mirror from number `first` on."""
        return [] if self.ledger is None else self.ledger.segments(first)

    def open_segment(self, sha256: bytes) -> BinaryIO | None:
        """A full segment of the mirror by its hash."""
        return None if self.ledger is None else self.ledger.open_segment(sha256)

    # What contributors and validators hand in.

    def admit(self, submission: Signed[Submission]) -> bytes | None:
        """Judge a submission by its record, before a byte of its file is read.

        Returns the receipt it has if it is stored already. Raises WrongRunError, ClockError, or RefusedError:
        evicted, finished, not-admitted, over-cap, over-tokens, too-large, stale-step, future-step, duplicate-index.
        """
        manifest, head = self.require_manifest(), self._require_head()
        record = submission.record
        require_run(record.run_id, manifest, Submission.KIND)
        receipt = self._store.receipt(submission.id)
        if receipt is not None:
            return receipt
        self._refuse_closed(submission.author, head.record)
        self._refuse_unadmitted(submission.author)
        self.check_clock(record.issued_at_ms, Submission.KIND, submission.author)
        _check_bounds(record, manifest.record)
        _check_window(record, head.record)
        if self._store.index_taken(submission.author, record.step, record.index):
            raise duplicate_index(submission)
        return None

    def refuse_evicted(self, peer: PeerId) -> None:
        """Raises RefusedError `evicted`, with the reason, for a key that the ledger has thrown out."""
        if peer in self.evicted and self.ledger is not None:
            reason = self.ledger.state.contributors[peer].reason
            raise RefusedError(
                f"{peer.short} is evicted from this run: {reason}",
                code="evicted",
                hint="`intellect-node verdict show last` has what was measured; an honest node appeals:"
                " intellect-node appeal SUBMISSION",
            )

    def make_receipt(self, submission: Signed[Submission]) -> bytes:
        """Sign for a stored submission. Names the newest head: the checks are drawn by the first one after it."""
        receipt = Receipt(
            run_id=submission.record.run_id,
            submission=submission.id,
            head_sequence=self._require_head().record.sequence,
            received_at_ms=self._clock(),
        )
        return seal(receipt, self._identity)

    def feed_changed(self) -> None:
        """Tell the listeners that the store has more to read."""
        self._changed()

    def accept_verdict(self, data: bytes) -> None:
        """Store a validator's verdict; the same one again is fine."""
        manifest = self.require_manifest()
        verdict = open_envelope(data, Verdict).require_author(*manifest.record.validator_ids)
        require_run(verdict.record.run_id, manifest, Verdict.KIND)
        self.check_clock(verdict.record.issued_at_ms, Verdict.KIND, verdict.author)
        self._store.add_verdict(verdict, known=self._is_in_ledger)
        self._changed()

    # Internals.

    def _restore(self) -> None:
        run = self._store.document("run")
        if run is not None and run != str(self.run).encode():
            raise DataDirError(
                f"this data directory holds the records of the run {run.decode()!r}",
                hint="give each run its own --data-dir",
            )
        self._store.set_document("run", str(self.run).encode())
        if (data := self._store.document("manifest")) is None:
            return
        try:
            manifest = self.run.open_manifest(data)
            self._take_manifest(manifest)
            notice, head = self._store.document("notice"), self._store.document("head")
            self.notice = None if notice is None else open_envelope(notice, OriginNotice)
            self.head = None if head is None else open_envelope(head, Head)
        except ProtocolError as error:
            raise DataDirError(
                f"the relay's stored records are damaged: {error.message}",
                hint="move this relay's data directory away; the trainer and the contributors hand everything in again",
            ) from error

    def _take_manifest(self, manifest: Signed[Manifest]) -> None:
        self.ledger = live_ledger(self._ledger_path, manifest, mends=True)
        self.witness = ForkWitness(
            manifest, self._ledger_path.with_name(FORKS), keep_head=self._ledger_path / HEAD_FILE
        )
        self.evicted = frozenset(self.ledger.state.evicted)
        self.manifest = manifest
        log.info("run=%s manifest=%s known", self.run, manifest.id.hex()[:12])

    def _open_manifest(self, data: bytes) -> Signed[Manifest]:
        manifest = self.run.open_manifest(data)
        if self.manifest is not None and manifest.id != self.manifest.id:
            raise WrongRunError(
                f"another manifest for {self.run} than the one this relay serves",
                hint="a manifest never changes: give a changed run a new name, or the relay a fresh --data-dir",
            )
        return manifest

    def _open_notice(self, data: bytes, manifest: Signed[Manifest]) -> Signed[OriginNotice]:
        notice = open_envelope(data, OriginNotice).require_author(manifest.record.trainer_id)
        require_run(notice.record.run_id, manifest, OriginNotice.KIND)
        if notice.record.relay != self.peer_id.public_key:
            raise WrongAuthorError(f"this origin notice is for {PeerId(notice.record.relay).short}, not for this relay")
        self.check_clock(notice.record.issued_at_ms, OriginNotice.KIND, notice.author)
        if self.notice is not None and notice.record.issued_at_ms < self.notice.record.issued_at_ms:
            raise StaleRecordError("this origin notice is older than the one this relay has")
        return notice

    def _open_head(self, data: bytes, manifest: Signed[Manifest]) -> Signed[Head]:
        head = open_envelope(data, Head).require_author(manifest.record.trainer_id)
        require_run(head.record.run_id, manifest, Head.KIND)
        self.check_clock(head.record.issued_at_ms, Head.KIND, head.author)
        return head

    def _refuse_fork(self, head: Signed[Head]) -> None:
        """Keep to the ledger that is here: a head that contradicts it is another trainer's, or an old copy's."""
        if self.ledger is None or self.witness is None:
            return
        tip = self.ledger.state.tip_at(head.record.ledger_length)
        if tip is None and self.witness.see(head) is None:
            return
        if tip is not None:
            if tip == head.record.ledger_tip:
                return
            self.witness.compare(head, self.ledger)
        raise RefusedError(
            f"head {head.record.sequence} contradicts the ledger that this relay has from the same trainer",
            code="fork",
            hint="a second trainer runs with this key, or this one was started from an old copy of its directory",
        )

    def _keep_head(self, head: Signed[Head]) -> None:
        self._store.set_document("head", head.data)
        if self.head is None or head.record.step != self.head.record.step:
            oldest = head.record.oldest_checkpoint_step - self._kept_steps()
            pruned = self._store.prune(oldest, needed=self._is_needed)
            log.info("head sequence=%d step=%d pruned=%d", head.record.sequence, head.record.step, pruned)
        self.head = head

    def _is_in_ledger(self, subject: bytes) -> bool:
        """Whether the ledger has this submission, or appeal."""
        state = None if self.ledger is None else self.ledger.state
        return state is not None and (subject in state.submissions or subject in state.appeals)

    def _is_needed(self, submission: bytes) -> bool:
        return self.ledger is not None and self.ledger.state.may_be_appealed(submission)

    def _kept_steps(self) -> int:
        window = 0 if self.manifest is None else self.manifest.record.credits.maturity_steps
        return max(KEEP_FILE_STEPS, window)

    def require_manifest(self) -> Signed[Manifest]:
        """Raises RefusedError `no-manifest` before it is known."""
        if self.manifest is None:
            raise RefusedError(
                f"this relay does not know the run {self.run} yet",
                code="no-manifest",
                hint="wait until the run's trainer has found this relay, or use another relay",
            )
        return self.manifest

    def _require_head(self) -> Signed[Head]:
        if self.head is None:
            raise RefusedError(
                "this relay has not heard from the run's trainer yet",
                code="no-head",
                hint="wait until the trainer has found this relay, or use another relay",
            )
        return self.head

    def _refuse_closed(self, author: PeerId, head: Head) -> None:
        self.refuse_evicted(author)
        if head.finished:
            raise RefusedError("the run is finished", code="finished", hint="nothing to do: stop the node")

    def now_ms(self) -> int:
        """This relay's time."""
        return self._clock()

    def _refuse_unadmitted(self, author: PeerId) -> None:
        if self.ledger is not None and not self.ledger.state.admitted(author):
            raise RefusedError(
                f"{author.short} is not admitted to this run, by the ledger that this relay has",
                code="not-admitted",
                hint="a node asks for it when it starts, and the trainer writes it down within seconds; its status says"
                " what is missing",
            )

    def check_clock(self, issued_at_ms: int, kind: str, author: PeerId) -> None:
        """Raises ClockError for what is dated in the future."""
        ahead_s = (issued_at_ms - self._clock()) / 1000
        if ahead_s > MAX_CLOCK_SKEW_S:
            raise ClockError(
                f"a {kind} of {author.short} is dated {ahead_s:.0f} s in the future by this relay's clock;"
                f" clocks may differ by {MAX_CLOCK_SKEW_S:.0f} s",
                hint="set both computers' clocks: `timedatectl set-ntp true`",
            )

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()


def require_run(run_id: bytes, manifest: Signed[Manifest], kind: str) -> None:
    """Raises WrongRunError for a record of another run."""
    if run_id != manifest.id:
        raise WrongRunError(
            f"a {kind} of the run {run_id.hex()[:12]}; this relay serves {manifest.id.hex()[:12]}",
            hint="compare --run on both sides: it must be the same address",
        )


def _check_bounds(record: Submission, manifest: Manifest) -> None:
    cap = manifest.rollout.max_submissions_per_step
    if record.index >= cap:
        raise RefusedError(
            f"submission index {record.index}; a node may hand in {cap} a step",
            code="over-cap",
            hint="wait for the next step",
        )
    fault = manifest.bounds_fault(rollouts=record.rollouts, output_tokens=record.output_tokens)
    if fault:
        raise RefusedError(
            fault,
            code="over-tokens",
            hint="the manifest bounds rollouts and tokens of a submission: is this node's version right?",
        )
    limit = max_file_bytes(manifest)
    if record.size > limit:
        raise RefusedError(
            f"a rollout file of {record.size} bytes; this run's files have at most {limit}",
            code="too-large",
            hint="the manifest bounds rollouts and tokens of a submission: is this node's version right?",
        )


def _check_window(record: Submission, head: Head) -> None:
    if record.checkpoint_step < head.oldest_checkpoint_step or record.checkpoint_step > record.step:
        raise RefusedError(
            f"rollouts of policy {record.checkpoint_step} for step {record.step}; step {head.step} takes policies from"
            f" {head.oldest_checkpoint_step} on",
            code="stale-step",
            hint="nothing to do: the node goes on with the current policy (a slow link or computer falls behind)",
        )
    if record.step > head.step + 1:  # a contributor may have a newer head than this relay, by a beat
        raise RefusedError(
            f"rollouts for step {record.step}; this relay knows of steps up to {head.step}",
            code="future-step",
            hint="try again soon, or at another relay: this one may be behind",
        )

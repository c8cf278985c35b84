"""What the other roles say to a relay: a typed trio client of its HTTP interface (node.relay.service).

Nothing a relay answers is believed: signatures, authors, run and order are checked before a method returns, and a lie
is a ProtocolError that names the relay. What a relay refuses comes out as RefusedError with its code, what the network
does as RelayError. Checkpoints travel by p2p.shardcast instead.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec

from node.membership import MAX_ACTIVE_SHOWN, BeatAnswer, Question, Standing
from p2p.contacts import Contact
from p2p.http import HttpClient, HttpResponse
from protocol.checkpoint import open_checkpoint
from protocol.envelope import Record, Signed, open_envelope
from protocol.errors import MalformedError, ProtocolError, RefusedError, RelayError, StaleRecordError, WrongRunError
from protocol.identity import PeerId
from protocol.ledger import open_entry
from protocol.records import (
    Admission,
    Appeal,
    Batch,
    CheckpointManifest,
    Head,
    Heartbeat,
    Manifest,
    Receipt,
    Submission,
    Trained,
    Verdict,
)
from protocol.run import RunAddress
from protocol.segments import SegmentInfo

REQUEST_TIMEOUT_S: Final = 15.0
TRANSFER_GRACE_S: Final = 60.0
SLOWEST_BYTES_PER_S: Final = 16 << 10
"""Transfers of rollout files slower than this are given up; a relay cuts uploads off at the same rate."""
MAX_ANSWER_BYTES: Final = 8 << 20
RECORD_HEADER: Final = "X-Intellect-Record"
RECORD_CODES: Final = frozenset(
    {"malformed", "bad-signature", "wrong-author", "wrong-run", "wrong-version", "too-large"}
)
"""Refusals that every relay would repeat for ever, for they are about a record's own bytes."""

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class RelayInfo(msgspec.Struct, frozen=True):
    """What a relay says of itself; unsigned, for people and diagnosis only."""

    peer_id: str
    software: str
    protocol: int
    run: str
    instance: str = ""
    """Which of the nodes with its key it is (node.instance), in hexadecimal; empty where it does not say."""


@dataclass(frozen=True)
class FeedItem:
    """One checked item of a relay's feed. `seq` rises strictly, per relay."""

    seq: int
    signed: Signed[Any]
    """A Submission, a Verdict, an Admission or an Appeal."""
    receipt: Signed[Receipt] | None = None
    """The relay's own, with every submission."""

    @property
    def about(self) -> PeerId:
        """The contributor."""
        record = self.signed.record
        return PeerId(record.contributor) if isinstance(record, Verdict) else self.signed.author


class RelayObserver(Protocol):
    """Who keeps count of what relays do."""

    def traffic(self, client: RelayClient, *, bytes_in: int = 0, bytes_out: int = 0, failures: int = 0) -> None:
        """Bodies went over the wire, or a request failed."""

    def misdeed(self, client: RelayClient, error: ProtocolError) -> None:
        """The relay answered with something that no honest relay answers."""


class RelayClient:
    """One relay of one run. All but `info` and `manifest` need the run's manifest: see `trust`."""

    def __init__(
        self,
        http: HttpClient,
        url: str,
        *,
        peer_id: PeerId,
        run: RunAddress,
        observer: RelayObserver | None = None,
        contact: Contact | None = None,
    ) -> None:
        """`contact` says which certificate the relay at `url` has, and signs this node in there."""
        self.url = url.rstrip("/")
        self.peer_id = peer_id
        self.contact = contact
        self._http = http
        self._run = run
        self._observer = observer
        self._manifest: Signed[Manifest] | None = None

    def __repr__(self) -> str:
        return f"RelayClient({self.peer_id.short}, {self.url})"

    def trust(self, manifest: Signed[Manifest]) -> None:
        """Say what the run's manifest is: it tells who may sign what."""
        self._manifest = manifest

    async def info(self) -> RelayInfo:
        with self._watched():
            return _decode((await self._get("/v1/info")).body, RelayInfo)

    async def manifest(self) -> Signed[Manifest]:
        """The run's manifest as this relay has it, which is trusted from then on. RefusedError `no-manifest` if not."""
        with self._watched():
            manifest = self._run.open_manifest((await self._get("/v1/manifest")).body)
        self.trust(manifest)
        return manifest

    async def head(self, after: int = 0, *, wait_s: float = 0.0) -> Signed[Head] | None:
        """The relay's head if its sequence is above `after`; waits up to `wait_s` for one, then gives None."""
        trusted = self._trusted()
        with self._watched():
            response = await self._get("/v1/head", {"after": after, "wait_s": wait_s}, wait_s=wait_s)
            if response.status == 204:
                return None
            head = self._open(response.body, Head).require_author(trusted.record.trainer_id)
            if head.record.sequence <= after:
                raise StaleRecordError(f"head {head.record.sequence} in answer to a request for one after {after}")
        return head

    async def post_origin(self, manifest: bytes, notice: bytes, head: bytes) -> int:
        """Tell the relay where checkpoints come from. Returns the sequence of the head it holds then."""
        with self._watched():
            return _head_sequence(await self._post("/v1/origin", msgspec.msgpack.encode([manifest, notice, head])))

    async def post_head(self, envelope: bytes) -> int:
        """Give the relay a newer head. RefusedError `stale` if it has one as new, `no-origin` before post_origin."""
        with self._watched():
            return _head_sequence(await self._post("/v1/head", envelope))

    async def submit(self, envelope: bytes, path: Path) -> Signed[Receipt]:
        """Hand in a submission and its file; doing it again gives the same receipt.

        RefusedError codes: evicted, finished, wrong-run, stale-step, future-step, over-cap, duplicate-index, too-large,
        over-tokens, bad-hash, bad-signature, bad-clock, disk-full, node-quota, step-quota, busy, timeout, no-manifest,
        no-head, not-yours, not-allowed, too-many-requests.
        """
        submission = open_envelope(envelope, Submission)
        size = submission.record.size
        with self._watched():
            response = await self._http.post_file(
                f"{self.url}/v1/submissions",
                path,
                headers={RECORD_HEADER: base64.b64encode(envelope).decode("ascii")},
                timeout_s=TRANSFER_GRACE_S + size / SLOWEST_BYTES_PER_S,
                contact=self.contact,
            )
            self._count(bytes_out=size, bytes_in=len(response.body))
            return self._check_receipt(response.body, submission)

    async def file(self, submission: Signed[Submission], path: Path, *, timeout_s: float | None = None) -> None:
        """Fetch a submission's file; `path` appears only with the size and hash that its author signed.

        Without a `timeout_s` a slow link gets the time that the size needs. RefusedError `not-found` if the relay has
        the file no more.
        """
        size = submission.record.size
        with self._watched():
            await self._http.get_to_file(
                f"{self.url}/v1/submissions/{submission.id.hex()}/file",
                path,
                expected_bytes=size,
                expected_sha256=submission.record.sha256,
                timeout_s=TRANSFER_GRACE_S + size / SLOWEST_BYTES_PER_S if timeout_s is None else timeout_s,
                contact=self.contact,
            )
            self._count(bytes_in=size)

    async def post_verdict(self, envelope: bytes) -> None:
        """Hand in a verdict; doing it again changes nothing. RefusedError `already-judged` for a second, other one."""
        with self._watched():
            await self._post("/v1/verdicts", envelope)

    # Who takes part.

    async def post_admission(self, envelope: bytes) -> bool:
        """Ask to be admitted; whether this key is by now. RefusedError `admission-<rule>` says why it never will be."""
        with self._watched():
            return _decode(await self._post("/v1/admissions", envelope), dict[str, bool]).get("admitted", False)

    async def post_appeal(self, envelope: bytes) -> str:
        """Appeal; `taken`, or what the ledger says of it. RefusedError `appeal-<rule>` says why it cannot be."""
        with self._watched():
            return _decode(await self._post("/v1/appeals", envelope), dict[str, str]).get("state", "")[:16]

    async def post_heartbeat(self, envelope: bytes) -> BeatAnswer:
        """Say that this node is there. RefusedError `second-instance` if another one with its key is."""
        with self._watched():
            return _decode(await self._post("/v1/heartbeats", envelope), BeatAnswer)

    async def active(self, most: int = MAX_ACTIVE_SHOWN) -> list[Signed[Heartbeat]]:
        """Heartbeats of the nodes that this relay heard lately, the latest first."""
        self._trusted()
        with self._watched():
            rows = _decode((await self._get("/v1/heartbeats", {"most": most})).body, list[bytes])[:most]
            return [self._open(row, Heartbeat) for row in rows]

    async def standing(self, submissions: Sequence[bytes] = ()) -> Standing:
        """Where this node stands by the ledger that the relay has; nobody's proof of anything."""
        with self._watched():
            return _decode(
                await self._post("/v1/standing", msgspec.msgpack.encode(Question(tuple(submissions)))), Standing
            )

    async def step_entries(self, step: int) -> tuple[Signed[Batch], Signed[Trained] | None]:
        """A step's batch, signed by the trainer, and that it was trained, if it was. RefusedError `not-yet`."""
        trainer = self._trusted().record.trainer_id
        with self._watched():
            batch, trained = _decode((await self._get(f"/v1/ledger/steps/{step}")).body, tuple[bytes, bytes])
            opened = self._open(batch, Batch).require_author(trainer)
            done = self._open(trained, Trained).require_author(trainer) if trained else None
            if opened.record.step != step or (done is not None and done.record.step != step):
                raise MalformedError(f"the entries of another step than {step}")
        return opened, done

    async def feed(
        self,
        after: int,
        *,
        kinds: Sequence[str] = (Submission.KIND, Verdict.KIND),
        about: PeerId | None = None,
        wait_s: float = 0.0,
        limit: int = 200,
    ) -> list[FeedItem]:
        """Items with a sequence above `after`, oldest first; waits up to `wait_s` for the first one.

        `about` narrows to one contributor's submissions and the verdicts on them.
        """
        query: dict[str, object] = {"after": after, "kinds": ",".join(kinds), "limit": limit, "wait_s": wait_s}
        if about is not None:
            query["about"] = about.public_key.hex()
        self._trusted()
        with self._watched():
            body = (await self._get("/v1/feed", query, wait_s=wait_s)).body
            items = [self._feed_item(*row) for row in _decode(body, list[tuple[int, str, bytes, bytes]])]
            _check_order(after, items)
            _check_filter(items, kinds, about)
        return items

    async def offers(self, checkpoint: bytes) -> bool:
        """Whether the relay knows a checkpoint of the run, in part or whole."""
        return await self.checkpoint(checkpoint) is not None

    async def checkpoint(self, checkpoint: bytes) -> Signed[CheckpointManifest] | None:
        """The manifest of a checkpoint that the relay knows, in part or whole."""
        trusted = self._trusted()
        with self._watched():
            try:
                body = (await self._get(f"/v1/checkpoints/{checkpoint.hex()}/manifest")).body
            except RefusedError as error:
                if error.code in ("not-found", "not-yet"):
                    return None
                raise
            return open_checkpoint(body, checkpoint).require_author(trusted.record.trainer_id)

    async def ledger(self, start: int) -> list[Signed[Any]]:
        """Entries from number `start` on, as many as the relay gives at once.

        Each one's signature and run hold; whether the chain does is LedgerLog.extend's to say.
        """
        run_id = self._trusted().id
        with self._watched():
            body = (await self._get("/v1/ledger", {"from": start})).body
            entries = [open_entry(data) for data in _decode(body, list[bytes])]
            for entry in entries:
                _require_run(entry, run_id)
        return entries

    @property
    def name(self) -> str:
        """For people."""
        return f"relay {self.peer_id.short}"

    async def ledger_entries(self, start: int) -> list[bytes]:
        """The same as bytes."""
        return [entry.data for entry in await self.ledger(start)]

    async def ledger_segments(self, first: int) -> list[SegmentInfo]:
        """Full segments of the relay's ledger from number `first` on. RefusedError `not-found`: it has none."""
        with self._watched():
            return _decode((await self._get("/v1/ledger/segments", {"from": first})).body, list[SegmentInfo])

    async def ledger_segment(self, info: SegmentInfo) -> bytes:
        """A segment's bytes, of the size that was said; what is in them is node.ledger.pull's to check."""
        data = bytearray()
        with self._watched():
            await self._http.get_stream(
                f"{self.url}/v1/ledger/segments/{info.sha256.hex()}",
                data.extend,
                expected_bytes=info.size,
                timeout_s=TRANSFER_GRACE_S + info.size / SLOWEST_BYTES_PER_S,
                contact=self.contact,
            )
            self._count(bytes_in=info.size)
        return bytes(data)

    def _trusted(self) -> Signed[Manifest]:
        if self._manifest is None:
            raise RelayError("the run's manifest is not known yet, so no relay's answer can be checked")
        return self._manifest

    async def _get(self, path: str, query: Mapping[str, object] | None = None, *, wait_s: float = 0.0) -> HttpResponse:
        url = f"{self.url}{path}?{urlencode(query)}" if query else f"{self.url}{path}"
        response = await self._http.get(
            url, timeout_s=REQUEST_TIMEOUT_S + wait_s, max_bytes=MAX_ANSWER_BYTES, contact=self.contact
        )
        self._count(bytes_in=len(response.body))
        return response

    async def _post(self, path: str, body: bytes) -> bytes:
        response = await self._http.post(f"{self.url}{path}", body, timeout_s=REQUEST_TIMEOUT_S, contact=self.contact)
        self._count(bytes_out=len(body), bytes_in=len(response.body))
        return response.body

    def _open(self, data: bytes, kind: type[R]) -> Signed[R]:
        signed = open_envelope(data, kind)
        _require_run(signed, self._trusted().id)
        return signed

    def _check_receipt(self, data: bytes, submission: Signed[Submission]) -> Signed[Receipt]:
        receipt = open_envelope(data, Receipt).require_author(self.peer_id)
        if receipt.record.submission != submission.id or receipt.record.run_id != submission.record.run_id:
            raise MalformedError("a receipt for another submission than the one that was handed in")
        return receipt

    def _feed_item(self, seq: int, kind: str, envelope: bytes, extra: bytes) -> FeedItem:
        if kind == Submission.KIND:
            submission = self._open(envelope, Submission)
            return FeedItem(seq, submission, self._check_receipt(extra, submission))
        if kind == Verdict.KIND:
            return FeedItem(seq, self._open(envelope, Verdict).require_author(*self._trusted().record.validator_ids))
        if kind in (Admission.KIND, Appeal.KIND):
            return FeedItem(seq, self._open(envelope, Admission if kind == Admission.KIND else Appeal))
        raise MalformedError(f"a feed item of the unknown kind {kind[:40]!r}")

    def _count(self, *, bytes_in: int = 0, bytes_out: int = 0, failures: int = 0) -> None:
        if self._observer is not None:
            self._observer.traffic(self, bytes_in=bytes_in, bytes_out=bytes_out, failures=failures)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Name the relay in whatever goes wrong, and tell the observer."""
        try:
            yield
        except RefusedError:
            raise  # an honest answer
        except RelayError:
            self._count(failures=1)
            raise
        except ProtocolError as error:
            error.message = f"relay {self.peer_id.short} at {self.url} sent what no honest relay sends: {error.message}"
            error.args = (error.message,)
            if self._observer is not None:
                self._observer.misdeed(self, error)
            raise


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"an answer that does not decode: {str(error)[:200]}") from error


def _head_sequence(data: bytes) -> int:
    return _decode(data, dict[str, int]).get("head_sequence", 0)


def _require_run(signed: Signed[Any], run_id: bytes) -> None:
    if signed.record.run_id != run_id:
        raise WrongRunError(f"a {signed.record.KIND} of another run")


def _check_order(after: int, items: Sequence[FeedItem]) -> None:
    for item in items:
        if item.seq <= after:
            raise StaleRecordError(f"feed item {item.seq} after {after}")
        after = item.seq


def _check_filter(items: Sequence[FeedItem], kinds: Sequence[str], about: PeerId | None) -> None:
    for item in items:
        if item.signed.record.KIND not in kinds or about not in (None, item.about):
            raise MalformedError("a feed item that was not asked for")

"""The relay's HTTP interface: routes under /v1, each a thin skin over the desk and the store.

Asyncio code on p2p.bridge's thread. Whatever touches the disk goes to a worker thread; long polls sleep on one bell.
Bounded everywhere: bodies, uploads at once, waiting polls, waiting times, sizes of answers. Checkpoint and ledger
routes belong to p2p.shardcast.origin; the former are served beside these.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from node.relay.desk import RelayDesk
from node.relay.door import NO_LIMITS, Door, DoorLimits
from node.relay.membership import MembershipRoutes
from node.relay.store import RelayStore
from node.version import SOFTWARE
from p2p.bridge import AioThread
from p2p.http import FileRange, body_chunks, msgpack_response, read_body, send_ranges
from p2p.http.params import digest, query_number, query_seconds
from p2p.shardcast.origin import ledger_routes
from protocol.constants import PROTOCOL_VERSION
from protocol.envelope import Signed, open_envelope
from protocol.errors import MalformedError, RefusedError
from protocol.identity import PeerId
from protocol.records import Admission, Appeal, Submission, Verdict

log = logging.getLogger(__name__)

RECORD_HEADER: Final = "X-Intellect-Record"
MAX_WAIT_S: Final = 30.0
MAX_POLLS: Final = 768
MAX_POLLS_EACH: Final = 64
"""Of one identity, as the next but one."""
MAX_UPLOADS: Final = 64
MAX_UPLOADS_EACH: Final = 4
UPLOAD_GRACE_S: Final = 60.0
MIN_UPLOAD_BYTES_PER_S: Final = 16 << 10
"""Slower uploads are cut off: a slot must not be held for nothing."""
PROGRESS_TIMEOUT_S: Final = 15.0

FEED_KINDS: Final = (Submission.KIND, Verdict.KIND, Admission.KIND, Appeal.KIND)
JUDGING_KINDS: Final = FEED_KINDS[:2]
"""What the feed has unless more is asked for."""

T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes of bodies since start."""

    bytes_in: int = 0
    bytes_out: int = 0


class RelayService:
    """Routes of one relay. Give `routes()`, `middleware` and `door.on_answer` to a HttpServer on the same thread."""

    def __init__(
        self,
        aio: AioThread,
        desk: RelayDesk,
        store: RelayStore,
        limits: DoorLimits = NO_LIMITS,
        *,
        instance: str = "",
    ) -> None:
        """`instance` says which of the nodes with its key this is."""
        self.door = Door(desk, store, limits)
        self.membership = MembershipRoutes(desk, store, self.door.peer)
        self._desk = desk
        self._instance = instance
        self._store = store
        self._bell = _Bell()
        self._polls = _Slots(MAX_POLLS, MAX_POLLS_EACH, "polls")
        self._uploads = _Slots(MAX_UPLOADS, MAX_UPLOADS_EACH, "uploads")
        self.traffic = Traffic()
        desk.subscribe(lambda: aio.call_soon(self._bell.ring))

    def routes(self) -> list[web.RouteDef]:
        return [
            *self.door.routes(),
            *self.membership.routes(),
            web.get("/v1/info", self._info),
            web.get("/v1/manifest", self._manifest),
            web.get("/v1/head", self._head),
            web.get("/v1/feed", self._feed),
            web.get("/v1/submissions/{id}/file", self._file),
            web.post("/v1/origin", self._post_origin),
            web.post("/v1/head", self._post_head),
            web.post("/v1/submissions", self._post_submission),
            web.post("/v1/verdicts", self._post_verdict),
            *ledger_routes(self._desk.ledger_entries, self._desk),
        ]

    @web.middleware
    async def _count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.traffic.bytes_in += request.content_length or 0
        response = await self.door.admit(request, handler)
        self.traffic.bytes_out += response.content_length or 0
        return response

    @property
    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        """The door, and a count of traffic."""
        return self._count

    # What is known of the run.

    async def _info(self, _: web.Request) -> web.Response:
        desk = self._desk
        info = {"peer_id": str(desk.peer_id), "software": SOFTWARE, "protocol": PROTOCOL_VERSION, "run": str(desk.run)}
        return msgpack_response({**info, "instance": self._instance})

    async def _manifest(self, _: web.Request) -> web.Response:
        manifest = self._desk.manifest
        if manifest is None:
            raise RefusedError("this relay does not know the run's manifest yet", code="no-manifest")
        return msgpack_response(manifest.data)

    async def _head(self, request: web.Request) -> web.Response:
        after = query_number(request, "after", most=2**53)

        async def newer() -> bytes | None:
            head = self._desk.head
            return head.data if head is not None and head.record.sequence > after else None

        data = await self._poll(request, newer)
        return web.Response(status=204) if data is None else msgpack_response(data)

    async def _post_origin(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        try:
            manifest, notice, head = msgspec.msgpack.decode(body, type=tuple[bytes, bytes, bytes])
        except msgspec.MsgspecError as error:
            raise MalformedError(f"not a list of manifest, origin notice and head: {str(error)[:100]}") from error
        sequence = await asyncio.to_thread(self._desk.accept_origin, manifest, notice, head)
        return msgpack_response({"head_sequence": sequence})

    async def _post_head(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        return msgpack_response({"head_sequence": await asyncio.to_thread(self._desk.accept_head, body)})

    # Submissions, verdicts and the feed.

    async def _post_submission(self, request: web.Request) -> web.Response:
        submission = open_envelope(_record_header(request), Submission)
        peer = self.door.peer(request)
        _require_own(submission, peer)
        receipt = await asyncio.to_thread(self._desk.admit, submission)
        if receipt is None:
            self.door.charge_upload(peer, submission.record.size)
            with self._uploads.taken(peer):
                receipt = await self._receive(request, submission)
            self._desk.feed_changed()
        return msgpack_response(receipt)

    async def _receive(self, request: web.Request, submission: Signed[Submission]) -> bytes:
        size = submission.record.size
        with self._store.upload(submission) as upload:
            try:
                async with asyncio.timeout(UPLOAD_GRACE_S + size / MIN_UPLOAD_BYTES_PER_S):
                    async for chunk in body_chunks(request, max_bytes=size, progress_timeout_s=PROGRESS_TIMEOUT_S):
                        upload.write(chunk)
            except TimeoutError as error:
                raise RefusedError(
                    f"the upload was slower than {MIN_UPLOAD_BYTES_PER_S >> 10} KiB/s",
                    code="timeout",
                    hint="check the link to this relay, or hand in at another one",
                ) from error
            return await asyncio.to_thread(upload.keep, lambda: self._desk.make_receipt(submission))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        submission_id = digest(request.match_info["id"], "submission id")
        with await asyncio.to_thread(self._store.open_file, submission_id) as file:
            size = os.fstat(file.fileno()).st_size
            return await send_ranges(request, [FileRange(file, 0, size)])

    async def _post_verdict(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        await asyncio.to_thread(self._desk.accept_verdict, body)
        return msgpack_response({})

    async def _feed(self, request: web.Request) -> web.Response:
        after = query_number(request, "after", most=2**53)
        limit = query_number(request, "limit", default=200, most=500)
        kinds = _kinds(request)
        about = digest(request.query["about"], "key") if "about" in request.query else None

        looked_at = after

        async def news() -> list[tuple[int, str, bytes, bytes]] | None:
            nonlocal looked_at
            last = self._store.newest(about)
            if last <= looked_at:  # the bell rang for something else; a look at the disk a poll would add up
                return None
            looked_at = last
            rows = await asyncio.to_thread(self._store.feed, after, kinds=kinds, about=about, limit=limit)
            return [(row.seq, row.kind, row.envelope, row.receipt) for row in rows] or None

        return msgpack_response(await self._poll(request, news) or [])

    async def _poll(self, request: web.Request, look: Callable[[], Awaitable[T | None]]) -> T | None:
        """Look until there is something or the wait that was asked for is over."""
        wait_s = min(query_seconds(request, "wait_s"), MAX_WAIT_S)
        event = self._bell.event
        found = await look()
        if found is not None or wait_s <= 0:
            return found
        with self._polls.taken(self.door.peer(request)):
            try:
                async with asyncio.timeout(wait_s):
                    while found is None:
                        await event.wait()
                        event = self._bell.event
                        found = await look()
            except TimeoutError:
                return None
        return found


class _Bell:
    """Wakes every waiting poll at once. Take `event` before looking, so that a ring in between is not missed."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def ring(self) -> None:
        self.event.set()
        self.event = asyncio.Event()


class _Slots:
    """How many of a kind may be under way at once, in all and for one identity."""

    def __init__(self, most: int, most_each: int, name: str) -> None:
        self._most = most
        self._most_each = most_each
        self._name = name
        self._used: Counter[PeerId] = Counter()

    @contextmanager
    def taken(self, peer: PeerId) -> Iterator[None]:
        """Hold a slot. Raises RefusedError `busy` when there is none."""
        if self._used.total() >= self._most:
            raise self._busy(f"this relay has {self._most} {self._name} under way, its most")
        if self._used[peer] >= self._most_each:
            raise self._busy(f"{peer.short} has {self._most_each} {self._name} under way, the most of one node")
        self._used[peer] += 1
        try:
            yield
        finally:
            self._used[peer] -= 1
            if not self._used[peer]:
                del self._used[peer]

    def _busy(self, message: str) -> RefusedError:
        return RefusedError(message, code="busy", hint="try again in a few seconds, or at another relay")


def _require_own(submission: Signed[Submission], peer: PeerId) -> None:
    if submission.author != peer:
        raise RefusedError(
            f"a submission of {submission.author.short}, handed in by {peer.short}",
            code="not-yours",
            hint="each node hands in its own work",
        )


def _record_header(request: web.Request) -> bytes:
    try:
        return base64.b64decode(request.headers[RECORD_HEADER], validate=True)
    except (KeyError, ValueError, binascii.Error) as error:
        raise MalformedError(f"the header {RECORD_HEADER} must hold the record's envelope in base64") from error


def _kinds(request: web.Request) -> list[str]:
    kinds = request.query.get("kinds", ",".join(JUDGING_KINDS)).split(",")[: len(FEED_KINDS) + 1]
    unknown = [kind for kind in kinds if kind not in FEED_KINDS]
    if unknown:
        raise MalformedError(f"the feed has {', '.join(FEED_KINDS)}, and no {unknown[0][:40]!r}")
    return kinds

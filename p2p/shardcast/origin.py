"""Serving checkpoints over HTTP: the routes that trainer and relays share, and the trainer's door for relays.

The trainer answers nobody but the relays it gave a token to; a relay answers everybody, or whom its own door lets in.
Handlers run on the HTTP thread. Cut-through: a shard is served as soon as it is hashed (trainer) or verified (relay),
long before its checkpoint is whole. Which shards the trainer gives to which relay is p2p.shardcast.fan_out's work.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, Final, Protocol, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2p.http import FileRange, msgpack_response, send_ranges
from p2p.http.params import digest, query_number, query_seconds, whole_number
from p2p.shardcast.entries import Progress
from p2p.shardcast.fan_out import Admission
from p2p.shardcast.patches import PatchStore, checkpoint_id, patch_routes, require_admission
from p2p.shardcast.sources import Standing, pack_bits
from p2p.shardcast.store import CheckpointStore
from protocol.errors import RefusedError
from protocol.identity import PeerId
from protocol.segments import SegmentInfo

MAX_LEDGER_ENTRIES: Final = 500
MAX_LEDGER_BYTES: Final = 4 << 20
"""Entries are left out of an answer beyond this; the caller asks again from where the answer ended."""
MAX_LEDGER_SEGMENTS: Final = 1000
"""In one answer, as the two above."""

MAX_WAIT_S: Final = 30.0
MAX_POLLS: Final = 2048
GATHER_S: Final = 0.01
"""Changes that come together are told together."""
LOOK_AGAIN_S: Final = 2.0
"""What is for whom may change when somebody is not heard of any more, which rings no bell."""

_BEARER: Final = "Bearer "

T = TypeVar("T")

log = logging.getLogger(__name__)

LedgerReader = Callable[[int, int], Sequence[bytes]]
"""(first entry, most entries) -> envelopes; may block."""


def checkpoint_routes(store: CheckpointStore, *, admits: Admission | None = None) -> list[web.RouteDef]:
    """What `store` holds, in part or whole, under a checkpoint's id or its plan's; below `/v1/checkpoints`:

    `next?from=STEP&wait_s=S` newest plan of that step or later; `{id}/manifest`; `{id}/shards/{n}`; and
    `{id}/standing?parts=N&held=M&closed=0|1&wait_s=S`, as soon as there is more than the asker has.
    Nobody sees shards that `admits` says are for others.
    """
    window = _Window(store, admits or (lambda _request, _step, shards: shards))
    return [
        web.get("/v1/checkpoints/next", window.next_plan, allow_head=False),
        web.get("/v1/checkpoints/{checkpoint}/manifest", window.manifest, allow_head=False),
        web.get("/v1/checkpoints/{checkpoint}/standing", window.standing, allow_head=False),
        web.get("/v1/checkpoints/{checkpoint}/shards/{index}", window.shard, allow_head=False),
    ]


class _Window:
    """Handlers over one store; polls sleep until the store changes."""

    def __init__(self, store: CheckpointStore, admits: Admission) -> None:
        self._store = store
        self._admits = admits
        self._polls = 0
        self._changed: asyncio.Event | None = None

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        checkpoint = checkpoint_id(request)
        held = self._store.manifest(checkpoint)
        if held is None:
            known = self._store.draft(checkpoint) is not None
            raise RefusedError(
                f"the manifest of {checkpoint.hex()[:12]} is not here", code="not-yet" if known else "not-found"
            )
        return msgpack_response(held.data)

    async def shard(self, request: web.Request) -> web.StreamResponse:
        checkpoint, index = checkpoint_id(request), whole_number(request.match_info["index"], "a shard")
        draft = self._store.draft(checkpoint)
        if draft is not None:
            require_admission(self._admits, request, draft.layout.step, index)
        with self._store.open_shard(checkpoint, index) as ranges:
            return await send_ranges(request, ranges)

    async def next_plan(self, request: web.Request) -> web.StreamResponse:
        oldest = query_number(request, "from")

        def look() -> bytes | None:
            plan = self._store.newest_plan(oldest)
            return plan.data if plan is not None else None

        found = await self._poll(request, look)
        return web.Response(status=204) if found is None else msgpack_response(found)

    async def standing(self, request: web.Request) -> web.StreamResponse:
        checkpoint = checkpoint_id(request)
        parts, held, closed = (query_number(request, name) for name in ("parts", "held", "closed"))
        seen: Progress | None = None

        def look() -> Progress | None:
            nonlocal seen
            seen = self._store.progress(checkpoint)
            if seen is None:
                return None
            seen = seen._replace(held=self._admits(request, seen.step, seen.held))
            is_news = (
                len(seen.parts) > parts or seen.held.bit_count() != held or (seen.manifest is not None and not closed)
            )
            return seen if is_news else None

        look()
        if seen is None:
            raise RefusedError(f"checkpoint {checkpoint.hex()[:12]} is not here", code="not-found")
        progress = await self._poll(request, look) or seen
        if progress is None:
            raise RefusedError(f"checkpoint {checkpoint.hex()[:12]} was removed meanwhile", code="not-found")
        return msgpack_response(msgspec.msgpack.encode(_standing(progress, parts)))

    async def _poll(self, request: web.Request, look: Callable[[], T | None]) -> T | None:
        """Look until there is something or the wait that was asked for is over."""
        wait_s = min(query_seconds(request, "wait_s"), MAX_WAIT_S)
        changed = self._bell()
        found = look()
        if found is not None or wait_s <= 0:
            return found
        if self._polls >= MAX_POLLS:
            raise RefusedError(f"{MAX_POLLS} others wait here already", code="busy", hint="ask another relay")
        self._polls += 1
        try:
            async with asyncio.timeout(wait_s):
                while found is None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN_S):
                            await changed.wait()
                    await asyncio.sleep(GATHER_S)
                    changed = self._bell()
                    found = look()
        except TimeoutError:
            return None
        finally:
            self._polls -= 1
        return found

    def _bell(self) -> asyncio.Event:
        """Take it before looking, so that a change in between is not missed."""
        if self._changed is None:
            self._changed = asyncio.Event()
            loop = asyncio.get_running_loop()
            self._store.subscribe(lambda: _call_in(loop, self._ring))
        return self._changed

    def _ring(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = asyncio.Event()


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        log.debug("a checkpoint changed after the HTTP thread's end")


def _standing(progress: Progress, known_parts: int) -> Standing:
    return Standing(
        shards=progress.shards,
        parts=[part.data for part in progress.parts[known_parts:]],
        manifest=progress.manifest.data if progress.manifest is not None else b"",
        held=pack_bits(progress.held, progress.shards),
    )


class SegmentReader(Protocol):
    """Whole segments of a ledger; may block."""

    def segments(self, first: int) -> Sequence[SegmentInfo]: ...

    def open_segment(self, sha256: bytes) -> BinaryIO | None: ...


def ledger_routes(read: LedgerReader, segments: SegmentReader | None = None) -> list[web.RouteDef]:
    """`GET /v1/ledger?from=N&limit=M`: a msgpack list of envelopes, as many as fit in one answer.

    With `segments` also `/v1/ledger/segments?from=N`, full ones, and `/v1/ledger/segments/{hash}`, their bytes.
    """

    async def ledger(request: web.Request) -> web.StreamResponse:
        first = query_number(request, "from")
        limit = query_number(request, "limit", default=MAX_LEDGER_ENTRIES, most=MAX_LEDGER_ENTRIES)
        return msgpack_response(_that_fit(await asyncio.to_thread(read, first, limit)))

    routes = [web.get("/v1/ledger", ledger, allow_head=False)]
    return routes if segments is None else [*routes, *_segment_routes(segments)]


def _segment_routes(reader: SegmentReader) -> list[web.RouteDef]:
    async def listed(request: web.Request) -> web.StreamResponse:
        infos = reader.segments(query_number(request, "from"))[:MAX_LEDGER_SEGMENTS]
        return msgpack_response(msgspec.msgpack.encode(infos))

    async def segment(request: web.Request) -> web.StreamResponse:
        sha256 = digest(request.match_info["hash"], "segment")
        file = await asyncio.to_thread(reader.open_segment, sha256)
        if file is None:
            raise RefusedError(f"there is no segment {sha256.hex()[:12]} of the ledger here", code="not-found")
        with file:
            return await send_ranges(request, [FileRange(file, 0, os.fstat(file.fileno()).st_size)])

    return [
        web.get("/v1/ledger/segments", listed, allow_head=False),
        web.get("/v1/ledger/segments/{hash}", segment, allow_head=False),
    ]


def _that_fit(entries: Sequence[bytes]) -> list[bytes]:
    total = 0
    fitting: list[bytes] = []
    for entry in entries:
        total += len(entry)
        if fitting and total > MAX_LEDGER_BYTES:
            break
        fitting.append(entry)
    return fitting


class OriginDoor:
    """Bearer tokens of the trainer's origin, one for each relay; safe from any thread."""

    def __init__(self) -> None:
        self._tokens: dict[PeerId, str] = {}

    def token_for(self, relay: PeerId) -> str:
        """The relay's token, made at the first call; it goes into the relay's OriginNotice and nowhere else."""
        return self._tokens.setdefault(relay, secrets.token_urlsafe(32))

    def revoke(self, relay: PeerId) -> None:
        """Let a relay in no longer."""
        self._tokens.pop(relay, None)

    def holder(self, authorization: str) -> PeerId | None:
        """Whose token an Authorization header carries. Compares with every token in constant time."""
        given = authorization.removeprefix(_BEARER).encode(errors="surrogateescape")
        holder = None
        for relay, token in list(self._tokens.items()):
            if hmac.compare_digest(token.encode(), given):
                holder = relay
        return holder if authorization.startswith(_BEARER) else None

    @property
    def middleware(self) -> Middleware:
        """For HttpServer: answers 401 to requests without a good token."""

        @web.middleware
        async def require_token(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.holder(request.headers.get("Authorization", "")) is None:
                raise RefusedError("this origin serves the run's relays only", code="unauthorized")
            return await handler(request)

        return require_token


def origin_routes(
    store: CheckpointStore,
    read_ledger: LedgerReader,
    *,
    patches: PatchStore | None = None,
    fan_out: Admission | None = None,
    segments: SegmentReader | None = None,
) -> list[web.RouteDef]:
    """All that the trainer serves; use with `OriginDoor.middleware`. `fan_out` holds for shards in every form."""
    smaller = [] if patches is None else patch_routes(patches, admits=fan_out)
    return [*checkpoint_routes(store, admits=fan_out), *smaller, *ledger_routes(read_ledger, segments)]

"""Serving checkpoints over HTTP: the routes that trainer and relays share, and the trainer's door for relays.

The trainer answers nobody but the relays it gave a token to; a relay answers everybody, or whom its own door lets in.
Handlers run on the HTTP thread. Cut-through: a shard is served as soon as it is hashed (trainer) or verified (relay),
long before its checkpoint is whole. A relay beyond the origin's fan-out sees signed records there, no shards.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2p.http import msgpack_response, send_ranges
from p2p.shardcast.sources import Standing, pack_bits
from p2p.shardcast.store import CheckpointStore, Progress
from protocol.errors import MalformedError, RefusedError
from protocol.identity import PeerId

MAX_LEDGER_ENTRIES: Final = 500
MAX_LEDGER_BYTES: Final = 4 << 20
"""Entries are left out of an answer beyond this; the caller asks again from where the answer ended."""

MAX_WAIT_S: Final = 30.0
MAX_POLLS: Final = 2048
GATHER_S: Final = 0.01
"""Changes that come together are told together."""

_BEARER: Final = "Bearer "

T = TypeVar("T")
Admission = Callable[[web.Request, int], bool]
"""(request, step of a checkpoint) -> whether its shards are for whoever asks."""

log = logging.getLogger(__name__)

LedgerReader = Callable[[int, int], Sequence[bytes]]
"""(first entry, most entries) -> envelopes; may block."""


def checkpoint_routes(store: CheckpointStore, *, admits: Admission | None = None) -> list[web.RouteDef]:
    """What `store` holds, in part or whole, under a checkpoint's id or its plan's; below `/v1/checkpoints`:

    `next?from=STEP&wait_s=S` newest plan of that step or later; `{id}/manifest`; `{id}/shards/{n}`; and
    `{id}/standing?parts=N&held=M&closed=0|1&wait_s=S`, as soon as there is more than the asker has.
    Whom `admits` turns away sees no shards.
    """
    window = _Window(store, admits or (lambda _request, _step: True))
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
        checkpoint = checkpoint_id(request.match_info["checkpoint"])
        held = self._store.manifest(checkpoint)
        if held is None:
            known = self._store.draft(checkpoint) is not None
            raise RefusedError(
                f"the manifest of {checkpoint.hex()[:12]} is not here", code="not-yet" if known else "not-found"
            )
        return msgpack_response(held.data)

    async def shard(self, request: web.Request) -> web.StreamResponse:
        checkpoint, index = checkpoint_id(request.match_info["checkpoint"]), number(request.match_info["index"])
        draft = self._store.draft(checkpoint)
        if draft is not None and not self._admits(request, draft.layout.step):
            raise RefusedError(
                "this node gives its shards to others just now", code="busy", hint="fetch them from another relay"
            )
        with self._store.open_shard(checkpoint, index) as ranges:
            return await send_ranges(request, ranges)

    async def next_plan(self, request: web.Request) -> web.StreamResponse:
        oldest = number(request.query.get("from", "0"))

        def look() -> bytes | None:
            plan = self._store.newest_plan(oldest)
            return plan.data if plan is not None else None

        found = await self._poll(request, look)
        return web.Response(status=204) if found is None else msgpack_response(found)

    async def standing(self, request: web.Request) -> web.StreamResponse:
        checkpoint = checkpoint_id(request.match_info["checkpoint"])
        parts, held, closed = (number(request.query.get(name, "0")) for name in ("parts", "held", "closed"))
        seen: Progress | None = None

        def look() -> Progress | None:
            nonlocal seen
            seen = self._store.progress(checkpoint)
            if seen is None:
                return None
            if not self._admits(request, seen.step):
                seen = seen._replace(held=0)
            is_news = (
                len(seen.parts) > parts or seen.held.bit_count() > held or (seen.manifest is not None and not closed)
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
        wait_s = min(_seconds(request.query.get("wait_s", "0")), MAX_WAIT_S)
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


def ledger_routes(read: LedgerReader) -> list[web.RouteDef]:
    """`GET /v1/ledger?from=N&limit=M`: a msgpack list of envelopes, as many as fit in one answer."""

    async def ledger(request: web.Request) -> web.StreamResponse:
        first = number(request.query.get("from", "0"))
        limit = min(number(request.query.get("limit", str(MAX_LEDGER_ENTRIES))), MAX_LEDGER_ENTRIES)
        return msgpack_response(_that_fit(await asyncio.to_thread(read, first, limit)))

    return [web.get("/v1/ledger", ledger, allow_head=False)]


def _that_fit(entries: Sequence[bytes]) -> list[bytes]:
    total = 0
    fitting: list[bytes] = []
    for entry in entries:
        total += len(entry)
        if fitting and total > MAX_LEDGER_BYTES:
            break
        fitting.append(entry)
    return fitting


def checkpoint_id(text: str) -> bytes:
    """A checkpoint's id in a URL. Raises MalformedError."""
    try:
        checkpoint = bytes.fromhex(text)
    except ValueError:
        checkpoint = b""
    if len(checkpoint) != 32:
        raise MalformedError(f"not a checkpoint id: {text[:80]!r}")
    return checkpoint


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise MalformedError(f"not a number of seconds from 0 to 3600: {text[:40]!r}")
    return seconds


def number(text: str) -> int:
    """A number in a URL. Raises MalformedError."""
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise MalformedError(f"not a number: {text[:40]!r}")
    return int(text)


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
    store: CheckpointStore, read_ledger: LedgerReader, *, fan_out: Admission | None = None
) -> list[web.RouteDef]:
    """All that the trainer serves; use with `OriginDoor.middleware`."""
    return [*checkpoint_routes(store, admits=fan_out), *ledger_routes(read_ledger)]

"""Serving checkpoints over HTTP: the routes that trainer and relays share, and the trainer's door for relays.

The trainer answers nobody but the relays it gave a token to; a relay answers everybody, or whom its own door lets in.
Handlers run on the HTTP thread. Cut-through: a shard is served as soon as it is verified, long before its checkpoint
is whole.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2p.http import msgpack_response, send_ranges
from p2p.shardcast.store import CheckpointStore
from protocol.errors import MalformedError, RefusedError
from protocol.identity import PeerId

MAX_LEDGER_ENTRIES: Final = 500
MAX_LEDGER_BYTES: Final = 4 << 20
"""Entries are left out of an answer beyond this; the caller asks again from where the answer ended."""

_BEARER: Final = "Bearer "

LedgerReader = Callable[[int, int], Sequence[bytes]]
"""(first entry, most entries) -> envelopes; may block."""


def checkpoint_routes(store: CheckpointStore) -> list[web.RouteDef]:
    """`GET /v1/checkpoints/{id}/manifest` and `…/shards/{n}` for what `store` holds, in part or whole."""

    async def manifest(request: web.Request) -> web.StreamResponse:
        checkpoint = _checkpoint_id(request)
        held = store.manifest(checkpoint)
        if held is None:
            raise RefusedError(f"checkpoint {checkpoint.hex()[:12]} is not here", code="not-found")
        return msgpack_response(held.data)

    async def shard(request: web.Request) -> web.StreamResponse:
        with store.open_shard(_checkpoint_id(request), _number(request.match_info["index"])) as ranges:
            return await send_ranges(request, ranges)

    return [
        web.get("/v1/checkpoints/{checkpoint}/manifest", manifest, allow_head=False),
        web.get("/v1/checkpoints/{checkpoint}/shards/{index}", shard, allow_head=False),
    ]


def ledger_routes(read: LedgerReader) -> list[web.RouteDef]:
    """`GET /v1/ledger?from=N&limit=M`: a msgpack list of envelopes, as many as fit in one answer."""

    async def ledger(request: web.Request) -> web.StreamResponse:
        first = _number(request.query.get("from", "0"))
        limit = min(_number(request.query.get("limit", str(MAX_LEDGER_ENTRIES))), MAX_LEDGER_ENTRIES)
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


def _checkpoint_id(request: web.Request) -> bytes:
    text = request.match_info["checkpoint"]
    try:
        checkpoint = bytes.fromhex(text)
    except ValueError:
        checkpoint = b""
    if len(checkpoint) != 32:
        raise MalformedError(f"not a checkpoint id: {text[:80]!r}")
    return checkpoint


def _number(text: str) -> int:
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


def origin_routes(store: CheckpointStore, read_ledger: LedgerReader) -> list[web.RouteDef]:
    """All that the trainer serves; use with `OriginDoor.middleware`."""
    return [*checkpoint_routes(store), *ledger_routes(read_ledger)]

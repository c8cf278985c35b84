"""A trainer's checkpoints and relays on loopback, honest and otherwise."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from p2p.bridge import AioThread
from p2p.http import BoundAddress, HttpClient, HttpServer, msgpack_response
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.origin import checkpoint_routes
from p2p.shardcast.sources import Source
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules
from protocol.envelope import Signed
from protocol.identity import Identity, PeerId
from protocol.records import CheckpointManifest

TRAINER = Identity.from_phrase("trainer")
ALICE = Identity.from_phrase("alice").peer_id
BOB = Identity.from_phrase("bob").peer_id
CAROL = Identity.from_phrase("carol").peer_id
RUN_ID = b"r" * 32
SHARD_BYTES = 4096
TENSOR_FILES = {"model-1.safetensors": 17_000, "model-2.safetensors": 12_288}
RULES = CheckpointRules(RUN_ID, TRAINER.peer_id, SHARD_BYTES, total_steps=100, max_bytes=1 << 20)
QUICK_S = 0.3


def make_policy(directory: Path, *, tag: int = 1) -> Path:
    """A policy of five files, one of them empty, which make eight shards with borders inside and between files."""
    directory.mkdir(parents=True)
    sizes = {"added.json": 0, "config.json": 300}
    for name, size in sizes.items():
        (directory / name).write_bytes(pattern(size, tag))
    for name, size in TENSOR_FILES.items():
        (directory / name).write_bytes(tensor_file(size, tag))
    (directory / "tokenizer.json").write_bytes(b"{}")
    return directory


def pattern(size: int, tag: int = 1) -> bytes:
    return bytes((index * 31 + index // 251 + tag) % 256 for index in range(size))


def tensor_file(size: int, tag: int = 1) -> bytes:
    """A safetensors file of exactly so many bytes with one tensor."""
    data = size - 128
    header = json.dumps({"weight": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}).encode().ljust(120)
    return struct.pack("<Q", len(header)) + header + pattern(data, tag)


async def publish(
    store: CheckpointStore, source: Path, *, identity: Identity = TRAINER, run_id: bytes = RUN_ID, step: int = 1
) -> Signed[CheckpointManifest]:
    return await store.publish(source, identity=identity, run_id=run_id, step=step, shard_bytes=SHARD_BYTES)


def contents(directory: Path | None) -> dict[str, bytes]:
    assert directory is not None
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


class Loopback:
    """One HTTP thread, one client pool, servers that end with the block, and what clients tell of their relays."""

    def __init__(self, aio: AioThread, http: HttpClient, nursery: trio.Nursery) -> None:
        self.aio = aio
        self.http = http
        self.nursery = nursery
        self.relays: list[Source] = []
        self.bytes: Counter[PeerId] = Counter()
        self.misdeeds: list[tuple[PeerId, str]] = []
        self._token = trio.lowlevel.current_trio_token()
        self._news = trio.Event()

    async def serve(
        self, routes: Sequence[web.AbstractRouteDef], *middlewares: Middleware, **more: Any
    ) -> BoundAddress:
        server = HttpServer(self.aio, routes, host="127.0.0.1", port=0, middlewares=middlewares, **more)
        address: BoundAddress = await self.nursery.start(server.run)
        return address

    def client_of(self, store: CheckpointStore, rules: CheckpointRules, **more: Any) -> CheckpointClient:
        settings: dict[str, Any] = {
            "progress_timeout_s": QUICK_S,
            "patience_s": 5.0,
            "on_bytes": self._count,
            "on_misdeed": self._note_misdeed,
        }
        return CheckpointClient(self.http, store, rules, lambda: self.relays, **settings | more)

    def notify(self) -> None:
        """Something happened that `until` may wait for; from any thread."""
        self._token.run_sync_soon(self._wake)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _note_misdeed(self, relay: PeerId, what: str) -> None:
        self.misdeeds.append((relay, what))
        self.notify()

    def _count(self, relay: PeerId, received: int) -> None:
        self.bytes[relay] += received


class World(Loopback):
    """Relays with a policy of a few files, which a trainer has published or will."""

    def __init__(self, tmp_path: Path, aio: AioThread, http: HttpClient, nursery: trio.Nursery) -> None:
        super().__init__(aio, http, nursery)
        self.tmp_path = tmp_path
        self.policy = make_policy(tmp_path / "policy")
        self.trainer = CheckpointStore(tmp_path / "trainer")
        self.node = CheckpointStore(tmp_path / "node")
        self.progress: list[tuple[int, int]] = []

    async def relay(self, peer: PeerId, *middlewares: Middleware, store: CheckpointStore | None = None) -> None:
        address = await self.serve(checkpoint_routes(store or self.trainer), *middlewares)
        self.relays.append(Source(peer, address.url))

    async def impostor(self, peer: PeerId, answers: Mapping[str, bytes]) -> None:
        """A relay that has its own answer to everything, by path below `/v1/checkpoints`."""

        def route(path: str, body: bytes) -> web.RouteDef:
            async def answer(_: web.Request) -> web.Response:
                return msgpack_response(body)

            return web.get(f"/v1/checkpoints/{path}", answer)

        address = await self.serve([route(path, body) for path, body in answers.items()])
        self.relays.append(Source(peer, address.url))

    def client(self, **more: Any) -> CheckpointClient:
        rules = more.pop("rules", RULES)
        store = more.pop("store", self.node)
        return self.client_of(store, rules, **{"on_progress": self._note_progress} | more)

    async def rescued(
        self, manifest: Signed[CheckpointManifest], when: Callable[[], bool], *, source: Path | None = None, **more: Any
    ) -> None:
        """Download from the relays that there are, until Alice's honest one comes too; all must be well in the end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.client(**more).download, manifest.id)
            await self.until(when)
            await self.relay(ALICE)
        assert contents(self.node.local_dir(manifest.id)) == contents(source or self.policy)

    def _note_progress(self, done: int, total: int, relays: Mapping[PeerId, int]) -> None:
        assert sum(relays.values()) <= sum(self.bytes.values())
        self.progress.append((done, total))
        self.notify()


@asynccontextmanager
async def world_in(tmp_path: Path) -> AsyncIterator[World]:
    async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
        yield World(tmp_path, aio, http, nursery)
        nursery.cancel_scope.cancel()


def misconduct(key: str, act: Callable[[web.Request], Awaitable[web.StreamResponse | None]]) -> Middleware:
    """A relay's: `act` answers a request whose path has `key`, or gives None to let it pass."""

    @web.middleware
    async def instead(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await act(request) if key in request.match_info else None
        return answer if answer is not None else await handler(request)

    return instead


def on_shards(act: Callable[[web.Request, int], Any]) -> Middleware:
    """A relay's misconduct with shards: `act(request, index)`."""
    return misconduct("index", lambda request: act(request, int(request.match_info["index"])))


def on_patches(act: Callable[[web.Request], Awaitable[web.StreamResponse | None]]) -> Middleware:
    """A relay's misconduct with patches."""
    return misconduct("base", act)


async def begin_answer(request: web.Request, body: bytes, *, sent: int = 0) -> web.StreamResponse:
    """Promise all of a body and send so much of it."""
    response = web.StreamResponse()
    response.content_length = len(body)
    await response.prepare(request)
    await response.write(body[:sent])
    return response


def shard_bytes_of(store: CheckpointStore, checkpoint: bytes, index: int) -> bytes:
    with store.open_shard(checkpoint, index) as ranges:
        parts = []
        for file, offset, length in ranges:
            file.seek(offset)
            parts.append(file.read(length))
    return b"".join(parts)

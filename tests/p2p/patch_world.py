"""Checkpoints of one bf16 model at several steps, and nodes that hold some of them; with a network and without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import trio
from aiohttp.typedefs import Middleware
from shardcast_world import RUN_ID, TRAINER, Loopback

from p2p.bridge import AioThread
from p2p.http import HttpClient
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.origin import checkpoint_routes
from p2p.shardcast.partial import PartialCheckpoint
from p2p.shardcast.patch_client import Patching
from p2p.shardcast.patches import PatchStore, patch_routes, read_shard
from p2p.shardcast.sources import Source
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules
from protocol.envelope import Signed
from protocol.errors import RefusedError
from protocol.identity import Identity, PeerId
from protocol.records import CheckpointManifest

SHARD_BYTES = 16384
VALUES = 40_000
"""bf16 values of the model's large tensor; with the small ones they make six shards, two of them in a second file."""


def bf16(count: int, *, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2")


def safetensors(**tensors: tuple[str, list[int], bytes]) -> bytes:
    at = 0
    entries = {}
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(data for _, _, data in tensors.values())


class Model:
    """Weights that can be moved a little and written as a policy's directory."""

    def __init__(self) -> None:
        self.large = bf16(VALUES)
        self.scalar = bf16(1, seed=1)
        self.untouched = bf16(4000, seed=2)
        self.float32 = np.random.default_rng(3).normal(0, 0.02, 3000).astype("<f4")

    def move(self, *, every: int = 97, by: int = 1, first: int = 0) -> Model:
        self.large[first::every] += np.uint16(by)
        return self

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True)
        first = safetensors(
            embedding=("BF16", [VALUES // 100, 100], self.large.tobytes()),
            scale=("BF16", [], self.scalar.tobytes()),
            nothing=("BF16", [0, 8], b""),
        )
        second = safetensors(
            bias=("F32", [3000], self.float32.tobytes()),
            norm=("BF16", [4000], self.untouched.tobytes()),
            mask=("BOOL", [3], b"\1\0\1"),
        )
        (directory / "config.json").write_bytes(b'{"odd": 1}\n')  # every tensor lies at an odd place in the stream
        (directory / "model-1.safetensors").write_bytes(first)
        (directory / "model-2.safetensors").write_bytes(second)
        return directory


class Trainer:
    """Publishes versions of one model."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.model = Model()
        self.store = CheckpointStore(tmp_path / "trainer", keep=20)
        self.patches = PatchStore(self.store, tmp_path / "trainer-patches")
        self.versions: dict[int, Signed[CheckpointManifest]] = {}

    async def publish(self, step: int) -> Signed[CheckpointManifest]:
        source = self.model.write(self.tmp_path / f"policy-{step}")
        manifest = await self.store.publish(source, identity=TRAINER, run_id=RUN_ID, step=step, shard_bytes=SHARD_BYTES)
        self.versions[step] = manifest
        return manifest

    def give(self, manifest: Signed[CheckpointManifest], partial: PartialCheckpoint, *shards: int) -> None:
        """Write shards of a version whole into a download."""
        for index in shards or range(len(manifest.record.shards)):
            partial.write_shard(index, bytes(read_shard(self.store, manifest.id, index)))


async def hold(trainer: Trainer, node: CheckpointStore, *steps: int) -> None:
    """Have versions complete on a node."""
    for step in steps:
        manifest = trainer.versions[step]
        with node.begin(manifest) as partial:
            assert partial is not None
            trainer.give(manifest, partial)
        await node.install(manifest.id)


class Oracle:
    """A relay without a network: answers from a PatchStore, changed on the way by `tamper`."""

    def __init__(
        self, patches: PatchStore, target: bytes, *, tamper: Callable[[str, bytes], bytes] = lambda _, data: data
    ) -> None:
        self._patches = patches
        self._target = target
        self._tamper = tamper
        self.asked: list[str] = []

    async def ask(self, path: str, max_bytes: int) -> bytes:
        self.asked.append(path)
        form, *rest = path.split("/")
        base = bytes.fromhex(rest[0]) if form == "patches" else None
        with self._patches.make(self._patches.pair(self._target, base, int(rest[-1]))) as file:
            data = self._tamper(path, file.read())
        assert len(data) <= max_bytes
        return data


async def obtain(
    patching: Patching, partial: PartialCheckpoint, source: Oracle, *, throughput: float | None = None
) -> Mapping[str, list[int]]:
    """Every missing shard that can be had without fetching it whole; which came how."""
    came: dict[str, list[int]] = {"copied": [], "patched": [], "whole": []}
    for index in partial.missing():
        if await patching.copy(index):
            came["copied"].append(index)
        elif await patching.fetch(index, "relay", source.ask, throughput=throughput) is not None:
            came["patched"].append(index)
        else:
            came["whole"].append(index)
    return came


def refuse(code: str) -> Callable[[str, bytes], bytes]:
    def tamper(_: str, __: bytes) -> bytes:
        raise RefusedError("no", code=code)

    return tamper


class Network(Loopback):
    """Relays on loopback with the trainer's store or their own, and a client that downloads from all of them."""

    def __init__(self, trainer: Trainer, aio: AioThread, http: HttpClient, nursery: trio.Nursery) -> None:
        super().__init__(aio, http, nursery)
        self.trainer = trainer

    async def relay(
        self,
        name: str,
        *middlewares: Middleware,
        store: CheckpointStore | None = None,
        patches: PatchStore | None = None,
        has_patches: bool = True,
    ) -> PeerId:
        routes = checkpoint_routes(store or self.trainer.store)
        if has_patches:
            routes += patch_routes(patches or self.trainer.patches)
        address = await self.serve(routes, *middlewares)
        peer = Identity.from_phrase(name).peer_id
        self.relays.append(Source(peer, address.url))
        return peer

    def client(self, node: CheckpointStore, **more: Any) -> CheckpointClient:
        rules = CheckpointRules(RUN_ID, TRAINER.peer_id, SHARD_BYTES, total_steps=100, max_bytes=1 << 20)
        return self.client_of(node, rules, **more)


@asynccontextmanager
async def network_of(trainer: Trainer) -> AsyncIterator[Network]:
    async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
        yield Network(trainer, aio, http, nursery)
        nursery.cancel_scope.cancel()

"""Where two versions of a checkpoint lie: patches between them, made when asked for, cached on disk, and served.

A patch leads straight from the base that a node holds to the version it wants, however many steps lie between, and ends
in the hash that the trainer signed; so whoever makes it needs no trust. Both shards are hashed before one is made. The
cache is bounded and starts empty: what it held can be made again. Fetching is p2p.shardcast.patch_client's work.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import os
import shutil
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from aiohttp import web

from p2p.http import FileRange, send_ranges
from p2p.http.params import digest, whole_number
from p2p.shardcast.fan_out import Admission
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import Layout
from protocol.errors import MalformedError, ModelError, RefusedError
from protocol.patch import NO_BASE, Run, make_patch, pack_shard
from protocol.tensor_runs import cut_runs, file_runs
from protocol.tensorfile import PREFIX_BYTES, SUFFIX, header_length

log = logging.getLogger(__name__)

MAX_CACHE_BYTES: Final = 2 << 30
MAX_CACHE_ENTRIES: Final = 1 << 16
MAX_WAITING: Final = 256
"""Requests that wait for a patch to be made; it is made at well over 100 MB of model a second, one at a time."""
MAX_LAYOUTS: Final = 8

NO_PATCH: Final = "no-patch"
"""Refusal: this relay has no smaller form of that shard; it has, or will have, the shard itself."""


@dataclass(frozen=True)
class Pair:
    """A shard of `target` and the same shard of `base`; no base, to pack the shard by itself."""

    target: bytes
    base: bytes | None
    index: int
    step: int
    """Of the target."""
    target_sha256: bytes
    base_sha256: bytes

    @property
    def key(self) -> bytes:
        return self.base_sha256 + self.target_sha256


class PatchStore:
    """Makes patches between the checkpoints of a store. Methods are for any thread."""

    def __init__(self, store: CheckpointStore, directory: Path, *, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._store = store
        self._cache = _Cache(directory, max_bytes)
        self._layouts: OrderedDict[bytes, list[Run]] = OrderedDict()
        self._making = threading.Lock()

    def pair(self, target: bytes, base: bytes | None, index: int) -> Pair:
        """What a patch would be made from. Quick. Raises RefusedError: "not-found", "not-yet" or "no-patch"."""
        wanted = self._store.draft(target)
        if wanted is None:
            raise RefusedError(f"checkpoint {target.hex()[:12]} is not here", code="not-found")
        with self._store.open_shard(target, index):
            goal = wanted.hashes[index]
        if goal is None:
            raise RefusedError(f"shard {index} is still on its way to this node", code="not-yet")
        if base is None:
            return Pair(target, None, index, wanted.layout.step, goal, NO_BASE)
        held = self._store.manifest(base)
        if held is None or self._store.local_dir(base) is None:
            raise RefusedError(f"checkpoint {base.hex()[:12]}, to patch, is not here", code=NO_PATCH)
        if not leads_on(Layout.of(held.record), wanted.layout):
            raise RefusedError("patches lead from an older checkpoint to a newer one of the same layout", code=NO_PATCH)
        return Pair(target, base, index, wanted.layout.step, goal, held.record.shards[index])

    def cached(self, pair: Pair) -> BinaryIO | None:
        """A patch that was made before; close it after use. Quick. Raises RefusedError when there can be none."""
        return self._cache.open(pair.key)

    def make(self, pair: Pair) -> BinaryIO:
        """The patch, made now unless it is cached; close it after use. Raises RefusedError."""
        with self._making:
            file = self.cached(pair)
            if file is None:
                self._cache.put(pair.key, self._encode(pair))
                file = self.cached(pair)
        if file is None:
            raise RefusedError("there is no room for patches on this node", code=NO_PATCH)
        return file

    def keep(self, target_sha256: bytes, base_sha256: bytes, patch: bytes) -> None:
        """Serve a patch that this node was given and that led to the right hash."""
        self._cache.put(base_sha256 + target_sha256, patch)

    def _encode(self, pair: Pair) -> bytes | None:
        target = self._sound(pair.target, pair.index, pair.target_sha256)
        if pair.base is None:
            return pack_shard(target, self._runs(pair.target, pair.index), target_sha256=pair.target_sha256)
        base = self._sound(pair.base, pair.index, pair.base_sha256)
        runs = self._runs(pair.base, pair.index)
        return make_patch(base, target, runs, base_sha256=pair.base_sha256, target_sha256=pair.target_sha256)

    def _sound(self, checkpoint: bytes, index: int, digest: bytes) -> memoryview:
        data = read_shard(self._store, checkpoint, index)
        if hashlib.sha256(data).digest() != digest:
            log.error("checkpoint=%s shard=%d cause=damaged-on-disk", checkpoint.hex()[:12], index)
            raise RefusedError("this node's copy of that shard is damaged", code=NO_PATCH)
        return data

    def _runs(self, checkpoint: bytes, index: int) -> list[Run]:
        """What the bytes of a shard are, by the headers of a checkpoint that is whole here."""
        manifest = self._store.manifest(checkpoint)
        if manifest is None:
            raise RefusedError(f"checkpoint {checkpoint.hex()[:12]} is not here any more", code=NO_PATCH)
        layout = Layout.of(manifest.record)
        if checkpoint not in self._layouts:
            try:
                with self._store.lease(checkpoint) as directory:
                    runs = [run for file in layout.files for run in _runs_of(directory / file.name, file.size)]
            except ModelError as error:
                raise RefusedError(error.message, code=NO_PATCH) from error
            self._layouts[checkpoint] = runs
            while len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        return cut_runs(self._layouts[checkpoint], layout.range(index))


def leads_on(base: Layout, target: Layout) -> bool:
    """Whether patches from one checkpoint to the other may be: it is newer, and every byte has its place in both."""
    same = (base.shard_bytes, base.files) == (target.shard_bytes, target.files)
    return same and base.step < target.step


def read_shard(store: CheckpointStore, checkpoint: bytes, index: int) -> memoryview:
    """A shard from disk, as it lies there. Blocks. Raises RefusedError when it is not here, OSError."""
    with store.open_shard(checkpoint, index) as ranges:
        # Memory of its own, not the allocator's, goes back to the system as soon as it is not used any more.
        buffer = memoryview(mmap.mmap(-1, sum(part.length for part in ranges)))
        left = buffer
        for part in ranges:
            part.file.seek(part.offset)
            _read_into(part.file, left[: part.length])
            left = left[part.length :]
        return buffer


def _read_into(file: BinaryIO, view: memoryview) -> None:
    while view:
        count = os.readv(file.fileno(), [view])
        if not count:
            raise OSError(f"{file.name} is shorter than it was")
        view = view[count:]


def _runs_of(path: Path, size: int) -> list[Run]:
    if not path.name.endswith(SUFFIX):
        return file_runs(b"", size)
    with path.open("rb") as file:
        try:
            header = file.read(header_length(file.read(PREFIX_BYTES), size))
        except MalformedError:
            header = b""
    return file_runs(header, size)


class _Cache:
    """Files by key, the least recently used of which go when they are too many or too large; no file: a sure no."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)

    def open(self, key: bytes) -> BinaryIO | None:
        """Raises RefusedError when what was put is that there is none."""
        with self._lock:
            if key not in self._sizes:
                return None
            self._sizes.move_to_end(key)
            if not self._sizes[key]:
                raise RefusedError("no form of that shard is much smaller than the shard itself", code=NO_PATCH)
            return self._path(key).open("rb", buffering=0)

    def put(self, key: bytes, data: bytes | None) -> None:
        """A disk that does not take it is no misfortune: it is as if it had been evicted at once."""
        size = len(data or b"")
        path = self._path(key)
        part = path.with_suffix(f".{threading.get_ident()}")
        try:
            if data is not None:
                part.write_bytes(data)
            with self._lock:
                if data is not None:
                    part.rename(path)
                self._total += size - self._sizes.pop(key, 0)
                self._sizes[key] = size
                self._evict()
        except OSError as error:
            part.unlink(missing_ok=True)
            log.warning("patch bytes=%d kept=no error=%r", size, str(error))

    def _evict(self) -> None:
        while self._total > self._max_bytes or len(self._sizes) > MAX_CACHE_ENTRIES:
            key, size = self._sizes.popitem(last=False)
            self._total -= size
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return self._directory / f"{hashlib.sha256(key).hexdigest()}.patch"


def checkpoint_id(request: web.Request, name: str = "checkpoint") -> bytes:
    """A checkpoint's id in a request's path. Raises MalformedError."""
    return digest(request.match_info[name], "checkpoint id")


def require_admission(admits: Admission, request: web.Request, step: int, index: int) -> None:
    """Raise RefusedError "not-yet" when a shard, in whatever form, is for others."""
    if not admits(request, step, 1 << index):
        raise RefusedError(
            f"shard {index} is for other relays here", code="not-yet", hint="fetch it from one that has it"
        )


def patch_routes(patches: PatchStore, *, admits: Admission | None = None) -> list[web.RouteDef]:
    """`GET /v1/checkpoints/{id}/patches/{base id}/{n}` and `…/packed/{n}`, beside what checkpoint_routes serve."""
    serve = _Window(patches, admits or (lambda _request, _step, shards: shards))
    return [
        web.get("/v1/checkpoints/{checkpoint}/patches/{base}/{shard}", serve.patch, allow_head=False),
        web.get("/v1/checkpoints/{checkpoint}/packed/{shard}", serve.packed, allow_head=False),
    ]


class _Window:
    """Answers on the HTTP thread. Patches are made in a worker thread, one after the other."""

    def __init__(self, patches: PatchStore, admits: Admission) -> None:
        self._patches = patches
        self._admits = admits
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def patch(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, checkpoint_id(request, "base"))

    async def packed(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, None)

    async def _answer(self, request: web.Request, base: bytes | None) -> web.StreamResponse:
        target, index = checkpoint_id(request), whole_number(request.match_info["shard"], "a shard")
        pair = self._patches.pair(target, base, index)
        require_admission(self._admits, request, pair.step, index)
        with self._patches.cached(pair) or await self._made(pair) as file:
            return await send_ranges(request, [FileRange(file, 0, os.fstat(file.fileno()).st_size)])

    async def _made(self, pair: Pair) -> BinaryIO:
        if self._waiting >= MAX_WAITING:
            raise RefusedError(
                f"{self._waiting} others wait for patches already", code="busy", hint="try another relay"
            )
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(self._patches.make, pair)
        finally:
            self._waiting -= 1

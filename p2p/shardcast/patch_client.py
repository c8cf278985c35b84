"""Whoever is behind: shards by patch from the newest version held, packed where links are slow, copied where equal.

The base shard's hash is checked before a patch is applied and the result's after; the base's files are only read. A
shard that cannot be had like this is left to be fetched whole. A relay is blamed only for bytes that lead elsewhere:
that it has no patch is no misdeed, and neither is a damaged base on this node's own disk.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

from p2p.shardcast.partial import Bytes, PartialCheckpoint
from p2p.shardcast.patches import NO_PATCH, PatchStore, leads_on, read_shard
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import Layout
from protocol.envelope import Signed
from protocol.errors import ChecksumError, ModelError, ProtocolError, RefusedError, RelayError
from protocol.patch import NO_BASE, apply_patch, max_patch_bytes, unpack_shard
from protocol.records import CheckpointManifest

log = logging.getLogger(__name__)

PACKED_BELOW: Final = 40e6
"""Bytes a second from the fastest relay; on a quicker link unpacking costs more time than it saves."""
MAX_FAILURES: Final = 2
"""Failed fetches of one shard's patch before the shard is fetched whole."""
MAX_IN_VAIN: Final = 4
"""Times in a row that a source gave no patch, after which it is asked for none in this download."""

_WITHOUT: Final = frozenset({NO_PATCH, "not-found", "not-allowed"})
"""Refusals that the same shard whole would not meet."""
_LATER: Final = frozenset({"not-yet", "busy", "too-many-requests", "over-budget"})
"""Refusals that say nothing about patches: the shard cannot be had here just now."""

Ask = Callable[[str, int], Awaitable[bytes]]
"""(what, below a checkpoint's URL; most bytes of the answer) -> the answer, or a RelayError."""


@dataclass
class Savings:
    """Bytes that came as patches and packed shards, that came as whole shards, and that did not have to come."""

    patched_bytes: int = 0
    full_bytes: int = 0
    saved_bytes: int = 0

    def add_whole(self, length: int) -> None:
        self.full_bytes += length

    def add_smaller(self, received: int, length: int) -> None:
        self.patched_bytes += received
        self.saved_bytes += length - received


class PatchClient:
    """Shared by the downloads of one store. `keep` gets the patches that led to the right hash, to serve them on."""

    def __init__(self, store: CheckpointStore, *, keep: PatchStore | None = None) -> None:
        self.savings = Savings()
        self._store = store
        self._keep = keep
        self._one_at_a_time = trio.CapacityLimiter(1)

    @contextmanager
    def towards(self, partial: PartialCheckpoint) -> Iterator[Patching]:
        """For the length of one download; keeps its base from being pruned."""
        base = self._newest_base(partial.draft.layout)
        try:
            lease = None if base is None else self._store.lease(base.id)
        except ModelError:
            base, lease = None, None
        if lease is None:
            yield Patching(self, partial, None)
            return
        with lease:
            yield Patching(self, partial, base)

    def _newest_base(self, target: Layout) -> Signed[CheckpointManifest] | None:
        for _, checkpoint in reversed(self._store.complete()):
            held = self._store.manifest(checkpoint)
            if held is not None and leads_on(Layout.of(held.record), target):
                return held
        return None

    async def in_thread(self, work: Callable[[], bool]) -> bool:
        """Decode and write, one shard at a time, so that memory holds a base and a result once."""
        return await trio.to_thread.run_sync(work, limiter=self._one_at_a_time)

    def base_shard(self, base: Signed[CheckpointManifest], index: int) -> memoryview | None:
        """A shard of the base if its hash holds. Blocks."""
        try:
            data = read_shard(self._store, base.id, index)
        except (RefusedError, OSError) as error:
            log.error("checkpoint=%s shard=%d unreadable=%r", base.id.hex()[:12], index, str(error)[:200])
            return None
        if hashlib.sha256(data).digest() == base.record.shards[index]:
            return data
        log.error("checkpoint=%s shard=%d cause=damaged-on-disk action=fetch-whole", base.id.hex()[:12], index)
        return None

    def kept(self, target_sha256: bytes, base_sha256: bytes, patch: bytes) -> None:
        if self._keep is not None:
            self._keep.keep(target_sha256, base_sha256, patch)


class Patching:
    """One download. `base` is the version that it patches from, if any."""

    def __init__(
        self, client: PatchClient, partial: PartialCheckpoint, base: Signed[CheckpointManifest] | None
    ) -> None:
        self.base = base
        self._client = client
        self._partial = partial
        self._failures: Counter[int] = Counter()
        self._in_vain: Counter[Hashable] = Counter()

    @property
    def savings(self) -> Savings:
        return self._client.savings

    async def copy(self, index: int) -> bool:
        """Take over a shard that is the same in the base; whether it was, and is in place now."""
        base = self.base
        digest = self._partial.draft.hashes[index]
        if base is None or self._failures[index] or digest != base.record.shards[index]:
            return False
        if not await self._client.in_thread(lambda: self._place(index, self._client.base_shard(base, index), digest)):
            self._failures[index] = MAX_FAILURES
            return False
        self._client.savings.saved_bytes += self._length(index)
        return True

    async def fetch(self, index: int, source: Hashable, ask: Ask, *, throughput: float | None) -> int | None:
        """Have a shard in place; gives the bytes that came for it, or None: fetch it whole from this source.

        `ask` requests something of the source, `throughput` is the fastest source's. Raises RelayError when the source
        failed or has not got the shard yet, ProtocolError when it sent wrong bytes.
        """
        path, max_bytes = self._form(index, throughput)
        if not path or self._failures[index] >= MAX_FAILURES or self._in_vain[source] >= MAX_IN_VAIN:
            return None
        try:
            data = await ask(path, max_bytes)
        except RelayError as error:
            code = error.code if isinstance(error, RefusedError) else ""
            self._in_vain[source] += code not in _LATER
            if code in _WITHOUT:
                return None
            self._failures[index] += code not in _LATER
            raise
        self._in_vain[source] = 0
        return await self._take(index, data)

    def _form(self, index: int, throughput: float | None) -> tuple[str, int]:
        """What to ask for, below a checkpoint's URL, and how long the answer may be."""
        if self.base is not None:
            return f"patches/{self.base.id.hex()}/{index}", max_patch_bytes(self._length(index))
        if throughput is not None and throughput < PACKED_BELOW:
            return f"packed/{index}", self._length(index) - 1
        return "", 0

    async def _take(self, index: int, data: bytes) -> int | None:
        digest = self._hash(index)
        try:
            done = await self._client.in_thread(lambda: self._place(index, self._decode(index, data, digest), digest))
        except ProtocolError:
            self._failures[index] = MAX_FAILURES
            raise
        if not done:
            self._failures[index] = MAX_FAILURES
            return None
        self._client.savings.add_smaller(len(data), self._length(index))
        return len(data)

    def _decode(self, index: int, data: bytes, target: bytes) -> bytearray | None:
        """The shard with hash `target`; None when this node's own base is at fault. Raises ProtocolError."""
        if self.base is None:
            shard = unpack_shard(data, length=self._length(index), target_sha256=target)
            self._client.kept(target, NO_BASE, data)
            return shard
        base = self._client.base_shard(self.base, index)
        if base is None:
            return None
        before = self.base.record.shards[index]
        shard = apply_patch(data, base, base_sha256=before, target_sha256=target)
        self._client.kept(target, before, data)
        return shard

    def _place(self, index: int, shard: Bytes | None, digest: bytes) -> bool:
        """Write a shard that has this hash; whether that is still the hash that is wanted."""
        if shard is None:
            return False
        sink = self._partial.sink(index)
        try:
            sink.write(shard)
            sink.commit(digest)
        except ChecksumError:
            return False
        finally:
            sink.close()
        return True

    def _hash(self, index: int) -> bytes:
        digest = self._partial.draft.hashes[index]
        if digest is None:
            raise ValueError(f"shard {index} is asked for before its hash is known")
        return digest

    def _length(self, index: int) -> int:
        return self._partial.draft.layout.length(index)

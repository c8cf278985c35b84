"""A checkpoint that is being downloaded: files of full size, and a bitmap of the shards that are verified.

Shards are written at their final offsets as they arrive and count once their hash held. The bitmap outlives a killed
process; what it claims is hashed again from disk before it counts, which also covers a power cut, so no shard waits for
the disk. Leaves out where shards come from (client) and where the directory goes (store). All methods block unless
they say otherwise; they may be called from several threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from p2p.shardcast.draft import Draft
from p2p.shardcast.hashing import hash_shard, require_files
from protocol.errors import ChecksumError, MalformedError, ModelError
from protocol.tensorfile import PREFIX_BYTES, SUFFIX, check_header, header_length

BITMAP: Final = ".bitmap"
FLUSH_BYTES: Final = 256 << 20
"""The disk is made to keep up with the network so far behind at most, so that the last sync is short."""

Bytes = bytes | bytearray | memoryview


class PartialCheckpoint:
    """One download in one directory, which must exist; resumes from what the directory holds."""

    def __init__(self, directory: Path, draft: Draft, *, on_change: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        self.draft = draft
        self._on_change = on_change
        self._lock = threading.Lock()
        self._held = 0
        """Bit i is set while shard i is verified, as the next one."""
        self._count = 0
        self._unflushed = 0
        intact = self._allocate()
        self._claimed = self._load_bitmap(intact)

    def _allocate(self) -> bool:
        """Give every file its size; whether all had it already."""
        intact = True
        for name, size in self.draft.layout.files:
            fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                if os.fstat(fd).st_size != size:
                    os.ftruncate(fd, size)
                    intact = False
            finally:
                os.close(fd)
        return intact

    def _load_bitmap(self, intact: bool) -> int:
        path = self.directory / BITMAP
        stored = path.read_bytes() if path.exists() else b""
        if len(stored) == self._bitmap_bytes and intact:
            return int.from_bytes(stored, "little") & ((1 << self.draft.layout.shards) - 1)
        path.write_bytes(bytes(self._bitmap_bytes))
        return 0

    @property
    def _bitmap_bytes(self) -> int:
        return (self.draft.layout.shards + 7) // 8

    def _store_bitmap(self) -> None:
        with (self.directory / BITMAP).open("r+b", buffering=0) as file:
            file.write((self._held | self._claimed).to_bytes(self._bitmap_bytes, "little"))

    def has(self, index: int) -> bool:
        """Whether a shard is verified and may be served. Does not block."""
        return bool(self._held >> index & 1)

    @property
    def held(self) -> int:
        """The verified shards as a number whose bit i stands for shard i. Does not block."""
        return self._held

    @property
    def count(self) -> int:
        """How many shards are verified. Does not block."""
        return self._count

    def missing(self) -> list[int]:
        """Shards still to be fetched, in order; those to be verified from disk are not. Does not block."""
        here = self._held | self._claimed
        return [index for index in range(self.draft.layout.shards) if not here >> index & 1]

    def wanted(self) -> int:
        """The missing shards whose hash is known, as a number like `held`. Does not block."""
        here = self._held | self._claimed
        known = sum(1 << index for index, digest in enumerate(self.draft.hashes) if digest is not None)
        return known & ~here

    @property
    def verified_bytes(self) -> int:
        """How much of the checkpoint is here and verified. Does not block."""
        layout = self.draft.layout
        last = layout.shards - 1
        short = layout.shard_bytes - layout.length(last) if self.has(last) else 0
        return self._count * layout.shard_bytes - short

    @property
    def claims(self) -> bool:
        """Whether an earlier process left shards that are still to be hashed. Does not block."""
        return self._claimed != 0

    def recheck(self) -> None:
        """Hash what an earlier process left, as far as its hashes are known; what is damaged is missing again."""
        with self._lock:
            known = [
                (index, digest)
                for index, digest in enumerate(self.draft.hashes)
                if digest is not None and self._claimed >> index & 1
            ]
        for index, digest in known:
            if self._hash_on_disk(index) == digest:
                self._mark(index, digest)
            else:
                self.forget([index])

    def _hash_on_disk(self, index: int) -> bytes:
        try:
            return hash_shard(self.directory, self.draft.layout, index).sha256
        except ModelError:  # somebody has cut the file short
            return b""

    @property
    def is_whole(self) -> bool:
        """Whether the manifest is known and every shard is verified. Does not block."""
        return self.draft.manifest is not None and self._count == self.draft.layout.shards

    def check_files(self) -> None:
        """Raise MalformedError when a file has another hash than was signed, or a header that could harm its reader."""
        if self.draft.manifest is not None:
            require_files(self.directory, self.draft.manifest.record)
        for name, size in self.draft.layout.files:
            if name.endswith(SUFFIX):
                check_tensor_file(self.directory / name, size)

    def sink(self, index: int) -> ShardSink:
        """Where one shard's bytes go as they arrive."""
        return ShardSink(self, index, self.draft.layout.range(index))

    def write_shard(self, index: int, data: bytes) -> None:
        """Store one whole shard; its hash is checked before anything is written. Raises ChecksumError."""
        digest = hashlib.sha256(data).digest()
        self._require_hash(index, digest, len(data))
        sink = self.sink(index)
        try:
            sink.write(data)
            sink.commit(digest)
        finally:
            sink.close()

    def flush(self) -> None:
        """Wait until all that was written is on disk."""
        for name, _ in self.draft.layout.files:
            sync_file(self.directory / name)

    def forget(self, shards: Iterable[int]) -> None:
        """Count these as missing again: the manifest names other hashes for them, or the disk damaged them."""
        with self._lock:
            for index in shards:
                bit = 1 << index
                self._count -= bool(self._held & bit)
                self._held &= ~bit
                self._claimed &= ~bit
            self._store_bitmap()
        self._on_change()

    def _require_hash(self, index: int, digest: bytes, length: int) -> None:
        if length != self.draft.layout.length(index) or digest != self.draft.hashes[index]:
            step = self.draft.layout.step
            raise ChecksumError(f"shard {index} of checkpoint step {step} has another hash than was signed")

    def _mark(self, index: int, digest: bytes) -> None:
        with self._lock:
            if self.draft.hashes[index] != digest:  # the manifest came meanwhile, and says otherwise
                return
            bit = 1 << index
            self._count += not self._held & bit
            self._held |= bit
            self._claimed &= ~bit
            self._store_bitmap()
            self._unflushed += self.draft.layout.length(index)
            due = self._unflushed >= FLUSH_BYTES
            if due:
                self._unflushed = 0
        self._on_change()
        if due:
            self.flush()


class ShardSink:
    """Takes one shard's bytes in order and puts them at their final offsets; `commit` makes them count.

    After `close` nothing is written any more, so that a fetch which was given up cannot overwrite its successor's work.
    """

    def __init__(self, partial: PartialCheckpoint, index: int, part: range) -> None:
        self._partial = partial
        self._index = index
        self._part = part
        self._received = 0
        self._closed = False
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}

    @property
    def received(self) -> int:
        """Bytes taken so far. Does not block."""
        return self._received

    def write(self, data: Bytes) -> None:
        """Write the next bytes. Raises MalformedError beyond the shard's end."""
        with self._lock:
            if self._closed:
                return
            start = self._part.start + self._received
            if start + len(data) > self._part.stop:
                raise MalformedError(f"more than the {len(self._part)} bytes of shard {self._index}")
            view = memoryview(data)
            for extent in self._partial.draft.layout.extents(range(start, start + len(data))):
                _pwrite_all(self._fd(extent.file), view[: extent.length], extent.offset)
                view = view[extent.length :]
            self._received += len(data)

    def commit(self, digest: bytes) -> None:
        """Make the shard count, given the SHA-256 of what was written. Raises ChecksumError."""
        with self._lock:
            if self._closed:
                raise ChecksumError(f"shard {self._index} was given up before it was whole")
            self._partial._require_hash(self._index, digest, self._received)
            self._partial._mark(self._index, digest)

    def finish(self, digest: bytes) -> None:
        """`commit`, and `close` in any case."""
        try:
            self.commit(digest)
        finally:
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether `close` is still to be called. Does not block."""
        return not self._closed

    def close(self) -> None:
        """Stop taking bytes; waits for a write in progress."""
        with self._lock:
            self._closed = True
            while self._fds:
                os.close(self._fds.popitem()[1])

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            self._fds[name] = os.open(self._partial.directory / name, os.O_WRONLY | os.O_NOFOLLOW)
        return self._fds[name]


def check_tensor_file(path: Path, size: int) -> None:
    """Raise MalformedError when the header of a safetensors file is too large for its file, or hostile."""
    try:
        with path.open("rb") as file:
            length = header_length(file.read(PREFIX_BYTES), size)
            check_header(file.read(length), size - PREFIX_BYTES - length)
    except MalformedError as error:
        raise MalformedError(f"{path.name}: {error.message}") from error


def sync_file(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written

"""A checkpoint that is being downloaded: files of full size, and a bitmap of the shards that are verified and durable.

Shards are written at their final offsets as they arrive and count only after their hash held and fsync returned, so a
node that is killed fetches no verified shard again. Leaves out where shards come from (client) and where the directory
goes (store). All methods block unless they say otherwise; they may be called from several threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from protocol.checkpoint import Extent, extents, shard_range
from protocol.envelope import Signed
from protocol.errors import ChecksumError, MalformedError
from protocol.records import CheckpointFile, CheckpointManifest

BITMAP: Final = ".bitmap"
READ_BYTES: Final = 1 << 20


class PartialCheckpoint:
    """One download in one directory, which must exist; resumes from what the directory holds."""

    def __init__(self, directory: Path, manifest: Signed[CheckpointManifest]) -> None:
        self.directory = directory
        self.manifest = manifest
        self._lock = threading.Lock()
        self._served = bytearray(len(manifest.record.shards))
        intact = self._allocate()
        self._durable = self._load_bitmap(intact)

    def _allocate(self) -> bool:
        """Give every file its size; whether all had it already."""
        intact = True
        for file in self.manifest.record.files:
            fd = os.open(self.directory / file.name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                if os.fstat(fd).st_size != file.size:
                    os.ftruncate(fd, file.size)
                    intact = False
            finally:
                os.close(fd)
        return intact

    def _load_bitmap(self, intact: bool) -> bytearray:
        path = self.directory / BITMAP
        stored = path.read_bytes() if path.exists() else b""
        size = (len(self._served) + 7) // 8
        if len(stored) != size or not intact:
            stored = bytes(size)
            path.write_bytes(stored)
            sync_file(path)
        for index in range(len(self._served)):
            self._served[index] = stored[index // 8] >> (index % 8) & 1
        return bytearray(stored)

    def _write_bitmap(self) -> None:
        fd = os.open(self.directory / BITMAP, os.O_WRONLY)
        try:
            _pwrite_all(fd, memoryview(self._durable), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def has(self, index: int) -> bool:
        """Whether a shard is verified and may be served. Does not block."""
        return bool(self._served[index])

    def missing(self) -> list[int]:
        """Shards still to be fetched, in order. Does not block."""
        return [index for index, held in enumerate(self._served) if not held]

    @property
    def verified_bytes(self) -> int:
        """How much of the checkpoint is here and verified. Does not block."""
        return sum(len(self._range(index)) for index, held in enumerate(self._served) if held)

    def sink(self, index: int) -> ShardSink:
        """Where one shard's bytes go as they arrive."""
        return ShardSink(self, index, self._range(index))

    def write_shard(self, index: int, data: bytes) -> None:
        """Store one whole shard; its hash is checked before anything is written. Raises ChecksumError."""
        self._require_hash(index, hashlib.sha256(data).digest(), len(data))
        sink = self.sink(index)
        try:
            sink.write(data)
            sink.commit(hashlib.sha256(data).digest())
        finally:
            sink.close()

    def verify(self) -> None:
        """Check every file and the whole against the manifest, from disk.

        Raises ChecksumError after it has marked the damaged shards as missing, and MalformedError when the manifest
        contradicts itself, which no download can cure.
        """
        record = self.manifest.record
        whole, digests = hash_files(self.directory, record.files)
        if whole == record.sha256 and digests == [file.sha256 for file in record.files]:
            return
        bad = list(bad_shards(self.directory, record))
        if not bad:
            raise MalformedError(f"the manifest of checkpoint step {record.step} contradicts itself: its shards hold")
        self._forget(bad)
        raise ChecksumError(f"shards {bad[:8]} of checkpoint step {record.step} were damaged on this node's disk")

    def _range(self, index: int) -> range:
        record = self.manifest.record
        return shard_range(index, record.total_bytes, shard_bytes=record.shard_bytes)

    def _require_hash(self, index: int, digest: bytes, length: int) -> None:
        if length != len(self._range(index)) or digest != self.manifest.record.shards[index]:
            step = self.manifest.record.step
            raise ChecksumError(f"shard {index} of checkpoint step {step} has another hash than was signed")

    def _mark_durable(self, index: int) -> None:
        with self._lock:
            self._served[index] = 1
            self._durable[index // 8] |= 1 << (index % 8)
            self._write_bitmap()

    def _forget(self, shards: Iterable[int]) -> None:
        with self._lock:
            for index in shards:
                self._served[index] = 0
                self._durable[index // 8] &= ~(1 << (index % 8)) & 0xFF
            self._write_bitmap()


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

    def write(self, data: bytes) -> None:
        """Write the next bytes. Raises MalformedError beyond the shard's end."""
        with self._lock:
            if self._closed:
                return
            start = self._part.start + self._received
            if start + len(data) > self._part.stop:
                raise MalformedError(f"more than the {len(self._part)} bytes of shard {self._index}")
            view = memoryview(data)
            for extent in extents(self._partial.manifest.record.files, range(start, start + len(data))):
                _pwrite_all(self._fd(extent.file), view[: extent.length], extent.offset)
                view = view[extent.length :]
            self._received += len(data)

    def commit(self, digest: bytes) -> None:
        """Make the shard count, given the SHA-256 of what was written. Raises ChecksumError."""
        with self._lock:
            if self._closed:
                raise ChecksumError(f"shard {self._index} was given up before it was whole")
            self._partial._require_hash(self._index, digest, self._received)
            for fd in self._fds.values():
                os.fsync(fd)
            self._partial._mark_durable(self._index)

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


def hash_files(directory: Path, files: Sequence[CheckpointFile]) -> tuple[bytes, list[bytes]]:
    """SHA-256 of files laid end to end, and of each."""
    whole = hashlib.sha256()
    digests = []
    for file in files:
        digest = hashlib.sha256()
        for piece in read_extent(directory, Extent(file.name, 0, file.size)):
            digest.update(piece)
            whole.update(piece)
        digests.append(digest.digest())
    return whole.digest(), digests


def bad_shards(directory: Path, record: CheckpointManifest) -> Iterator[int]:
    """The shards whose bytes on disk do not have the hash that was signed."""
    for index, expected in enumerate(record.shards):
        digest = hashlib.sha256()
        for extent in extents(record.files, shard_range(index, record.total_bytes, shard_bytes=record.shard_bytes)):
            for piece in read_extent(directory, extent):
                digest.update(piece)
        if digest.digest() != expected:
            yield index


def read_extent(directory: Path, extent: Extent) -> Iterator[bytes]:
    """The bytes of an extent in pieces; fewer when the file is shorter."""
    with (directory / extent.file).open("rb", buffering=0) as file:
        file.seek(extent.offset)
        left = extent.length
        while left and (piece := file.read(min(left, READ_BYTES))):
            left -= len(piece)
            yield piece


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

"""Hashing checkpoint files where they lie: a shard's hash, and from the same pass the hash of each file (SHARDCAST).

A file's hash is over the hashes of its pieces, which end where shards end. Most pieces are a whole shard, whose hash is
needed anyway; so every byte is hashed once, but for the few shards in which one file ends and the next begins. All
functions block.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from protocol.checkpoint import Extent, Layout, content_digest
from protocol.errors import MalformedError, ModelError
from protocol.records import CheckpointManifest

READ_BYTES: Final = 4 << 20
"""Hashing lets go of the interpreter lock for a piece at a time; getting it back takes long on a busy machine."""


class ShardHash(NamedTuple):
    """A shard's SHA-256, and those of the pieces of files that it is made of."""

    sha256: bytes
    pieces: Sequence[tuple[str, bytes]]


class FileHashes:
    """Collects the pieces of files, in the order of the byte stream."""

    def __init__(self) -> None:
        self._pieces: defaultdict[str, list[bytes]] = defaultdict(list)

    def add(self, shard: ShardHash) -> None:
        for name, digest in shard.pieces:
            self._pieces[name].append(digest)

    def of(self, name: str) -> bytes:
        """The hash of a file; that of an empty one is over no piece."""
        return content_digest(self._pieces[name])


def hash_shard(directory: Path, layout: Layout, index: int) -> ShardHash:
    """Hash one shard from disk. Raises ModelError when a file is shorter than it should be."""
    extents = list(layout.extents(layout.range(index)))
    shard = hashlib.sha256()
    pieces = []
    for extent in extents:
        piece = shard if len(extents) == 1 else hashlib.sha256()
        for data in read_extent(directory, extent):
            shard.update(data)
            if piece is not shard:
                piece.update(data)
        pieces.append((extent.file, piece.digest()))
    return ShardHash(shard.digest(), pieces)


def require_files(directory: Path, manifest: CheckpointManifest) -> None:
    """Raise MalformedError unless each file's hash is what the manifest says. The shards must have been verified.

    Reads only those shards in which one file ends and another begins.
    """
    layout, hashes = Layout.of(manifest), FileHashes()
    for index, sha256 in enumerate(manifest.shards):
        first, *more = layout.extents(layout.range(index))
        hashes.add(hash_shard(directory, layout, index) if more else ShardHash(sha256, [(first.file, sha256)]))
    for file in manifest.files:
        if hashes.of(file.name) != file.sha256:
            raise MalformedError(f"{file.name} of checkpoint step {manifest.step} has another hash than was signed")


def is_sound(directory: Path, manifest: CheckpointManifest) -> bool:
    """Whether every shard on disk has the hash that was signed."""
    layout = Layout.of(manifest)
    try:
        return all(
            hash_shard(directory, layout, index).sha256 == sha256 for index, sha256 in enumerate(manifest.shards)
        )
    except (OSError, ModelError):
        return False


def read_extent(directory: Path, extent: Extent) -> Iterator[memoryview]:
    """The bytes of an extent in pieces, each valid until the next. Raises ModelError when the file is shorter."""
    buffer = memoryview(bytearray(min(READ_BYTES, extent.length)))
    with (directory / extent.file).open("rb", buffering=0) as file:
        file.seek(extent.offset)
        left = extent.length
        while left:
            count = file.readinto(buffer[: min(left, READ_BYTES)])
            if not count:
                raise ModelError(f"{extent.file} is shorter than it was")
            left -= count
            yield buffer[:count]

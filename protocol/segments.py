"""The ledger in pieces: how entries are framed and cut into segments, and what names a segment.

A segment is entries one after another, each behind its length as 4 bytes big-endian, until the segment is as long as
LEDGER_SEGMENT_BYTES. Its hash covers its bytes and the hash before it (the run id before the first), so one hash names
all of the ledger up to there, and every node cuts the same ledger into the same segments.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.constants import LEDGER_SEGMENT_BYTES, MAX_ENVELOPE_BYTES
from protocol.errors import MalformedError

_LENGTH: Final = struct.Struct(">I")
FRAME_BYTES: Final = _LENGTH.size
MAX_SEGMENT_BYTES: Final = LEDGER_SEGMENT_BYTES + MAX_ENVELOPE_BYTES + FRAME_BYTES
"""The last entry of a segment may reach beyond its length."""


class SegmentInfo(msgspec.Struct, frozen=True, array_like=True):
    """A segment that is full: number, first entry, how many, bytes, and its hash."""

    number: Annotated[int, Meta(ge=0)]
    first: Annotated[int, Meta(ge=0)]
    count: Annotated[int, Meta(ge=1)]
    size: Annotated[int, Meta(ge=1, le=MAX_SEGMENT_BYTES)]
    sha256: Annotated[bytes, Meta(min_length=32, max_length=32)]

    @property
    def end(self) -> int:
        """Number of the first entry after it."""
        return self.first + self.count


def segment_hash(previous: bytes, data: bytes) -> bytes:
    """What names a segment: SHA-256(hash of the segment before ‖ bytes)."""
    digest = hashlib.sha256(previous)
    digest.update(data)
    return digest.digest()


def frame(entry: bytes) -> bytes:
    """An entry as it lies in a segment."""
    return _LENGTH.pack(len(entry)) + entry


def whole_entries(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each entry, up to the first that is not whole. Raises MalformedError for a false length."""
    offset = 0
    while offset + FRAME_BYTES <= len(data):
        (length,) = _LENGTH.unpack_from(data, offset)
        if not 0 < length <= MAX_ENVELOPE_BYTES:
            raise MalformedError(f"byte {offset} begins an entry of {length} bytes")
        start = offset + FRAME_BYTES
        if start + length > len(data):
            return
        yield start, data[start : start + length]
        offset = start + length


def split_segment(data: bytes) -> list[bytes]:
    """The entries of a full segment. Raises MalformedError if it does not end with an entry."""
    entries = [entry for _, entry in whole_entries(data)]
    if sum(map(len, entries)) + FRAME_BYTES * len(entries) != len(data):
        raise MalformedError(f"a segment of {len(data)} bytes that does not end with an entry")
    return entries


def framed_bytes(entries: Sequence[bytes]) -> int:
    """How long entries are in a segment."""
    return sum(map(len, entries)) + FRAME_BYTES * len(entries)

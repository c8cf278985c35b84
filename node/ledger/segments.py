"""The ledger's segment files: written at the end only, read from the beginning, and what is wrong with them.

`segment-00000000`, `segment-00000001` … in one directory, each at most protocol.segments.MAX_SEGMENT_BYTES long; all
but the last are full. A crash can leave a part of an entry at the end of the last one, which is no damage. Reading
changes nothing, so it may go on beside a node that writes. What entries say is node.ledger.log's business.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final

from protocol.atomic import sync_directory
from protocol.constants import LEDGER_SEGMENT_BYTES
from protocol.errors import DataDirError, MalformedError
from protocol.segments import (
    FRAME_BYTES,
    MAX_SEGMENT_BYTES,
    SegmentInfo,
    frame,
    framed_bytes,
    segment_hash,
    whole_entries,
)

log = logging.getLogger(__name__)

PREFIX: Final = "segment-"
_NAME: Final = re.compile(f"{PREFIX}[0-9]{{8}}")
READ_BYTES: Final = 1 << 20


class DamagedSegment(DataDirError):
    """Raised when a segment is truncated, missing or garbled; `segment` and `entry` say from where on.

    `whole` are the entries before that in the same segment, as far as they are known to be good.
    """

    def __init__(self, path: Path, what: str, *, segment: int, entry: int, whole: Sequence[bytes] = ()) -> None:
        super().__init__(f"the ledger's segment {path} is damaged at entry {entry}: {what}")
        self.segment = segment
        self.entry = entry
        self.whole = whole


@dataclass(frozen=True)
class Segment:
    """A segment as it was read: its entries, where each begins, and the bytes of a torn one after them."""

    number: int
    first: int
    path: Path
    offsets: tuple[int, ...]
    entries: tuple[bytes, ...]
    torn_bytes: int
    last: bool

    @property
    def size(self) -> int:
        """Bytes of whole entries."""
        return framed_bytes(self.entries)


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{PREFIX}{number:08d}"


def read_segments(path: Path, *, segment_bytes: int = LEDGER_SEGMENT_BYTES) -> Iterator[Segment]:
    """All segments of a ledger's directory, or of a single file of earlier versions. Raises DamagedSegment.

    `last` ones are open: more may be written to them. One segment is in memory at a time.
    """
    if path.is_file():
        yield from _cut(path, segment_bytes)
        return
    numbers, first = _numbers(path), 0
    for expected, number in enumerate(numbers):
        if number != expected:
            what = f"it is missing, and {segment_path(path, number).name} is there"
            raise DamagedSegment(segment_path(path, expected), what, segment=expected, entry=first)
        segment = _read(path, number, first, last=expected + 1 == len(numbers) or numbers[expected + 1] != number + 1)
        if not segment.last and (segment.torn_bytes or segment.size < segment_bytes):
            raise DamagedSegment(
                segment.path,
                f"it is truncated: {segment.size} whole bytes where a full segment has {segment_bytes} at least",
                segment=number,
                entry=first + len(segment.entries),
            )
        yield segment
        first += len(segment.entries)


def _numbers(directory: Path) -> list[int]:
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.name.startswith(PREFIX)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataDirError(f"the ledger {directory} cannot be read: {error.strerror}") from error
    return sorted(int(name.removeprefix(PREFIX)) for name in names if _NAME.fullmatch(name))


def _read(directory: Path, number: int, first: int, *, last: bool) -> Segment:
    path = segment_path(directory, number)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SEGMENT_BYTES + 1)
    except OSError as error:
        raise DataDirError(
            f"the ledger's segment {path} cannot be read: {error.strerror}",
            hint=f"look at what it is, and whose (ls -ld {path}): it must be a file that this user may read",
        ) from error
    if len(data) > MAX_SEGMENT_BYTES:
        raise DamagedSegment(path, "it is too long", segment=number, entry=first)
    offsets: list[int] = []
    entries: list[bytes] = []
    try:
        for offset, entry in whole_entries(data):
            offsets.append(offset)
            entries.append(entry)
    except MalformedError as error:
        raise DamagedSegment(path, error.message, segment=number, entry=first + len(entries)) from error
    torn = len(data) - framed_bytes(entries)
    return Segment(number, first, path, tuple(offsets), tuple(entries), torn, last)


def _cut(path: Path, segment_bytes: int) -> Iterator[Segment]:
    """A single file as the segments that it would be."""
    number = first = 0
    rest = b""
    with path.open("rb") as file:
        while data := rest + file.read(max(READ_BYTES, segment_bytes)):
            found = list(_up_to(data, segment_bytes, path, first))
            size = framed_bytes([entry for _, entry in found])
            more = file.peek(1) != b""
            full = size >= segment_bytes
            if not full and more and len(data) <= MAX_SEGMENT_BYTES:
                rest = data
                continue
            torn = 0 if full else len(data) - size
            offsets, entries = tuple(at for at, _ in found), tuple(entry for _, entry in found)
            yield Segment(number, first, path, offsets, entries, torn, not full)
            if not full:
                return
            number, first, rest = number + 1, first + len(entries), data[size:]


def _up_to(data: bytes, segment_bytes: int, path: Path, first: int) -> Iterator[tuple[int, bytes]]:
    count = 0
    try:
        for offset, entry in whole_entries(data):
            yield offset, entry
            count += 1
            if offset + len(entry) >= segment_bytes:
                return
    except MalformedError as error:
        raise DamagedSegment(path, error.message, segment=0, entry=first + count) from error


@dataclass
class _Open:
    """The segment that is written to."""

    number: int
    first: int
    count: int
    size: int
    file: int


class SegmentWriter:
    """Appends to the segments of one directory; durable when `append` returns. Not for two threads at once."""

    def __init__(self, directory: Path, *, start: bytes, segment_bytes: int = LEDGER_SEGMENT_BYTES) -> None:
        """`start` is the run id. Tell it of every segment that is there with `resume`, in order."""
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._start = start
        self._open: _Open | None = None
        self.closed: list[SegmentInfo] = []
        """Full segments; their hashes."""

    def close(self) -> None:
        current, self._open = self._open, None
        if current is not None:
            with suppress(OSError):  # all that counts was synced
                os.close(current.file)

    def resume(self, segment: Segment) -> None:
        """Take over a segment that was read; what is torn at its end is cut off. Raises OSError."""
        if segment.size >= self._segment_bytes:
            self._close(segment.number, segment.first, b"".join(map(frame, segment.entries)), len(segment.entries))
            return
        file = os.open(segment.path, os.O_RDWR)
        self._open = _Open(segment.number, segment.first, len(segment.entries), segment.size, file)
        if segment.torn_bytes:
            log.warning("ledger path=%s torn_bytes=%d cut off", segment.path, segment.torn_bytes)
            os.ftruncate(file, segment.size)

    def append(self, entries: Sequence[bytes]) -> list[tuple[int, int]]:
        """Write as many of some entries as the open segment takes, one at least; the segment and offset of each.

        Raises DataDirError, and then none of them counts as written: the next call writes over the remains.
        """
        try:
            current = self._open = self._open or self._begin()
            taken, places = self._that_fit(current, entries)
            block = b"".join(map(frame, taken))
            size = current.size + len(block)
            before = os.pread(current.file, current.size, 0) if size >= self._segment_bytes else b""
            _write(current.file, block, current.size)
            os.fsync(current.file)
        except OSError as error:
            raise DataDirError(
                f"cannot write the ledger {self._directory}: {error.strerror}",
                hint="free some space (`df -h`) and start the node again: it continues from the last whole entry",
            ) from error
        current.size, current.count = size, current.count + len(taken)
        if size >= self._segment_bytes:
            self.close()
            self._close(current.number, current.first, before + block, current.count)
        return places

    def open_segment(self, sha256: bytes) -> BinaryIO | None:
        """A full segment by its hash, for reading."""
        number = next((one.number for one in self.closed if one.sha256 == sha256), None)
        return None if number is None else segment_path(self._directory, number).open("rb")

    def read(self, places: Sequence[tuple[int, int, int]]) -> Iterator[bytes]:
        """The entries at (segment, offset, size), which were all written. From any thread."""
        for number, group in groupby(places, key=itemgetter(0)):
            file = os.open(segment_path(self._directory, number), os.O_RDONLY)
            try:
                for _, offset, size in group:
                    yield os.pread(file, size, offset)
            finally:
                os.close(file)

    def _that_fit(self, current: _Open, entries: Sequence[bytes]) -> tuple[list[bytes], list[tuple[int, int]]]:
        taken: list[bytes] = []
        places: list[tuple[int, int]] = []
        size = current.size
        for entry in entries:
            if size >= self._segment_bytes:
                break
            taken.append(entry)
            places.append((current.number, size + FRAME_BYTES))
            size += FRAME_BYTES + len(entry)
        return taken, places

    def _begin(self) -> _Open:
        number, first = len(self.closed), self.closed[-1].end if self.closed else 0
        file = os.open(segment_path(self._directory, number), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            sync_directory(self._directory)
        except OSError:
            os.close(file)
            raise
        return _Open(number, first, 0, 0, file)

    def _close(self, number: int, first: int, data: bytes, count: int) -> None:
        previous = self.closed[-1].sha256 if self.closed else self._start
        self.closed.append(SegmentInfo(number, first, count, len(data), segment_hash(previous, data)))


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def set_aside(directory: Path, damaged: DamagedSegment) -> list[Path]:
    """Rename a damaged segment and all after it; write back what of it is whole. Returns where they are now."""
    moved: list[Path] = []
    for number in _numbers(directory):
        if number >= damaged.segment:
            path = segment_path(directory, number)
            moved.append(_free_name(path))
            path.rename(moved[-1])
    if damaged.whole:
        _rewrite(segment_path(directory, damaged.segment), b"".join(map(frame, damaged.whole)))
    sync_directory(directory)
    return moved


def _free_name(path: Path) -> Path:
    return next(
        name for number in range(1 << 20) if not (name := path.with_name(f"damaged-{number}-{path.name}")).exists()
    )


def _rewrite(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write(file, data, 0)
        os.fsync(file)
    finally:
        os.close(file)

"""The ledger on disk: segment files of entries, appended and synced, an index over them, and their replay.

A crash can leave a torn last entry; it is cut off on opening. What is damaged otherwise is named: a log that others can
fill again sets the damaged part aside and goes on from its last consistent state, any other changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from node.ledger.index import LedgerIndex, Row
from node.ledger.migrate import settle_layout
from node.ledger.scratch import Scratch
from node.ledger.segments import DamagedSegment, Segment, SegmentWriter, read_segments, segment_path, set_aside
from protocol.constants import LEDGER_SEGMENT_BYTES
from protocol.envelope import Signed, id_of
from protocol.errors import DataDirError, ProtocolError
from protocol.ledger import LedgerState, next_tip, open_entry
from protocol.segments import SegmentInfo

log = logging.getLogger(__name__)

INDEX: Final = "index.sqlite"
BLOCK_ENTRIES: Final = 1000
"""Entries that are applied and synced at a time while a mirror takes in many."""


def require_signatures(entries: Iterable[bytes], *, first: int = 0) -> None:
    """Raise ProtocolError unless each entry's own signature holds; `first` is the number of the first one.

    Ids, and so the chain's tip, leave signatures out: whoever passes entries on can spoil one, and its author or the
    trainer cannot be told from that who did.
    """
    for number, entry in enumerate(entries, first):
        try:
            open_entry(entry)
        except ProtocolError as error:
            raise ProtocolError(f"ledger entry {number} as it was sent does not hold: {error.message}") from error


class LedgerLog:
    """Entries of one run, durable once `append` returns. `state` is their replay.

    Where the disk refuses some, `state` is ahead of it until `flush`, or the next `append`, has written them: nobody is
    given those entries before. One thread appends; any may read.
    """

    def __init__(
        self,
        path: Path,
        state: LedgerState,
        *,
        mends: bool = False,
        scratch: Scratch | None = None,
        segment_bytes: int = LEDGER_SEGMENT_BYTES,
    ) -> None:
        """Open or make it, and replay it into an empty state. Raises DataDirError.

        `mends`: a damaged part is set aside, because relays have it; otherwise it is an error.
        `scratch`: what the state remembers on the disk, closed with the log.
        """
        self.state = state
        self._scratch = scratch
        self._path = path
        self._segment_bytes = segment_bytes
        self._unwritten: list[Signed[Any]] = []
        self._unindexed: list[Row] = []
        self._written = 0
        """Entries in segments."""
        settle_layout(path, start=state.run_id, segment_bytes=segment_bytes)
        self._index = LedgerIndex(path / INDEX)
        self._writer = SegmentWriter(path, start=state.run_id, segment_bytes=segment_bytes)
        try:
            self._open(mends)
        except OSError as error:
            self.close()
            raise DataDirError(
                f"cannot open the ledger {path}: {error.strerror or error}",
                hint=f"check free space and permissions (df -h {path}, ls -l {path}), then start the node again",
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    def close(self) -> None:
        self._writer.close()
        self._index.close()
        if self._scratch is not None:
            self._scratch.close()

    def append(self, entries: Sequence[bytes]) -> None:
        """Apply entries and write them in one go. Raises LedgerError at the first bad one; earlier ones stay.

        DataDirError when the disk fails: nothing more is applied until it has taken those that were.
        """
        self.flush()
        try:
            for entry in entries:
                self._unwritten.append(self.state.apply(entry))
        finally:
            self.flush()

    def flush(self) -> None:
        """Write what the disk has refused so far, if anything. Once it returns, all that `state` has is durable.

        In order, and an entry's place in the index follows it, so that neither ever has a gap. Raises DataDirError.
        """
        self._index_written()
        while self._unwritten:
            places = self._writer.append([entry.data for entry in self._unwritten])
            self._unindexed += [
                Row(number, (segment, offset, len(entry.data)), entry)
                for number, ((segment, offset), entry) in enumerate(
                    zip(places, self._unwritten, strict=False), self._written
                )
            ]
            del self._unwritten[: len(places)]
            self._written += len(places)
            self._index_written()

    def _index_written(self) -> None:
        if self._unindexed:
            self._index.add(self._unindexed)
            self._unindexed = []

    def _append_signed(self, entries: Sequence[bytes]) -> None:
        """The same with entries whose own signatures were checked; those within them were not."""
        self.flush()
        try:
            for data in entries:
                entry = open_entry(data, signature_checked=True)
                self.state.take(entry)
                self._unwritten.append(entry)
        finally:
            self.flush()

    def extend(self, entries: Iterable[bytes], *, length: int, tip: bytes) -> None:
        """Append a mirror's entries, if all are signed and the chain reaches the signed `tip` at `length` with them.

        They are gone through three times. Raises ProtocolError and changes nothing otherwise. What the rules refuse
        is then the trainer's own: LedgerError, and the entries before it stay.
        """
        reached, count = self.state.tip, self.state.length
        for entry in entries:
            reached, count = next_tip(reached, id_of(entry)), count + 1
        if count != length or reached != tip:
            raise ProtocolError("these ledger entries do not lead to the tip that the trainer signed")
        require_signatures(entries, first=self.state.length)
        block: list[bytes] = []
        for entry in entries:
            block.append(entry)
            if len(block) == BLOCK_ENTRIES:
                self._append_signed(block)
                block = []
        self._append_signed(block)

    def entries(self, start: int, limit: int) -> list[bytes]:
        """Up to `limit` entries from number `start` on."""
        return list(self._writer.read(self._index.places(max(0, start), max(0, limit))))

    def ids(self, start: int, end: int) -> list[bytes]:
        """Ids of the entries from number `start` to before `end`."""
        return self._index.ids(start, end)

    def of_step(self, kind: str, step: int) -> bytes:
        """The `batch` or `trained` entry of a training step; empty where there is none yet."""
        number = self._index.of_step(kind, step)
        return b"" if number is None else next(iter(self.entries(number, 1)), b"")

    @property
    def index(self) -> LedgerIndex:
        """Which entries are about whom."""
        return self._index

    def segments(self, first: int = 0) -> list[SegmentInfo]:
        """The full segments from number `first` on."""
        return self._writer.closed[first:]

    def open_segment(self, sha256: bytes) -> BinaryIO | None:
        """A full segment by its hash."""
        return self._writer.open_segment(sha256)

    # Opening.

    def _open(self, mends: bool) -> None:
        known = self._index.count()
        try:
            self._resume(known)
        except DamagedSegment as damaged:
            if not mends:
                raise self._advised(damaged) from damaged
            self._mend(damaged)
        self._written = self.state.length
        if known != self.state.length:
            self._index.cut(self.state.length)

    def _resume(self, known: int) -> None:
        """Replay all segments and take them over. The last one is touched only when nothing is missing from it."""
        last: Segment | None = None
        for segment in self._segments():
            self._replay(segment, known)
            last = segment if segment.last else None
            if last is None:
                self._writer.resume(segment)
        if self.state.length < known:
            raise self._truncated(known, last)
        if last is not None:
            self._writer.resume(last)

    def _segments(self) -> Iterable[Segment]:
        return read_segments(self._path, segment_bytes=self._segment_bytes)

    def _replay(self, segment: Segment, known: int) -> None:
        missing: list[Row] = []
        try:
            for at, (offset, data) in enumerate(zip(segment.offsets, segment.entries, strict=True)):
                self.state.work_checked = segment.first + at < known
                entry = self._apply(segment, at)
                row = Row(segment.first + at, (segment.number, offset, len(data)), entry)
                if row.number >= known or not self._index.holds(row):
                    missing.append(row)
        finally:
            self.state.work_checked = False
            self._index.add(missing)

    def _apply(self, segment: Segment, at: int) -> Signed[Any]:
        try:
            return self.state.apply(segment.entries[at])
        except ProtocolError as error:
            raise DamagedSegment(
                segment.path,
                error.message,
                segment=segment.number,
                entry=segment.first + at,
                whole=segment.entries[:at],
            ) from error

    def _truncated(self, known: int, last: Segment | None) -> DamagedSegment:
        """Entries that were durable are gone from the last segment, or whole segments from the end."""
        length = self.state.length
        segment, _, _ = self._index.places(length, 1)[0]
        return DamagedSegment(
            segment_path(self._path, segment),
            f"it is truncated: {known - length} entries that were there are gone",
            segment=segment,
            entry=length,
            whole=last.entries if last is not None and last.number == segment else (),
        )

    def _advised(self, damaged: DamagedSegment) -> DataDirError:
        return DataDirError(
            damaged.message, hint=f"restore {self._path} and training/ from one back-up, never one alone"
        )

    def _mend(self, damaged: DamagedSegment) -> None:
        """Keep the entries that were replayed, put the rest aside."""
        self._writer.close()
        self._writer = SegmentWriter(self._path, start=self.state.run_id, segment_bytes=self._segment_bytes)
        moved = set_aside(self._path, damaged)
        for segment in self._segments():
            self._writer.resume(segment)
        log.error(
            "ledger: %s; going on from entry %d, the rest is fetched from relays; set aside as %s",
            *(damaged.message, self.state.length, ", ".join(path.name for path in moved) or "nothing"),
        )

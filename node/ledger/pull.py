"""Fetching a stretch of the ledger from somebody who may lie: whole segments when far behind, pages of entries else.

Segments are held against their hashes, which hang together and with the segments that are here. Whether it is the
trainer's ledger at all, only the tip at its end tells (node.ledger.keeper), and whether entries still have their
authors' signatures, who takes them in checks (LedgerLog.extend, node.ledger.fetch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from node.ledger.spool import Spool
from protocol.errors import ChecksumError, MalformedError, RefusedError, RelayError
from protocol.segments import SegmentInfo, segment_hash, split_segment

FAR_BEHIND: Final = 2000
"""Entries; whoever lacks more looks for segments first."""


class LedgerSource(Protocol):
    """A relay, or the trainer's origin. Each raises RelayError, or ProtocolError for what no honest one sends."""

    @property
    def name(self) -> str:
        """For people."""

    async def ledger_entries(self, start: int) -> Sequence[bytes]:
        """Entries from number `start` on, as many as come at once."""

    async def ledger_segments(self, first: int) -> Sequence[SegmentInfo]:
        """Full segments from number `first` on, as many as come at once."""

    async def ledger_segment(self, info: SegmentInfo) -> bytes:
        """A segment's bytes, of the size that was said."""


async def pull(source: LedgerSource, spool: Spool, *, length: int, held: Sequence[SegmentInfo], run_id: bytes) -> None:
    """Fill a spool until it is as long as a head says. `held` are the segments that are here, all of them full."""
    if length - spool.length > FAR_BEHIND:
        await _pull_segments(source, spool, length=length, held=held, run_id=run_id)
    while spool.length < length:
        page = await source.ledger_entries(spool.length)
        if not page:
            raise RelayError(f"{source.name} has {spool.length} of {length} ledger entries yet")
        spool.add(page[: length - spool.length])


async def _pull_segments(
    source: LedgerSource, spool: Spool, *, length: int, held: Sequence[SegmentInfo], run_id: bytes
) -> None:
    number, end = len(held), held[-1].end if held else 0
    previous = held[-1].sha256 if held else run_id
    while infos := await _segments(source, number):
        for info in infos:
            if (info.number, info.first) != (number, end):
                raise MalformedError(f"segment {info.number} from entry {info.first} where {number} from {end} is due")
            if spool.length >= length:
                return
            entries = await _entries(source, info, previous, spool.length)
            spool.add(entries[: length - spool.length])
            number, previous, end = number + 1, info.sha256, info.end


async def _segments(source: LedgerSource, first: int) -> Sequence[SegmentInfo]:
    try:
        return await source.ledger_segments(first)
    except RefusedError as error:
        if error.code == "not-found":  # an earlier release: it has pages alone
            return ()
        raise


async def _entries(source: LedgerSource, info: SegmentInfo, previous: bytes, start: int) -> list[bytes]:
    data = await source.ledger_segment(info)
    if len(data) != info.size or segment_hash(previous, data) != info.sha256:
        raise ChecksumError(
            f"segment {info.number} of the ledger from {source.name} has another hash than it was named by"
        )
    entries = split_segment(data)
    if len(entries) != info.count:
        raise MalformedError(f"segment {info.number} has {len(entries)} entries; {info.count} were said")
    return entries[start - info.first :]

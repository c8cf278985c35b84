"""The ledger on disk: one file of length-prefixed envelopes, appended and synced, replayed at start.

A crash can leave a torn last entry; it is cut off on opening. Anything else that does not replay is a named error.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from protocol.errors import DataDirError, ProtocolError
from protocol.ledger import LedgerState, next_tip, open_entry

_LENGTH = struct.Struct(">I")
log = logging.getLogger(__name__)


class LedgerFile:
    """Entries of one run, durable once `append` returns. `state` is their replay."""

    def __init__(self, path: Path, state: LedgerState) -> None:
        self._path = path
        self.state = state
        self._offsets: list[int] = []
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._end = self._replay()

    def close(self) -> None:
        os.close(self._file)

    def append(self, entries: Sequence[bytes]) -> None:
        """Apply entries and write them in one go. Raises LedgerError at the first bad one; earlier ones stay."""
        taken: list[bytes] = []
        try:
            for entry in entries:
                self.state.apply(entry)
                taken.append(entry)
        finally:
            self._write(taken)

    def entries(self, start: int, limit: int) -> list[bytes]:
        """Up to `limit` entries from number `start` on."""
        return [self._read(number) for number in range(max(0, start), min(start + limit, len(self._offsets)))]

    def extend(self, entries: Sequence[bytes], *, length: int, tip: bytes) -> None:
        """Append a mirror's entries, if with them the chain reaches the signed `tip` at `length`.

        Raises ProtocolError and changes nothing otherwise.
        """
        reached = self.state.tip
        for entry in entries:
            reached = next_tip(reached, open_entry(entry).id)
        if self.state.length + len(entries) != length or reached != tip:
            raise ProtocolError("these ledger entries do not lead to the tip that the trainer signed")
        self.append(entries)

    def _write(self, entries: Sequence[bytes]) -> None:
        if not entries:
            return
        block = b"".join(_LENGTH.pack(len(entry)) + entry for entry in entries)
        try:
            os.pwrite(self._file, block, self._end)
            os.fsync(self._file)
        except OSError as error:
            raise DataDirError(
                f"cannot write the ledger {self._path}: {error.strerror}",
                hint="free some space (`df -h`) and start the node again: it continues from the last whole entry",
            ) from error
        for entry in entries:
            self._offsets.append(self._end)
            self._end += _LENGTH.size + len(entry)

    def _read(self, number: int) -> bytes:
        offset = self._offsets[number]
        (length,) = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, offset))
        return os.pread(self._file, length, offset + _LENGTH.size)

    def _replay(self) -> int:
        end = 0
        for offset, entry in self._scan():
            try:
                self.state.apply(entry)
            except ProtocolError as error:
                raise DataDirError(
                    f"entry {len(self._offsets)} of the ledger {self._path} is damaged: {error.message}",
                    hint=f"trainer: restore {self._path} and training/ from one back-up, never one alone; "
                    f"any other node: move {self._path} away, the ledger is fetched again from the relays",
                ) from error
            self._offsets.append(offset)
            end = offset + _LENGTH.size + len(entry)
        if end < os.fstat(self._file).st_size:
            log.warning("ledger path=%s torn_bytes=%d cut off", self._path, os.fstat(self._file).st_size - end)
            os.ftruncate(self._file, end)
        return end

    def _scan(self) -> Iterator[tuple[int, bytes]]:
        size, offset = os.fstat(self._file).st_size, 0
        while offset + _LENGTH.size <= size:
            (length,) = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, offset))
            if offset + _LENGTH.size + length > size:
                return
            yield offset, os.pread(self._file, length, offset + _LENGTH.size)
            offset += _LENGTH.size + length

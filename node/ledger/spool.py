"""Entries on their way into a copy of the ledger: on disk until it is certain that they lead to the signed tip.

An unnamed file of framed entries that goes with the process. Reads back in order, as often as wanted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from protocol.envelope import id_of
from protocol.errors import DataDirError, ProtocolError
from protocol.ledger import next_tip
from protocol.segments import FRAME_BYTES, frame

MAX_SPOOL_BYTES: Final = 64 << 30
"""More than any run's ledger; what a relay that lies can make a newcomer write at most."""


class Spool:
    """Use it in a `with` block. `length` and `tip` are the ledger's with the entries so far, if they are true."""

    def __init__(self, directory: Path, *, length: int, tip: bytes) -> None:
        self.start = length
        self.length = length
        self.tip = tip
        self._bytes = 0
        self._directory = directory
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed on leaving the block
        except OSError as error:
            raise _disk_error(directory, error) from error

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):  # what a full disk does not take, `add` has refused
            self._file.close()

    def add(self, entries: Sequence[bytes]) -> None:
        """Take in what follows. Raises ProtocolError for what cannot be an entry, DataDirError for a full disk."""
        block = b"".join(map(frame, entries))
        self._bytes += len(block)
        if self._bytes > MAX_SPOOL_BYTES:
            raise ProtocolError(f"more than {MAX_SPOOL_BYTES >> 30} GiB of ledger entries")
        for entry in entries:
            self.tip = next_tip(self.tip, id_of(entry))
        self.length += len(entries)
        try:
            self._file.write(block)
            self._file.flush()
        except OSError as error:
            raise _disk_error(self._directory, error) from error

    def __iter__(self) -> Iterator[bytes]:
        """Raises DataDirError."""
        try:
            self._file.seek(0)
        except OSError as error:
            raise _disk_error(self._directory, error) from error
        while size := self._read(FRAME_BYTES):
            yield self._read(int.from_bytes(size, "big"))

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise _disk_error(self._directory, error) from error


def _disk_error(directory: Path, error: OSError) -> DataDirError:
    return DataDirError(
        f"ledger entries cannot be kept until they are checked: {error.strerror}",
        hint=f"free some space (df -h {directory}); a node that runs goes on by itself",
    )

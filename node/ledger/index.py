"""Where each entry of the ledger lies, and which are about whom: a SQLite file that the segments can rebuild.

It is written after the entries are durable, so it is never ahead of them: an index that is means that entries which
were there are gone. Whatever else is wrong with it, it is thrown away and made again.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol.envelope import Signed
from protocol.errors import DataDirError
from protocol.identity import PeerId
from protocol.ledger import about
from protocol.records import Batch, Submission, Trained

log = logging.getLogger(__name__)

LAYOUT: Final = 1
_SCHEMA: Final = f"""
PRAGMA journal_mode=WAL;
PRAGMA synchronous=NORMAL;
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    size INTEGER NOT NULL,
    id BLOB NOT NULL,
    kind TEXT NOT NULL,
    author BLOB NOT NULL,
    about BLOB,
    submission BLOB
);
CREATE INDEX IF NOT EXISTS by_about ON entries (about, number) WHERE about IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_submission ON entries (submission, number) WHERE submission IS NOT NULL;
CREATE INDEX IF NOT EXISTS of_step ON entries (kind, number) WHERE kind IN ('batch', 'trained');
PRAGMA user_version={LAYOUT};
"""
_END: Final = "SELECT COALESCE(MAX(number) + 1, 0) FROM entries"
_STEP_KINDS: Final = (Batch.KIND, Trained.KIND)

Place = tuple[int, int, int]
"""Segment, offset, size."""


@dataclass(frozen=True)
class Row:
    """An entry of the index."""

    number: int
    place: Place
    entry: Signed[Any]

    @property
    def values(self) -> tuple[Any, ...]:
        record = self.entry.record
        subject = about(self.entry)
        submission = self.entry.id if isinstance(record, Submission) else getattr(record, "submission", None)
        return (
            *(self.number, *self.place, self.entry.id, record.KIND, self.entry.author.public_key),
            subject.public_key if subject else None,
            submission,
        )


class LedgerIndex:
    """Safe for any thread; each call is one short query. Raises DataDirError when the disk fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._steps: dict[str, array[int]] | None = None
        """By kind: numbers of the entries of steps 0, 1, …, 8 bytes each; None: to be read when it is asked for."""
        try:
            self._db = self._opened_or_made_again()
        except (OSError, sqlite3.Error) as error:
            raise DataDirError(f"cannot open the ledger's index {path}: {error}", hint="df -h; ls -l") from error

    def close(self) -> None:
        self._db.close()

    def count(self) -> int:
        """How many entries it knows."""
        (number,) = self._rows(_END)[0]
        return int(number)

    def add(self, rows: Sequence[Row]) -> None:
        """Take in the next entries. Those of the same numbers are replaced."""
        with self._lock, self._errors():
            steps, self._steps = self._steps, None
            end = self._db.execute(_END).fetchone()[0] if steps is not None else 0
            with self._db:
                self._db.execute("BEGIN")
                self._db.executemany(
                    "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", [row.values for row in rows]
                )
            if steps is not None and all(row.number >= end for row in rows):
                _add_steps(steps, rows)
                self._steps = steps

    def cut(self, length: int) -> None:
        """Forget the entries from this number on."""
        with self._lock, self._errors():
            self._steps = None
            self._db.execute("DELETE FROM entries WHERE number >= ?", (length,))

    def holds(self, row: Row) -> bool:
        """Whether it knows this very entry at this very place."""
        found = self._rows("SELECT segment, offset, size, id FROM entries WHERE number = ?", row.number)
        return found == [(*row.place, row.entry.id)]

    def places(self, start: int, limit: int) -> list[Place]:
        """Where entries from number `start` on lie."""
        query = "SELECT segment, offset, size FROM entries WHERE number >= ? ORDER BY number LIMIT ?"
        return [(segment, offset, size) for segment, offset, size in self._rows(query, start, limit)]

    def ids(self, start: int, end: int) -> list[bytes]:
        """Ids of the entries from number `start` to before `end`."""
        query = "SELECT id FROM entries WHERE number >= ? AND number < ? ORDER BY number"
        return [bytes(row[0]) for row in self._rows(query, start, end)]

    def about(self, peer: PeerId, *, kind: str, limit: int) -> list[int]:
        """Numbers of the newest entries of a kind about a contributor, newest first."""
        query = "SELECT number FROM entries WHERE about = ? AND kind = ? ORDER BY number DESC LIMIT ?"
        return [int(row[0]) for row in self._rows(query, peer.public_key, kind, limit)]

    def of_step(self, kind: str, step: int) -> int | None:
        """Number of a step's `batch` or `trained` entry: the ledger takes both in the order of steps."""
        with self._lock, self._errors():
            if self._steps is None:
                self._steps = self._read_steps()
            numbers = self._steps[kind]
            return numbers[step] if step < len(numbers) else None

    def of_submission(self, submission: bytes) -> list[int]:
        """Numbers of the entries that are a submission or judge it, in order."""
        return [int(row[0]) for row in self._rows(
            "SELECT number FROM entries WHERE submission = ? ORDER BY number", submission
        )]  # fmt: skip

    def _read_steps(self) -> dict[str, array[int]]:
        query = "SELECT number FROM entries WHERE kind = ? AND kind IN ('batch', 'trained') ORDER BY number"
        return {kind: array("Q", [row[0] for row in self._db.execute(query, (kind,))]) for kind in _STEP_KINDS}

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, self._errors():
            return self._db.execute(query, values).fetchall()

    def _opened_or_made_again(self) -> sqlite3.Connection:
        try:
            return self._opened()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            log.warning("ledger index=%s unusable, made again: %s", self._path, error)
            self._remove()
            return self._opened()

    def _opened(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            (layout,) = db.execute("PRAGMA user_version").fetchone()
            if layout not in (0, LAYOUT):
                raise sqlite3.DatabaseError(f"layout {layout}")
            db.executescript(_SCHEMA)
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DataDirError(
                f"cannot use the ledger's index {self._path}: {error}",
                hint=f"stop the node, remove {self._path}* and start it again: the index is made from the ledger",
            ) from error


def _add_steps(steps: dict[str, array[int]], rows: Sequence[Row]) -> None:
    for row in rows:
        if row.entry.record.KIND in steps:
            steps[row.entry.record.KIND].append(row.number)

"""SQLite files of a node: opened alike, durable on return, and their failures translated once.

Write-ahead log, synced at every commit; one connection, for one thread. What a file holds is its owner's business: the
schema and the queries stay there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from protocol.errors import DataDirError

_HINT: Final = "check free space and permissions (`df -h`, `ls -l`), then start the node again"


class Database:
    """One file. Every change is on disk when its method or transaction ends. Everything here raises DataDirError."""

    def __init__(self, path: Path, schema: str, *, name: str, hint: str = _HINT) -> None:
        """Open or make it. `name` is what a person calls it ("the outbox"); `hint` what to do when it fails."""
        self.path = path
        self._name = name
        self._hint = hint
        with self._errors():
            self._connection = sqlite3.connect(path, isolation_level=None)
            try:
                self._connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + schema)
            except sqlite3.Error:
                self._connection.close()
                raise

    def close(self) -> None:
        self._connection.close()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All that a query finds."""
        with self._errors():
            return self._connection.execute(query, values).fetchall()

    def row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        """The first that a query finds."""
        with self._errors():
            found: tuple[Any, ...] | None = self._connection.execute(query, values).fetchone()
        return found

    def change(self, query: str, *values: object) -> int:
        """Run one statement; how many rows it changed."""
        with self._errors():
            return self._connection.execute(query, values).rowcount

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes within the block, or none where it raises."""
        with self._errors(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:  # what sqlite says of a file that is no database, or no longer one
                raise self._damaged(error) from error
            raise DataDirError(f"cannot use {self._name} {self.path}: {error}", hint=self._hint) from error

    def _damaged(self, error: sqlite3.Error) -> DataDirError:
        return DataDirError(
            f"{self._name} {self.path} is damaged: {error}",
            hint="restore it from a back-up, or move it away, which loses what it held of unfinished work: "
            f"mv {self.path} {self.path}.damaged",
        )

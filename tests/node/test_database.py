"""The SQLite files of a node: durable, whole, and named when they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.database import Database
from protocol.errors import DataDirError

SCHEMA = "CREATE TABLE IF NOT EXISTS things (name TEXT UNIQUE NOT NULL);"


def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite", SCHEMA, name="the test")
    assert database.change("INSERT INTO things VALUES (?)", "one") == 1
    database.close()
    again = Database(tmp_path / "a.sqlite", SCHEMA, name="the test")
    assert again.rows("SELECT name FROM things") == [("one",)]
    assert again.row("SELECT name FROM things WHERE name = ?", "two") is None
    again.close()


def test_every_commit_is_synced(tmp_path: Path) -> None:
    """Power fails right after a method has returned."""
    database = Database(tmp_path / "a.sqlite", SCHEMA, name="the test")
    assert (database.row("PRAGMA journal_mode"), database.row("PRAGMA synchronous")) == (("wal",), (2,))
    database.close()


def insert(database: Database, *names: str, then: type[Exception] | None = None) -> None:
    with database.transaction():
        for name in names:
            database.change("INSERT INTO things VALUES (?)", name)
        if then is not None:
            raise then


def test_a_transaction_that_fails_changes_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite", SCHEMA, name="the test", hint="do this")
    with pytest.raises(DataDirError, match=r"the test .*a\.sqlite") as caught:
        insert(database, "one", "one")
    assert caught.value.hint == "do this"
    with pytest.raises(KeyError):
        insert(database, "one", then=KeyError)
    assert database.rows("SELECT name FROM things") == []
    database.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(DataDirError, match="the test") as caught:
        Database(path, SCHEMA, name="the test")
    assert str(path) in caught.value.message

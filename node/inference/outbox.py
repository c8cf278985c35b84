"""The contributor's durable outbox: every submission from generation until its verdict, in one SQLite file.

A submission is written here, synced, before it is sent anywhere, so a crash at any point loses no finished work and
never reuses a submission index. Sending is the role's business.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.envelope import Signed
from protocol.errors import DataDirError
from protocol.identity import PeerId
from protocol.records import Receipt, Submission, Verdict

State = Literal["ready", "received", "accepted", "rejected", "undecided", "refused"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS submissions (
    id BLOB PRIMARY KEY,
    step INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    envelope BLOB NOT NULL,
    path TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    receipt BLOB,
    relay BLOB,
    tokens INTEGER NOT NULL,
    UNIQUE (step, idx)
);
CREATE INDEX IF NOT EXISTS by_state ON submissions (state);
"""


@dataclass(frozen=True)
class Outgoing:
    """A submission that still has to reach a relay."""

    id: bytes
    step: int
    index: int
    envelope: bytes
    path: Path


class Outbox:
    """Submissions of one node, by state. Every change is on disk when its method returns. Raises DataDirError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._errors():
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + _SCHEMA)

    def close(self) -> None:
        self._db.close()

    def next_index(self, step: int) -> int:
        """The submission index to generate next at this step: one more than the highest ever written."""
        (highest,) = self._one("SELECT COALESCE(MAX(idx), -1) FROM submissions WHERE step = ?", step)
        return int(highest) + 1

    def add(self, submission: Signed[Submission], path: Path) -> None:
        record = submission.record
        self._do(
            "INSERT INTO submissions (id, step, idx, envelope, path, state, tokens) VALUES (?, ?, ?, ?, ?, 'ready', ?)",
            *(submission.id, record.step, record.index, submission.data, str(path), record.output_tokens),
        )

    def ready(self, limit: int = 16) -> list[Outgoing]:
        """The oldest submissions that no relay has taken."""
        return self._outgoing("state = 'ready'", limit)

    def unjudged(self, limit: int = 64) -> list[Outgoing]:
        """Submissions that a relay took and no validator has judged."""
        return self._outgoing("state = 'received'", limit)

    def received(self, submission_id: bytes, relay: PeerId, receipt: Signed[Receipt]) -> None:
        self._do(
            "UPDATE submissions SET state = 'received', relay = ?, receipt = ? WHERE id = ? AND state = 'ready'",
            *(relay.public_key, receipt.data, submission_id),
        )

    def relay_of(self, submission_id: bytes) -> PeerId | None:
        """The relay that holds a submission."""
        with self._errors():
            row = self._db.execute("SELECT relay FROM submissions WHERE id = ?", (submission_id,)).fetchone()
        return PeerId(row[0]) if row and row[0] else None

    def refused(self, submission_id: bytes, reason: str) -> None:
        """A relay said no for good; the submission will never be judged."""
        self._settle(submission_id, "refused", reason)

    def judged(self, verdict: Signed[Verdict]) -> bool:
        """Take in a verdict; whether it was news about a submission of ours."""
        state: dict[str, State] = {"accept": "accepted", "reject": "rejected", "undecided": "undecided"}
        return self._settle(verdict.record.submission, state[verdict.record.outcome], verdict.record.reason)

    def count(self, *states: State) -> int:
        marks = ",".join("?" * len(states))
        return int(self._one(f"SELECT COUNT(*) FROM submissions WHERE state IN ({marks})", *states)[0])

    def reasons(self) -> dict[str, int]:
        """Refusals and rejections by the name of the check or rule (what stands before the reason's colon)."""
        with self._errors():
            rows = self._db.execute("SELECT state, reason FROM submissions WHERE state IN ('rejected', 'refused')")
            counted: dict[str, int] = {}
            for state, reason in rows:
                label = reason.partition(":")[0] or state
                counted[label] = counted.get(label, 0) + 1
        return counted

    def discard_files(self, oldest_step: int) -> None:
        """Delete the files of settled submissions; their records stay."""
        with self._errors():
            rows = self._db.execute(
                "SELECT path FROM submissions WHERE state NOT IN ('ready', 'received') AND step < ? AND path != ''",
                (oldest_step,),
            ).fetchall()
        for (path,) in rows:
            Path(path).unlink(missing_ok=True)
            self._do("UPDATE submissions SET path = '' WHERE path = ?", path)

    def _settle(self, submission_id: bytes, state: State, reason: str) -> bool:
        changed = self._do(
            "UPDATE submissions SET state = ?, reason = ? WHERE id = ? AND state IN ('ready', 'received', 'undecided')",
            *(state, reason, submission_id),
        )
        return changed > 0

    def _outgoing(self, where: str, limit: int) -> list[Outgoing]:
        query = f"SELECT id, step, idx, envelope, path FROM submissions WHERE {where} ORDER BY step, idx LIMIT ?"
        with self._errors():
            rows = self._db.execute(query, (limit,)).fetchall()
        return [Outgoing(row[0], row[1], row[2], row[3], Path(row[4])) for row in rows]

    def _one(self, query: str, *values: object) -> tuple[int, ...]:
        with self._errors():
            row: tuple[int, ...] = self._db.execute(query, values).fetchone()
        return row

    def _do(self, query: str, *values: object) -> int:
        with self._errors():
            return self._db.execute(query, values).rowcount

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DataDirError(
                f"cannot use the outbox {self._path}: {error}",
                hint="check free space and permissions (`df -h`, `ls -l`), then start the node again",
            ) from error

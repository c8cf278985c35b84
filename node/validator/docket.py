"""What a validator has to judge and has judged, on disk: one SQLite file of open cases, of verdicts, and of the relays
that still lack them. A verdict that answers an appeal stands under the appeal's id, every other under the submission's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.database import Database
from protocol.envelope import Signed, open_envelope
from protocol.identity import PeerId
from protocol.records import Receipt, Submission, Verdict

MAX_SEEN: Final = 1 << 16
MAX_MET: Final = 64
"""Of so many relays is kept what they lack, and of those that are there."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS verdicts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, submission BLOB UNIQUE NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    envelope BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS cases (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, submission BLOB UNIQUE NOT NULL, envelope BLOB NOT NULL,
    receipt BLOB NOT NULL, seen_sequence INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS seen (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, submission BLOB UNIQUE NOT NULL, envelope BLOB NOT NULL,
    receipt BLOB NOT NULL, seen_sequence INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS looks (
    submission BLOB PRIMARY KEY, contributor BLOB NOT NULL, looks INTEGER NOT NULL, due_ms INTEGER NOT NULL,
    reason TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS sources (submission BLOB NOT NULL, relay BLOB NOT NULL, PRIMARY KEY (submission, relay));
CREATE TABLE IF NOT EXISTS posted (submission BLOB NOT NULL, relay BLOB NOT NULL, PRIMARY KEY (submission, relay));
CREATE TABLE IF NOT EXISTS met (relay BLOB PRIMARY KEY);
CREATE TABLE IF NOT EXISTS lacking (relay BLOB NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (relay, seq)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class OpenCase:
    """A submission that waits for its verdict."""

    number: int
    """Rises with every new case."""
    submission: Signed[Submission]
    receipt: Signed[Receipt]
    """The first that was seen."""
    seen_sequence: int
    """Sequence of the newest head that this validator knew when it first saw the submission."""
    relays: tuple[PeerId, ...]
    """Who has the file."""


@dataclass(frozen=True)
class Look:
    """A submission that could not be told, and is going to be judged again."""

    submission: bytes
    contributor: PeerId
    looks: int
    """So many were begun after the first verdict."""
    due_ms: int
    reason: str
    """Why it could not be told at the latest."""


class Docket:
    """Verdicts by submission. Every change is on disk when its method returns. Raises DataDirError.

    What it takes to keep, post and count a verdict does not grow with the number of earlier ones.
    """

    def __init__(self, path: Path) -> None:
        self._db = Database(path, _SCHEMA, name="the docket")
        self._met = {relay for (relay,) in self._db.rows("SELECT relay FROM met")}
        """Relays of which is kept what they lack."""
        self._outcomes: Counter[str] = Counter()
        self._rejections: Counter[str] = Counter()
        counted = (
            "SELECT outcome, CASE outcome WHEN 'reject' THEN reason ELSE '' END, COUNT(*) FROM verdicts GROUP BY 1, 2"
        )
        for outcome, reason, count in self._db.rows(counted):
            self._count(outcome, reason, count)

    def close(self) -> None:
        self._db.close()

    def judged(self, subject: bytes) -> bool:
        """Whether there is a verdict about a submission, or in answer to an appeal."""
        return self._db.row("SELECT 1 FROM verdicts WHERE submission = ?", subject) is not None

    def verdict(self, subject: bytes) -> Signed[Verdict] | None:
        """What this validator says of a submission, or in answer to an appeal."""
        row = self._db.row("SELECT envelope FROM verdicts WHERE submission = ?", subject)
        return None if row is None else open_envelope(row[0], Verdict)

    def settled(self, submission: bytes) -> bool:
        """Whether a submission was judged here, or left to other validators."""
        query = "SELECT 1 FROM seen WHERE submission = ? UNION SELECT 1 FROM verdicts WHERE submission = ?"
        return self._db.row(query, submission, submission) is not None

    def seen(self, submission: bytes) -> OpenCase | None:
        """A submission whose case is closed, or still open, as it was first seen; None where it was forgotten."""
        for table in ("seen", "cases"):
            query = f"SELECT seq, submission, envelope, receipt, seen_sequence FROM {table} WHERE submission = ?"
            row = self._db.row(query, submission)
            if row is not None:
                return self._case(*row)
        return None

    def open(self, submission: Signed[Submission], receipt: Signed[Receipt], *, seen_sequence: int) -> None:
        """Remember a submission that must be judged, whatever happens in between, and one more relay that has it.

        The first receipt stays, and the sequence of the newest head that was known when it came.
        """
        with self._db.transaction():
            self._db.change(
                "INSERT OR IGNORE INTO cases (submission, envelope, receipt, seen_sequence) VALUES (?, ?, ?, ?)",
                *(submission.id, submission.data, receipt.data, seen_sequence),
            )
            self._db.change("INSERT OR IGNORE INTO sources VALUES (?, ?)", submission.id, receipt.author.public_key)

    def opened(self, limit: int, *, after: int = 0) -> list[OpenCase]:
        """The oldest submissions that still wait for a verdict, from the one behind number `after` on."""
        query = "SELECT seq, submission, envelope, receipt, seen_sequence FROM cases WHERE seq > ? ORDER BY seq LIMIT ?"
        return [self._case(*row) for row in self._db.rows(query, after, limit)]

    def _case(self, number: int, key: bytes, envelope: bytes, receipt: bytes, seen_sequence: int) -> OpenCase:
        relays = self._db.rows("SELECT relay FROM sources WHERE submission = ? ORDER BY rowid", key)
        return OpenCase(
            number,
            open_envelope(envelope, Submission),
            open_envelope(receipt, Receipt),
            seen_sequence,
            tuple(PeerId(relay) for (relay,) in relays),
        )

    def add(self, verdict: Signed[Verdict]) -> None:
        """Keep a verdict and close its case. The first one stays, but for an `undecided` when a decision comes.

        A decision that takes its place goes to every relay again.
        """
        record = verdict.record
        key = record.appeal or record.submission
        with self._db.transaction():
            before = self._db.row("SELECT outcome FROM verdicts WHERE submission = ?", key)
            changed = self._db.change(
                "INSERT INTO verdicts (submission, outcome, reason, envelope) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (submission) DO UPDATE SET outcome = excluded.outcome, reason = excluded.reason, "
                "envelope = excluded.envelope WHERE outcome = 'undecided' AND excluded.outcome != 'undecided'",
                *(key, record.outcome, record.reason, verdict.data),
            )
            if changed:
                self._db.change("DELETE FROM posted WHERE submission = ?", key)
                self._db.change(
                    "INSERT OR IGNORE INTO lacking SELECT relay, seq FROM met, verdicts WHERE submission = ?", key
                )
            self._close(record.submission)
        if changed:
            self._count(record.outcome, record.reason, 1)
            self._outcomes.subtract([before[0]] if before else [])

    def _count(self, outcome: str, reason: str, count: int) -> None:
        self._outcomes[outcome] += count
        if outcome == "reject":
            self._rejections[reason.partition(":")[0]] += count

    def dismiss(self, submission: bytes) -> None:
        """Close a case without a verdict: others have settled it."""
        with self._db.transaction():
            self._close(submission)

    def _close(self, submission: bytes) -> None:
        """Of closed cases the newest are remembered, for appeals."""
        self._db.change(
            "INSERT OR IGNORE INTO seen (submission, envelope, receipt, seen_sequence) "
            "SELECT submission, envelope, receipt, seen_sequence FROM cases WHERE submission = ?",
            submission,
        )
        self._db.change("DELETE FROM seen WHERE seq <= (SELECT MAX(seq) FROM seen) - ?", MAX_SEEN)
        for table in ("cases", "sources"):
            self._db.change(f"DELETE FROM {table} WHERE submission = ?", submission)

    # What is judged again.

    def looks(self) -> list[Look]:
        rows = self._db.rows("SELECT submission, contributor, looks, due_ms, reason FROM looks")
        return [Look(submission, PeerId(contributor), *rest) for submission, contributor, *rest in rows]

    def keep_look(self, look: Look) -> None:
        """Remember, or change, when a submission is judged again."""
        values = (look.submission, look.contributor.public_key, look.looks, look.due_ms, look.reason)
        self._db.change("INSERT OR REPLACE INTO looks VALUES (?, ?, ?, ?, ?)", *values)

    def drop_look(self, submission: bytes) -> None:
        self._db.change("DELETE FROM looks WHERE submission = ?", submission)

    # What relays lack.

    def unposted(self, relay: PeerId, limit: int = 64, *, behind: bytes = b"") -> list[tuple[bytes, bytes]]:
        """Verdicts that this relay has not taken: submission id and envelope, oldest first.

        Only those younger than the one about `behind`, if that is given.
        """
        self._meet(relay.public_key)
        query = (
            "SELECT submission, envelope FROM lacking JOIN verdicts USING (seq) WHERE relay = ? AND lacking.seq > "
            "COALESCE((SELECT seq FROM verdicts WHERE submission = ?), 0) ORDER BY lacking.seq LIMIT ?"
        )
        return [(row[0], row[1]) for row in self._db.rows(query, relay.public_key, behind, limit)]

    def _meet(self, relay: bytes) -> None:
        """A relay that is new lacks all there is; one that an older file knows, what was not posted to it."""
        if relay in self._met:
            return
        with self._db.transaction():
            self._db.change("INSERT OR IGNORE INTO met VALUES (?)", relay)
            self._db.change(
                "INSERT OR IGNORE INTO lacking SELECT ?, seq FROM verdicts v WHERE NOT EXISTS "
                "(SELECT 1 FROM posted p WHERE p.submission = v.submission AND p.relay = ?)",
                *(relay, relay),
            )
        self._met.add(relay)

    def forget_but(self, relays: Collection[PeerId]) -> None:
        """Let go of other relays where many were met; what one lacks is found again should it come back."""
        gone = self._met - {relay.public_key for relay in relays}
        if not gone or len(self._met) <= MAX_MET:
            return
        with self._db.transaction():
            for table in ("met", "lacking"):
                for relay in gone:
                    self._db.change(f"DELETE FROM {table} WHERE relay = ?", relay)
        self._met -= gone

    def posted(self, submission: bytes, relay: PeerId, envelope: bytes | None = None) -> None:
        """A relay has the verdict; with an `envelope`, if that is still the one that stands."""
        stands = "submission = ? AND envelope = COALESCE(?, envelope)"
        with self._db.transaction():
            found = self._db.row(f"SELECT seq FROM verdicts WHERE {stands}", submission, envelope)
            if found is not None:
                self._db.change("INSERT OR IGNORE INTO posted VALUES (?, ?)", submission, relay.public_key)
                self._db.change("DELETE FROM lacking WHERE relay = ? AND seq = ?", relay.public_key, found[0])

    def outcomes(self) -> dict[str, int]:
        """How many verdicts of each outcome."""
        return {outcome: count for outcome, count in self._outcomes.items() if count}

    def rejections(self) -> dict[str, int]:
        """Rejections by the name of the check that failed (what stands before the reason's colon)."""
        return dict(self._rejections)

"""The contributor's durable outbox: every submission from generation until its verdict, in one SQLite file.

A submission is written here, synced, before it is sent anywhere, so a crash at any point loses no finished work and
never reuses a submission index. Sending is the role's business. What others signed for stays as proof of credit: the
relay's receipt, each validator's verdict, and the trainer's batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from node.database import Database
from protocol.envelope import Signed, open_envelope
from protocol.identity import PeerId
from protocol.records import Receipt, Submission, Verdict

State = Literal["ready", "received", "accepted", "rejected", "undecided", "refused"]

_SCHEMA: Final = """
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
-- `validator`: its key for what it says of a submission; its key and `appeal` for its newest answer to an appeal.
CREATE TABLE IF NOT EXISTS verdicts (
    submission BLOB NOT NULL, validator BLOB NOT NULL, envelope BLOB NOT NULL, PRIMARY KEY (submission, validator)
);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, batch BLOB NOT NULL, trained BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS used (submission BLOB PRIMARY KEY, step INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS with_file ON submissions (step) WHERE path != '';
"""


def _label(row: str) -> str:
    """SQL for the name of the check or rule that a `row.` was rejected or refused by; empty for any other."""
    name = f"substr({row}reason, 1, instr({row}reason || ':', ':') - 1)"
    return f"CASE WHEN {row}state IN ('rejected', 'refused') THEN {name} ELSE '' END"


_ADD_NEW: Final = f"""
    INSERT INTO counts VALUES (NEW.state, {_label("NEW.")}, 1, NEW.tokens) ON CONFLICT (state, label)
    DO UPDATE SET submissions = submissions + 1, tokens = tokens + excluded.tokens;
"""
_ONCE: Final = "(SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM counts))"
_COUNTED: Final = f"""
-- What is asked at every verdict, and stays as quick however many came before: triggers keep both tables, which a file
-- of an earlier release is given when it is opened. Of what is accepted, `unproved` holds what no trained step has.
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS counts (
    state TEXT NOT NULL, label TEXT NOT NULL, submissions INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (state, label)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unproved (
    step INTEGER NOT NULL, idx INTEGER NOT NULL, submission BLOB NOT NULL, PRIMARY KEY (step, idx)
) WITHOUT ROWID;
INSERT OR IGNORE INTO unproved SELECT s.step, idx, id FROM {_ONCE} CROSS JOIN submissions s
    LEFT JOIN used u ON u.submission = id LEFT JOIN steps t ON t.step = u.step
    WHERE state = 'accepted' AND COALESCE(LENGTH(t.trained), 0) = 0;
INSERT INTO counts SELECT state, {_label("")}, COUNT(*), SUM(tokens) FROM {_ONCE} CROSS JOIN submissions GROUP BY 1, 2;
CREATE TRIGGER IF NOT EXISTS made AFTER INSERT ON submissions BEGIN {_ADD_NEW} END;
CREATE TRIGGER IF NOT EXISTS moved AFTER UPDATE OF state, reason ON submissions BEGIN
    UPDATE counts SET submissions = submissions - 1, tokens = tokens - OLD.tokens
    WHERE state = OLD.state AND label = {_label("OLD.")};
    {_ADD_NEW}
END;
CREATE TRIGGER IF NOT EXISTS accepted AFTER UPDATE OF state ON submissions WHEN NEW.state = 'accepted' BEGIN
    INSERT OR IGNORE INTO unproved VALUES (NEW.step, NEW.idx, NEW.id);
END;
COMMIT;
"""
_ANSWER = b"appeal"
_STATES: dict[str, State] = {"accept": "accepted", "reject": "rejected", "undecided": "undecided"}


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

    def __init__(self, path: Path, *, quorum: int = 1, validators: int = 2) -> None:
        """`quorum`: so many of the run's `validators` must say the same of a submission before it counts."""
        self.path = path
        self._quorum = quorum
        self._validators = validators
        self._db = Database(path, _SCHEMA + _COUNTED, name="the outbox")

    def close(self) -> None:
        self._db.close()

    def next_index(self, step: int) -> int:
        """The submission index to generate next at this step: one more than the highest ever written."""
        (highest,) = self._one("SELECT COALESCE(MAX(idx), -1) FROM submissions WHERE step = ?", step)
        return int(highest) + 1

    def newest(self) -> Submission | None:
        """The submission of the highest step and index, whatever became of it; the ledger's order of policies."""
        row = self._db.row("SELECT envelope FROM submissions ORDER BY step DESC, idx DESC LIMIT 1")
        return None if row is None else open_envelope(row[0], Submission).record

    def add(self, submission: Signed[Submission], path: Path) -> None:
        record = submission.record
        with self._db.transaction():
            self._db.change(
                "INSERT INTO submissions (id, step, idx, envelope, path, state, tokens) "
                "VALUES (?, ?, ?, ?, ?, 'ready', ?)",
                *(submission.id, record.step, record.index, submission.data, str(path), record.output_tokens),
            )
            self._refuse_behind(record.step)

    def ready(self, limit: int = 16) -> list[Outgoing]:
        """The oldest submissions that no relay has taken."""
        return self._outgoing("state = 'ready'", limit)

    def unjudged(self, limit: int = 64) -> list[Outgoing]:
        """Submissions that a relay took and no validator has judged."""
        return self._outgoing("state = 'received'", limit)

    def received(self, submission_id: bytes, relay: PeerId, receipt: Signed[Receipt]) -> None:
        self._db.change(
            "UPDATE submissions SET state = 'received', relay = ?, receipt = ? WHERE id = ? AND state = 'ready'",
            *(relay.public_key, receipt.data, submission_id),
        )

    def relay_of(self, submission_id: bytes) -> PeerId | None:
        """The relay that holds a submission."""
        row = self._db.row("SELECT relay FROM submissions WHERE id = ?", submission_id)
        return PeerId(row[0]) if row and row[0] else None

    def file(self, submission_id: bytes) -> Path | None:
        """Where a submission's file lies, if it was not discarded yet."""
        row = self._db.row("SELECT path FROM submissions WHERE id = ? AND path != ''", submission_id)
        return Path(row[0]) if row else None

    def find(self, path: Path) -> bytes | None:
        """The envelope of the submission whose file lies at `path`."""
        row = self._db.row("SELECT envelope FROM submissions WHERE path = ?", str(path))
        return None if row is None else bytes(row[0])

    def submission(self, submission_id: bytes) -> Submission | None:
        """What was signed for, by its id."""
        row = self._db.row("SELECT envelope FROM submissions WHERE id = ?", submission_id)
        return None if row is None else open_envelope(row[0], Submission).record

    def accepted_tokens(self) -> int:
        """Output tokens of accepted work: what credits are counted in."""
        return int(self._one("SELECT COALESCE(SUM(tokens), 0) FROM counts WHERE state = 'accepted'")[0])

    def refused(self, submission_id: bytes, reason: str) -> bool:
        """A relay said no for good; whether that settles the submission, as no other relay took it.

        The ledger takes a step's submissions by index, so those behind it would wait there for ever: they are not sent.
        """
        row = self._db.row("SELECT step FROM submissions WHERE id = ? AND state = 'ready'", submission_id)
        if row is None:
            return False
        with self._db.transaction():
            self._settle(submission_id, "refused", reason)
            self._refuse_behind(row[0])
        return True

    def _refuse_behind(self, step: int) -> None:
        behind = "step = ? AND idx > (SELECT MIN(idx) FROM submissions WHERE step = ? AND state = 'refused')"
        self._db.change(
            f"UPDATE submissions SET state = 'refused', reason = ? WHERE state = 'ready' AND {behind}",
            *("after-refused: a submission before it was refused, and the ledger takes them in order", step, step),
        )

    def is_ready(self, submission_id: bytes) -> bool:
        """Whether a submission still has to reach a relay."""
        row = self._db.row("SELECT 1 FROM submissions WHERE id = ? AND state = 'ready'", submission_id)
        return row is not None

    def has_refused(self, step: int) -> bool:
        """Whether a submission of a step was refused, so that the ledger takes no further one."""
        return self._db.row("SELECT 1 FROM submissions WHERE step = ? AND +state = 'refused'", step) is not None

    def judged(self, verdict: Signed[Verdict]) -> bool:
        """Take in a verdict; whether it changed what became of a submission of ours.

        Of each validator the latest is kept: its decision, however late its earlier `undecided` comes by another relay.
        What it answers to an appeal stands beside that, and takes the place of nothing that was judged at first.
        """
        key, outcome, reason = verdict.record.submission, verdict.record.outcome, verdict.record.reason
        before = [one for one in self.verdicts(key) if _slot(one) == _slot(verdict)]
        if outcome == "undecided" and any(one.record.outcome != "undecided" for one in before):
            return False
        self._db.change(
            "INSERT OR REPLACE INTO verdicts SELECT ?, ?, ? FROM submissions WHERE id = ?",
            *(key, _slot(verdict), verdict.data, key),
        )
        if verdict.record.appeal:
            query = "UPDATE submissions SET state = 'accepted', reason = ? WHERE id = ? AND state != 'accepted'"
            return outcome == "accept" and self._is_granted(key) and self._db.change(query, reason, key) > 0
        agreed = sum(one.record.outcome == outcome and not one.record.appeal for one in self.verdicts(key))
        if outcome != "undecided" and agreed < self._quorum:
            return False
        return self._settle(key, _STATES[outcome], reason)

    def _is_granted(self, submission_id: bytes) -> bool:
        """Whether enough answers to appeals accept, by the verdicts that are here: those who judged at first were a
        quorum that rejects, and whoever accepted; as many as a quorum, or all who were left, must accept. Who judged at
        first answers nothing."""
        said = self.verdicts(submission_id)
        judged = {one.author: one.record.outcome for one in said if not one.record.appeal}
        judges = {author for author, outcome in judged.items() if outcome != "undecided"}
        accepts = {one.author for one in said if one.record.appeal and one.record.outcome == "accept"}
        beside_judges = self._validators - self._quorum - sum(outcome == "accept" for outcome in judged.values())
        return len(accepts - judges) >= max(1, min(self._quorum, beside_judges))

    def verdicts(self, submission_id: bytes) -> list[Signed[Verdict]]:
        """What validators said of a submission, oldest first."""
        rows = self._db.rows("SELECT envelope FROM verdicts WHERE submission = ? ORDER BY rowid", submission_id)
        return [open_envelope(row[0], Verdict) for row in rows]

    def rejections(self, limit: int) -> list[Signed[Verdict]]:
        """The newest verdicts that reject something, of `limit` submissions, newest first; no answers to appeals."""
        found: list[Signed[Verdict]] = []
        query = "SELECT v.envelope FROM verdicts v JOIN submissions s ON s.id = v.submission WHERE state != 'accepted'"
        for (envelope,) in self._db.rows(f"{query} ORDER BY v.rowid DESC LIMIT ?", 4 * limit):
            verdict = open_envelope(envelope, Verdict)
            if verdict.record.outcome == "reject" and not verdict.record.appeal:
                found.append(verdict)
        newest = list(dict.fromkeys(one.record.submission for one in found))[:limit]
        return [one for one in found if one.record.submission in newest]

    def unproved(self, limit: int) -> list[bytes]:
        """The newest accepted submissions of which no batch is known, or not that it was trained."""
        query = (
            "SELECT a.submission FROM unproved a LEFT JOIN used u ON u.submission = a.submission "
            "LEFT JOIN steps t ON t.step = u.step WHERE COALESCE(LENGTH(t.trained), 0) = 0 "
            "ORDER BY a.step DESC, idx DESC LIMIT ?"
        )
        return [bytes(row[0]) for row in self._db.rows(query, limit)]

    def keep_step(self, step: int, batch: bytes, trained: bytes, used: Iterable[bytes]) -> None:
        """Keep a step's batch, in which these submissions are, and that it was trained, empty while it is not."""
        with self._db.transaction():
            self._db.change("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", step, batch, trained)
            for submission in used:
                self._db.change("INSERT OR REPLACE INTO used VALUES (?, ?)", submission, step)
                if trained:
                    own = "(step, idx) = (SELECT step, idx FROM submissions WHERE id = ?)"
                    self._db.change(f"DELETE FROM unproved WHERE {own}", submission)

    def count(self, *states: State) -> int:
        marks = ",".join("?" * len(states))
        return int(self._one(f"SELECT COALESCE(SUM(submissions), 0) FROM counts WHERE state IN ({marks})", *states)[0])

    def reasons(self) -> dict[str, int]:
        """Refusals and rejections by the name of the check or rule (what stands before the reason's colon)."""
        counted: dict[str, int] = {}
        query = "SELECT label, state, submissions FROM counts WHERE state IN ('rejected', 'refused')"
        for label, state, submissions in self._db.rows(f"{query} AND submissions > 0"):
            counted[label or state] = counted.get(label or state, 0) + submissions
        return counted

    def discard_files(self, oldest_step: int) -> None:
        """Delete the files of settled submissions; their records stay."""
        rows = self._db.rows(
            "SELECT id, path FROM submissions WHERE state NOT IN ('ready', 'received') AND step < ? AND path != ''",
            oldest_step,
        )
        for submission_id, path in rows:
            Path(path).unlink(missing_ok=True)
            self._db.change("UPDATE submissions SET path = '' WHERE id = ?", submission_id)

    def _settle(self, submission_id: bytes, state: State, reason: str) -> bool:
        changed = self._db.change(
            "UPDATE submissions SET state = ?, reason = ? WHERE id = ? AND state IN ('ready', 'received', 'undecided')",
            *(state, reason, submission_id),
        )
        return changed > 0

    def _outgoing(self, where: str, limit: int) -> list[Outgoing]:
        query = f"SELECT id, step, idx, envelope, path FROM submissions WHERE {where} ORDER BY step, idx LIMIT ?"
        return [Outgoing(row[0], row[1], row[2], row[3], Path(row[4])) for row in self._db.rows(query, limit)]

    def _one(self, query: str, *values: object) -> tuple[Any, ...]:
        """The row of a query that always finds one."""
        return self._db.row(query, *values) or ()


def _slot(verdict: Signed[Verdict]) -> bytes:
    """Under what a verdict is kept, beside its submission: one for its author's judgement, and one for its answers."""
    return verdict.author.public_key + (_ANSWER if verdict.record.appeal else b"")

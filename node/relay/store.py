"""What a relay keeps: the feed of submissions and verdicts, rollout files, and the run's own records, on one disk.

One SQLite file (WAL, fully synchronous) beside a directory of files. Everything is durable before a method returns, so
a receipt never promises what a crash could lose, and a crash at any point leaves nothing but temporary files, which
opening sweeps away. Who may hand in what is decided elsewhere (node.relay.desk); nothing here knows the network.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from node.relay.loose import LooseVerdicts
from node.relay.quota import DiskQuota, Usage, refuse_share
from protocol.atomic import sync_directory
from protocol.envelope import Signed
from protocol.errors import ChecksumError, DataDirError, RefusedError
from protocol.identity import PeerId
from protocol.records import Admission, Appeal, Submission, Verdict

log = logging.getLogger(__name__)

MAX_FEED_ITEMS: Final = 500
MAX_FEED_BYTES: Final = 4 << 20
ROW_BYTES: Final = 4096
"""What one feed row is charged against the quota, so that tiny submissions cannot fill a disk for free."""
MAX_PETITIONS_EACH: Final = 64
"""Admissions, or appeals, of one author: an admission is asked for again only after another was refused."""
FREE_DISK_BYTES: Final = 64 << 20
"""Left free on the file system for the database, checkpoints and the ledger."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS feed (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id BLOB NOT NULL UNIQUE,
    author BLOB NOT NULL,
    about BLOB NOT NULL,
    step INTEGER NOT NULL,
    idx INTEGER,
    subject BLOB NOT NULL,
    file_bytes INTEGER NOT NULL DEFAULT 0,
    envelope BLOB NOT NULL,
    receipt BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS one_index ON feed (author, step, idx) WHERE kind = 'submission';
CREATE UNIQUE INDEX IF NOT EXISTS one_verdict ON feed (author, subject) WHERE kind = 'verdict';
CREATE UNIQUE INDEX IF NOT EXISTS one_appeal ON feed (author, subject) WHERE kind = 'appeal';
CREATE INDEX IF NOT EXISTS by_kind ON feed (kind, seq);
CREATE INDEX IF NOT EXISTS by_about ON feed (about, seq);
CREATE INDEX IF NOT EXISTS with_file ON feed (step) WHERE file_bytes > 0;
CREATE INDEX IF NOT EXISTS petitions ON feed (author, kind) WHERE kind IN ('admission', 'appeal');
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, envelope BLOB NOT NULL);
"""
_LOOSE = (
    "SELECT author, id, substr(subject, 1, 32) FROM feed AS verdict WHERE kind = 'verdict' AND NOT EXISTS"
    " (SELECT 1 FROM feed WHERE id = substr(verdict.subject, 1, 32)) ORDER BY seq"
)


@dataclass(frozen=True)
class FeedRow:
    """One item of the feed; `receipt` is empty unless it is a submission."""

    seq: int
    kind: str
    envelope: bytes
    receipt: bytes


@dataclass(frozen=True)
class StoreStats:
    """What the store holds."""

    submissions: int
    verdicts: int
    file_bytes: int


class RelayStore:
    """Thread-safe and synchronous; each call is one short transaction. Raises DataDirError when the disk fails."""

    def __init__(self, directory: Path, *, max_bytes: int, max_node_bytes: int = 0, max_step_bytes: int = 0) -> None:
        """At most so many bytes of files: in all, of one contributor, of one step (0: no such limit)."""
        self._directory = directory
        self._files = directory / "submissions"
        self._incoming = directory / "incoming"
        self._quota = DiskQuota(max_bytes, max_node_bytes, max_step_bytes)
        self._lock = threading.Lock()
        self._count_lock = threading.Lock()  # never held over a disk access, so event loops may take it
        self._stored, self._reserved = Usage(), Usage()
        with self._errors():
            for each in (self._files, self._incoming):
                each.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(directory / "relay.sqlite", isolation_level=None, check_same_thread=False)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + _SCHEMA)
            self._sweep()
            self._submissions, self._verdicts, self._petitions, self.last_seq = self._count()
            self._last_about = self._newest_by_subject()
            self._loose = LooseVerdicts(self._db.execute(_LOOSE))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @property
    def max_bytes(self) -> int:
        """Most bytes of rollout files, in all."""
        return self._quota.total

    # The run's own records: manifest, head, origin notice.

    def document(self, name: str) -> bytes | None:
        row = self._one("SELECT envelope FROM documents WHERE name = ?", name)
        return bytes(row[0]) if row else None

    def set_document(self, name: str, envelope: bytes) -> None:
        """Replace a record; durable on return."""
        with self._lock, self._errors():
            self._db.execute("INSERT OR REPLACE INTO documents (name, envelope) VALUES (?, ?)", (name, envelope))

    # Submissions.

    def receipt(self, submission_id: bytes) -> bytes | None:
        """The receipt that was given for a submission, if it is stored."""
        row = self._one("SELECT receipt FROM feed WHERE kind = 'submission' AND id = ?", submission_id)
        return bytes(row[0]) if row else None

    def index_taken(self, author: PeerId, step: int, index: int) -> bool:
        """Whether this author has handed in a submission with this index at this step."""
        query = "SELECT 1 FROM feed WHERE kind = 'submission' AND author = ? AND step = ? AND idx = ?"
        return self._one(query, author.public_key, step, index) is not None

    @contextmanager
    def upload(self, submission: Signed[Submission]) -> Iterator[Upload]:
        """Room for a submission's file; leaving the block drops whatever was not kept.

        Raises RefusedError `disk-full`, `node-quota` or `step-quota` before the first byte.
        """
        author, step, size = submission.author, submission.record.step, submission.record.size
        self._reserve(author, step, size)
        try:
            with Upload(submission, self._incoming, self._keep) as upload:
                yield upload
        finally:
            with self._count_lock:
                self._reserved.add(author.public_key, step, -size)

    def open_file(self, submission_id: bytes) -> BinaryIO:
        """A submission's file, which stays readable while it is open. Raises RefusedError `not-found`."""
        query = "SELECT 1 FROM feed WHERE kind = 'submission' AND id = ? AND file_bytes > 0"
        try:
            if self._one(query, submission_id):
                return self._path(submission_id).open("rb")
        except FileNotFoundError:
            log.info("relay store file=%s pruned meanwhile", submission_id.hex()[:12])
        raise RefusedError(
            "this relay does not have that submission's file",
            code="not-found",
            hint="ask the relay that gave the receipt; old files are deleted",
        )

    def prune(self, before_step: int, *, needed: Callable[[bytes], bool] = lambda submission: False) -> int:
        """Delete the files of submissions for earlier steps, unless they are `needed`; their records stay.

        Returns how many.
        """
        with self._lock, self._errors():
            query = "SELECT id, author, step, file_bytes FROM feed WHERE file_bytes > 0 AND step < ?"
            old = [row for row in self._db.execute(query, (before_step,)).fetchall() if not needed(row[0])]
            for submission_id, *_ in old:
                self._path(submission_id).unlink(missing_ok=True)
            with self._db:  # all of them or none, as in the counts below
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("UPDATE feed SET file_bytes = 0 WHERE id = ?", [(row[0],) for row in old])
            with self._count_lock:
                for _, author, step, size in old:
                    self._stored.add(bytes(author), step, -size)
        return len(old)

    # Verdicts and the feed.

    def add_verdict(self, verdict: Signed[Verdict], *, known: Callable[[bytes], bool] = lambda subject: False) -> None:
        """Store a verdict; the same one again changes nothing.

        Of those whose submission, or appeal, is neither here nor `known`, only the newest of each validator stay.
        Raises RefusedError `already-judged` if its author has said something else about that submission, or in answer
        to that appeal: an answer is another judgement than the one that may have come too late to count. One that could
        not tell may decide later.
        """
        record, author = verdict.record, verdict.author.public_key
        about = record.appeal or record.submission
        subject = about + (b"?" if record.outcome == "undecided" else b"")
        values = (verdict.id, author, record.contributor, record.step, subject, verdict.data)
        query = (
            "INSERT INTO feed (kind, id, author, about, step, subject, envelope, receipt)"
            " VALUES ('verdict', ?, ?, ?, ?, ?, ?, x'')"
        )
        try:
            with self._lock, self._errors():
                self._note(self._db.execute(query, values).lastrowid, record.contributor)
                with self._count_lock:
                    self._verdicts += 1
        except sqlite3.IntegrityError as error:
            if self._one("SELECT 1 FROM feed WHERE id = ?", verdict.id):
                return
            raise RefusedError(
                f"{verdict.author.short} has already judged this submission, with another verdict",
                code="already-judged",
                hint="nothing to do: a validator's first verdict on a submission is the one that counts",
            ) from error
        if not self.has(about) and not known(about):
            self._forget(
                self._loose.add(author, verdict.id, subject=about, known=lambda one: known(one) or self.has(one))
            )

    def _forget(self, verdicts: list[bytes]) -> None:
        if not verdicts:
            return
        with self._lock, self._errors():
            query = f"DELETE FROM feed WHERE kind = 'verdict' AND id IN ({_marks(verdicts)})"
            gone = self._db.execute(query, verdicts).rowcount
            with self._count_lock:
                self._verdicts -= gone
        log.warning("relay store forgot verdicts=%d about what nobody here knows", gone)

    def has(self, record_id: bytes) -> bool:
        """Whether the feed has a record."""
        return self._one("SELECT 1 FROM feed WHERE id = ?", record_id) is not None

    def add_petition(self, petition: Signed[Admission] | Signed[Appeal], *, subject: bytes) -> None:
        """Store an admission, or an appeal against the verdict `subject`; the same one again changes nothing.

        Raises RefusedError `disk-full`, `appeal-duplicate-appeal`, or `too-many-petitions` of one author.
        """
        kind, author = petition.record.KIND, petition.author.public_key
        query = "SELECT COUNT(*) FROM feed WHERE author = ? AND kind = ? AND kind IN ('admission', 'appeal')"
        (count,) = self._one(query, author, kind) or (0,)
        if int(count) >= MAX_PETITIONS_EACH:
            raise RefusedError(
                f"{petition.author.short} has handed in {MAX_PETITIONS_EACH} records of the kind {kind!r} here",
                code="too-many-petitions",
                hint="hand it in at another relay",
            )
        query = (
            "INSERT INTO feed (kind, id, author, about, step, subject, envelope, receipt)"
            " VALUES (?, ?, ?, ?, 0, ?, ?, x'')"
        )
        self._require_row()
        try:
            with self._lock, self._errors():
                inserted = self._db.execute(query, (kind, petition.id, author, author, subject, petition.data))
                self._note(inserted.lastrowid, author)
                with self._count_lock:
                    self._petitions += 1
        except sqlite3.IntegrityError as error:
            if not self.has(petition.id):
                raise RefusedError(
                    "this verdict was appealed against before",
                    code="appeal-duplicate-appeal",
                    hint="wait for the answer: intellect-node status shows it",
                ) from error

    def _require_row(self) -> None:
        with self._errors():
            free = shutil.disk_usage(self._directory).free - FREE_DISK_BYTES
        with self._count_lock:
            if min(self._quota.total - self._used(), free) - self._reserved.total < ROW_BYTES:
                raise _disk_full("this relay has no room for another record")

    def _used(self) -> int:
        return self._stored.total + (self._submissions + self._verdicts + self._petitions) * ROW_BYTES

    def feed(self, after: int, *, kinds: Sequence[str], about: bytes | None = None, limit: int = 200) -> list[FeedRow]:
        """Items with a sequence above `after`, in order; fewer than `limit` where they are large."""
        query = f"SELECT seq, kind, envelope, receipt FROM feed WHERE seq > ? AND kind IN ({_marks(kinds)})"
        values: list[object] = [after, *kinds]
        if about is not None:
            query += " AND about = ?"
            values.append(about)
        values.append(max(1, min(limit, MAX_FEED_ITEMS)))
        with self._lock, self._errors():
            return _bounded(self._db.execute(query + " ORDER BY seq LIMIT ?", values))

    def newest(self, about: bytes | None = None) -> int:
        """The last sequence in the feed, or of what it has about one contributor; from memory."""
        return self.last_seq if about is None else self._last_about.get(about, 0)

    def stats(self) -> StoreStats:
        with self._count_lock:
            return StoreStats(self._submissions, self._verdicts, self._stored.total)

    def _keep(self, upload: Upload, make_receipt: Callable[[], bytes]) -> bytes:
        """Give a whole file its name, then its row. Concurrent uploads of one submission end with one receipt."""
        submission = upload.submission
        try:
            with self._errors():
                os.replace(upload.path, self._path(submission.id))
                sync_directory(self._files)
            return self._insert(submission, make_receipt)
        except sqlite3.IntegrityError as error:
            self._path(submission.id).unlink(missing_ok=True)
            raise duplicate_index(submission) from error
        except DataDirError:
            self._drop_file(submission.id)
            raise

    def _drop_file(self, submission_id: bytes) -> None:
        """Delete a file whose row the disk did not take: nobody would count it, serve it, or make room by it."""
        with self._lock, self._errors():
            if self._db.execute("SELECT 1 FROM feed WHERE id = ?", (submission_id,)).fetchone() is None:
                self._path(submission_id).unlink(missing_ok=True)

    def _insert(self, submission: Signed[Submission], make_receipt: Callable[[], bytes]) -> bytes:
        record, author = submission.record, submission.author.public_key
        with self._lock, self._errors():
            row = self._db.execute("SELECT receipt FROM feed WHERE id = ?", (submission.id,)).fetchone()
            if row is not None:
                return bytes(row[0])
            if not self._path(submission.id).exists():
                raise _disk_full("this relay's disk did not take the same file, which came twice at once")
            receipt = make_receipt()
            inserted = self._db.execute(
                "INSERT INTO feed (kind, id, author, about, step, idx, subject, file_bytes, envelope, receipt)"
                " VALUES ('submission', ?, ?, ?, ?, ?, x'', ?, ?, ?)",
                (submission.id, author, author, record.step, record.index, record.size, submission.data, receipt),
            )
            self._note(inserted.lastrowid, author)
            with self._count_lock:
                self._submissions += 1
                self._stored.add(author, record.step, record.size)
        return receipt

    def _reserve(self, author: PeerId, step: int, size: int) -> None:
        with self._errors():
            free = shutil.disk_usage(self._directory).free - FREE_DISK_BYTES
        with self._count_lock:
            if size + ROW_BYTES > min(self._quota.total - self._used(), free) - self._reserved.total:
                raise _disk_full(f"this relay has no room for {size} bytes")
            refuse_share(self._quota, author, step, size, self._stored, self._reserved)
            self._reserved.add(author.public_key, step, size)

    def _path(self, submission_id: bytes) -> Path:
        return self._files / submission_id.hex()

    def _sweep(self) -> None:
        """Remove what a crash left: unfinished uploads, files without a row, rows' claims to files that are gone."""
        for leftover in self._incoming.iterdir():
            leftover.unlink()
        known = {bytes(row[0]).hex() for row in self._db.execute("SELECT id FROM feed WHERE file_bytes > 0")}
        present = {path.name for path in self._files.iterdir()}
        for orphan in present - known:
            (self._files / orphan).unlink()
        for lost in known - present:
            log.warning("relay store file=%s lost: its record stays", lost[:12])
            self._db.execute("UPDATE feed SET file_bytes = 0 WHERE id = ?", (bytes.fromhex(lost),))

    def _note(self, seq: int | None, about: bytes) -> None:
        """A row is in: who waits for such a one need not look at the disk to know."""
        if seq:
            self.last_seq = self._last_about[bytes(about)] = seq

    def _newest_by_subject(self) -> dict[bytes, int]:
        """As many as the feed has contributors, whose rows are on the disk many times over."""
        return {bytes(about): seq for about, seq in self._db.execute("SELECT about, MAX(seq) FROM feed GROUP BY about")}

    def _count(self) -> tuple[int, int, int, int]:
        """Submissions, verdicts, petitions and the last sequence; takes the files' sizes in."""
        query = "SELECT author, step, SUM(file_bytes) FROM feed WHERE file_bytes > 0 GROUP BY author, step"
        for author, step, size in self._db.execute(query):
            self._stored.add(bytes(author), step, size)
        query = "SELECT SUM(kind = 'submission'), SUM(kind = 'verdict'), COUNT(*), MAX(seq) FROM feed"
        submissions, verdicts, rows, last_seq = self._db.execute(query).fetchone()
        submissions, verdicts = submissions or 0, verdicts or 0
        return submissions, verdicts, rows - submissions - verdicts, last_seq or 0

    def _one(self, query: str, *values: object) -> tuple[bytes, ...] | None:
        with self._lock, self._errors():
            row: tuple[bytes, ...] | None = self._db.execute(query, values).fetchone()
        return row

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise  # a rule of the schema: the caller knows its meaning
        except (sqlite3.Error, OSError) as error:
            raise DataDirError(
                f"cannot use the relay's store {self._directory}: {error}",
                hint="check free space and permissions (`df -h`, `ls -l`), then start the relay again",
            ) from error


class Upload:
    """A file on its way in: hashed as it comes, invisible until it is kept."""

    def __init__(
        self, submission: Signed[Submission], directory: Path, keep: Callable[[Upload, Callable[[], bytes]], bytes]
    ) -> None:
        self.submission = submission
        self._keep = keep
        self._hash = hashlib.sha256()
        self._received = 0
        with _full_disk():
            descriptor, self.path = _temporary(directory, submission.id.hex()[:16])
        self._file = os.fdopen(descriptor, "wb")

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        with suppress(
            OSError
        ):  # what is still buffered belongs to a file that has just been deleted, or kept and synced
            self._file.close()

    def write(self, chunk: bytes) -> None:
        """Take the next bytes. Raises RefusedError `too-large` beyond the size that was signed."""
        self._received += len(chunk)
        if self._received > self.submission.record.size:
            raise RefusedError(
                f"the body is longer than the {self.submission.record.size} bytes that its record names",
                code="too-large",
                hint="hand in the very file that the record was signed for",
            )
        self._hash.update(chunk)
        with _full_disk():
            self._file.write(chunk)

    def keep(self, make_receipt: Callable[[], bytes]) -> bytes:
        """Check the file against its record, make it durable, and return the receipt; blocks on the disk.

        Raises ChecksumError if these are not the bytes that were signed, RefusedError `duplicate-index` if another
        submission took the index meanwhile.
        """
        record = self.submission.record
        if self._received != record.size or self._hash.digest() != record.sha256:
            raise ChecksumError(f"the {self._received} bytes that came are not the file that the record names")
        with _full_disk():
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._keep(self, make_receipt)


def duplicate_index(submission: Signed[Submission]) -> RefusedError:
    """The refusal of a second submission with the same index."""
    record = submission.record
    return RefusedError(
        f"{submission.author.short} has already handed in another submission {record.index} for step {record.step}",
        code="duplicate-index",
        hint="each index counts once; is the same identity running on two computers? Give each its own --data-dir",
    )


def _disk_full(message: str) -> RefusedError:
    hint = "hand the submission in at another relay; this one's owner can free space or raise its quota"
    return RefusedError(message, code="disk-full", hint=hint)


@contextmanager
def _full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _disk_full(f"this relay could not write the file: {error.strerror}") from error


def _temporary(directory: Path, stem: str) -> tuple[int, Path]:
    for attempt in range(1 << 16):
        path = directory / f"{stem}.{attempt}"
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), path
        except FileExistsError:
            continue
    raise DataDirError(f"{directory} is full of unfinished uploads", hint="restart the relay: it sweeps them away")


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _bounded(rows: Iterable[tuple[int, str, bytes, bytes]]) -> list[FeedRow]:
    taken: list[FeedRow] = []
    total = 0
    for row in rows:
        total += len(row[2]) + len(row[3])
        if taken and total > MAX_FEED_BYTES:
            break
        taken.append(FeedRow(*row))
    return taken

"""Collections that lie on a disk but for their newest part, so that a replay of any length needs little memory.

One SQLite file in a directory that its owner deletes afterwards; nothing in it outlives the process, so nothing is
synced. Objects may be changed while they are among the newest: they are written when they leave.
"""

from __future__ import annotations

import os
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, MutableMapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.ledger_memory import TIP_BYTES, LedgerMemory, LedgerSubmission, SubmissionState
from protocol.records import Batch, Submission, Trained, Verdict

HOT: Final = 2048
"""Objects in memory; more than one entry of the ledger ever changes after it looked at them."""
COLD_AT_ONCE: Final = 512
HOT_STEPS: Final = 64
"""The same for batches, each of which names many submissions, and for trained steps."""
TIPS_AT_ONCE: Final = 2048
CACHE_KIB: Final = 4 << 10

K = TypeVar("K")
V = TypeVar("V")


class Scratch:
    """The file. Close it before its directory goes."""

    def __init__(self, directory: Path) -> None:
        self.db = sqlite3.connect(directory / "scratch.sqlite", isolation_level=None)
        self.db.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA locking_mode=EXCLUSIVE;"
            f"PRAGMA cache_size=-{CACHE_KIB};"
        )
        self._tips = ScratchTips(directory / "tips")

    def close(self) -> None:
        self._tips.close()
        self.db.close()

    def ledger_memory(self) -> LedgerMemory:
        """For a LedgerState of any length. Verdicts come back without checks and evidence, which no rule needs."""
        encode = msgspec.msgpack.encode
        return LedgerMemory(
            submissions=ScratchMap[bytes, LedgerSubmission](
                self, "submissions", partial(encode_submission, slim=True), decode_submission
            ),
            files=ScratchSet(self, "files"),
            committed=ScratchMap[int, Batch](
                self, "batches", encode, msgspec.msgpack.Decoder(Batch).decode, hot=HOT_STEPS
            ),
            trained=ScratchMap[int, Trained](
                self, "trained", encode, msgspec.msgpack.Decoder(Trained).decode, hot=HOT_STEPS
            ),
            tips=self._tips,
        )


class ScratchMap(MutableMapping[K, V], Generic[K, V]):
    """A dict of which only the last objects that were looked at are in memory."""

    def __init__(
        self,
        scratch: Scratch,
        name: str,
        encode: Callable[[V], bytes],
        decode: Callable[[bytes], V],
        *,
        hot: int | None = None,
    ) -> None:
        """At most `hot` objects stay in memory, HOT unless given."""
        self._db = scratch.db
        self._most = HOT if hot is None else hot
        self._name = name
        self._encode = encode
        self._decode = decode
        self._hot: OrderedDict[K, V] = OrderedDict()
        self._new: dict[K, int] = {}
        """Those that the file does not have, and their places in the order of coming."""
        self._next = 0
        self._count = 0
        self._db.execute(f"CREATE TABLE {name} (place INTEGER PRIMARY KEY, key UNIQUE, value BLOB)")

    def __getitem__(self, key: K) -> V:
        if key in self._hot:
            self._hot.move_to_end(key)
            return self._hot[key]
        row = self._db.execute(f"SELECT value FROM {self._name} WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise KeyError(key)
        self._heat(key, self._decode(row[0]))
        return self._hot[key]

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            self._new[key] = self._next
            self._next += 1
            self._count += 1
        self._heat(key, value)

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self._hot.pop(key, None)
        self._new.pop(key, None)
        self._db.execute(f"DELETE FROM {self._name} WHERE key = ?", (key,))
        self._count -= 1

    def __contains__(self, key: object) -> bool:
        if key in self._hot:
            return True
        return self._db.execute(f"SELECT 1 FROM {self._name} WHERE key = ?", (key,)).fetchone() is not None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        """In the order in which they came."""
        self._cool(len(self._hot))
        for (key,) in self._db.execute(f"SELECT key FROM {self._name} ORDER BY place"):
            yield key

    def items(self) -> ItemsView[K, V]:
        """One after the other; what is changed of them is lost."""
        return _Items(self, self._rows)

    def _rows(self) -> Iterator[tuple[K, V]]:
        self._cool(len(self._hot))
        for key, value in self._db.execute(f"SELECT key, value FROM {self._name} ORDER BY place"):
            yield key, self._decode(value)

    def _heat(self, key: K, value: V) -> None:
        self._hot[key] = value
        self._hot.move_to_end(key)
        if len(self._hot) > self._most:
            self._cool(min(COLD_AT_ONCE, self._most))

    def _cool(self, count: int) -> None:
        cold = list(islice(self._hot, count))
        encoded = [(self._encode(self._hot[key]), key) for key in cold]
        self._db.execute("BEGIN")
        self._db.executemany(
            f"INSERT INTO {self._name} (value, key, place) VALUES (?, ?, ?)",
            [(value, key, self._new[key]) for value, key in encoded if key in self._new],
        )
        self._db.executemany(
            f"UPDATE {self._name} SET value = ? WHERE key = ?", [row for row in encoded if row[1] not in self._new]
        )
        self._db.execute("COMMIT")
        for key in cold:
            del self._hot[key]
            self._new.pop(key, None)


class _Items(ItemsView[K, V]):
    """Without a look at each object by its key."""

    def __init__(self, mapping: MutableMapping[K, V], rows: Callable[[], Iterator[tuple[K, V]]]) -> None:
        super().__init__(mapping)
        self._walk = rows

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._walk()


class ScratchSet:
    """Hashes that were seen."""

    def __init__(self, scratch: Scratch, name: str) -> None:
        self._db = scratch.db
        self._name = name
        self._hot: set[bytes] = set()
        self._db.execute(f"CREATE TABLE {name} (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def __contains__(self, digest: object, /) -> bool:
        if digest in self._hot:
            return True
        return self._db.execute(f"SELECT 1 FROM {self._name} WHERE digest = ?", (digest,)).fetchone() is not None

    def add(self, digest: bytes, /) -> None:
        self._hot.add(digest)
        if len(self._hot) >= HOT:
            self._db.execute("BEGIN")
            self._db.executemany(
                f"INSERT OR IGNORE INTO {self._name} VALUES (?)", [(one,) for one in sorted(self._hot)]
            )
            self._db.execute("COMMIT")
            self._hot.clear()


class ScratchTips:
    """The chain's tips, one after the other in a file of their own."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("x+b", buffering=0)
        self._written = 0
        self._new = bytearray()

    def close(self) -> None:
        self._file.close()

    def add(self, tip: bytes, /) -> None:
        self._new += tip
        if len(self._new) >= TIPS_AT_ONCE * TIP_BYTES:
            self._file.write(self._new)
            self._written += len(self._new)
            self._new.clear()

    def __getitem__(self, length: int, /) -> bytes:
        start = length * TIP_BYTES
        if start >= self._written:
            start -= self._written
            return bytes(self._new[start : start + TIP_BYTES])
        return os.pread(self._file.fileno(), TIP_BYTES, start)


class _Kept(msgspec.Struct, array_like=True):
    record: Submission
    author: bytes
    place: int
    state: SubmissionState
    verdicts: list[tuple[bytes, bytes, Verdict]]
    used_in: int | None
    settled_at: int | None
    settled_step: int | None
    appeal: bytes


_kept = msgspec.msgpack.Decoder(_Kept)


def encode_submission(one: LedgerSubmission, *, slim: bool = False) -> bytes:
    """All of it but signatures; if `slim` without checks and evidence."""
    verdicts = [
        (peer.public_key, signed.id, _slim(signed.record) if slim else signed.record)
        for peer, signed in one.verdicts.items()
    ]
    rest = (one.used_in, one.settled_at, one.settled_step, one.appeal)
    return msgspec.msgpack.encode(_Kept(one.record, one.author.public_key, one.place, one.state, verdicts, *rest))


def decode_submission(data: bytes) -> LedgerSubmission:
    """What `encode_submission` made bytes of."""
    kept = _kept.decode(data)
    verdicts: dict[PeerId, Any] = {
        PeerId(key): Signed(record, PeerId(key), verdict_id, b"") for key, verdict_id, record in kept.verdicts
    }
    rest = (kept.used_in, kept.settled_at, kept.settled_step, kept.appeal)
    return LedgerSubmission(kept.record, PeerId(kept.author), kept.place, kept.state, verdicts, *rest)


def _slim(verdict: Verdict) -> Verdict:
    if not (verdict.checks or verdict.draw.beacon or verdict.draw.receipt):
        return verdict
    draw = msgspec.structs.replace(verdict.draw, beacon=b"", receipt=b"")
    return msgspec.structs.replace(verdict, checks=(), draw=draw)

"""Collections that lie on a disk but for their newest part, so that a replay of any length needs little memory.

A SQLite file, made anew at each opening: nothing in it outlives the process, so nothing is synced. It has a write-ahead
log, as what a full disk does not take of that is dropped without a write, and all that was there can still be read. One
thread changes the collections, any may read them. An object may be changed while it is among the newest; it is written
by `settle`, which the replay calls between two entries. What a full disk does not take stays in memory until it does.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, MutableMapping, Sequence, ValuesView
from contextlib import contextmanager, suppress
from heapq import merge
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from protocol.errors import DataDirError
from protocol.ledger_memory import TIP_BYTES

log = logging.getLogger(__name__)

NAME: Final = "scratch.sqlite"
DIGESTS_FACTOR: Final = 4
"""So many times as many hashes are written at once as objects are."""
TIPS_AT_ONCE: Final = 2048
ROWS_AT_ONCE: Final = 256
"""Of a walk; between two reads the others get their turn."""
CACHE_KIB: Final = 4 << 10
PATIENCE: Final = 64
"""So many more writes must be due before the next try on a disk that took none."""

K = TypeVar("K")
V = TypeVar("V")


class Scratch:
    """The file. Close it before its directory goes."""

    def __init__(self, directory: Path, *, at_once: int) -> None:
        """`at_once` objects are written together: few where others wait for the one thread, many in audits.

        Raises DataDirError.
        """
        self.at_once = at_once
        self.lock = threading.RLock()
        self._maps: list[ScratchMap[Any, Any]] = []
        try:
            for suffix in ("", "-wal", "-shm", "-journal"):
                (directory / (NAME + suffix)).unlink(missing_ok=True)
            self.db = sqlite3.connect(directory / NAME, isolation_level=None, check_same_thread=False)
            self.db.executescript(
                "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;"
                f"PRAGMA temp_store=MEMORY; PRAGMA cache_size=-{CACHE_KIB};"
            )
        except (OSError, sqlite3.Error) as error:
            raise DataDirError(f"cannot open {directory / NAME}: {error}", hint="df -h; ls -l") from error

    def close(self) -> None:
        with self.lock:
            self.db.close()

    def make(self, statement: str) -> None:
        """Create a table. Raises DataDirError."""
        try:
            self.db.execute(statement)
        except sqlite3.Error as error:
            raise DataDirError(f"cannot write the replay's memory: {error}", hint="df -h") from error

    def read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of one short query. Raises DataDirError."""
        try:
            with self.lock:
                return self.db.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise _unreadable(error) from error

    def keep(self, one: ScratchMap[Any, Any]) -> None:
        """Let a map's oldest objects be written whenever things are settled."""
        self._maps.append(one)

    def settle(self) -> None:
        """Nobody is changing an object: write those that were not looked at for long."""
        for one in self._maps:
            one.settle()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction. Raises sqlite3.OperationalError, as where the disk is full, and then nothing was written;
        DataDirError where the file is no database any more."""
        with self.lock:
            try:
                self._end_transaction()
                self.db.execute("BEGIN")
                yield
                self.db.execute("COMMIT")
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                raise _unreadable(error) from error
            finally:
                with suppress(sqlite3.OperationalError):  # the next one tries again
                    self._end_transaction()

    def _end_transaction(self) -> None:
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")


def _unreadable(error: sqlite3.Error) -> DataDirError:
    return DataDirError(
        f"cannot read what the replay of the ledger remembers: {error}",
        hint="look at the disk (df -h; dmesg), then start again: it is made anew from the ledger",
    )


class ScratchMap(MutableMapping[K, V], Generic[K, V]):
    """A dict, in the order of coming, of which only the last objects that were looked up are in memory.

    What is looked up is an object until `hot` others were, and a change of it stays. What `look`, or a walk over
    `items()` or `values()`, gives is to be read only and leaves no object behind: for threads that do not write.
    """

    def __init__(
        self,
        scratch: Scratch,
        name: str,
        encode: Callable[[V], bytes],
        decode: Callable[[bytes], V],
        *,
        hot: int,
    ) -> None:
        """About `hot` objects stay in memory. Raises DataDirError."""
        self._scratch = scratch
        self._db, self._lock = scratch.db, scratch.lock
        self._name = name
        self._encode = encode
        self._decode = decode
        self._hot: OrderedDict[K, V] = OrderedDict()
        self._most = hot + scratch.at_once
        self._limit = self._most
        self._new: dict[K, int] = {}
        """Those that the file does not have, and their places in the order of coming."""
        self._next = 0
        self._count = 0
        scratch.make(f"CREATE TABLE {name} (place INTEGER PRIMARY KEY, key UNIQUE, value BLOB)")
        scratch.keep(self)

    def __getitem__(self, key: K) -> V:
        with self._lock:
            value = self._hot[key] if key in self._hot else self._read(key)
            self._heat(key, value)
            return value

    def look(self, key: K) -> V:
        """One to read, which does not become an object for long. Raises KeyError."""
        with self._lock:
            return self._hot[key] if key in self._hot else self._read(key)

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            if key not in self:
                self._new[key] = self._next
                self._next += 1
                self._count += 1
            self._heat(key, value)

    def __delitem__(self, key: K) -> None:
        with self._lock:
            if key not in self:
                raise KeyError(key)
            if key not in self._new:
                self._db.execute(f"DELETE FROM {self._name} WHERE key = ?", (key,))
            self._new.pop(key, None)
            self._hot.pop(key, None)
            self._count -= 1

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._hot or bool(self._scratch.read(f"SELECT 1 FROM {self._name} WHERE key = ?", key))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        """Those that are there now."""
        return (key for _, key, _ in self._walk())

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def newest(self, count: int) -> list[K]:
        """The last `count` keys that came, the newest at the end."""
        query = f"SELECT place, key FROM {self._name} ORDER BY place DESC LIMIT ?"
        with self._lock:
            found = [*self._scratch.read(query, count), *((place, key) for key, place in self._new.items())]
        return [key for _, key in sorted(found, key=itemgetter(0))[-count:]]

    def pairs(self) -> Iterator[tuple[K, V]]:
        """All, one after the other, to read."""
        for _, key, value in self._walk():
            yield key, self._decode(value) if isinstance(value, bytes) else value

    def settle(self) -> None:
        """Write objects that were not looked up for long, if there are enough of them."""
        if len(self._hot) < self._limit:
            return
        try:
            self._cool(list(islice(self._hot, self._scratch.at_once)))
            self._limit = self._most
        except sqlite3.OperationalError as error:
            if self._limit == self._most:
                log.warning("%s stay in memory, as the disk takes no more: %s", self._name, error)
            self._limit = len(self._hot) + PATIENCE * self._scratch.at_once

    def _read(self, key: K) -> V:
        found = self._scratch.read(f"SELECT value FROM {self._name} WHERE key = ?", key)
        if not found:
            raise KeyError(key)
        return self._decode(found[0][0])

    def _heat(self, key: K, value: V) -> None:
        self._hot[key] = value
        self._hot.move_to_end(key)

    def _cool(self, cold: Sequence[K]) -> None:
        with self._lock:
            encoded = [(self._encode(self._hot[key]), key) for key in cold]
            with self._scratch.writing():
                self._db.executemany(
                    f"INSERT INTO {self._name} (value, key, place) VALUES (?, ?, ?)",
                    [(value, key, self._new[key]) for value, key in encoded if key in self._new],
                )
                self._db.executemany(
                    f"UPDATE {self._name} SET value = ? WHERE key = ?",
                    [row for row in encoded if row[1] not in self._new],
                )
            for key in cold:
                del self._hot[key]
                self._new.pop(key, None)

    def _walk(self) -> Iterator[tuple[int, K, V | bytes]]:
        """Places, keys, and objects or their bytes, in the order of coming."""
        with self._lock:
            fresh = [(place, key, self._hot[key]) for key, place in self._new.items()]
        places = {place for place, _, _ in fresh}
        written = (row for row in self._written() if row[0] not in places)
        return merge(fresh, written, key=itemgetter(0))

    def _written(self) -> Iterator[tuple[int, K, V | bytes]]:
        query = f"SELECT place, key, value FROM {self._name} WHERE place > ? ORDER BY place LIMIT {ROWS_AT_ONCE}"
        place = -1
        while True:
            with self._lock:
                found = self._scratch.read(query, place)
                rows = [(at, key, self._hot.get(key, value)) for at, key, value in found]
            if not rows:
                return
            yield from rows
            place = rows[-1][0]


class _Items(ItemsView[K, V]):
    """Without a look at each object by its key."""

    def __init__(self, mapping: ScratchMap[K, V]) -> None:
        super().__init__(mapping)
        self._pairs = mapping.pairs

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._pairs()


class _Values(ValuesView[V]):
    def __init__(self, mapping: ScratchMap[Any, V]) -> None:
        super().__init__(mapping)
        self._pairs = mapping.pairs

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._pairs())


class ScratchSet:
    """Hashes that were seen."""

    def __init__(self, scratch: Scratch, name: str) -> None:
        self._scratch = scratch
        self._db = scratch.db
        self._name = name
        self._hot: set[bytes] = set()
        self._most = DIGESTS_FACTOR * scratch.at_once
        self._limit = self._most
        scratch.make(f"CREATE TABLE {name} (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def __contains__(self, digest: object, /) -> bool:
        return digest in self._hot or bool(self._scratch.read(f"SELECT 1 FROM {self._name} WHERE digest = ?", digest))

    def add(self, digest: bytes, /) -> None:
        self._hot.add(digest)
        if len(self._hot) < self._limit:
            return
        try:
            with self._scratch.writing():
                rows = [(one,) for one in sorted(self._hot)]
                self._db.executemany(f"INSERT OR IGNORE INTO {self._name} VALUES (?)", rows)
        except (sqlite3.OperationalError, DataDirError):  # an entry is being applied; who reads says what is wrong
            self._limit = len(self._hot) + self._most
            return
        self._limit = self._most
        self._hot.clear()


class ScratchTips:
    """The chain's tips, in rows of TIPS_AT_ONCE."""

    def __init__(self, scratch: Scratch, name: str) -> None:
        self._scratch = scratch
        self._db = scratch.db
        self._name = name
        self._each = TIPS_AT_ONCE * TIP_BYTES
        self._rows = 0
        self._new = bytearray()
        scratch.make(f"CREATE TABLE {name} (row INTEGER PRIMARY KEY, tips BLOB)")

    def add(self, tip: bytes, /) -> None:
        with self._scratch.lock:
            self._new += tip
            if len(self._new) % self._each == 0:
                with suppress(sqlite3.OperationalError, DataDirError):  # the next time; who reads says what is wrong
                    self._write()

    def _write(self) -> None:
        count = len(self._new) // self._each
        rows = [(self._rows + at, bytes(self._new[at * self._each : (at + 1) * self._each])) for at in range(count)]
        with self._scratch.writing():
            self._db.executemany(f"INSERT INTO {self._name} VALUES (?, ?)", rows)
        self._rows += count
        self._new.clear()

    def __getitem__(self, length: int, /) -> bytes:
        row, start = divmod(length * TIP_BYTES, self._each)
        with self._scratch.lock:
            if row >= self._rows:
                start += (row - self._rows) * self._each
                return bytes(self._new[start : start + TIP_BYTES])
            query = f"SELECT substr(tips, ?, {TIP_BYTES}) FROM {self._name} WHERE row = ?"
            return bytes(self._scratch.read(query, start + 1, row)[0][0])

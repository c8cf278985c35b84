"""Submissions of a node that lives: all but the newest are kept as bytes, a sixth of what objects take.

Threads of a node (dashboard, relay) read what its event loop writes. So an object is only put away when a new
submission comes, which the loop alone adds.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from threading import Lock
from typing import Final

from node.ledger.scratch import decode_submission, encode_submission
from protocol.envelope import Signed
from protocol.ledger import LedgerMemory, LedgerState, LedgerSubmission
from protocol.records import Manifest

HOT: Final = 512
"""Objects in memory at least. Entries come about the newest submissions, and so do questions."""
AT_ONCE: Final = 8
"""Most objects that one new submission puts away, so that none holds up readers for long."""
FASTEST: Final = 1
"""Level of compression: the names of checks are in each verdict."""


def live_state(manifest: Signed[Manifest]) -> LedgerState:
    """A node's ledger before its first entry: a long run's submissions must not fill its memory."""
    memory = LedgerMemory(submissions=CompactSubmissions())
    return LedgerState(manifest.id, manifest.record, operator=manifest.author, memory=memory)


def looked_at(submissions: Mapping[bytes, LedgerSubmission], key: bytes) -> LedgerSubmission | None:
    """One to read, if it is there: for whoever answers others' questions, which may be about every old submission."""
    try:
        return submissions.look(key) if isinstance(submissions, CompactSubmissions) else submissions[key]
    except KeyError:
        return None


def rollouts_of(submissions: Mapping[bytes, LedgerSubmission], keys: Iterable[bytes]) -> int:
    """All rollouts of these submissions together."""
    found = (looked_at(submissions, key) for key in keys)
    return sum(one.record.rollouts for one in found if one is not None)


class CompactSubmissions(MutableMapping[bytes, LedgerSubmission]):
    """A dict of submissions by id, in the order in which they came.

    What is looked up is an object until `hot` others were looked up after it, and a change of it stays: nothing is put
    away before the next new submission, and then AT_ONCE of them. What `look`, or a walk over `items()` or `values()`,
    gives is to be read only, and leaves no object behind.
    """

    def __init__(self, hot: int = HOT) -> None:
        self._most = hot
        self._kept: dict[bytes, LedgerSubmission | bytes] = {}
        self._hot: OrderedDict[bytes, None] = OrderedDict()
        """Keys of the objects, those looked up last at the end."""
        self._lock = Lock()

    def __getitem__(self, key: bytes) -> LedgerSubmission:
        with self._lock:
            one = self._kept[key]
            if isinstance(one, bytes):
                one = self._kept[key] = _opened(one)
            self._hot[key] = None
            self._hot.move_to_end(key)
            return one

    def __setitem__(self, key: bytes, value: LedgerSubmission) -> None:
        with self._lock:
            self._kept[key] = value
            self._hot[key] = None
            self._hot.move_to_end(key)
            for _ in range(min(AT_ONCE, len(self._hot) - self._most)):
                self._put_away(self._hot.popitem(last=False)[0])

    def __delitem__(self, key: bytes) -> None:
        with self._lock:
            del self._kept[key]
            self._hot.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[bytes]:
        """Those that are there now."""
        with self._lock:
            return iter(list(self._kept))

    def items(self) -> ItemsView[bytes, LedgerSubmission]:
        return _Items(self)

    def values(self) -> ValuesView[LedgerSubmission]:
        return _Values(self)

    def look(self, key: bytes) -> LedgerSubmission:
        """One to read, which is not made an object for long."""
        one = self._kept[key]
        return _opened(one) if isinstance(one, bytes) else one

    def _put_away(self, key: bytes) -> None:
        one = self._kept[key]
        if isinstance(one, LedgerSubmission):
            self._kept[key] = zlib.compress(encode_submission(one), FASTEST)


def _opened(packed: bytes) -> LedgerSubmission:
    return decode_submission(zlib.decompress(packed))


class _Items(ItemsView[bytes, LedgerSubmission]):
    def __init__(self, submissions: CompactSubmissions) -> None:
        super().__init__(submissions)
        self._submissions = submissions

    def __iter__(self) -> Iterator[tuple[bytes, LedgerSubmission]]:
        return ((key, self._submissions.look(key)) for key in self._submissions)


class _Values(ValuesView[LedgerSubmission]):
    def __init__(self, submissions: CompactSubmissions) -> None:
        super().__init__(submissions)
        self._submissions = submissions

    def __iter__(self) -> Iterator[LedgerSubmission]:
        return (self._submissions.look(key) for key in self._submissions)

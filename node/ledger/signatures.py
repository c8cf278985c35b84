"""Checking signatures and proofs of work of many entries, in processes of their own where there are cores for it.

One entry has up to three signatures: its own, and in a verdict's draw those of the relay's receipt and of the head that
drew, or an invite's in an admission. Heads are shared by many verdicts, so the last ones are remembered.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, Final, Literal

from node.ledger.segments import Segment
from protocol.envelope import Signed, open_envelope
from protocol.errors import AuditError, LedgerError, ProtocolError
from protocol.ledger import open_entry
from protocol.records import Admission, Head, Invite, Receipt, Verdict
from protocol.work import work_holds

CHUNK_ENTRIES: Final = 256
CHUNKS_AHEAD: Final = 4
"""For each process: waiting or done, and not taken yet."""
HEADS_REMEMBERED: Final = 256
SELDOM: Final = (20_000, 20, 100)
"""The garbage collector's thresholds while entries are opened: almost nothing of them hangs together in cycles."""

Where = Literal["entry", "evidence"]


@dataclass(frozen=True)
class Fault:
    """What is wrong with an entry's bytes, or with the evidence that it carries."""

    where: Where
    kind: str
    what: str

    @property
    def hides_entry(self) -> bool:
        """Whether what the entry says is not known to be its author's word."""
        return self.where == "entry" and self.kind != "work"


@dataclass(frozen=True)
class Checked:
    """An entry whose signatures and proof of work were looked at; `fault` is None if they all hold.

    `entry` is it opened, None if it cannot be.
    """

    number: int
    data: bytes
    entry: Signed[Any] | None
    fault: Fault | None


@dataclass(frozen=True)
class WorkAsked:
    """The proof of work that a run asks of admissions."""

    run_id: bytes
    bits: int


def fault_kind(error: ProtocolError) -> str:
    """A short name for people and programs: a ledger rule's, or the error's own."""
    if isinstance(error, LedgerError):
        return error.rule
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("-")


def examine(data: bytes, asked: WorkAsked) -> tuple[Signed[Any] | None, Fault | None]:
    """An entry opened, as far as it can be, and what is wrong with its signatures and its proof of work."""
    try:
        entry: Signed[Any] = open_entry(data)
    except ProtocolError as error:
        return _opened(data), Fault("entry", fault_kind(error), error.message)
    if isinstance(entry.record, Verdict):
        try:
            _check_evidence(entry.record)
        except ProtocolError as error:
            return entry, Fault("evidence", fault_kind(error), f"in the draw of a verdict: {error.message}")
    if isinstance(entry.record, Admission):
        return entry, _fault_of(entry, asked)
    return entry, None


def _fault_of(entry: Signed[Admission], asked: WorkAsked) -> Fault | None:
    try:
        if entry.record.invite:
            open_envelope(entry.record.invite, Invite)
    except ProtocolError as error:
        return Fault("evidence", fault_kind(error), f"in the invite of an admission: {error.message}")
    if not work_holds(entry.author, asked.run_id, entry.record.nonce, bits=asked.bits):
        return Fault("entry", "work", f"an admission without the {asked.bits} bits of work that the run asks for")
    return None


def _opened(data: bytes) -> Signed[Any] | None:
    try:
        return open_entry(data, signature_checked=True)
    except ProtocolError:
        return None


def _check_evidence(verdict: Verdict) -> None:
    if verdict.draw.receipt:
        open_envelope(verdict.draw.receipt, Receipt)
    if verdict.draw.beacon:
        _check_head(verdict.draw.beacon)


@lru_cache(maxsize=HEADS_REMEMBERED)
def _check_head(data: bytes) -> None:
    open_envelope(data, Head)


def _check_chunk(entries: Sequence[bytes], asked: WorkAsked) -> list[tuple[int, Fault]]:
    """Those of a chunk that have a fault, by their place."""
    return [(place, fault) for place, data in enumerate(entries) if (fault := examine(data, asked)[1]) is not None]


Chunk = tuple[int, Sequence[bytes]]
"""Number of the first entry, and the entries."""


def checked_entries(segments: Iterable[Segment], *, asked: WorkAsked, processes: int) -> Iterator[Checked]:
    """All entries in order. Without `processes` they are checked here. Raises AuditError when one dies."""
    chunks = (chunk for segment in segments for chunk in _chunks(segment))
    if processes:
        with _pool(processes) as pool:
            yield from _in_order(
                chunks, lambda entries: pool.submit(_check_chunk, entries, asked), ahead=CHUNKS_AHEAD * processes
            )
        return
    for first, entries in chunks:
        for place, data in enumerate(entries):
            yield Checked(first + place, data, *examine(data, asked))


def _chunks(segment: Segment) -> Iterator[Chunk]:
    for start in range(0, len(segment.entries), CHUNK_ENTRIES):
        yield segment.first + start, segment.entries[start : start + CHUNK_ENTRIES]


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    context = get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=gc.set_threshold, initargs=SELDOM)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


Check = Callable[[Sequence[bytes]], "Future[list[tuple[int, Fault]]]"]


def _in_order(chunks: Iterator[Chunk], check: Check, *, ahead: int) -> Iterator[Checked]:
    waiting: deque[tuple[Chunk, Future[list[tuple[int, Fault]]]]] = deque()
    for chunk in chunks:
        waiting.append((chunk, check(chunk[1])))
        if len(waiting) > ahead:
            yield from _of_chunk(*waiting.popleft())
    while waiting:
        yield from _of_chunk(*waiting.popleft())


def _of_chunk(chunk: Chunk, found: Future[list[tuple[int, Fault]]]) -> Iterator[Checked]:
    try:
        faults = dict(found.result())
    except BrokenProcessPool as error:
        raise AuditError(
            f"a process that checks signatures died: {error}", hint="it may lack memory; try again with --processes 0"
        ) from error
    first, entries = chunk
    for place, data in enumerate(entries):
        yield Checked(first + place, data, _opened(data), faults.get(place))

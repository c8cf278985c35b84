"""Replaying a directory's ledger from beginning to end: for `audit`, and for `ledger show`, `mine` and `export`."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from node.ledger.audit import Audit, Report
from node.ledger.material import Material
from node.ledger.memory import audit_memory
from node.ledger.recheck import recheck
from node.ledger.segments import DamagedSegment, read_segments
from node.ledger.signatures import SELDOM, WorkAsked, checked_entries
from protocol.errors import MalformedError

SMALL_BYTES: Final = 8 << 20
"""A shorter ledger is checked before processes have started."""
SHOW_EVERY: Final = 50_000

Say = Callable[[str], None]


def default_processes(ledger: Path) -> int:
    """Processes for signatures: one for each core, since the replay waits for them; none for a short ledger."""
    size = ledger.stat().st_size if ledger.is_file() else sum(path.stat().st_size for path in ledger.glob("segment-*"))
    cores = len(os.sched_getaffinity(0))
    return cores if size >= SMALL_BYTES and cores > 1 else 0


@contextmanager
def replayed(material: Material, *, say: Say, processes: int | None = None) -> Iterator[tuple[Audit, list[str]]]:
    """An audit that has taken in every entry, and notes on what could not be read. Valid within the block."""
    with tempfile.TemporaryDirectory(prefix="intellect-audit-") as directory, collecting_seldom():
        scratch, memory = audit_memory(Path(directory))
        try:
            audit = Audit(material.manifest, memory)
            yield audit, _replay(audit, material, processes, say)
        finally:
            scratch.close()


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """A replay makes many objects and no cycles to speak of: looking for some takes a fifth of its time otherwise."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _replay(audit: Audit, material: Material, processes: int | None, say: Say) -> list[str]:
    processes = default_processes(material.ledger) if processes is None else processes
    asked = WorkAsked(material.manifest.id, material.manifest.record.admission.work_bits)
    notes: list[str] = []
    number = 0
    try:
        for checked in checked_entries(read_segments(material.ledger), asked=asked, processes=processes):
            number = checked.number
            audit.take(checked)
            if (number + 1) % SHOW_EVERY == 0:
                say(f"{number + 1} entries, {sum(audit.breaches.counts.values())} breaches")
    except DamagedSegment as damaged:
        audit.breaches.add("truncated", None, damaged.message, entry=max(0, damaged.entry))
        notes.append(f"the ledger cannot be read from entry {damaged.entry} on")
    except MalformedError as error:
        audit.breaches.add("chain", None, f"no entry, so that the chain ends here: {error.message}", entry=number)
        notes.append(f"the chain cannot be followed from entry {number} on")
    return notes


def audit_material(material: Material, *, say: Say, processes: int | None = None, samples: int = 0) -> Report:
    """Check everything that can be; of the files at hand, judge `samples` again."""
    began = time.monotonic()
    with replayed(material, say=say, processes=processes) as (audit, notes):
        for path, fork in material.forks():
            what = f"it has signed two ledgers; the proof: intellect-node audit --fork {path}"
            audit.breaches.add("fork", fork.trainer, what)
        audit.finish(heads=material.heads, checkpoints=material.checkpoints())
        again, more = recheck(audit, material, count=samples)
        report = audit.report([*notes, *_missing(material), *_unconfirmed(audit), *more])
        return msgspec.structs.replace(report, rechecked=again, seconds=time.monotonic() - began)


def _unconfirmed(audit: Audit) -> Iterator[str]:
    """Whoever keeps a copy can leave out its end, and nobody sees it but by a head."""
    length, confirmed = audit.state.length, audit.confirmed
    if confirmed != length:
        signed = "none at hand is of this copy" if confirmed is None else f"the longest at hand is of {confirmed}"
        yield (
            f"complete up to entry {length} as far as this copy shows: no head signed by the trainer is of so many "
            f"entries, {signed}. What came after them may have been left out"
        )


def _missing(material: Material) -> Iterator[str]:
    if material.strange_heads:
        yield f"heads at hand that the trainer has not signed, and that say nothing: {material.strange_heads}"
    if next(material.checkpoints(), None) is None:
        yield "no checkpoint's manifest is at hand: lineage is checked by the ledger's entries alone"

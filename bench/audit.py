"""Auditing a ledger: entries a second and peak memory at several lengths, and from them a million entries; and what one
more entry adds to the memory and the disk of a node that follows it.

The ledger is made and signed here (bench.synthetic_ledger), written as nodes keep it, and audited in a process of its
own. What one process takes is its CPU time, and so is `bare_cpu_s`, what PyNaCl alone takes for the signatures in it;
with more processes it is wall time. Where the rest goes: `opening_to_bare`, decoding and ids beyond the signatures;
`rules_to_bare`, the rules; what is left are the audit's own books and maps on disk. A million entries are a straight
line through the lengths that were measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from nacl.signing import VerifyKey
from rich.table import Table

from bench.harness import Result
from bench.synthetic_ledger import entries, head_over, manifest, signatures_in
from node.ledger.inspect import audit_material, collecting_seldom, default_processes
from node.ledger.material import LEDGER, MANIFEST, find_material
from node.ledger.memory import live_ledger
from node.ledger.segments import SegmentWriter, read_segments
from node.ledger.signatures import WorkAsked, examine
from node.ledger.witness import HEAD_FILE
from protocol.ledger import LedgerState
from protocol.segments import framed_bytes

LENGTHS: Final = (25_000, 50_000, 100_000)
QUICK_LENGTHS: Final = (200, 400)
MILLION: Final = 1_000_000
SAMPLE: Final = 5000
"""Signatures that PyNaCl checks, evenly from all of them."""
BLOCK: Final = 1000
FOLLOWED_AT_ONCE: Final = 20
"""A node takes entries in as they come."""

T = TypeVar("T")


def bench(*, quick: bool) -> Result:
    """Audit the same ledger at rising lengths, with the processes that a user gets and with none."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    made = list(entries(lengths[-1]))
    result = Result()
    with tempfile.TemporaryDirectory(prefix="bench-audit-") as scratch:
        places = [_write(Path(scratch) / str(length), made[:length]) for length in lengths]
        processes = default_processes(places[-1] / LEDGER) or 1
        before_s = _bare_cpu_s(made)  # before and after, since the machine is not the same all the time
        alone = [_audited(place, 0) for place in places]
        together = [_audited(place, processes) for place in places]
        following = [_in_a_process(_follow, place) for place in places[-2:]]
    bare_s = (before_s + _bare_cpu_s(made)) / 2
    with collecting_seldom():
        opening_s, rules_s = _parts_cpu_s(made)
    result.tables.append(_table(lengths, alone, together, processes))
    result.figures = {
        "entries": lengths[-1],
        "entry_bytes": framed_bytes(made) / len(made),
        "processes": processes,
        "entries_per_s": lengths[-1] / together[-1].seconds,
        "entries_per_cpu_s_in_one_process": lengths[-1] / alone[-1].cpu_s,
        "bare_cpu_s": bare_s,
        "to_bare": alone[-1].cpu_s / bare_s,
        "opening_to_bare": opening_s / bare_s - 1,
        "rules_to_bare": rules_s / bare_s,
        "peak_mib": together[-1].peak_mib,
    }
    if not quick:  # a straight line through short ledgers says nothing of long ones
        result.figures |= {
            "peak_bytes_an_entry": _slope_bytes(lengths, [one.peak_mib for one in alone]),
            "node_peak_bytes_an_entry": _slope_bytes(lengths, [peak_mib for peak_mib, _ in following]),
            "node_disk_bytes_an_entry": _slope_bytes(lengths, [disk_mib for _, disk_mib in following]),
            "million_minutes": _at_a_million(lengths, [one.seconds for one in together]) / 60,
            "million_cpu_minutes_in_one_process": _at_a_million(lengths, [one.cpu_s for one in alone]) / 60,
            "million_mib": _at_a_million(lengths, [one.peak_mib for one in together]),
        }
        result.at_most("million_cpu_minutes_in_one_process", 10)
        result.at_most("million_mib", 256)
        result.at_most("peak_bytes_an_entry", 100)
        result.at_most("node_peak_bytes_an_entry", 100)
        result.at_most("to_bare", 2)
    return result


class _Measured:
    """An audit in a process of its own."""

    def __init__(self, seconds: float, cpu_s: float, peak_mib: float) -> None:
        self.seconds = seconds
        self.cpu_s = cpu_s
        self.peak_mib = peak_mib


def _write(directory: Path, made: Sequence[bytes]) -> Path:
    run = manifest()
    state = LedgerState(run.id, run.record, signatures_checked=True)
    (directory / LEDGER).mkdir(parents=True)
    with closing(SegmentWriter(directory / LEDGER, start=run.id)) as writer:
        for start in range(0, len(made), BLOCK):
            left = made[start : start + BLOCK]
            while left:
                left = left[len(writer.append(left)) :]
    for entry in made:
        state.apply(entry)
    (directory / MANIFEST).write_bytes(run.data)
    (directory / HEAD_FILE).write_bytes(head_over(state, 1 << 40).data)
    return directory


def _audited(directory: Path, processes: int) -> _Measured:
    return _Measured(*_in_a_process(_audit, directory, processes))


def _in_a_process(work: Callable[..., T], *arguments: object) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _follow(directory: Path) -> tuple[float, float]:
    """The most memory that a mirror of a ledger takes while it grows to its length, and its disk at last; MiB."""
    material = find_material(directory)
    with (
        tempfile.TemporaryDirectory(prefix="bench-follow-") as copy,
        closing(live_ledger(Path(copy) / LEDGER, material.manifest)) as log,
    ):
        for segment in read_segments(material.ledger):
            for start in range(0, len(segment.entries), FOLLOWED_AT_ONCE):
                log.append(segment.entries[start : start + FOLLOWED_AT_ONCE])
        files = [path for path in Path(copy).rglob("*") if path.is_file()]
        return _peak_mib(), sum(path.stat().st_size for path in files) / (1 << 20)


def _audit(directory: Path, processes: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds of the replaying process, and the most memory that it had, in MiB."""
    began, cpu_began = time.perf_counter(), time.process_time()
    report = audit_material(find_material(directory), say=lambda _: None, processes=processes)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    if not report.clean:
        raise RuntimeError(f"the bench's ledger has breaches: {report.breaches[:3]}")
    return seconds, cpu_s, _peak_mib()


def _peak_mib() -> float:
    """Of this process alone: getrusage also counts what its parent had when it was started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _bare_cpu_s(made: Sequence[bytes]) -> float:
    """CPU seconds for all signatures, each looked at once, from the rate over a sample of them."""
    found = {each for data in made for each in signatures_in(data)}
    sample = sorted(found)[:: max(1, len(found) // SAMPLE)]
    began = time.process_time()
    for key, message, signature in sample:
        VerifyKey(key).verify(message, signature)
    return (time.process_time() - began) / len(sample) * len(found)


def _parts_cpu_s(made: Sequence[bytes]) -> tuple[float, float]:
    """CPU seconds for opening every entry, signatures included, and for the rules alone, with nothing on disk."""
    run = manifest()
    asked = WorkAsked(run.id, run.record.admission.work_bits)
    state = LedgerState(run.id, run.record, operator=run.author, signatures_checked=True)
    state.work_checked = True
    began = time.process_time()
    opened = [examine(data, asked)[0] for data in made]
    opening_s, began = time.process_time() - began, time.process_time()
    for entry in opened:
        if entry is not None:
            state.take(entry)
    return opening_s, time.process_time() - began


def _at_a_million(lengths: Sequence[int], values: Sequence[float]) -> float:
    slope, start = np.polyfit(lengths, values, 1)
    return float(start + slope * MILLION)


def _slope_bytes(lengths: Sequence[int], found_mib: Sequence[float]) -> float:
    """What one more entry adds, between the two longest ledgers: caches are full by then."""
    (shorter, longer), (less, more) = lengths[-2:], found_mib[-2:]
    return (more - less) * (1 << 20) / (longer - shorter)


def _table(lengths: Sequence[int], alone: Sequence[_Measured], together: Sequence[_Measured], processes: int) -> Table:
    name = f"{processes} for signatures"
    table = Table("entries", "one process, CPU s", "peak, MiB", f"{name}, s", "peak, MiB", title="audit")
    for length, one, many in zip(lengths, alone, together, strict=True):
        cells = (one.cpu_s, one.peak_mib, many.seconds, many.peak_mib)
        table.add_row(f"{length:,}", *(f"{cell:,.1f}" for cell in cells))
    return table

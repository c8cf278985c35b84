"""Operating system processes: who descends from whom, what they use, and ending a tree of them for good.

Works on what it is given by pid and start time, so that a pid used again is never mistaken for the old process.
Without /proc (other systems than Linux) only process groups are known.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

NODE_VARIABLE: Final = "SIMNET_NODE"
"""Names a node in the environment of its processes."""
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessKey:
    """One process, told apart from a later one with the same pid."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class _Row:
    key: ProcessKey
    parent: int
    zombie: bool
    cpu_s: float
    memory_bytes: int


@dataclass
class Usage:
    """What some processes took of the machine, looked at from time to time: the last moments of each are missed."""

    peak_bytes: int = 0
    """Most memory that they had together; pages that several share count for each."""
    _cpu_s: dict[ProcessKey, float] = field(default_factory=dict)

    @property
    def cpu_s(self) -> float:
        """CPU time, in user mode and in the kernel."""
        return sum(self._cpu_s.values())

    def note(self, table: ProcessTable, keys: Iterable[ProcessKey]) -> None:
        """Take in what the processes of one node have used by now."""
        rows = table.rows(keys)
        self._cpu_s.update({row.key: row.cpu_s for row in rows})
        self.peak_bytes = max(self.peak_bytes, sum(row.memory_bytes for row in rows))


class ProcessTable:
    """What ran at one moment."""

    def __init__(self) -> None:
        rows = (_read_row(entry) for entry in os.listdir("/proc") if entry.isdigit()) if os.path.isdir("/proc") else ()
        self._rows = {row.key.pid: row for row in rows if row is not None}
        self._children: dict[int, list[ProcessKey]] = {}
        for row in self._rows.values():
            self._children.setdefault(row.parent, []).append(row.key)

    def descendants(self, pid: int) -> set[ProcessKey]:
        """Children of a process, theirs, and so on; without itself."""
        found: set[ProcessKey] = set()
        waiting = [pid]
        while waiting:
            fresh = [key for key in self._children.get(waiting.pop(), ()) if key not in found]
            found.update(fresh)
            waiting.extend(key.pid for key in fresh)
        return found

    def alive(self, keys: Iterable[ProcessKey]) -> set[ProcessKey]:
        """Those that still run (a zombie does not)."""
        return {row.key for row in self.rows(keys) if not row.zombie}

    def rows(self, keys: Iterable[ProcessKey]) -> list[_Row]:
        """What was seen of those that are still there."""
        return [row for key in keys if (row := self._rows.get(key.pid)) and row.key == key]

    def key(self, pid: int) -> ProcessKey | None:
        """The process that had a pid."""
        row = self._rows.get(pid)
        return row.key if row else None


def key_of(pid: int) -> ProcessKey | None:
    """The process that has a pid now."""
    row = _read_row(str(pid))
    return row.key if row else None


def runs(key: ProcessKey) -> bool:
    """Whether a process still runs; one that has ended and that nobody has waited for yet does not."""
    row = _read_row(str(key.pid))
    return row is not None and row.key == key and not row.zombie


def variable_of(pid: int, name: str) -> str | None:
    """What a process has as a variable of the environment it was started with: empty if nothing, None if unreadable."""
    try:
        entries = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return None
    begin = f"{name}=".encode()
    return next((one.removeprefix(begin).decode(errors="replace") for one in entries if one.startswith(begin)), "")


def send(pid: int, number: signal.Signals, *, group: bool = False) -> None:
    """Send a signal to a process or its group; one that is gone already is no error."""
    with suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _read_row(entry: str) -> _Row | None:
    try:
        text = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it ended while we looked
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    if len(fields) < 22:
        return None
    return _Row(
        key=ProcessKey(int(entry), int(fields[19])),
        parent=int(fields[1]),
        zombie=fields[0] in "ZX",
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND,
        memory_bytes=int(fields[21]) * _PAGE_BYTES,
    )

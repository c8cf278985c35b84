"""What each process of the nodes takes of the machine, looked at every few seconds while a simulation runs.

Memory is what a process has for itself (anonymous pages, and those swapped out): shares of pages that several map
would change when another node comes or goes. Nothing here judges; simnet.oracles does. Linux only: without /proc there
are no samples.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

from simnet.processes import NODE_VARIABLE, ProcessKey, ProcessTable, variable_of

T = TypeVar("T")

SAMPLE_S: Final = 2.0
MAX_SAMPLES: Final = 600
PULSE_S: Final = 0.05
MAX_COMMAND_CHARS: Final = 80


class ProcessSample(Struct, array_like=True):
    """A process at one moment; `tasks` are those of a network process's event loop, where its status says so."""

    at_ms: int
    private_bytes: int
    descriptors: int | None = None
    tasks: int | None = None


class ProcessSeen(Struct):
    """One process of a node, while it could be seen."""

    pid: int
    started_ms: int
    network: bool
    """The node's own process; others are those that it started."""
    command: str = ""
    samples: list[ProcessSample] = []
    stride: int = 1
    """Samples are kept of every so many looks, so that a long simulation stays small."""
    looks: int = 0

    def add(self, sample: ProcessSample) -> None:
        """Keep a sample, or let it go; the times between those that are kept stay equal."""
        self.stride = keep_evenly(self.samples, sample, look=self.looks, stride=self.stride, most=MAX_SAMPLES)
        self.looks += 1


def keep_evenly(kept: list[T], one: T, *, look: int, stride: int, most: int) -> int:
    """Keep what was seen at a look if `stride` divides its number, and half of all once they are more than `most`.

    The stride from then on. To halve the older ones alone would forget a long simulation's begin.
    """
    if look % stride == 0:
        kept.append(one)
    if len(kept) <= most:
        return stride
    del kept[1::2]
    return 2 * stride


class Pulse:
    """How late this machine lets a thread that only sleeps wake up: nodes cannot be expected to be more punctual."""

    def __init__(self) -> None:
        self._late_ms: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def late_ms(self, share: float) -> int | None:
        """What this share of all wakings stayed within; None before the first one."""
        late = sorted(self._late_ms)
        return late[min(len(late) - 1, int(share * len(late)))] if late else None

    def _beat(self) -> None:
        began = time.monotonic()
        while not self._over.wait(PULSE_S):
            now = time.monotonic()
            self._late_ms.append(max(0, round((now - began - PULSE_S) * 1000)))
            if len(self._late_ms) > 200_000:
                del self._late_ms[::2]
            began = now


def look(
    table: ProcessTable, keys: Iterable[ProcessKey], seen: list[ProcessSeen], *, network_pid: int, tasks: int | None
) -> None:
    """Add a sample of every process of one node; the first look at one begins its record."""
    now_ms = time.time_ns() // 1_000_000
    records = {(one.pid, one.started_ms): one for one in seen}
    for key in sorted(table.alive(keys), key=lambda one: one.pid):
        sample = _sample(key.pid, now_ms)
        if sample is None:
            continue
        started_ms = _started_ms(key)
        record = records.get((key.pid, started_ms))
        if record is None:
            record = ProcessSeen(key.pid, started_ms, key.pid == network_pid, _command(key.pid))
            seen.append(record)
        record.command = record.command or _command(key.pid)
        if record.network:
            sample.tasks = tasks
        record.add(sample)


def processes_within(directories: Mapping[str, Path]) -> dict[str, list[int]]:
    """A node's processes that work in its directory, by its name: also those that nobody descends from any more.

    A person's shell that has gone there carries no node's name, and is none of them.
    """
    roots = {str(path.resolve()): name for name, path in directories.items()}
    found: dict[str, list[int]] = {}
    for pid, place in _working_directories():
        for root, name in roots.items():
            within = place == root or place.startswith(root + os.sep)
            if within and variable_of(pid, NODE_VARIABLE) in (name, None):
                found.setdefault(name, []).append(pid)
    return found


def _working_directories() -> Iterable[tuple[int, str]]:
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError):  # it ended, is a zombie, or is somebody else's
                    yield int(entry), os.readlink(f"/proc/{entry}/cwd")


def _sample(pid: int, now_ms: int) -> ProcessSample | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        private_kb = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    except (OSError, KeyError, ValueError):  # it ended while we looked
        return None
    with suppress(OSError):
        return ProcessSample(now_ms, private_kb << 10, len(os.listdir(f"/proc/{pid}/fd")))
    return ProcessSample(now_ms, private_kb << 10)


def _started_ms(key: ProcessKey) -> int:
    uptime_s = key.start_ticks / os.sysconf("SC_CLK_TCK")
    return round((_booted_s() + uptime_s) * 1000)


@cache
def _booted_s() -> float:
    """When this machine started, as the wall clock had it at the first call."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _command(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(os.path.basename(word) for word in words if word)[:MAX_COMMAND_CHARS]
    return ""

"""Whether this machine has room for a scenario: what its nodes take, and what there is."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from protocol.errors import ConfigError
from simnet.scenario import FleetEntry, Scenario

COMPUTE_NODE_MB: Final = 400
TRAINER_MB: Final = 750
RELAY_MB: Final = 170
WATCH_MB: Final = 120
HOSTILE_MB: Final = 90
_USUAL: Final = {"trainer": TRAINER_MB, "relay": RELAY_MB, "watch": WATCH_MB, "hostile": HOSTILE_MB}
"""What a node's processes have for themselves alone after minutes to an hour of the demo's run, the table "The machine"
of its report."""


def needed_memory_mb(scenario: Scenario) -> int:
    """Estimate of the memory that a scenario's nodes take together, with their disks that lie in memory."""
    disks = sum(plan.disk_mb or 0 for plan in scenario.nodes())
    return disks + sum(entry.count * _one_mb(entry) for entry in scenario.fleet)


def fitted(scenario: Scenario, available_mb: int | None) -> Scenario:
    """The scenario with as many nodes of its `fill` entries as the memory holds, in the order of the file."""
    if available_mb is None or not any(entry.fill for entry in scenario.fleet):
        return scenario
    least = [msgspec.structs.replace(entry, count=1 if entry.fill else entry.count) for entry in scenario.fleet]
    made = msgspec.structs.replace(scenario, fleet=tuple(least))
    for place, (entry, smallest) in enumerate(zip(scenario.fleet, least, strict=True)):
        counts = range(smallest.count, entry.count + 1)
        needed = partial(_needed_with_mb, made, place)
        count = counts[max(0, bisect_right(counts, available_mb, key=needed) - 1)]
        made = _with_count(made, place, count, declared=entry.count if count < entry.count else None)
    return made


def check_memory(scenario: Scenario, available_mb: int | None) -> None:
    """Refuse a scenario that this machine has no room for. `None`: the system does not say."""
    needed = needed_memory_mb(scenario)
    if available_mb is not None and needed > available_mb:
        raise ConfigError(
            f"scenario {scenario.name!r} needs about {needed} MB of memory for {len(scenario.nodes())} nodes; "
            f"{available_mb} MB are free",
            hint="close other programs, or lower `count` in the scenario's [[fleet]] entries",
        )


def available_memory_mb() -> int | None:
    """Memory that new processes can have, by the system and by the control group this process is in."""
    figures = [_meminfo_available_mb(), _cgroup_free_mb()]
    known = [figure for figure in figures if figure is not None]
    return min(known) if known else None


def _needed_with_mb(scenario: Scenario, place: int, count: int) -> int:
    return needed_memory_mb(_with_count(scenario, place, count))


def _with_count(scenario: Scenario, place: int, count: int, *, declared: int | None = None) -> Scenario:
    """With so many nodes in the entry at a place of the fleet."""
    fleet = list(scenario.fleet)
    fleet[place] = msgspec.structs.replace(fleet[place], count=count, declared=declared)
    return msgspec.structs.replace(scenario, fleet=tuple(fleet))


def _one_mb(entry: FleetEntry) -> int:
    return entry.memory_mb or _USUAL.get(entry.role, COMPUTE_NODE_MB)


def _meminfo_available_mb() -> int | None:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) // 1024
    return None


def _cgroup_free_mb() -> int | None:
    root = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no limit is written as `max`
        limit, used = (int((root / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
        return (limit - used + int(stat["inactive_file"])) // 2**20  # cached files make room when asked
    return None

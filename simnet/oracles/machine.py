"""Oracles about what nodes take of the machine: memory, descriptors, tasks, punctual loops, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from simnet.gather import LoopSeen, NodeRecord, Recording
from simnet.oracles.judgement import Evidence, Figure, Judgement, listed
from simnet.sampling import ProcessSeen

WARM_UP_S: Final = 60.0
WARM_UP_SHARE: Final = 0.2
"""Of a process's life; the longer of the two is left out."""
MIN_SLOPE_SPAN_S: Final = 240.0
MIN_SAMPLES: Final = 12
MAX_SLOPE_MB_MIN: Final = 1.0
SURE_FACTOR: Final = 3.0
"""A process has grown when it did by so many times what its memory goes up and down anyway."""
MAX_PAIRS_OF: Final = 200

SETTLED_S: Final = 15.0
"""After so long a process has opened what it works with."""
MIN_LEVEL_SAMPLES: Final = 9
MIN_LEVEL_SPAN_S: Final = 45.0
"""A walk through peers that do not answer takes ten seconds, a task for each: a third of the time must be longer."""
SPARE_DESCRIPTORS: Final = 12
SPARE_TASKS: Final = 24
DESCRIPTORS_A_PEER: Final = 6
TASKS_A_PEER: Final = 12
"""Beside what is spare, for each node that runs at the end and did not at first. A relay was seen to take five
descriptors for one: a connection of libp2p, and several for its requests."""
SPARE_SHARE: Final = 0.25

MAX_LAG_MS: Final = 100
MAX_MACHINE_LATE_MS: Final = 50
"""Where the machine itself wakes threads up later than this, and does not tell how long a thread waited for a core, a
late loop need not be the node's fault. Where it does, nodes have taken that off."""
MIN_PULSES: Final = 40


def memory_stays_level(evidence: Evidence) -> Judgement:
    """After its warm-up no process grows by 1 MB a minute or more (Theil-Sen slope of its private memory)."""
    name = f"memory grows by less than {MAX_SLOPE_MB_MIN:g} MB a minute"
    found = [_growth(node, seen) for node, seen in _processes(evidence.recording)]
    fits = sorted((one for one in found if one is not None), key=lambda one: -one.mb_per_min)
    numbers: dict[str, Figure] = {"processes": len(found), "long enough": len(fits)}
    if not fits:
        return Judgement(name, "could not tell", _too_short(evidence.recording), numbers)
    numbers |= {"steepest MB/min": round(fits[0].mb_per_min, 2), "of": fits[0].whose, "span s": round(fits[0].span_s)}
    steep = [one for one in fits if one.mb_per_min >= MAX_SLOPE_MB_MIN]
    sure = [one for one in steep if one.grown_mb >= SURE_FACTOR * one.noise_mb]
    if sure:
        worst = sure[0]
        finding = f"{worst.whose} grows by {worst.mb_per_min:.2f} MB a minute over {worst.span_s:.0f} s."
        return Judgement(name, "failed", finding, numbers)
    if steep:
        worst = steep[0]
        finding = f"{worst.whose} may grow by {worst.mb_per_min:.2f} MB a minute; its memory moves too much to say."
        return Judgement(name, "could not tell", finding, numbers)
    finding = f"The steepest of {len(fits)} processes is {fits[0].whose} with {fits[0].mb_per_min:.2f} MB a minute"
    short = len(found) - len(fits)
    beside = f"; {short} were not judged, as they were there too briefly." if short else "."
    return Judgement(name, "passed", finding + beside, numbers)


def descriptors_and_tasks_return(evidence: Evidence) -> Judgement:
    """In their last third processes come back to about as many descriptors and tasks as they had in their first."""
    name = "descriptors and tasks return to their level"
    recording = evidence.recording
    from_ms = _under_way_ms(recording)
    levels = [level for node, seen in _processes(recording) for level in _levels(node, seen, recording, from_ms)]
    numbers: dict[str, Figure] = {"processes": len({level.whose for level in levels})}
    if not levels:
        finding = (
            f"No process was there for {SETTLED_S + MIN_LEVEL_SPAN_S:.0f} s after the first step and the last node's "
            f"first start, with {MIN_LEVEL_SAMPLES} looks."
        )
        return Judgement(name, "could not tell", finding, numbers)
    worst = max(levels, key=lambda level: level.end - level.allowed)
    for what in ("descriptors", "tasks"):
        most = max((level for level in levels if level.what == what), key=lambda one: one.end - one.begin, default=None)
        if most is not None:
            numbers |= {f"most {what} gained": f"{most.begin:g} to {most.end:g} ({most.whose})"}
    high = [level for level in levels if level.end > level.allowed]
    if high:
        finding = f"{len(high)} are too high at the end, the worst {worst.text}."
        return Judgement(name, "failed", finding, numbers)
    finding = f"{numbers['processes']} processes end at their level; furthest from it: {worst.text}."
    return Judgement(name, "passed", finding, numbers)


def event_loops_are_punctual(evidence: Evidence) -> Judgement:
    """In network processes 99 % of the event loop's pulses are less than 100 ms late."""
    name = f"event loops late by less than {MAX_LAG_MS} ms (p99)"
    recording = evidence.recording
    slowed = {plan.name for plan in recording.scenario.nodes() if plan.nice}
    loops = [(node.name, loop) for node in recording.nodes if node.name not in slowed for loop in _loops(node)]
    numbers: dict[str, Figure] = {"loops": len(loops)}
    if recording.late_p99_ms is not None:
        numbers["the machine itself, p99 ms"] = recording.late_p99_ms
    if not loops:
        return Judgement(name, "could not tell", "No node counted enough pulses of its loop.", numbers)
    whose, worst = max(loops, key=lambda one: one[1].p99_ms)
    numbers |= {"worst p99 ms": worst.p99_ms, "of": whose, "longest ms": max(loop.worst_ms for _, loop in loops)}
    late = sorted({node for node, loop in loops if loop.p99_ms >= MAX_LAG_MS})
    if not late:
        finding = f"The latest of {len(loops)} loops is {whose}'s, with {worst.p99_ms} ms."
        return Judgement(name, "passed", finding, numbers)
    busy = recording.late_p99_ms is None or recording.late_p99_ms > MAX_MACHINE_LATE_MS
    if busy and not recording.core_waits_known:
        finding = (
            f"{listed(late)}: up to {worst.p99_ms} ms. But the machine was busy: it woke a sleeper {_late(recording)}."
        )
        return Judgement(name, "could not tell", finding, numbers)
    return Judgement(name, "failed", f"{listed(late)}: up to {worst.p99_ms} ms.", numbers)


def no_process_left_behind(evidence: Evidence) -> Judgement:
    """When a node has ended, so has everything that it started."""
    name, recording = "no process left behind", evidence.recording
    watched = sum(len(node.processes) for node in recording.nodes)
    numbers: dict[str, Figure] = {"processes seen": watched, "left behind": len(recording.left_behind)}
    if recording.left_behind:
        return Judgement(name, "failed", f"Outlived their node: {listed(recording.left_behind)}.", numbers)
    if not watched:
        return Judgement(name, "could not tell", "No process could be seen: is there a /proc?", numbers)
    return Judgement(name, "passed", f"All {watched} processes that were seen have ended.", numbers)


@dataclass(frozen=True)
class _Growth:
    whose: str
    mb_per_min: float
    grown_mb: float
    noise_mb: float
    span_s: float


def _too_short(recording: Recording) -> str:
    lives = [(seen.samples[-1].at_ms - seen.started_ms) / 1000 for _, seen in _processes(recording) if seen.samples]
    wanted = f"A slope needs {WARM_UP_S + MIN_SLOPE_SPAN_S:.0f} s of a process's life"
    if not lives:
        return f"{wanted}, and no process could be seen."
    return f"{wanted}, and the longest of {len(lives)} was {max(lives):.0f} s: nothing was judged."


@dataclass(frozen=True)
class _Level:
    whose: str
    what: str
    begin: float
    end: float
    allowed: float

    @property
    def text(self) -> str:
        return f"{self.whose} with {self.begin:g} {self.what} at first and {self.end:g} at last"


def _processes(recording: Recording) -> Iterator[tuple[NodeRecord, ProcessSeen]]:
    """Of nodes that run the program; a hostile peer does not."""
    for node in recording.nodes:
        if node.role != "hostile":
            yield from ((node, seen) for seen in node.processes)


def _whose(node: NodeRecord, seen: ProcessSeen) -> str:
    return node.name if seen.network else f"{node.name} (compute, pid {seen.pid})"


def _growth(node: NodeRecord, seen: ProcessSeen) -> _Growth | None:
    """How a process's memory grew after its warm-up; None where it was not there for long enough."""
    if not seen.samples:
        return None
    life_s = (seen.samples[-1].at_ms - seen.started_ms) / 1000
    from_ms = seen.started_ms + 1000 * max(WARM_UP_S, WARM_UP_SHARE * life_s)
    points = [(one.at_ms / 60_000, one.private_bytes / 1e6) for one in seen.samples if one.at_ms >= from_ms]
    span_min = points[-1][0] - points[0][0] if points else 0.0
    if len(points) < MIN_SAMPLES or span_min * 60 < MIN_SLOPE_SPAN_S:
        return None
    slope = theil_sen(points)
    middle = median(y - slope * x for x, y in points)
    noise = median(abs(y - slope * x - middle) for x, y in points)
    return _Growth(_whose(node, seen), slope, slope * span_min, noise, span_min * 60)


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """Median slope of all pairs of at most `MAX_PAIRS_OF` points, spread evenly (Theil 1950, Sen 1968)."""
    few = points[:: max(1, -(-len(points) // MAX_PAIRS_OF))]
    pairs = ((few[i], few[j]) for i in range(len(few)) for j in range(i + 1, len(few)))
    return median((later[1] - one[1]) / (later[0] - one[0]) for one, later in pairs if later[0] > one[0])


def _under_way_ms(recording: Recording) -> int:
    """When a step had been trained and every node of the plan had been started once: before, levels rise by rights."""
    starts = [node.lives[0].started_ms for node in recording.nodes if node.lives]
    first_step = next((sample.at_ms for sample in recording.samples if sample.step >= 1), recording.started_ms)
    return max([first_step, *starts])


def _levels(node: NodeRecord, seen: ProcessSeen, recording: Recording, from_ms: int) -> Iterator[_Level]:
    settled_ms = max(seen.started_ms, from_ms) + 1000 * SETTLED_S
    settled = [one for one in seen.samples if one.at_ms >= settled_ms]
    if not settled or settled[-1].at_ms - settled[0].at_ms < 1000 * MIN_LEVEL_SPAN_S:
        return
    third = max(1, len(settled) // 3)
    first, last = (median(_there(recording, one.at_ms) for one in part) for part in (settled[:third], settled[-third:]))
    more = max(0.0, last - first) if seen.network else 0.0
    descriptors = [one.descriptors for one in settled if one.descriptors is not None]
    spare = SPARE_DESCRIPTORS + more * DESCRIPTORS_A_PEER
    yield from _level(_whose(node, seen), "descriptors", descriptors, spare)
    tasks = [one.tasks for one in settled if one.tasks is not None]
    yield from _level(_whose(node, seen), "tasks", tasks, SPARE_TASKS + more * TASKS_A_PEER)


def _there(recording: Recording, at_ms: int) -> int:
    """How many nodes ran at a moment: as many may a node be connected with."""
    return sum(
        any(life.started_ms <= at_ms and (life.ended_ms is None or at_ms <= life.ended_ms) for life in node.lives)
        for node in recording.nodes
    )


def _level(whose: str, what: str, values: Sequence[int], spare: float) -> Iterator[_Level]:
    """A level that is gone up and down from is no leak; one that is never come back to is."""
    if len(values) < MIN_LEVEL_SAMPLES:
        return
    third = len(values) // 3
    begin, end = median(values[:third]), min(values[-third:])
    yield _Level(whose, what, begin, end, begin + max(spare, SPARE_SHARE * begin))


def _loops(node: NodeRecord) -> Iterator[LoopSeen]:
    for life in node.lives:
        if life.status and life.status.details.discovery.loop.pulses >= MIN_PULSES:
            yield life.status.details.discovery.loop


def _late(recording: Recording) -> str:
    return "at unknown times" if recording.late_p99_ms is None else f"{recording.late_p99_ms} ms late (p99)"

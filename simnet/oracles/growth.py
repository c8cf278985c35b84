"""Oracles about what grows: the memory, descriptors and tasks of every process, from its warm-up to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Final

from simnet.gather import Life, NodeRecord, Recording
from simnet.oracles.answers import FIRST_ANSWER_S
from simnet.oracles.judgement import Evidence, Figure, Judgement
from simnet.oracles.undisturbed import passed_step_ms
from simnet.sampling import ProcessSeen

WARM_UP_S: Final = 600.0
WARM_UP_SHARE: Final = 0.2
"""Of a process's life; the longer of the two is left out. A relay that was started again took 50 MB more within ten
minutes, as its heap and its caches filled, and 0.2 a minute from then on."""
BRIEF_WARM_UP_S: Final = 60.0
"""Of a life too short for that."""
MIN_SLOPE_SPAN_S: Final = 240.0
MIN_SAMPLES: Final = 12
MAX_SLOPE_MB_MIN: Final = 1.0
MAX_BRIEF_SLOPE_MB_MIN: Final = 6.0
"""Of a brief life. What lies between the two tells nothing, unless a longer life of the same kind was level."""
SURE_FACTOR: Final = 3.0
"""A process has grown when it did by so many times what its memory goes up and down anyway."""
MAX_PAIRS_OF: Final = 200
LATE_S: Final = 600.0
"""The newest part of a life that lasts twice as long or longer after its warm-up: what begins late moves no slope of
the whole."""
MAX_LATE_SLOPE_MB_MIN: Final = 3.0
"""There; caches and heaps grow a little when peers come back or a larger policy is loaded."""
SPARE_MB: Final = 64.0
SPARE_MEMORY_SHARE: Final = 0.5
"""By so much, and by what the slope allows, a process may end above what it had after its warm-up: one jump moves no
slope either."""

SETTLED_S: Final = 15.0
"""After so long a process has opened what it works with; at the least, it takes as long as it took to load it."""
SAME_START_MS: Final = 5000
"""By which the kernel's and the simulation's clocks may differ on when a process began."""
MIN_LEVEL_SAMPLES: Final = 9
END_S: Final = 240.0
"""A level is come back to when it was within so long before the end, or within the last third of a shorter life."""
MIN_END_LOOKS: Final = 5
MIN_LEVEL_SPAN_S: Final = 45.0
"""A walk through peers that do not answer takes ten seconds, a task for each: a third of the time must be longer."""
SPARE_DESCRIPTORS: Final = 12
SPARE_TASKS: Final = 24
DESCRIPTORS_A_PEER: Final = 6
TASKS_A_PEER: Final = 12
"""Beside what is spare, for each node that runs at the end and did not at first. A relay was seen to take five
descriptors for one: a connection of libp2p, and several for its requests."""
SPARE_SHARE: Final = 0.25


def memory_stays_level(evidence: Evidence) -> Judgement:
    """After its warm-up no process grows by 1 MB a minute or more (Theil-Sen slope of its private memory).

    Neither does one grow by more at the end of its life, or end far above what it had after its warm-up.
    """
    name = f"memory grows by less than {MAX_SLOPE_MB_MIN:g} MB a minute"
    found = [_growth(node, seen) for node, seen in _processes(evidence.recording)]
    fits = sorted((one for one in found if one is not None), key=lambda one: -one.whole.mb_per_min)
    numbers: dict[str, Figure] = {"processes": len(found), "long enough": len(fits)}
    if not fits:
        return Judgement(name, "could not tell", _too_short(evidence.recording), numbers)
    first = fits[0]
    numbers |= {
        "steepest MB/min": round(first.whole.mb_per_min, 2),
        "of": first.whose,
        "span s": round(first.whole.span_s),
    }
    grown = [text for one in fits if (text := _what_grew(one))]
    if grown:
        return Judgement(name, "failed", f"{grown[0]}.", numbers)
    if unsure := _unsure(fits):
        return Judgement(name, "could not tell", unsure, numbers)
    filling = [one for one in fits if one.may_be_filling]
    judged = [one for one in fits if not one.may_be_filling]
    steepest = judged[0]
    finding = (
        f"The steepest of {len(judged)} processes is {steepest.whose} with {steepest.whole.mb_per_min:.2f} MB a minute"
    )
    if filling:
        finding += f"; {len(filling)} that had been there briefly were still filling, as others of their kind had"
    short = len(found) - len(fits)
    beside = f"; {short} were not judged, as they were there too briefly." if short else "."
    return Judgement(name, "passed", finding + beside, numbers)


def _unsure(fits: Sequence[_Growth]) -> str:
    """What cannot be told of some process, in words; empty where all can."""
    for one in fits:
        for part, most in one.parts:
            if part.mb_per_min >= most:
                return f"{one.whose} may grow by {part.mb_per_min:.2f} MB a minute; its memory moves too much to say."
    level = {one.kind for one in fits if not one.brief}
    for one in fits:
        if one.may_be_filling and one.kind not in level:
            return (
                f"{one.whose} grew by {one.whole.mb_per_min:.2f} MB a minute; it was there too briefly, as were all of "
                "its kind, to tell a leak from what fills at first."
            )
    return ""


def descriptors_and_tasks_return(evidence: Evidence) -> Judgement:
    """In their last third processes come back to about as many descriptors and tasks as they had in their first."""
    name = "descriptors and tasks return to their level"
    recording = evidence.recording
    from_ms = _under_way_ms(recording)
    levels = [level for node, seen in _processes(recording) for level in _levels(node, seen, recording, from_ms)]
    numbers: dict[str, Figure] = {"processes": len({level.whose for level in levels})}
    if not levels:
        finding = (
            f"No process was there for {SETTLED_S + MIN_LEVEL_SPAN_S:.0f} s, with {MIN_LEVEL_SAMPLES} looks, from "
            f"{(from_ms - recording.started_ms) / 1000:.0f} s on, when there was a step and the last node to come up "
            "had had time to find the others."
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


@dataclass(frozen=True)
class _Slope:
    """Of a stretch of a process's life."""

    mb_per_min: float
    noise_mb: float
    span_s: float

    @property
    def sure(self) -> bool:
        return self.mb_per_min * self.span_s / 60 >= SURE_FACTOR * self.noise_mb


@dataclass(frozen=True)
class _Growth:
    """How a process's memory moved after its warm-up."""

    whose: str
    kind: tuple[str, bool]
    """Role, and whether it is the network process: of one kind all do the same."""
    brief: bool
    whole: _Slope
    late: _Slope | None
    begin_mb: float
    end_mb: float

    @property
    def parts(self) -> list[tuple[_Slope, float]]:
        """Stretches, and the slope that each may have."""
        most = MAX_BRIEF_SLOPE_MB_MIN if self.brief else MAX_SLOPE_MB_MIN
        return [(self.whole, most), *([(self.late, MAX_LATE_SLOPE_MB_MIN)] if self.late else [])]

    @property
    def may_be_filling(self) -> bool:
        return self.brief and MAX_SLOPE_MB_MIN <= self.whole.mb_per_min < MAX_BRIEF_SLOPE_MB_MIN

    @property
    def allowed_mb(self) -> float:
        spare_mb = max(SPARE_MB, SPARE_MEMORY_SHARE * self.begin_mb)
        return self.begin_mb + spare_mb + MAX_SLOPE_MB_MIN * self.whole.span_s / 60


def _what_grew(one: _Growth) -> str:
    """What is surely wrong with a process's memory, in words; empty where nothing is."""
    for part, most in one.parts:
        if part.mb_per_min >= most and part.sure:
            when = "over" if part is one.whole else "in the last"
            return f"{one.whose} grows by {part.mb_per_min:.2f} MB a minute {when} {part.span_s:.0f} s"
    if one.end_mb > one.allowed_mb:
        return f"{one.whose} has {one.end_mb:.0f} MB at last and had {one.begin_mb:.0f} MB after its warm-up"
    return ""


def _too_short(recording: Recording) -> str:
    lives = [(seen.samples[-1].at_ms - seen.started_ms) / 1000 for _, seen in _processes(recording) if seen.samples]
    wanted = f"A slope needs {BRIEF_WARM_UP_S + MIN_SLOPE_SPAN_S:.0f} s of a process's life"
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
    brief = life_s < WARM_UP_S + MIN_SLOPE_SPAN_S
    from_ms = seen.started_ms + 1000 * max(BRIEF_WARM_UP_S if brief else WARM_UP_S, WARM_UP_SHARE * life_s)
    points = [(one.at_ms / 60_000, one.private_bytes / 1e6) for one in seen.samples if one.at_ms >= from_ms]
    whole = _slope(points)
    if whole is None:
        return None
    newest = [point for point in points if point[0] >= points[-1][0] - LATE_S / 60]
    values = [value for _, value in points]
    first_third = sorted(values[: len(values) // 3])
    return _Growth(
        _whose(node, seen),
        (node.role, seen.network),
        brief,
        whole,
        _slope(newest) if whole.span_s >= 2 * LATE_S else None,
        begin_mb=first_third[len(first_third) // 4],
        end_mb=_end([(x * 60_000, y) for x, y in points]),
    )


def _slope(points: Sequence[tuple[float, float]]) -> _Slope | None:
    """Of minutes and MB; None where they are too few or too close together."""
    span_min = points[-1][0] - points[0][0] if points else 0.0
    if len(points) < MIN_SAMPLES or span_min * 60 < MIN_SLOPE_SPAN_S:
        return None
    slope = theil_sen(points)
    middle = median(y - slope * x for x, y in points)
    return _Slope(slope, median(abs(y - slope * x - middle) for x, y in points), span_min * 60)


def _ending(times_ms: Sequence[float]) -> int:
    """How many of the last looks are a process's end: those of `END_S`, but a few, and a third of all at most."""
    within = sum(at_ms >= times_ms[-1] - 1000 * END_S for at_ms in times_ms)
    return min(max(within, MIN_END_LOOKS), max(1, len(times_ms) // 3))


def _end(points: Sequence[tuple[float, float]]) -> float:
    """The least of the last values (by ms): what goes up and down has come back to it, what leaks has not."""
    return min(value for _, value in points[-_ending([at_ms for at_ms, _ in points]) :])


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """Median slope of all pairs of at most `MAX_PAIRS_OF` points, spread evenly (Theil 1950, Sen 1968)."""
    few = points[:: max(1, -(-len(points) // MAX_PAIRS_OF))]
    pairs = ((few[i], few[j]) for i in range(len(few)) for j in range(i + 1, len(few)))
    return median((later[1] - one[1]) / (later[0] - one[0]) for one, later in pairs if later[0] > one[0])


def _under_way_ms(recording: Recording) -> int:
    """When a step had been trained and every node of the plan was with the others: before, levels rise by rights."""
    joined = [_joined_ms(node, node.lives[0]) for node in recording.nodes if node.lives]
    first_step_ms = passed_step_ms(recording, 0)
    return max([recording.started_ms if first_step_ms is None else first_step_ms, *joined])


def _joined_ms(node: NodeRecord, life: Life) -> int:
    """When a node had come up and found the others: on a busy machine that takes about as long as its loading did."""
    if life.first_status_at_ms is not None:
        return 2 * life.first_status_at_ms - life.started_ms
    if node.role == "hostile":  # it is no node, and answers nobody
        return life.started_ms
    limit_ms = life.started_ms + round(1000 * FIRST_ANSWER_S)
    return limit_ms if life.ended_ms is None else min(life.ended_ms, limit_ms)


def _levels(node: NodeRecord, seen: ProcessSeen, recording: Recording, from_ms: int) -> Iterator[_Level]:
    came_up_ms = max((_joined_ms(node, one) for one in node.lives if _is_of(seen, one)), default=seen.started_ms)
    settled_ms = max(came_up_ms, from_ms) + 1000 * SETTLED_S
    settled = [one for one in seen.samples if one.at_ms >= settled_ms]
    if not settled or settled[-1].at_ms - settled[0].at_ms < 1000 * MIN_LEVEL_SPAN_S:
        return
    times_ms = [one.at_ms for one in settled]
    parts = times_ms[: max(1, len(settled) // 3)], times_ms[-_ending(times_ms) :]
    first, last = (median(_there(recording, at_ms) for at_ms in part) for part in parts)
    more = max(0.0, last - first) if seen.network else 0.0
    descriptors = [(one.at_ms, one.descriptors) for one in settled if one.descriptors is not None]
    spare = SPARE_DESCRIPTORS + more * DESCRIPTORS_A_PEER
    yield from _level(_whose(node, seen), "descriptors", descriptors, spare)
    tasks = [(one.at_ms, one.tasks) for one in settled if one.tasks is not None]
    yield from _level(_whose(node, seen), "tasks", tasks, SPARE_TASKS + more * TASKS_A_PEER)


def _is_of(seen: ProcessSeen, life: Life) -> bool:
    """Whether a process is the node's own, in one of its lives."""
    return seen.network and seen.pid == life.pid and abs(seen.started_ms - life.started_ms) < SAME_START_MS


def _there(recording: Recording, at_ms: int) -> int:
    """How many nodes ran at a moment and had come up: as many may a node be connected with."""
    return sum(
        any(_up_ms(node, life) <= at_ms and (life.ended_ms is None or at_ms <= life.ended_ms) for life in node.lives)
        for node in recording.nodes
    )


def _up_ms(node: NodeRecord, life: Life) -> float:
    if node.role == "hostile":
        return life.started_ms
    return inf if life.first_status_at_ms is None else life.first_status_at_ms


def _level(whose: str, what: str, values: Sequence[tuple[int, int]], spare: float) -> Iterator[_Level]:
    """A level that is gone up and down from is no leak; one that is never come back to is."""
    if len(values) < MIN_LEVEL_SAMPLES:
        return
    begin, end = median(value for _, value in values[: len(values) // 3]), _end(values)
    yield _Level(whose, what, begin, end, begin + max(spare, SPARE_SHARE * begin))

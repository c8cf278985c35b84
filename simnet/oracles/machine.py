"""Oracles about the nodes' processes: event loops that are punctual, and nothing left behind.

What they take of the machine is for simnet.oracles.growth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from simnet.gather import Life, LoopSeen, NodeRecord, Recording
from simnet.oracles.excuses import stopped_spells
from simnet.oracles.judgement import Evidence, Figure, Judgement, listed

MAX_LAG_MS: Final = 100
MAX_BLOCK_MS: Final = 10_000
"""That a loop may stand still once, beyond the time for which its node was stopped."""
MAX_MACHINE_LATE_MS: Final = 50
"""Where the machine itself wakes threads up later than this, and does not tell how long a thread waited for a core, a
late loop need not be the node's fault. Where it does, nodes have taken that off."""
MIN_PULSES: Final = 120
"""Half a minute, and as many more for each time that the node was stopped: of so many, one pulse may be late."""
UNCOUNTED_S: Final = 120.0
"""Whoever answered for so long has a loop that was counted."""
AT_ONCE_MS: Final = 2000
"""Between two stops; a loop may not come to run in between, and then is late by both."""


@dataclass(frozen=True)
class _Loop:
    """One network process's."""

    whose: str
    seen: LoopSeen
    stops_ms: list[float]
    """For how long it was stopped, each time."""
    answered_ms: int

    @property
    def enough(self) -> bool:
        return self.seen.pulses >= MIN_PULSES * (1 + len(self.stops_ms))

    @property
    def uncounted(self) -> bool:
        return self.seen.pulses < MIN_PULSES and self.answered_ms - sum(self.stops_ms) >= 1000 * UNCOUNTED_S

    @property
    def blocked_ms(self) -> float:
        """The longest time for which it stood still, beyond the longest stop."""
        return self.seen.worst_ms - max(self.stops_ms, default=0.0)

    @property
    def text(self) -> str:
        return f"{self.whose} for {self.blocked_ms / 1000:.1f} s"


def event_loops_are_punctual(evidence: Evidence) -> Judgement:
    """In network processes 99 % of the event loop's pulses are less than 100 ms late, and none is 10 s or more."""
    name, recording = f"event loops late by less than {MAX_LAG_MS} ms (p99)", evidence.recording
    every = list(_loops(recording))
    loops = [one for one in every if one.enough]
    brief = len(every) - len(loops)
    numbers: dict[str, Figure] = {"loops": len(loops), "too brief": brief}
    if recording.late_p99_ms is not None:
        numbers["the machine itself, p99 ms"] = recording.late_p99_ms
    blocked = sorted((one for one in every if one.blocked_ms >= MAX_BLOCK_MS), key=lambda one: -one.blocked_ms)
    if not loops and not blocked:
        return Judgement(name, "could not tell", "No node counted enough pulses of its loop.", numbers)
    worst = max(loops or every, key=lambda one: one.seen.p99_ms)
    numbers |= {"worst p99 ms": worst.seen.p99_ms, "of": worst.whose}
    numbers |= {"longest ms": max(one.seen.worst_ms for one in every)}
    late = sorted({one.whose for one in loops if one.seen.p99_ms >= MAX_LAG_MS})
    if late or blocked:
        said = [f"{listed(late)}: up to {worst.seen.p99_ms} ms."] if late else []
        said += [f"Stood still: {listed([one.text for one in blocked])}."] if blocked else []
        return _late_or_busy(name, said, recording, numbers)
    if uncounted := sorted({one.whose for one in every if one.uncounted}):
        finding = f"Answered for {UNCOUNTED_S:.0f} s or more, with a loop that was not counted: {listed(uncounted)}."
        return Judgement(name, "could not tell", finding, numbers)
    beside = f"; {brief} were not judged, as they were there too briefly." if brief else "."
    finding = f"The latest of {len(loops)} loops is {worst.whose}'s, with {worst.seen.p99_ms} ms{beside}"
    return Judgement(name, "passed", finding, numbers)


def _late_or_busy(name: str, said: list[str], recording: Recording, numbers: dict[str, Figure]) -> Judgement:
    busy = recording.late_p99_ms is None or recording.late_p99_ms > MAX_MACHINE_LATE_MS
    if busy and not recording.core_waits_known:
        said = [*said, f"But the machine was busy: it woke a sleeper {_late(recording)}."]
        return Judgement(name, "could not tell", " ".join(said), numbers)
    return Judgement(name, "failed", " ".join(said), numbers)


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


def _loops(recording: Recording) -> Iterator[_Loop]:
    slowed = {plan.name for plan in recording.scenario.nodes() if plan.nice}
    for node in recording.nodes:
        if node.role == "hostile" or node.name in slowed:
            continue
        for life in node.lives:
            if life.status:
                answered_ms = (life.status_at_ms or life.started_ms) - life.started_ms
                yield _Loop(
                    node.name, life.status.details.discovery.loop, _stops_ms(recording, node, life), answered_ms
                )


def _stops_ms(recording: Recording, node: NodeRecord, life: Life) -> list[float]:
    """For how long a life was stopped, each time: as one where there was hardly a moment in between."""
    last_ms = life.ended_ms or recording.ended_ms or life.started_ms
    stretches: list[tuple[float, float]] = []
    for begin_ms, end_ms in stopped_spells(recording, node):
        begin, end = float(max(begin_ms, life.started_ms)), float(min(end_ms, last_ms))
        if begin >= end:
            continue
        if stretches and begin - stretches[-1][1] < AT_ONCE_MS:
            begin = stretches.pop()[0]
        stretches.append((begin, end))
    return [end - begin for begin, end in stretches]


def _late(recording: Recording) -> str:
    return "at unknown times" if recording.late_p99_ms is None else f"{recording.late_p99_ms} ms late (p99)"

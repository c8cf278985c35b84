"""Oracles about the nodes' processes: event loops that are punctual, and nothing left behind.

What they take of the machine is for simnet.oracles.growth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
SURE_PULSES: Final = 1200
"""Five minutes: a dozen may be late there. Of a briefer life more may be, as it starts: what was kept is read again."""
UNCOUNTED_S: Final = 120.0
"""Whoever answered for so long has a loop that was counted."""
AT_ONCE_MS: Final = 2000
"""Between two stops; a loop may not come to run in between, and then is late by both."""


@dataclass(frozen=True)
class _Loop:
    """One network process's."""

    whose: str
    role: str
    seen: LoopSeen
    stops_ms: list[float]
    """For how long it was stopped, each time."""
    answered_ms: int

    @property
    def enough(self) -> bool:
        return self.seen.pulses >= MIN_PULSES * (1 + len(self.stops_ms))

    @property
    def long(self) -> bool:
        return self.seen.pulses >= SURE_PULSES + MIN_PULSES * len(self.stops_ms)

    @property
    def late(self) -> bool:
        return self.seen.p99_ms >= MAX_LAG_MS

    @property
    def surely_late(self) -> bool:
        """Half of all pulses are no start."""
        return self.late and (self.long or self.seen.p50_ms >= MAX_LAG_MS)

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
    starting = [one for one in loops if one.late and not one.surely_late]
    numbers |= {"late in a brief life": len(starting)} if starting else {}
    late = sorted({one.whose for one in loops if one.surely_late})
    if late or blocked:
        most_ms = max((one.seen.p99_ms for one in loops if one.surely_late), default=0)
        said = [f"{listed(late)}: up to {most_ms} ms."] if late else []
        said += [f"Stood still: {listed([one.text for one in blocked])}."] if blocked else []
        return _late_or_busy(name, said, recording, numbers)
    if uncounted := sorted({one.whose for one in every if one.uncounted}):
        finding = f"Answered for {UNCOUNTED_S:.0f} s or more, with a loop that was not counted: {listed(uncounted)}."
        return Judgement(name, "could not tell", finding, numbers)
    if unclear := _late_in_brief_lives(starting, loops):
        return Judgement(name, "could not tell", unclear, numbers)
    judged = [one for one in loops if one not in starting]
    worst = max(judged, key=lambda one: one.seen.p99_ms)
    finding = f"The latest of {len(judged)} loops is {worst.whose}'s, with {worst.seen.p99_ms} ms"
    if starting:
        finding += f"; {len(starting)} were late in lives of less than {SURE_PULSES} pulses, and longer ones not"
    beside = f"; {brief} were not judged, as they were there too briefly." if brief else "."
    return Judgement(name, "passed", finding + beside, numbers)


def _late_in_brief_lives(starting: Sequence[_Loop], loops: Sequence[_Loop]) -> str:
    """Whose loops were late, in words, where no longer life of the same role tells that this ends with the start.

    No longer one is late: that has failed already.
    """
    punctual = {one.role for one in loops if one.long}
    whose = sorted({one.whose for one in starting if one.role not in punctual})
    if not whose:
        return ""
    most_ms = max(one.seen.p99_ms for one in starting if one.role not in punctual)
    return f"{listed(whose)}: up to {most_ms} ms in lives of less than {SURE_PULSES} pulses, perhaps as they started."


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
                seen, stops_ms = life.status.details.discovery.loop, _stops_ms(recording, node, life)
                yield _Loop(node.name, node.role, seen, stops_ms, answered_ms)


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

"""For how long batches were not made although all that they were to hold lay there.

Two things tell it: what the trainer signed between (since then it lay there at the latest), and when the last thing was
signed that a batch waited for. The second also has its way to the trainer in it, and is asked only where nothing struck
that way. Batches that neither tells of are counted, not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simnet.oracles.books import Books, StepSeen
from simnet.oracles.judgement import Evidence
from simnet.oracles.undisturbed import Span, shaken, undisturbed

MIN_IDLE_S: Final = 5.0
"""A trainer needs a moment to hear of what was accepted, and longer on a machine that is busy."""
MAX_IDLE_S: Final = 60.0
MAX_IDLE_SHARE: Final = 0.1
"""Whole batches that were not made for so long in all, and for so much of the run, were forgotten."""
MIN_TIMED_SHARE: Final = 0.25
"""Of the batches: of a run in which fewer could be timed, nothing is claimed."""


@dataclass(frozen=True)
class Idle:
    """What is known of the time for which batches lay there."""

    timed: int
    batches: int
    seconds: float
    """Of those that lay there for longer than a moment."""

    @property
    def is_known(self) -> bool:
        """Whether enough batches could be timed, if there are any."""
        return self.timed >= MIN_TIMED_SHARE * self.batches


def idle_of(evidence: Evidence, books: Books) -> Idle:
    """For how long batches lay there, but for what faults explain."""
    times = [one for one in _times_ms(evidence, books.steps) if one is not None]
    long_ms = sum(one for one in times if one > 1000 * MIN_IDLE_S)
    return Idle(len(times), len(books.steps), long_ms / 1000)


def is_too_long(idle: Idle, length_s: float) -> bool:
    """Whether batches lay there for more than what a run of that length has of it anyway."""
    return idle.seconds > max(MAX_IDLE_S, MAX_IDLE_SHARE * length_s)


def _times_ms(evidence: Evidence, steps: Sequence[StepSeen]) -> list[int | None]:
    """For each batch how long it lay there; None where that cannot be told."""
    recording = evidence.recording
    spans = [span for node in recording.nodes if node.role == "trainer" for span in undisturbed(node, recording)]
    ahead_ms = {
        plan.role: round(1000 * plan.clock_ahead_s) for plan in recording.scenario.nodes() if plan.clock_ahead_s
    }
    found = [_since_ready_ms(step, spans, ahead_ms.get("trainer", 0)) for step in steps]
    if ahead_ms.keys() & {"trainer", "validator"}:
        return found  # there is no common clock
    blows = shaken(recording, ("relay", "validator"))
    made_ms = {step.step: step.committed_ms for step in steps}
    for at, step in enumerate(steps):
        since_due = _since_due_ms(step, made_ms.get(step.step - 1), spans, blows)
        found[at] = max((one for one in (found[at], since_due) if one is not None), default=None)
    return found


def _since_ready_ms(step: StepSeen, spans: Sequence[Span], ahead_ms: int) -> int | None:
    """What the trainer's own entries show; its clock was ahead by so much from the start."""
    if step.ready_ms is None or not _is_within((step.ready_ms - ahead_ms, step.committed_ms - ahead_ms), spans):
        return None
    return step.idle_ms


def _since_due_ms(step: StepSeen, before_ms: int | None, spans: Sequence[Span], blows: Sequence[Span]) -> int | None:
    """Since the last thing was signed that it waited for, in a life in which the trainer made the batch before, too."""
    if step.due_ms is None or step.due_ms > step.committed_ms:
        return None
    since_ms = step.due_ms if before_ms is None else min(step.due_ms, before_ms)
    if not _is_within((since_ms, step.committed_ms), spans):
        return None
    on_its_way = (step.due_ms, step.committed_ms)
    return None if any(_overlap(on_its_way, blow) for blow in blows) else step.committed_ms - step.due_ms


def _is_within(span: Span, spans: Sequence[Span]) -> bool:
    return any(begin_ms <= span[0] and span[1] <= end_ms for begin_ms, end_ms in spans)


def _overlap(one: Span, other: Span) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]

"""Oracles about the course of the run: it goes on, with fresh rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from simnet.oracles.excuses import explained_share, own_times_ms, unexplained_ms
from simnet.oracles.judgement import Evidence, Judgement, no_books

MIN_PAUSE_S: Final = 60.0
PAUSE_FACTOR: Final = 10.0
"""A pause is long beyond so many times the usual one, and beyond `MIN_PAUSE_S`."""
FIRST_STEP_S: Final = 600.0
"""The first step may take so much longer: programs, models and engines are loaded before it, all at the same time."""


def steps_advance(evidence: Evidence) -> Judgement:
    """Steps follow one another to the last without a gap, and no pause is long beyond what faults explain of it."""
    name, recording, books = "steps advance", evidence.recording, evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    trained = [(step.step, step.trained_ms) for step in books.steps if step.trained_ms is not None]
    if not trained:
        cut_off = recording.outcome in ("interrupted", "failed")
        return Judgement(name, "could not tell" if cut_off else "failed", "No step was trained.", {"steps": 0})
    pauses, limit_ms = _pauses(evidence, [at for _, at in trained])
    long = [one for one in pauses if _is_long(one, evidence, limit_ms)]
    longest_s = max((one.ms for one in pauses[1:]), default=0.0) / 1000
    share = _explained_percent(evidence, pauses, limit_ms)
    numbers = {
        "steps": len(trained),
        "first after s": round(pauses[0].ms / 1000, 1),
        "longest pause s": round(longest_s, 1),
        "limit s": round(limit_ms / 1000),
        "explained by faults %": share,
    }
    if [step for step, _ in trained] != list(range(len(trained))):
        return Judgement(name, "failed", "The ledger's trained steps have a gap.", numbers)
    if evidence.over and len(trained) != books.total_steps:
        finding = f"The run is said to have finished, and {len(trained)} of {books.total_steps} steps were trained."
        return Judgement(name, "failed", finding, numbers)
    if long:
        at_s = round((long[0].begin_ms - recording.started_ms) / 1000)
        finding = (
            f"Nothing was trained for {long[0].ms / 1000:.0f} s from {at_s} s on, and no fault explains that long."
        )
        return Judgement(name, "failed", finding, numbers)
    explained = f" Faults would explain a pause in {share:.0f} % of the time." if share else ""
    finding = f"{len(trained)} steps; the longest pause was {longest_s:.1f} s.{explained}"
    return Judgement(name, "passed", finding, numbers)


def _is_long(pause: _Pause, evidence: Evidence, limit_ms: float) -> bool:
    """Beyond what faults explain of it; which is asked of few, as there is a pause for each step."""
    most_ms = limit_ms + pause.spare_ms
    return pause.ms > most_ms and unexplained_ms(evidence, *pause.span, limit_ms=limit_ms) > most_ms


def _explained_percent(evidence: Evidence, pauses: Sequence[_Pause], limit_ms: float) -> float:
    """Of the time from the first pause's begin to the last one's end."""
    begin_ms, end_ms = pauses[0].begin_ms, pauses[-1].end_ms
    return round(100 * explained_share(evidence, begin_ms, end_ms, limit_ms=limit_ms), 1)


def staleness_within_bound(evidence: Evidence) -> Judgement:
    """No batch holds a rollout of a policy older than the manifest allows, or newer than its step."""
    name, books = "staleness within bound", evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    known = {one.id: one for one in books.submissions}
    ages = [
        (step.step - known[key].checkpoint_step, known[key], step.step)
        for step in books.steps
        for key in step.submissions
        if key in known
    ]
    if not ages:
        return Judgement(name, "could not tell", "No batch was made.", {"bound": books.max_staleness})
    wrong = [(one, step) for age, one, step in ages if not 0 <= age <= books.max_staleness]
    oldest = max(age for age, _, _ in ages)
    mean = sum(age * one.rollouts for age, one, _ in ages) / max(1, sum(one.rollouts for _, one, _ in ages))
    numbers = {"bound": books.max_staleness, "oldest": oldest, "mean": round(mean, 2), "outside": len(wrong)}
    if wrong:
        one, step = wrong[0]
        finding = f"Step {step} trains on policy {one.checkpoint_step}: {one.id[:12]}, and {len(wrong) - 1} more."
        return Judgement(name, "failed", finding, numbers)
    finding = f"The oldest was {oldest} of {books.max_staleness} allowed, the mean {mean:.1f}."
    return Judgement(name, "passed", finding, numbers)


@dataclass(frozen=True)
class _Pause:
    """From one trained step to the next, by the simulation's clock."""

    begin_ms: float
    end_ms: float
    spare_ms: float = 0.0

    @property
    def span(self) -> tuple[float, float]:
        return self.begin_ms, self.end_ms

    @property
    def ms(self) -> float:
        return self.end_ms - self.begin_ms


def _pauses(evidence: Evidence, trained_ms: list[int]) -> tuple[list[_Pause], float]:
    """The time before the first step, the pauses that follow, and what is long for one of those (ms)."""
    recording = evidence.recording
    own_ms = own_times_ms(recording, trained_ms)
    later = [_Pause(*span) for span in pairwise([*own_ms, *([] if evidence.over else [recording.closed_ms])])]
    usual_s = median(one.ms for one in later) / 1000 if len(later) >= 3 else 0.0
    first = _Pause(_ready_ms(evidence), own_ms[0], 1000 * FIRST_STEP_S)
    return [first, *later], 1000 * max(MIN_PAUSE_S, PAUSE_FACTOR * usual_s)


def _ready_ms(evidence: Evidence) -> int:
    """When everybody had been started without whom there is no step: some join later by plan."""
    recording, quorum = evidence.recording, evidence.books.quorum if evidence.books else 1
    ready_ms = [recording.started_ms]
    for role in ("trainer", "relay", "validator", "inference"):
        nodes = [node for node in recording.nodes if node.role == role and not node.cheat and node.lives]
        starts = sorted(node.lives[0].started_ms for node in nodes)
        wanted = quorum if role == "validator" else 1
        ready_ms += starts[wanted - 1 : wanted]
    return max(ready_ms)

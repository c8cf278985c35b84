"""Oracles about the course of the run: it goes on, with fresh rollouts, and uses each one once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import median
from typing import Final

from simnet.oracles.books import Books, SubmissionSeen
from simnet.oracles.excuses import unexplained_ms
from simnet.oracles.judgement import Evidence, Judgement, listed, no_books
from simnet.oracles.promises import Promise

MIN_PAUSE_S: Final = 60.0
PAUSE_FACTOR: Final = 10.0
"""A pause is long beyond so many times the usual one, and beyond `MIN_PAUSE_S`."""
ON_ITS_WAY_S: Final = 60.0
"""What relays received less than this before a simulation was cut off may still have been on its way."""


def steps_advance(evidence: Evidence) -> Judgement:
    """Steps follow one another without a gap, and no pause is long beyond what faults explain of it."""
    name, recording, books = "steps advance", evidence.recording, evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    trained = [(step.step, step.trained_ms) for step in books.steps if step.trained_ms is not None]
    end_ms = recording.over_ms or recording.ended_ms or recording.started_ms
    if not trained:
        cut_off = recording.outcome in ("interrupted", "failed")
        return Judgement(name, "could not tell" if cut_off else "failed", "No step was trained.", {"steps": 0})
    times = [at for _, at in trained] + ([] if evidence.over else [end_ms])
    gaps = [(later - before, before) for before, later in pairwise(times)]
    limit_ms = 1000 * max(MIN_PAUSE_S, PAUSE_FACTOR * _usual_s(gaps))
    long = [gap for gap in gaps if unexplained_ms(evidence, gap[1], gap[1] + gap[0], limit_ms=limit_ms) > limit_ms]
    longest_ms = max((gap for gap, _ in gaps), default=0)
    numbers = {"steps": len(trained), "longest pause s": round(longest_ms / 1000, 1), "limit s": round(limit_ms / 1000)}
    if [step for step, _ in trained] != list(range(len(trained))):
        return Judgement(name, "failed", "The ledger's trained steps have a gap.", numbers)
    if long:
        at_s = round((long[0][1] - recording.started_ms) / 1000)
        finding = (
            f"Nothing was trained for {long[0][0] / 1000:.0f} s from {at_s} s on, and no fault explains that long."
        )
        return Judgement(name, "failed", finding, numbers)
    return Judgement(name, "passed", f"{len(trained)} steps; the longest pause was {longest_ms / 1000:.1f} s.", numbers)


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
    mean = sum(age * one.rollouts for age, one, _ in ages) / sum(one.rollouts for _, one, _ in ages)
    numbers = {"bound": books.max_staleness, "oldest": oldest, "mean": round(mean, 2), "outside": len(wrong)}
    if wrong:
        one, step = wrong[0]
        finding = f"Step {step} trains on policy {one.checkpoint_step}: {one.id[:12]}, and {len(wrong) - 1} more."
        return Judgement(name, "failed", finding, numbers)
    finding = f"The oldest was {oldest} of {books.max_staleness} allowed, the mean {mean:.1f}."
    return Judgement(name, "passed", finding, numbers)


def no_rollout_lost_or_trained_twice(evidence: Evidence) -> Judgement:
    """Each accepted submission is trained at most once, and none goes missing between the relays and the ledger."""
    name, books = "each rollout trained once, none lost", evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    uses = Counter(key for step in books.steps for key in step.submissions)
    accepted = [one for one in books.submissions if one.state == "accepted"]
    strangers = sorted(uses.keys() - {one.id for one in books.submissions})
    twice = sorted(key for key, count in uses.items() if count > 1)
    lost = _lost(evidence, books)
    untrained = _untrained(evidence, books)
    numbers = {
        "accepted": len(accepted),
        "trained": len(uses),
        "too old": sum(_too_old(one, books) for one in accepted),
        "left over": sum(one.used_in is None and not _too_old(one, books) for one in accepted),
        "twice": len(twice),
        "lost": len(lost) + len(untrained) + len(strangers),
    }
    if twice or lost or untrained or strangers:
        return Judgement(name, "failed", _what_went_wrong(twice, lost, untrained, strangers), numbers)
    if not accepted:
        return Judgement(name, "could not tell", "Nothing was accepted.", numbers)
    finding = (
        f"{len(accepted)} submissions accepted: {numbers['trained']} trained once, {numbers['too old']} too old by "
        f"then, {numbers['left over']} more than the steps needed."
    )
    return Judgement(name, "passed", finding, numbers)


def _usual_s(gaps: list[tuple[int, int]]) -> float:
    return median(gap for gap, _ in gaps) / 1000 if len(gaps) >= 3 else 0.0


def _lost(evidence: Evidence, books: Books) -> list[Promise]:
    """What validators accepted, or relays dropped after a receipt, of an honest contributor's, and the ledger lacks."""
    known = {one.id for one in books.submissions}
    standing = {account.peer_id: account.standing for account in books.accounts}
    over_ms = evidence.recording.over_ms or evidence.recording.ended_ms or 0
    return [
        promise
        for promise in books.promises
        if promise.id not in known
        and (promise.accepts >= books.quorum or promise.dropped)
        and promise.contributor in evidence.honest
        and standing.get(promise.contributor, "active") == "active"
        and (evidence.over or promise.received_ms < over_ms - 1000 * ON_ITS_WAY_S)
    ]


def _untrained(evidence: Evidence, books: Books) -> list[str]:
    """What is in a batch that was never trained, although the run has finished."""
    if not evidence.over:
        return []
    return [key for step in books.steps if step.trained_ms is None for key in step.submissions]


def _too_old(one: SubmissionSeen, books: Books) -> bool:
    trained = sum(step.trained_ms is not None for step in books.steps)
    return one.used_in is None and one.checkpoint_step < min(trained, books.total_steps - 1) - books.max_staleness


def _what_went_wrong(twice: list[str], lost: list[Promise], untrained: list[str], strangers: list[str]) -> str:
    said = (
        ("trained twice", twice),
        ("received by a relay and missing from the ledger", [promise.id for promise in lost]),
        ("in a batch that was never trained", untrained),
        ("trained but not in the ledger", strangers),
    )
    texts = (f"{len(keys)} {what}: {listed([key[:12] for key in keys], limit=2)}" for what, keys in said if keys)
    return "; ".join(texts) + "."

"""The oracle about rollouts: each one is trained once, in its turn, and none goes missing on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Final

from simnet.oracles.batch_order import PassedOver
from simnet.oracles.books import Books, SubmissionSeen
from simnet.oracles.idle import idle_of, is_too_long
from simnet.oracles.inputs import missing_disks
from simnet.oracles.judgement import Evidence, Figure, Judgement, listed, no_books
from simnet.oracles.promises import Promise
from simnet.oracles.undisturbed import passed_step_ms

ON_ITS_WAY_S: Final = 60.0
"""What relays received less than this before a simulation was cut off may still have been on its way."""


def no_rollout_lost_or_trained_twice(evidence: Evidence) -> Judgement:
    """Each accepted submission is trained at most once, in its turn, and none goes missing."""
    name, books = "each rollout trained once, none lost", evidence.books
    if books is None or books.problem:
        return no_books(name, evidence)
    missing = missing_disks(evidence, books)
    accepted = [one for one in books.submissions if one.state == "accepted"]
    wrong = _what_went_wrong(evidence, books, stores_known=not any(one.startswith("the store") for one in missing))
    idle = idle_of(evidence, books)
    numbers = _numbers(accepted, books) | {what: len(keys) for what, keys in wrong}
    numbers |= {"batches timed": idle.timed, "idle s": round(idle.seconds, 1)}
    found = [f"{len(keys)} {_WORDS[what]}: {listed(keys, limit=2)}" for what, keys in wrong if keys]
    if is_too_long(idle, _length_s(evidence)):
        found.append(f"for {idle.seconds:.0f} s no batch was made though all that it was to hold lay there")
    if found:
        return Judgement(name, "failed", "; ".join(found) + ".", numbers)
    if missing:
        finding = f"Not looked at, as it is missing or cannot be read: {listed(missing)}. In the rest nothing is lost."
        return Judgement(name, "could not tell", finding, numbers)
    if not accepted:
        return Judgement(name, "could not tell", "Nothing was accepted.", numbers)
    if not idle.is_known:
        finding = f"Only {idle.timed} of {idle.batches} batches could be timed: whether others lay there is not known."
        return Judgement(name, "could not tell", f"{finding} In the rest nothing is wrong.", numbers)
    finding = (
        f"{len(accepted)} submissions accepted: {numbers['trained']} trained once, {numbers['too old']} too old by "
        f"then, {numbers['left over']} more than the steps needed."
    )
    return Judgement(name, "passed", finding, numbers)


_WORDS: Final = {
    "twice": "trained twice",
    "lost": "received by a relay and missing from the ledger",
    "never trained": "in a batch that was never trained",
    "strangers": "trained but not in the ledger",
    "passed over": "accepted in time and passed over for later ones",
}


def _what_went_wrong(evidence: Evidence, books: Books, *, stores_known: bool) -> list[tuple[str, list[str]]]:
    """The beginnings of submissions' ids, by the key of what befell them in `_WORDS`."""
    uses = Counter(key for step in books.steps for key in step.submissions)
    found: dict[str, Sequence[str]] = {
        "twice": sorted(key for key, count in uses.items() if count > 1),
        "lost": [promise.id for promise in _lost(evidence, books, stores_known=stores_known)],
        "never trained": _untrained(evidence, books),
        "strangers": sorted(uses.keys() - {one.id for one in books.submissions}),
        "passed over": _passed_over(books.passed_over),
    }
    return [(what, [key[:12] for key in keys]) for what, keys in found.items()]


def _numbers(accepted: Sequence[SubmissionSeen], books: Books) -> dict[str, Figure]:
    trained = sum(step.trained_ms is not None for step in books.steps)
    oldest = min(trained, books.total_steps - 1) - books.max_staleness
    unused = [one for one in accepted if one.used_in is None]
    return {
        "accepted": len(accepted),
        "trained": len(set(chain.from_iterable(step.submissions for step in books.steps))),
        "too old": sum(one.checkpoint_step < oldest for one in unused),
        "left over": sum(one.checkpoint_step >= oldest for one in unused),
        "promised": len(books.promises),
    }


def _lost(evidence: Evidence, books: Books, *, stores_known: bool) -> list[Promise]:
    """What validators accepted, or relays dropped after a receipt, of an honest contributor's, and the ledger lacks."""
    known = {one.id for one in books.submissions}
    active = books.active(evidence.honest)
    return [
        promise
        for promise in books.promises
        if promise.id not in known
        and (promise.accepts >= books.quorum or (promise.dropped and stores_known))
        and promise.contributor in active
        and (evidence.over or _had_time(evidence, books, promise))
    ]


def _had_time(evidence: Evidence, books: Books, promise: Promise) -> bool:
    """Whether a promise was given long before the run was cut off.

    The time in a receipt is a relay's. Where relays' clocks are put wrong it says nothing, and our own clock has to say
    that the submission's policy was too old for any batch since long.
    """
    until_ms = evidence.recording.closed_ms - 1000 * ON_ITS_WAY_S
    if not _relays_clocks_wrong(evidence):
        return promise.received_ms < until_ms
    too_old_ms = passed_step_ms(evidence.recording, promise.checkpoint_step + books.max_staleness)
    return too_old_ms is not None and too_old_ms < until_ms


def _relays_clocks_wrong(evidence: Evidence) -> bool:
    relays = {node.name for node in evidence.recording.nodes if node.role == "relay"}
    ahead = {plan.name for plan in evidence.recording.scenario.nodes() if plan.clock_ahead_s}
    return bool(relays & (ahead | {one.node for one in evidence.recording.faults if one.action == "clock"}))


def _untrained(evidence: Evidence, books: Books) -> list[str]:
    """What is in a batch that was never trained, although the run has finished."""
    if not evidence.over:
        return []
    return [key for step in books.steps if step.trained_ms is None for key in step.submissions]


def _passed_over(found: Sequence[PassedOver]) -> list[str]:
    """Each once, however many batches left it out."""
    return list(dict.fromkeys(one.id for one in found))


def _length_s(evidence: Evidence) -> float:
    return (evidence.recording.closed_ms - evidence.recording.started_ms) / 1000

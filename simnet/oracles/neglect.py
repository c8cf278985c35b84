"""Honest contributors that get nothing for their work: kept out, never judged, or turned down again and again.

Being slow is no defect, and a fault explains what it struck: only a node counts that ran undisturbed for long beside
others whose work was settled meanwhile, and only work that was handed in long before the end, while validators ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simnet.gather import NodeRecord
from simnet.oracles.books import Books, SubmissionSeen
from simnet.oracles.judgement import Evidence
from simnet.oracles.undisturbed import Span, longest, passed_step_ms, undisturbed

MIN_ALONE_S: Final = 120.0
SLOWER_FACTOR: Final = 4.0
"""A node is kept out when others needed so much less time for their first work."""
MIN_STEPS: Final = 5
MIN_SETTLED: Final = 10
"""Of others, meanwhile."""
LATE: Final = frozenset({"stale-step", "future-step", "after-refused"})
"""Why relays refuse what a slow node hands in; the last is what follows on a refused one."""

OLD_STEPS: Final = 10
OLD_S: Final = 180.0
MIN_JUDGED_S: Final = 120.0
"""For so long a quorum of honest validators must have run since work was handed in."""
MANY: Final = 10
MANY_SHARE: Final = 0.05
"""Of what was settled."""

_SETTLED: Final = ("accepted", "rejected")


@dataclass(frozen=True)
class Work:
    """Something handed in by an honest contributor, as far as it came."""

    step: int
    checkpoint_step: int
    state: str


@dataclass(frozen=True)
class Neglect:
    """What became of honest contributors' work."""

    kept_out: list[str]
    """Nodes that got nothing settled in all the time that they ran undisturbed."""
    unclear: list[str]
    """Nodes that got nothing settled and were too slow, too briefly there, or disturbed."""
    settled: int
    unsettled: list[Work]
    old: list[Work]
    """Of the unsettled: handed in long before the end."""
    judged: bool
    """Whether validators that could have settled the old ones were there."""

    def is_much(self, count: int) -> bool:
        """Whether so many submissions are more than what faults leave behind."""
        return count > max(MANY, MANY_SHARE * self.settled)


def neglect_of(evidence: Evidence, books: Books) -> Neglect:
    """What became of honest contributors' work, from the ledger and the relays' promises."""
    settled = [one for one in books.submissions if one.state in _SETTLED]
    idle = [node for peer, node in evidence.honest.items() if node.lives and not _of(settled, peer)]
    kept_out = [node.name for node in idle if _is_kept_out(node, evidence, books, settled)]
    unsettled = list(_unsettled(evidence, books))
    old = [one for one in unsettled if _is_old(one, evidence, books)]
    return Neglect(
        kept_out=kept_out,
        unclear=[node.name for node in idle if node.name not in kept_out],
        settled=sum(one.contributor in evidence.honest for one in settled),
        unsettled=unsettled,
        old=old,
        judged=bool(old) and _validators_were_there(evidence, books, max(old, key=lambda one: one.checkpoint_step)),
    )


def _of(submissions: Sequence[SubmissionSeen], peer: str) -> list[SubmissionSeen]:
    return [one for one in submissions if one.contributor == peer]


def _is_kept_out(node: NodeRecord, evidence: Evidence, books: Books, settled: Sequence[SubmissionSeen]) -> bool:
    """Whether a node was there for long enough, and others got on while it did not."""
    span = longest(undisturbed(node, evidence.recording))
    others = [one for one in settled if one.contributor in evidence.honest and one.judged_ms is not None]
    meanwhile = sum(_is_in(one.judged_ms, span) for one in others)
    steps = sum(_is_in(step.trained_ms, span) for step in books.steps)
    return (
        (span[1] - span[0]) / 1000 >= max(MIN_ALONE_S, SLOWER_FACTOR * _slowest_start_s(evidence, others))
        and steps >= MIN_STEPS
        and meanwhile >= MIN_SETTLED
        and not _is_slow(node, evidence, books)
    )


def _is_slow(node: NodeRecord, evidence: Evidence, books: Books) -> bool:
    """Whether a scenario slows a node, or relays did not take its work because it came late."""
    slowed = any(plan.nice for plan in evidence.recording.scenario.nodes() if plan.name == node.name)
    refused = set().union(*(life.status.rejected for life in node.lives if life.status))
    handed_in = any(promise.contributor == node.peer_id for promise in books.promises)
    return slowed or (bool(refused & LATE) and not handed_in)


def _slowest_start_s(evidence: Evidence, settled: Sequence[SubmissionSeen]) -> float:
    """How long the slowest of those that got on needed from its start to its first settled submission."""
    firsts = [
        (min(one.judged_ms or 0 for one in own) - node.lives[0].started_ms) / 1000
        for peer, node in evidence.honest.items()
        if node.lives and (own := _of(settled, peer))
    ]
    return max(firsts, default=0.0)


def _is_in(at_ms: int | None, span: Span) -> bool:
    return at_ms is not None and span[0] <= at_ms <= span[1]


def _unsettled(evidence: Evidence, books: Books) -> Sequence[Work]:
    """What the ledger has undecided, and what relays gave a receipt for and nobody judged."""
    known = {one.id for one in books.submissions}
    honest = books.active(evidence.honest)
    written = [
        Work(one.step, one.checkpoint_step, one.state)
        for one in books.submissions
        if one.contributor in honest and one.state not in _SETTLED
    ]
    return written + [
        Work(one.step, one.checkpoint_step, "submitted")
        for one in books.promises
        if one.contributor in honest and one.id not in known
    ]


def _is_old(one: Work, evidence: Evidence, books: Books) -> bool:
    newest = max((step.step for step in books.steps), default=0)
    since_ms = passed_step_ms(evidence.recording, one.checkpoint_step + books.max_staleness)
    return (
        newest - one.step >= OLD_STEPS
        and since_ms is not None
        and evidence.recording.closed_ms - since_ms >= 1000 * OLD_S
    )


def _validators_were_there(evidence: Evidence, books: Books, youngest: Work) -> bool:
    since_ms = passed_step_ms(evidence.recording, youngest.checkpoint_step + books.max_staleness) or 0
    spans = [
        longest([(max(begin_ms, since_ms), end_ms) for begin_ms, end_ms in undisturbed(node, evidence.recording)])
        for node in evidence.recording.nodes
        if node.role == "validator" and not node.cheat
    ]
    return sum(end_ms - begin_ms >= 1000 * MIN_JUDGED_S for begin_ms, end_ms in spans) >= books.quorum

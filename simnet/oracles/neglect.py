"""Honest contributors that get nothing for their work: kept out, shut out later, never judged, or turned down often.

Being slow is no defect, and a fault explains what it struck: only a node counts that ran undisturbed for long beside
others whose work was settled meanwhile, and only work that was handed in long before the end, while validators ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from simnet.gather import NodeRecord
from simnet.oracles.books import Books, SubmissionSeen
from simnet.oracles.excuses import overlap_ms
from simnet.oracles.judgement import Evidence
from simnet.oracles.undisturbed import Span, longest, passed_step_ms, undisturbed
from simnet.scenario import NodePlan
from simnet.waits import spells

MIN_ALONE_S: Final = 120.0
SLOWER_FACTOR: Final = 4.0
"""A node is kept out when others needed so much less time for their first work."""
MIN_STEPS: Final = 5
MIN_SETTLED: Final = 10
"""Of others, meanwhile."""
MIN_QUIET_S: Final = 300.0
"""So long in all a node that had got on must get nothing more, in stretches of which each would do for one that never
did; at its own pace it would have had `MIN_SETTLED`."""
MIN_AT_WORK_SHARE: Final = 0.1
"""Of that time; one that waits for the next step for nearly all of it hands in nothing by rights."""
PAUSES: Final = ("starting", "enough rollouts", "this node's share", "midnight UTC", "room on the disk")
"""Words of who can do nothing for want of work, room or allowance; the first also for what is not known of a begin."""
FETCHES: Final = "from the relays"
"""Word of who waits for a policy: no proof where the scenario holds up what the node downloads."""
DOWNLOAD_LIMITS: Final = ("download_bytes_per_s", "download_bytes_per_day")
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
    shut_out: list[str]
    """Nodes that had got on and got nothing more settled for long, while they worked undisturbed."""
    quiet: list[str]
    """The like of these, but that they came late or had hardly anything to do."""
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
    honest = books.active(evidence.honest)
    quiet = {
        node.name: (node, stretches)
        for peer, node in evidence.honest.items()
        if peer in honest and (stretches := _quiet(node, evidence, books, settled))
    }
    shut_out = [name for name, (node, stretches) in quiet.items() if not _has_cause(node, stretches, evidence)]
    unsettled = list(_unsettled(evidence, books))
    old = [one for one in unsettled if _is_old(one, evidence, books)]
    return Neglect(
        kept_out=kept_out,
        unclear=[node.name for node in idle if node.name not in kept_out],
        shut_out=shut_out,
        quiet=[name for name in quiet if name not in shut_out],
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
    others = _timed(settled, evidence)
    meanwhile = sum(_is_in(one.judged_ms, span) for one in others)
    steps = sum(_is_in(step.trained_ms, span) for step in books.steps)
    return (
        span[1] - span[0] >= _least_ms(evidence, others)
        and steps >= MIN_STEPS
        and meanwhile >= MIN_SETTLED
        and not _is_slow(node, evidence, books)
    )


def _timed(settled: Sequence[SubmissionSeen], evidence: Evidence) -> list[SubmissionSeen]:
    """Those of honest contributors of which is known when they were settled."""
    return [one for one in settled if one.contributor in evidence.honest and one.judged_ms is not None]


def _least_ms(evidence: Evidence, settled: Sequence[SubmissionSeen]) -> float:
    """For so long a node must run undisturbed at the least: whatever struck it, it may have to begin anew."""
    return 1000 * max(MIN_ALONE_S, SLOWER_FACTOR * _slowest_start_s(evidence, settled))


def _quiet(node: NodeRecord, evidence: Evidence, books: Books, settled: Sequence[SubmissionSeen]) -> list[Span]:
    """When a node that got on ran undisturbed and got nothing more, while others did; empty where that was not long."""
    own = _of(settled, node.peer_id)
    known_ms = [one.judged_ms for one in own if one.judged_ms is not None]
    end_ms = evidence.recording.closed_ms
    gaps = [gap for gap in pairwise(sorted([*known_ms, end_ms])) if _length_ms(gap) >= 1000 * MIN_QUIET_S]
    untold = [one for one in own if one.judged_ms is None]
    gaps = [gap for gap in gaps if not any(_is_in(at, gap) for one in untold for at in (one.made_ms, one.received_ms))]
    if not gaps:
        return []
    timed = _timed(settled, evidence)
    spans, least_ms = undisturbed(node, evidence.recording), _least_ms(evidence, timed)
    found = [(gap, [part for span in spans if _length_ms(part := _common(span, gap)) >= least_ms]) for gap in gaps]
    gap, stretches = max(found, key=lambda one: _sum_ms(one[1]))
    pace_per_ms = len(known_ms) / max(1, end_ms - node.lives[0].started_ms - _length_ms(gap))
    quiet_ms = _sum_ms(stretches)
    long = quiet_ms >= 1000 * MIN_QUIET_S and pace_per_ms * quiet_ms >= MIN_SETTLED
    others = [one for one in timed if one.contributor != node.peer_id]
    return stretches if long and _others_got_on(stretches, books, others) else []


def _others_got_on(stretches: Sequence[Span], books: Books, settled: Sequence[SubmissionSeen]) -> bool:
    """Whether meanwhile steps were trained, and those of whom something was settled had much of it on average."""
    meanwhile = [one for one in settled if any(_is_in(one.judged_ms, span) for span in stretches)]
    steps = sum(any(_is_in(step.trained_ms, span) for span in stretches) for step in books.steps)
    return steps >= MIN_STEPS and len(meanwhile) >= MIN_SETTLED * max(1, len({one.contributor for one in meanwhile}))


def _has_cause(node: NodeRecord, stretches: Sequence[Span], evidence: Evidence) -> bool:
    """Whether a node that gets nothing more may have no work to hand in, or hands it in late."""
    since_ms = stretches[0][0]
    pauses = (*PAUSES, FETCHES) if _is_held_up(node, evidence) else PAUSES
    late = any(reason in LATE and at_ms >= since_ms for life in node.lives for reason, at_ms in life.refused_ms.items())
    at_work = [
        (begin_ms, stop_ms)
        for begin_ms, stop_ms, _, what in spells(node, evidence.recording.closed_ms)
        if not any(words in what for words in pauses)
    ]
    share = sum(overlap_ms(at_work, *span) for span in stretches) / _sum_ms(stretches)
    return late or _is_slowed(node, evidence) or share < MIN_AT_WORK_SHARE


def _common(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _length_ms(span: Span) -> int:
    return span[1] - span[0]


def _sum_ms(spans: Sequence[Span]) -> int:
    return sum(_length_ms(span) for span in spans)


def _is_slowed(node: NodeRecord, evidence: Evidence) -> bool:
    return any(plan.nice for plan in _plans(node, evidence))


def _plans(node: NodeRecord, evidence: Evidence) -> list[NodePlan]:
    return [plan for plan in evidence.recording.scenario.nodes() if plan.name == node.name]


def _is_held_up(node: NodeRecord, evidence: Evidence) -> bool:
    """Whether a scenario gives a node a slow link or a limit, so that policies may come to it too late for its work."""
    return any(
        plan.link.down_mbit or plan.link.delay_ms or plan.link.loss or any(map(plan.settings.get, DOWNLOAD_LIMITS))
        for plan in _plans(node, evidence)
    )


def _is_slow(node: NodeRecord, evidence: Evidence, books: Books) -> bool:
    """Whether a scenario slows a node, or relays did not take its work because it came late."""
    slowed = _is_slowed(node, evidence)
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

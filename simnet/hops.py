"""How long a rollout and a checkpoint take from one place to the next, and how fast the run goes.

From the ledger's, the relays' and the logs' times. Clocks of several nodes meet here, and relays pass a checkpoint on
before they have all of it: what came before it was sent, by these times, is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from msgspec import Struct

from simnet.gather import NodeRecord, Recording
from simnet.oracles.books import Books, SubmissionSeen
from simnet.oracles.judgement import Evidence
from simnet.oracles.logs import CheckpointSeen

SPEED_BINS: Final = 40
MISSED_AFTER_S: Final = 60.0
"""A checkpoint that was published so shortly before the end may still have been on its way."""
STEPS_A_BIN: Final = 5
"""As many as there are usually, at least: fewer would show single steps and not a speed."""

Timed = Callable[[SubmissionSeen], int | None]


class Hop(Struct):
    """Seconds between two moments in the life of a rollout or a checkpoint."""

    what: str
    """`rollout` or `checkpoint`."""
    name: str
    count: int
    p50_s: float | None
    p99_s: float | None
    longest_s: float | None
    left_out: int = 0
    """What came before it was sent."""
    missing: int = 0
    """What some node that was there all the while never came to, nor to a newer one."""


class Speed(Struct):
    """What was trained in a piece of time."""

    from_s: float
    """After the start."""
    until_s: float
    steps: int
    rollouts: int
    tokens: int


class Throughput(Struct):
    """How fast the run went, from its first trained step's batch to its last."""

    steps_per_min: float | None = None
    rollouts_per_s: float | None = None
    tokens_per_s: float | None = None
    pieces: list[Speed] = []


def hops_of(evidence: Evidence) -> list[Hop]:
    """Every hop, in the order in which they are taken."""
    hops = _rollout_hops(evidence.books) if evidence.books else []
    return hops + _checkpoint_hops(evidence)


def throughput_of(evidence: Evidence) -> Throughput:
    """Trained rollouts and tokens over time; empty without two trained steps."""
    books = evidence.books
    if books is None:
        return Throughput()
    sizes = {one.id: (one.rollouts, one.tokens) for one in books.submissions}
    steps = [
        (step.trained_ms, [sizes[key] for key in step.submissions if key in sizes])
        for step in books.steps
        if step.trained_ms is not None
    ]
    if len(steps) < 2 or (span_s := (steps[-1][0] - steps[0][0]) / 1000) <= 0:
        return Throughput()
    later = [sizes for _, sizes in steps[1:]]  # the first one's work was done before the time that is looked at
    rollouts, tokens = (sum(pair[at] for sizes in later for pair in sizes) for at in (0, 1))
    return Throughput(
        steps_per_min=round(60 * len(later) / span_s, 2),
        rollouts_per_s=round(rollouts / span_s, 2),
        tokens_per_s=round(tokens / span_s, 1),
        pieces=_pieces(steps, evidence),
    )


def _pieces(steps: Sequence[tuple[int, list[tuple[int, int]]]], evidence: Evidence) -> list[Speed]:
    recording = evidence.recording
    end_ms = max(recording.ended_ms or 0, steps[-1][0] + 1)
    length_s = (end_ms - recording.started_ms) / 1000
    usual_s = median(later - before for (before, _), (later, _) in pairwise(steps)) / 1000
    width_s = max(1.0, STEPS_A_BIN * usual_s, length_s / SPEED_BINS)
    pieces = [Speed(i * width_s, (i + 1) * width_s, 0, 0, 0) for i in range(int(length_s / width_s) + 1)]
    for at_ms, sizes in steps:
        piece = pieces[max(0, min(len(pieces) - 1, int((at_ms - recording.started_ms) / 1000 / width_s)))]
        piece.steps += 1
        piece.rollouts += sum(rollouts for rollouts, _ in sizes)
        piece.tokens += sum(tokens for _, tokens in sizes)
    return pieces


def _rollout_hops(books: Books) -> list[Hop]:
    trained = {step.step: step.trained_ms for step in books.steps}

    def trained_ms(one: SubmissionSeen) -> int | None:
        return None if one.used_in is None else trained.get(one.used_in)

    moments: list[tuple[str, Timed]] = [
        ("made", lambda one: one.made_ms),
        ("received", lambda one: one.received_ms),
        ("judged", lambda one: one.judged_ms),
        ("trained", trained_ms),
    ]
    pairs = [*pairwise(moments), (moments[0], moments[-1])]
    return [
        _hop("rollout", f"{begin} → {end}", ((start(one), stop(one)) for one in books.submissions))
        for (begin, start), (end, stop) in pairs
    ]


def _checkpoint_hops(evidence: Evidence) -> list[Hop]:
    seen = evidence.checkpoints
    last = [_held_by_all(one, seen, evidence.recording) for one in seen]
    first = [min(one.at_relays.values(), default=None) for one in seen]
    published = [one.published_ms for one in seen]
    ways = (
        ("published → first relay", published, first),
        ("first relay → last relay", first, [max(one.at_relays.values(), default=None) for one in seen]),
        ("first relay → last node", first, last),
        ("published → last node", published, last),
    )
    hops = [_hop("checkpoint", name, zip(start, stop, strict=True)) for name, start, stop in ways if seen]
    for hop in hops[2:]:
        hop.missing = sum(_was_missed(one, seen, evidence.recording) for one in seen)
    return hops


def _held_by_all(one: CheckpointSeen, seen: Sequence[CheckpointSeen], recording: Recording) -> int | None:
    """When the last node that was there all the while held it, or a newer one in its place; None: not all came to."""
    times = []
    for node in _holders(recording):
        at_ms = _held_ms(node, one, seen)
        if at_ms is None and _was_there(node, one.published_ms, recording.closed_ms):
            return None
        if at_ms is not None and _was_there(node, one.published_ms, at_ms):
            times.append(at_ms)
    return max(times, default=None)


def _was_missed(one: CheckpointSeen, seen: Sequence[CheckpointSeen], recording: Recording) -> bool:
    """Whether a node never held it, nor a newer one, though it was there until the end and had the time."""
    end_ms = recording.closed_ms
    return end_ms - one.published_ms >= 1000 * MISSED_AFTER_S and any(
        _held_ms(node, one, seen) is None and _was_there(node, one.published_ms, end_ms) for node in _holders(recording)
    )


def _holders(recording: Recording) -> Iterator[NodeRecord]:
    """Nodes that are to hold every policy; of cheats some never want one, and an evicted node gets none."""
    for node in recording.nodes:
        if node.role in ("inference", "validator") and not node.cheat:
            yield node


def _held_ms(node: NodeRecord, one: CheckpointSeen, seen: Sequence[CheckpointSeen]) -> int | None:
    later = (other.held.get(node.name) for other in seen if other.step >= one.step)
    return min((at_ms for at_ms in later if at_ms is not None), default=None)


def _was_there(node: NodeRecord, from_ms: int, until_ms: int) -> bool:
    return any(
        life.started_ms <= from_ms and (life.ended_ms is None or life.ended_ms >= until_ms) for life in node.lives
    )


def _hop(what: str, name: str, times: Iterable[tuple[int | None, int | None]]) -> Hop:
    known = [(end - begin) / 1000 for begin, end in times if begin is not None and end is not None]
    durations = sorted(duration for duration in known if duration >= 0)
    return Hop(
        what=what,
        name=name,
        count=len(durations),
        p50_s=_share(durations, 0.5),
        p99_s=_share(durations, 0.99),
        longest_s=durations[-1] if durations else None,
        left_out=len(known) - len(durations),
    )


def _share(ordered: Sequence[float], share: float) -> float | None:
    """What this share of the values stays within (nearest rank)."""
    return ordered[max(0, min(len(ordered) - 1, -(-int(share * 1000) * len(ordered) // 1000) - 1))] if ordered else None

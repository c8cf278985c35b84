"""When a node ran with no fault upon it, and when the run came how far by the simulation's own clock.

For rules that hold something against a node: what it did while it was away, stopped, cut off or out of order, or had
just come back, says nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from simnet.faults import undoes
from simnet.gather import FaultMark, NodeRecord, Recording
from simnet.timeline import UNDO

RECOVERS_S: Final = 15.0
"""After a fault was undone it takes so long until a node has its connections again."""

GONE: Final = frozenset({"kill", "leave", "restart", "stop", "partition", "disk-full"})
"""What keeps a node from its work for as long as it lasts; the others slow or confuse it."""
TURNED_AWAY_S: Final = 60.0
"""So long after a node was gone everybody has turned to others."""

Span = tuple[int, int]


def undisturbed(node: NodeRecord, recording: Recording) -> list[Span]:
    """From when until when, in wall-clock milliseconds, a node ran and no fault struck it or had just struck it."""
    over_ms = recording.closed_ms
    spans = [(life.started_ms, min(life.ended_ms or over_ms, over_ms)) for life in node.lives]
    own = [fault for fault in recording.faults if fault.node == node.name]
    for begin_ms, end_ms in _ill(own, over_ms):
        spans = [part for span in spans for part in _without(span, begin_ms, end_ms)]
    return spans


def shaken(recording: Recording, roles: Collection[str]) -> list[Span]:
    """When what goes through nodes of these roles may have to wait: one was slow, had just gone or had just come back.

    Validators' clocks are right at all other times.
    """
    over_ms = recording.closed_ms
    found: list[Span] = []
    for node in recording.nodes:
        own = [fault for fault in recording.faults if fault.node == node.name] if node.role in roles else []
        for fault, (begin_ms, end_ms) in zip(own, _ill(own, over_ms), strict=True):
            passes = fault.action in GONE or (fault.action == "clock" and node.role == "relay")
            if passes and not undoes(fault):
                turned_ms, undone_ms = begin_ms + 1000 * TURNED_AWAY_S, end_ms - 1000 * RECOVERS_S
                found += [(begin_ms, min(end_ms, round(turned_ms))), (round(undone_ms), end_ms)]
            else:
                found.append((begin_ms, end_ms))
    return found


def longest(spans: list[Span]) -> Span:
    """The longest of some spans; an empty one if there is none."""
    return max(spans, key=lambda span: span[1] - span[0], default=(0, 0))


def passed_step_ms(recording: Recording, step: int) -> int | None:
    """When any node was first seen to collect for a step beyond this one. Our own clock: nodes' may be wrong."""
    at = bisect_right(recording.rises, step, key=lambda rise: rise[1])
    if at < len(recording.rises):
        return recording.rises[at][0]
    return next((sample.at_ms for sample in recording.samples if sample.step > step), None)  # more than are kept


def _ill(own: list[FaultMark], over_ms: int) -> Iterator[Span]:
    """For each of a node's faults from when until when it was not itself."""
    for at, fault in enumerate(own):
        undone_ms = fault.at_ms if undoes(fault) else undone_at_ms(fault, own[at + 1 :])
        end_ms = over_ms if undone_ms is None else undone_ms
        yield fault.at_ms, round(end_ms + 1000 * RECOVERS_S)


def undone_at_ms(fault: FaultMark, later: Iterable[FaultMark]) -> int | None:
    """When a node was what it had been, if it was: a process that is started anew is not stopped any more either."""
    ending = {UNDO.get(fault.action, "join"), *(("join", "restart") if fault.action == "stop" else ())}
    return next((one.at_ms for one in later if one.node == fault.node and one.action in ending), None)


def _without(span: Span, begin_ms: int, end_ms: int) -> Iterator[Span]:
    if end_ms <= span[0] or begin_ms >= span[1]:
        yield span
        return
    if begin_ms > span[0]:
        yield span[0], begin_ms
    if end_ms < span[1]:
        yield end_ms, span[1]

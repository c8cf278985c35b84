"""Which part of a pause faults explain: those of nodes that a step needs, and for a bounded time after they are undone.

A step needs the trainer, one relay, as many honest validators as must agree, and one honest contributor. A fault of
another node explains nothing; one of a relay beside which others work explains a moment, until everybody turned away;
a process that was not started anew goes on a moment after its fault, so that many short faults explain no standstill; a
disk that is slow explains what a step's writes take longer on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from simnet.faults import undoes
from simnet.gather import FaultMark, NodeRecord, Recording
from simnet.oracles.judgement import Evidence
from simnet.oracles.undisturbed import GONE, undone_at_ms

_NEVER: Final = 1 << 60
_ANEW: Final = ("kill", "leave", "restart", "disk-full")
"""After what a process is started anew, and loads what it works with."""
MOMENT_S: Final = 15.0
"""So long it takes until everybody has turned from a relay to others, or a process that was there has gone on."""
MAX_WRITES_A_STEP: Final = 1000
"""That a step waits for, one after another; a slow disk adds its delay to each."""


@dataclass(frozen=True)
class _Spell:
    """A fault of one node, from when until when."""

    node: NodeRecord
    begin_ms: int
    end_ms: int
    """`_NEVER` where it was not undone."""
    absent: bool
    """Whether it kept the node from its work, and did not only slow or confuse it."""
    anew: bool
    """Whether its process was started anew after it."""
    sync_ms: float | None = None
    """Of a slow disk."""


def unexplained_ms(evidence: Evidence, begin_ms: float, end_ms: float, *, limit_ms: float) -> float:
    """How much of a pause no fault explains.

    Each one does until it is undone, for as long again, and a moment: `limit_ms` where a process was started anew. One
    of a relay beside which others work explains a moment, and one more as it is undone.
    """
    spells = _spells(evidence.recording)
    needed = [spell for spell in spells if _is_needed(spell, spells, evidence)]
    left: list[tuple[float, float]] = []
    at_ms = float(begin_ms)
    for first_ms, last_ms in sorted(_excused(spells, needed, limit_ms)):
        if first_ms >= end_ms:
            break
        left.append((at_ms, first_ms))
        at_ms = max(at_ms, last_ms)
    left.append((at_ms, end_ms))
    whole_ms = sum(max(0.0, last_ms - first_ms) for first_ms, last_ms in left)
    return whole_ms - sum(_slowed_ms(spell, left) for spell in needed if spell.sync_ms is not None)


def explained_share(evidence: Evidence, begin_ms: float, end_ms: float, *, limit_ms: float) -> float:
    """Which part of a time faults would explain if it were a pause: in that much of it the rule judges nothing."""
    length_ms = end_ms - begin_ms
    return 1 - unexplained_ms(evidence, begin_ms, end_ms, limit_ms=limit_ms) / length_ms if length_ms > 0 else 0.0


def stopped_spells(recording: Recording, node: NodeRecord) -> list[tuple[int, int]]:
    """From when until when a node stood still by plan; one that is never woken up does so for good."""
    return [
        (fault.at_ms, _undone_ms(fault, recording.faults[at + 1 :]))
        for at, fault in enumerate(recording.faults)
        if fault.node == node.name and fault.action == "stop"
    ]


def overlap_ms(spells: Sequence[tuple[float, float]], begin_ms: float, end_ms: float) -> float:
    """How much of a time lies within spells that do not overlap."""
    return sum(max(0.0, min(end_ms, last_ms) - max(begin_ms, first_ms)) for first_ms, last_ms in spells)


def own_times_ms(recording: Recording, trainer_ms: Sequence[int]) -> list[float]:
    """Moments of the trainer's clock, in their order, as the simulation's own clock had them.

    Where its clock was turned back and forth, a moment may have come twice: the first that is not before the last one.
    """
    ahead_s = {plan.name: plan.clock_ahead_s for plan in recording.scenario.nodes() if plan.role == "trainer"}
    turns = [(0, usual) for usual in ahead_s.values()]
    turns += [
        (fault.at_ms, ahead_s[fault.node] if fault.seconds is None else fault.seconds)
        for fault in recording.faults
        if fault.action == "clock" and fault.node in ahead_s
    ]
    spans = [(begin_ms, end_ms, 1000 * ahead) for (begin_ms, ahead), (end_ms, _) in pairwise([*turns, (_NEVER, 0.0)])]
    found: list[float] = []
    for at_ms in trainer_ms:
        after_ms = found[-1] if found else 0.0
        moments = [at_ms - ahead_ms for begin, end, ahead_ms in spans if begin <= at_ms - ahead_ms < end]
        found.append(next((one for one in moments if one >= after_ms), at_ms))
    return found


def _excused(spells: Sequence[_Spell], needed: Sequence[_Spell], limit_ms: float) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    moment_ms = 1000 * MOMENT_S
    for spell in spells:
        if spell.sync_ms is not None:
            continue
        if spell in needed:
            again_ms = 0 if spell.end_ms == _NEVER else spell.end_ms - spell.begin_ms
            found.append((spell.begin_ms, spell.end_ms + again_ms + (limit_ms if spell.anew else moment_ms)))
        elif spell.node.role == "relay":
            found += [(spell.begin_ms, spell.begin_ms + moment_ms), (spell.end_ms, spell.end_ms + moment_ms)]
    return found


def _slowed_ms(spell: _Spell, left: Sequence[tuple[float, float]]) -> float:
    """What a slow disk adds to a step at most, and no more than what is left of the pause in which it was slow."""
    slow_ms = overlap_ms(left, spell.begin_ms, spell.end_ms)
    return min(MAX_WRITES_A_STEP * (spell.sync_ms or 0.0), slow_ms)


def _spells(recording: Recording) -> list[_Spell]:
    nodes = {node.name: node for node in recording.nodes}
    return [
        _Spell(
            nodes[fault.node],
            fault.at_ms,
            _undone_ms(fault, recording.faults[at + 1 :]),
            absent=fault.action in GONE,
            anew=fault.action in _ANEW,
            sync_ms=(fault.sync_ms or 0.0) if fault.action == "disk-slow" else None,
        )
        for at, fault in enumerate(recording.faults)
        if fault.node in nodes and not undoes(fault)
    ]


def _undone_ms(fault: FaultMark, later: Sequence[FaultMark]) -> int:
    found = undone_at_ms(fault, later)
    return _NEVER if found is None else found


def _is_needed(spell: _Spell, spells: Sequence[_Spell], evidence: Evidence) -> bool:
    """Whether a step could not do without the node while the fault lasted."""
    node, role = spell.node, spell.node.role
    if node.cheat or role not in ("trainer", "relay", "validator", "inference"):
        return False
    if not spell.absent and spell.end_ms == _NEVER:
        return False  # a wrong clock, for ever: a node that cannot live with it has failed
    quorum = evidence.books.quorum if evidence.books and role == "validator" else 1
    return role == "trainer" or sum(_works(one, spell, spells) for one in evidence.recording.nodes) < quorum


def _works(other: NodeRecord, spell: _Spell, spells: Sequence[_Spell]) -> bool:
    """Whether another honest node of the same role was there as it began, and no fault kept it from its work meanwhile.

    That it may have ended by itself meanwhile is left to the count of unexpected exits.
    """
    if other is spell.node or other.role != spell.node.role or other.cheat:
        return False
    there = any(
        life.started_ms <= spell.begin_ms and (life.ended_ms or _NEVER) >= spell.begin_ms for life in other.lives
    )
    ill = any(
        one.node is other and one.absent and one.begin_ms <= spell.end_ms and one.end_ms >= spell.begin_ms
        for one in spells
    )
    return there and not ill

"""Which part of a pause faults explain: those of nodes that a step needs, and for a bounded time after they are undone.

A step needs the trainer, one relay, as many honest validators as must agree, and one honest contributor. A fault of
another node explains nothing; one of a relay beside which others work explains a moment, until everybody turned away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simnet.gather import FaultMark, NodeRecord, Recording
from simnet.oracles.judgement import Evidence
from simnet.timeline import UNDO

_NEVER: Final = 1 << 60
_LAST: Final = ("kill", "leave", "restart", "stop", "partition", "disk-full")
"""What keeps a node from its work for as long as it lasts; the others slow or confuse it."""


@dataclass(frozen=True)
class _Spell:
    """A fault of one node, from when until when."""

    node: NodeRecord
    begin_ms: int
    end_ms: int
    """`_NEVER` where it was not undone."""
    absent: bool


def unexplained_ms(evidence: Evidence, begin_ms: int, end_ms: int, *, limit_ms: float) -> float:
    """How much of a pause no fault explains. Each one does until it is undone, for as long again, and `limit_ms`."""
    left, at_ms = 0.0, float(begin_ms)
    for first_ms, last_ms in sorted(_excused(evidence, limit_ms)):
        if first_ms >= end_ms:
            break
        left += max(0.0, first_ms - at_ms)
        at_ms = max(at_ms, last_ms)
    return left + max(0.0, end_ms - at_ms)


def _excused(evidence: Evidence, limit_ms: float) -> list[tuple[float, float]]:
    spells = _spells(evidence.recording)
    found: list[tuple[float, float]] = []
    for spell in spells:
        if _is_needed(spell, spells, evidence):
            again_ms = 0 if spell.end_ms == _NEVER else spell.end_ms - spell.begin_ms
            found.append((spell.begin_ms, spell.end_ms + again_ms + limit_ms))
        elif spell.node.role == "relay":
            found += [(spell.begin_ms, spell.begin_ms + limit_ms), (spell.end_ms, spell.end_ms + limit_ms)]
    return found


def _spells(recording: Recording) -> list[_Spell]:
    nodes = {node.name: node for node in recording.nodes}
    undoing = set(UNDO.values()) - set(UNDO)
    return [
        _Spell(nodes[fault.node], fault.at_ms, _undone_ms(fault, recording.faults[at + 1 :]), fault.action in _LAST)
        for at, fault in enumerate(recording.faults)
        if fault.node in nodes and fault.action not in undoing
    ]


def _undone_ms(fault: FaultMark, later: Sequence[FaultMark]) -> int:
    """When a node was what it had been: a process that is started anew is also one that is not stopped any more."""
    ending = {UNDO.get(fault.action, "join"), *(("join", "restart") if fault.action == "stop" else ())}
    return next((one.at_ms for one in later if one.node == fault.node and one.action in ending), _NEVER)


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
    """Whether another honest node of the same role was there all the while, with nothing that kept it from its work."""
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

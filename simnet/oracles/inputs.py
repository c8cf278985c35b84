"""What an oracle would have had to look at and could not: files of nodes that took part, which are gone or torn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from simnet.gather import NodeRecord
from simnet.oracles.books import Books
from simnet.oracles.excuses import own_times_ms
from simnet.oracles.judgement import Evidence
from simnet.oracles.undisturbed import undisturbed

FOLLOWS_S: Final = 300.0
"""A relay that ran undisturbed for so long has loaded what it had, and caught up."""
BEHIND_S: Final = 120.0
"""By so much it may then be behind the trainer."""
_BY_ROLE: Final[Mapping[str, str]] = {"relay": "store", "inference": "outbox", "validator": "docket"}


def missing_disks(evidence: Evidence, books: Books) -> list[str]:
    """Of whom what relays promised and validators decided is not known, in words. Whoever lies is not asked."""
    return [
        f"the {kind} of {node.name}"
        for node in _that_took_part(evidence)
        if (kind := _BY_ROLE.get(node.role)) and node.name not in books.sources.get(kind, ())
    ]


def missing_copies(evidence: Evidence, books: Books) -> list[str]:
    """Relays of which no copy of the ledger could be looked at, or one without an entry, in words."""
    there = {copy.node for copy in books.copies if copy.entries}
    return [
        f"the copy of {node.name}"
        for node in _that_took_part(evidence)
        if node.role == "relay" and node.name not in there
    ]


def short_copies(evidence: Evidence, books: Books) -> list[str]:
    """Relays whose copy of the ledger ends before what was in it long before they last ran undisturbed, in words."""
    steps = [(one.trained_ms, one.entries) for one in books.steps if one.trained_ms is not None]
    times_ms = own_times_ms(evidence.recording, [at_ms for at_ms, _ in steps])
    lengths = [(at_ms, length) for at_ms, (_, length) in zip(times_ms, steps, strict=True)]
    there = {copy.node: copy.entries for copy in books.copies if copy.entries}
    return [
        f"the copy of {node.name} ({there[node.name]} of {books.entries} entries)"
        for node in _that_took_part(evidence)
        if node.name in there and there[node.name] < _entries_due(node, evidence, lengths)
    ]


def _entries_due(node: NodeRecord, evidence: Evidence, lengths: Sequence[tuple[float, int]]) -> int:
    """How much of the ledger a relay must have come to: what was there well before the end of its last long stretch."""
    if node.role != "relay":
        return 0
    spans = undisturbed(node, evidence.recording)
    ends_ms = [end_ms for begin_ms, end_ms in spans if end_ms - begin_ms >= 1000 * FOLLOWS_S]
    until_ms = max(ends_ms, default=0) - 1000 * BEHIND_S
    return max((length for at_ms, length in lengths if at_ms <= until_ms), default=0)


def _that_took_part(evidence: Evidence) -> Iterator[NodeRecord]:
    """Nodes that once knew where the run stands: they have begun to write."""
    for node in evidence.recording.nodes:
        if not node.cheat and any(life.status and life.status.step is not None for life in node.lives):
            yield node

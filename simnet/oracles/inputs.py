"""What an oracle would have had to look at and could not: files of nodes that took part, which are gone or torn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from simnet.gather import NodeRecord
from simnet.oracles.books import Books
from simnet.oracles.judgement import Evidence

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


def _that_took_part(evidence: Evidence) -> Iterator[NodeRecord]:
    """Nodes that once knew where the run stands: they have begun to write."""
    for node in evidence.recording.nodes:
        if not node.cheat and any(life.status and life.status.step is not None for life in node.lives):
            yield node

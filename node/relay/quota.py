"""How much of a relay's disk rollout files may take: in all, of one contributor, of one step.

Identities cost nothing, so what one contributor may fill is no protection of the disk by itself; what one step may fill
keeps a flood within a step from taking the room of the next ones. Files that are still on their way count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

from protocol.errors import RefusedError
from protocol.identity import PeerId

K = TypeVar("K", bytes, int)


@dataclass(frozen=True)
class DiskQuota:
    """Most bytes of rollout files; 0 is no limit."""

    total: int
    of_node: int = 0
    of_step: int = 0


@dataclass
class Usage:
    """Bytes taken; not safe from several threads."""

    total: int = 0
    by_node: Counter[bytes] = field(default_factory=Counter)
    by_step: Counter[int] = field(default_factory=Counter)

    def add(self, author: bytes, step: int, size: int) -> None:
        """Take bytes, or give them back where `size` is negative."""
        self.total += size
        _add(self.by_node, author, size)
        _add(self.by_step, step, size)


def _add(counter: Counter[K], key: K, size: int) -> None:
    counter[key] += size
    if counter[key] <= 0:
        del counter[key]


def refuse_share(quota: DiskQuota, author: PeerId, step: int, size: int, *usages: Usage) -> None:
    """Raises RefusedError `node-quota` or `step-quota` where a file would take more than one's share."""
    of_node = sum(usage.by_node[author.public_key] for usage in usages) + size
    of_step = sum(usage.by_step[step] for usage in usages) + size
    if quota.of_node and of_node > quota.of_node:
        raise RefusedError(
            f"{author.short} would take {of_node} bytes of this relay's disk; one contributor may take {quota.of_node}",
            code="node-quota",
            hint="hand in at another relay; old files make room as the run goes on",
        )
    if quota.of_step and of_step > quota.of_step:
        raise RefusedError(
            f"the files of step {step} would take {of_step} bytes of this relay's disk; one step may take"
            f" {quota.of_step}",
            code="step-quota",
            hint="hand in at another relay",
        )

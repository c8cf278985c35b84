"""Looking on: a node without a role, which follows a run's head and ledger through relays and shows them on its page.

It hands in nothing, downloads no policy and is named to nobody; relays see a key that only reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trio

from node.dashboard.sources import Sources
from node.status import StatusBoard
from node.swarm import Swarm
from protocol.ledger import LedgerState
from protocol.records import Head

MANY_ENTRIES: Final = 500
"""The copy of the ledger is always a moment behind; only so far behind is it worth a word."""
QUIET_S: Final = 20.0
"""A trainer signs its head every two seconds; without news for so long, that is what people should read."""


@dataclass(frozen=True)
class WatchParts:
    """What the onlooker is built from; node.assembly makes and starts them."""

    swarm: Swarm
    sources: Sources
    board: StatusBoard


class WatchRole:
    """Run it until somebody has seen enough: it stays when the run is finished."""

    def __init__(self, parts: WatchParts) -> None:
        self._p = parts

    async def run(self) -> None:
        self._p.sources.wanted.set()  # whoever starts an onlooker wants to see
        self._p.board.waiting("a relay that has the run's head")
        sequence = 0
        while True:
            with trio.move_on_after(QUIET_S) as quiet:
                head = (await self._p.swarm.wait_head(sequence)).record
                sequence = head.sequence
                self._show(head)
            if quiet.cancelled_caught:
                self._p.board.waiting("news from the trainer: no relay has a newer head")

    async def leave(self, deadline_s: float) -> None:
        self._p.board.state("stopping", "nothing is left to do")

    def _show(self, head: Head) -> None:
        board, state = self._p.board, self._p.sources.ledger()
        entries = state.length if state is not None else 0
        board.update(checkpoint_step=head.checkpoint_step)
        if state is not None:
            accepted = sum(one.accepted for one in list(state.contributors.values()))
            board.update(accepted=accepted, rejected=_rejected(state))
        if head.finished:
            board.state("finished", "the run is finished; the page stays until Ctrl-C")
        elif entries + MANY_ENTRIES < head.ledger_length:
            board.working(f"replaying the ledger: {entries} of {head.ledger_length} entries")
        else:
            board.working(f"following step {head.step}")


def _rejected(state: LedgerState) -> dict[str, int]:
    """Rejections of all contributors, by check."""
    counted: dict[str, int] = {}
    for contributor in list(state.contributors.values()):
        for reason, count in list(contributor.rejected.items()):
            counted[reason] = counted.get(reason, 0) + count
    return counted

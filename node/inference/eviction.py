"""What a contributor does when its run turns it away: end with the reason, or wait while its appeal is open.

Relays say that it is evicted; one that answers as before is believed before those that refuse. Whether an appeal is
open they tell too, and a lie of theirs costs this node no more than its time.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from node.inference.outbox import Outbox
from node.inference.standing import StandingWatch
from node.status import StatusBoard
from node.swarm import Swarm
from protocol.errors import NodeError

log = logging.getLogger(__name__)

POLL_S: Final = 5.0
GROUND_S: Final = 3.0
LOOK_S: Final = 0.2


class Evicted(NodeError):
    """Raised when the run has evicted this node."""


class EvictionWatch:
    """`run` raises Evicted; it never ends otherwise."""

    def __init__(self, swarm: Swarm, outbox: Outbox, board: StatusBoard, standing: StandingWatch) -> None:
        self._swarm = swarm
        self._outbox = outbox
        self._board = board
        self._standing = standing

    async def run(self) -> None:
        while True:
            said = await self._swarm.wait_evicted()
            if not await self._reinstated(said):
                self._board.state("evicted", said)
                raise Evicted(
                    f"this node was evicted from the run: {said}",
                    hint="look at why: intellect-node verdict show last; if this node is honest: intellect-node appeal "
                    "last; a new contributor needs another --data-dir",
                )
            log.info("reinstated")
            self._board.waiting("relays to let this node in again: it is reinstated")
            self._swarm.forget_eviction()

    async def _reinstated(self, said: str) -> bool:
        """Wait as long as an appeal against the eviction is open; whether it was granted."""
        while True:
            standing = await self._standing.ask()
            if standing is None:
                return False
            if standing.standing == "active":
                return True
            states = {row.state for row in standing.appeals if row.submission == standing.evicted_for}
            if not states & {"open", "granted"}:
                await self._wait_for_ground(standing.evicted_for)
                return False
            self._board.state("evicted", f"{said}; its appeal waits for other validators")
            await trio.sleep(POLL_S)

    async def _wait_for_ground(self, submission: bytes) -> None:
        """The verdict is what an appeal is against; it may come a moment after the eviction."""
        with trio.move_on_after(GROUND_S):
            while not self._outbox.verdicts(submission):  # noqa: ASYNC110
                await trio.sleep(LOOK_S)

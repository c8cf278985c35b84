"""A node's own copy of the ledger, kept up to date through relays: what heads name, checked against their tips.

Entries enter the copy only if with them the chain reaches the tip that the trainer signed, so no relay can add, drop or
reorder any. Used by whoever must know contributors' records without asking anybody.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from node.ledger.keeper import FORK, LedgerKeeper
from node.ledger.log import LedgerLog
from node.ledger.witness import ForkWitness
from node.swarm import Swarm
from protocol.envelope import Signed
from protocol.errors import DataDirError, LedgerError, ProtocolError, RelayError
from protocol.ledger import LedgerState
from protocol.records import Head

log = logging.getLogger(__name__)

RETRY_S: Final = 0.3
"""Relays copy the ledger a moment after they have the head."""
LONGEST_RETRY_S: Final = 2.0
DISK_RETRY_S: Final = 30.0
"""After a full disk: what did not fit is fetched again."""


class LedgerFollower:
    """Run it in a nursery; `state` is the replay of all that was pulled so far."""

    def __init__(self, swarm: Swarm, ledger: LedgerLog, witness: ForkWitness | None = None) -> None:
        """With a `witness`, heads that contradict the copy are proved."""
        self._swarm = swarm
        self._keeper = LedgerKeeper(ledger, witness)
        self._changed = trio.Event()
        self._announced = ledger.state.length

    @property
    def state(self) -> LedgerState:
        return self._keeper.ledger.state

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep up with the newest head, for ever; what goes wrong at one relay is tried at the next."""
        task_status.started()
        sequence, retry_s = 0, RETRY_S
        while True:
            head = await self._swarm.wait_head(sequence)
            try:
                is_done = await self._catch_up(head)
            except DataDirError as error:  # what is held stays as it is, and the disk may have room later
                log.warning("ledger length=%d error=%r", self.state.length, error.message)
                self._announce()
                await trio.sleep(DISK_RETRY_S)
                continue
            self._announce()
            if is_done:
                sequence, retry_s = head.record.sequence, RETRY_S
            else:
                await trio.sleep(retry_s)
                retry_s = min(LONGEST_RETRY_S, 1.5 * retry_s)

    async def wait_changed(self) -> None:
        """Until entries were added after this was called."""
        await self._changed.wait()

    async def _catch_up(self, head: Signed[Head]) -> bool:
        """Whether there is nothing more to do about this head. Raises DataDirError."""
        for client in self._swarm.clients:
            try:
                await self._keeper.catch_up(client, head)
            except LedgerError as error:
                if error.rule != FORK:
                    log.error("ledger relay=%s length=%d error=%r", client.name, self.state.length, error.message)
                    continue
                log.warning("ledger relay=%s %s", client.name, error.message)
                return True
            except (RelayError, ProtocolError) as error:
                log.debug("ledger relay=%s length=%d error=%r", client.name, self.state.length, error.message)
                continue
            return True
        return False

    def _announce(self) -> None:
        """Wake who waits for entries, also for those that the disk has still to take."""
        if self.state.length > self._announced:
            self._announced = self.state.length
            self._changed.set()
            self._changed = trio.Event()

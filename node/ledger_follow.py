"""A node's own copy of the ledger, kept up to date through relays: what heads name, checked against their tips.

Entries enter the copy only if with them the chain reaches the tip that the trainer signed, so no relay can add, drop or
reorder any. Used by whoever must know contributors' records without asking anybody.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from node.ledger_file import LedgerFile
from node.relay_client import RelayClient
from node.swarm import Swarm
from protocol.envelope import Signed
from protocol.errors import ProtocolError, RelayError
from protocol.ledger import LedgerState
from protocol.records import Head

log = logging.getLogger(__name__)

RETRY_S: Final = 0.3
"""Relays copy the ledger a moment after they have the head."""
MAX_PULL_BYTES: Final = 256 << 20
"""Entries in memory at once while catching up."""


class LedgerFollower:
    """Run it in a nursery; `state` is the replay of all that was pulled so far."""

    def __init__(self, swarm: Swarm, ledger: LedgerFile) -> None:
        self._swarm = swarm
        self._ledger = ledger
        self._changed = trio.Event()

    @property
    def state(self) -> LedgerState:
        return self._ledger.state

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep up with the newest head, for ever; what goes wrong at one relay is tried at the next."""
        task_status.started()
        sequence = 0
        while True:
            head = await self._swarm.wait_head(sequence)
            if await self._catch_up(head):
                sequence = head.record.sequence
            else:
                await trio.sleep(RETRY_S)

    async def wait_changed(self) -> None:
        """Until entries were added after this was called."""
        await self._changed.wait()

    async def _catch_up(self, head: Signed[Head]) -> bool:
        """Whether the copy is as long as the head says."""
        if self.state.length >= head.record.ledger_length:
            return True
        for client in self._swarm.clients:
            try:
                entries = await self._pull(client, head.record.ledger_length)
                await trio.to_thread.run_sync(self._extend, entries, head.record)
            except (RelayError, ProtocolError) as error:
                log.debug("ledger relay=%s length=%d error=%r", client.peer_id.short, self.state.length, error.message)
                continue
            self._changed.set()
            self._changed = trio.Event()
            return True
        return False

    def _extend(self, entries: list[bytes], head: Head) -> None:
        self._ledger.extend(entries, length=head.ledger_length, tip=head.ledger_tip)

    async def _pull(self, client: RelayClient, length: int) -> list[bytes]:
        entries: list[bytes] = []
        total = 0
        while self.state.length + len(entries) < length:
            page = await client.ledger(self.state.length + len(entries))
            if not page:
                raise RelayError(f"this relay has {self.state.length + len(entries)} of {length} ledger entries yet")
            entries += [entry.data for entry in page]
            total += sum(len(entry.data) for entry in page)
            if total > MAX_PULL_BYTES:
                raise RelayError(
                    f"the ledger from entry {self.state.length} on does not fit in {MAX_PULL_BYTES >> 20} MiB",
                    hint="copy the ledger file of a relay of this run into this node's data directory",
                )
        return entries[: length - self.state.length]

"""The policies that a node holds: downloads what the head names, keeps what may still be asked for.

Used by inference nodes and validators. Downloading is p2p.shardcast's work; here is which, when, and what is on disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import trio

from node.status import StatusBoard
from node.swarm import Swarm
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.store import CheckpointStore
from protocol.errors import ProtocolError, RelayError

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Policies:
    """Checkpoints on disk by id, the newest first in line."""

    def __init__(self, store: CheckpointStore, client: CheckpointClient, swarm: Swarm, board: StatusBoard) -> None:
        self._store = store
        self._client = client
        self._swarm = swarm
        self._board = board
        self._changed = trio.Event()
        self._lock = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the newest checkpoint that the head names, for ever."""
        task_status.started()
        sequence = 0
        while True:
            head = await self._swarm.wait_head(sequence)
            sequence = head.record.sequence
            if self.path(head.record.checkpoint) is None:
                await self._obtain(head.record.checkpoint)

    def path(self, checkpoint: bytes) -> Path | None:
        """Where a complete policy lies, or None."""
        return self._store.local_dir(checkpoint)

    def newest(self, oldest_step: int) -> tuple[int, bytes, Path] | None:
        """The newest complete policy that is not older than `oldest_step`: its step, id and directory."""
        held = [(step, checkpoint) for step, checkpoint in self._store.complete() if step >= oldest_step]
        if not held:
            return None
        step, checkpoint = max(held)
        path = self._store.local_dir(checkpoint)
        return None if path is None else (step, checkpoint, path)

    async def wait_newest(self, oldest_step: Callable[[], int]) -> tuple[int, bytes, Path]:
        while (found := self.newest(oldest_step())) is None:
            changed = self._changed
            with trio.move_on_after(RETRY_S):
                await changed.wait()
        return found

    async def fetch(self, checkpoint: bytes, *, deadline_s: float) -> Path | None:
        """A policy by id, downloaded if need be; None when no relay gives it in time."""
        give_up = time.monotonic() + deadline_s
        while (path := self.path(checkpoint)) is None and time.monotonic() < give_up:
            with trio.move_on_after(deadline_s):
                await self._obtain(checkpoint)
        return path

    async def _obtain(self, checkpoint: bytes) -> None:
        async with self._lock:
            if self.path(checkpoint) is not None:
                return
            try:
                manifest = await self._client.download(checkpoint)
            except (RelayError, ProtocolError) as error:
                log.warning("checkpoint id=%s error=%r", checkpoint.hex()[:12], error.message)
                await trio.sleep(RETRY_S)
                return
            self._board.update(checkpoint_step=max((step for step, _ in self._store.complete()), default=None))
            log.info("checkpoint step=%d bytes=%d held", manifest.record.step, manifest.record.total_bytes)
            self._changed.set()
            self._changed = trio.Event()

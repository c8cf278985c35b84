"""The policies that a node holds: downloads what the head names, keeps what may still be asked for.

Used by inference nodes and validators. Downloading is p2p.shardcast's work; here is which, when, and what is on disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio

from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from p2p.limits import DownloadBudget
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.store import CheckpointStore
from protocol.envelope import Signed
from protocol.errors import DataDirError, ProtocolError, RelayError
from protocol.records import CheckpointManifest

log = logging.getLogger(__name__)

RETRY_S = 1.0
DISK_RETRY_S = 10.0
BUDGET_RETRY_S = 60.0
ASK_S = 5.0


class Policies:
    """Checkpoints on disk by id, the newest first in line."""

    def __init__(
        self,
        store: CheckpointStore,
        client: CheckpointClient,
        swarm: Swarm,
        board: StatusBoard,
        *,
        budget: DownloadBudget | None = None,
    ) -> None:
        """With a `budget`, nothing is begun on a day whose bytes are spent."""
        self._store = store
        self._client = client
        self._swarm = swarm
        self._board = board
        self._budget = budget or DownloadBudget()
        self._changed = trio.Event()
        self._lock = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the newest checkpoint that is announced or that the head names, for ever.

        Started when the newest one of an earlier process is sound, or gone; the older ones are looked at meanwhile.
        """
        held = [checkpoint for _, checkpoint in reversed(self._store.complete())]
        sound = False
        while held and not sound:
            sound = await self._store.verify(held.pop(0))
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(self._client.follow, self._hold, until_allowed=self._until_allowed))
            nursery.start_soon(self._verify, held)
            await self._follow_head()

    async def _verify(self, checkpoints: Sequence[bytes]) -> None:
        for checkpoint in checkpoints:
            await self._store.verify(checkpoint)

    async def _follow_head(self) -> None:
        sequence = 0
        while True:
            head = await self._swarm.wait_head(sequence)
            sequence = head.record.sequence
            if self.path(head.record.checkpoint) is None:
                await self._obtain(head.record.checkpoint, step=head.record.checkpoint_step)

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

    @contextmanager
    def kept(self, checkpoint: bytes) -> Iterator[Path | None]:
        """Where a complete policy lies, or None; it is not removed within the block, so that an engine can load it."""
        if self._store.local_dir(checkpoint) is None:
            yield None
            return
        with self._store.lease(checkpoint) as path:
            yield path

    def step_of(self, checkpoint: bytes) -> int | None:
        """The step of a complete policy; None when it is not here."""
        return next((step for step, key in self._store.complete() if key == checkpoint), None)

    async def offered(self, checkpoint: bytes) -> bool | None:
        """Whether any relay knows a checkpoint; None when one that might could not be asked."""
        answers: list[bool | None] = []

        async def ask(client: RelayClient) -> None:
            try:
                with trio.fail_after(ASK_S):
                    answers.append(await client.offers(checkpoint))
            except (RelayError, ProtocolError, trio.TooSlowError):
                answers.append(None)

        async with trio.open_nursery() as nursery:
            for client in self._swarm.clients:
                nursery.start_soon(ask, client)
        if True in answers:
            return True
        return None if None in answers or not answers else False

    async def fetch(self, checkpoint: bytes, *, deadline_s: float) -> Path | None:
        """A policy by id, downloaded if need be; None when no relay gives it in time."""
        give_up = time.monotonic() + deadline_s
        while (path := self.path(checkpoint)) is None and time.monotonic() < give_up:
            with trio.move_on_after(deadline_s):
                await self._obtain(checkpoint)
        return path

    async def _until_allowed(self) -> None:
        """Wait for midnight UTC where today's bytes are spent."""
        while (wait_s := self._budget.wait_s()) > 0:
            per_day = self._budget.bytes_per_day
            self._board.waiting(f"midnight UTC: the {per_day} bytes that may be downloaded today have come")
            await trio.sleep(min(wait_s, BUDGET_RETRY_S))

    async def _obtain(self, checkpoint: bytes, *, step: int | None = None) -> None:
        async with self._lock:
            await self._until_allowed()
            if self.path(checkpoint) is not None:
                return
            try:
                self._hold(await self._client.download(checkpoint, step=step))
            except (RelayError, ProtocolError) as error:
                holds = max((step for step, _ in self._store.complete()), default=None)
                log.warning("checkpoint id=%s holds=%s error=%r", checkpoint.hex()[:12], holds, error.message)
                await trio.sleep(RETRY_S)
            except DataDirError as error:
                log.error("checkpoint id=%s error=%r retry_s=%.0f", checkpoint.hex()[:12], error.message, DISK_RETRY_S)
                self._board.waiting(f"room on the disk: {error.message[:300]}")
                await trio.sleep(DISK_RETRY_S)

    def _hold(self, manifest: Signed[CheckpointManifest]) -> None:
        """A checkpoint is complete on this disk."""
        self._board.update(checkpoint_step=max((step for step, _ in self._store.complete()), default=None))
        self._board.details(download=None, policies_bytes=self._store.held_bytes, **vars(self._client.savings))
        log.info("checkpoint step=%d bytes=%d held", manifest.record.step, manifest.record.total_bytes)
        self._changed.set()
        self._changed = trio.Event()

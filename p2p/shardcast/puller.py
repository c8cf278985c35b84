"""A relay's side of SHARDCAST: pull the checkpoints that the head names from the trainer's origin, newest first.

The origin's address and this relay's token come from the trainer's OriginNotice and may change at any time. Shards are
served (p2p.shardcast.origin) from the moment they are verified. Leaves out which checkpoints are wanted and why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from p2p.http import PROGRESS_TIMEOUT_S, HttpClient
from p2p.shardcast.balance import Balancer
from p2p.shardcast.client import CheckpointClient, OnBytes, Source
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules
from protocol.errors import NodeError

log = logging.getLogger(__name__)

CONNECTIONS: Final = 4
PATIENCE_S: Final = 20.0
FIRST_RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 15.0
MAX_WANTED: Final = 3
"""Checkpoints that are still worth pulling when the trainer is ahead."""


@dataclass(frozen=True)
class _Origin:
    rules: CheckpointRules
    source: Source


class OriginPuller:
    """Pulls into `store`; `run` is started in a nursery. `set_origin` and `want` are plain calls in trio's thread."""

    def __init__(
        self,
        http: HttpClient,
        store: CheckpointStore,
        *,
        connections: int = CONNECTIONS,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        on_bytes: OnBytes | None = None,
    ) -> None:
        self._http = http
        self._store = store
        self._connections = connections
        self._progress_timeout_s = progress_timeout_s
        self._patience_s = patience_s
        self._on_bytes = on_bytes
        self._origin: _Origin | None = None
        self._wanted: list[bytes] = []
        self._news = trio.Event()

    def set_origin(self, url: str, token: str, *, rules: CheckpointRules) -> None:
        """Where to pull from, from an OriginNotice that was checked against the run's manifest."""
        self._origin = _Origin(rules, Source(rules.trainer, url, {"Authorization": f"Bearer {token}"}))
        self._wake()

    def want(self, checkpoint: bytes) -> None:
        """Pull this checkpoint next, unless it is here; older wishes come after it and are in the end forgotten."""
        if checkpoint not in self._wanted and self._store.local_dir(checkpoint) is None:
            self._wanted = [checkpoint, *self._wanted][:MAX_WANTED]
            self._wake()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pull what is wanted, for ever; what goes wrong is logged and tried again later."""
        task_status.started()
        retry_s = FIRST_RETRY_S
        while True:
            news = self._news
            if self._origin is None or not self._wanted:
                await news.wait()
                continue
            if await self._pull(self._origin, self._wanted[0]):
                retry_s = FIRST_RETRY_S
                continue
            with trio.move_on_after(retry_s):
                await news.wait()
            retry_s = min(LONGEST_RETRY_S, 2 * retry_s)

    async def _pull(self, origin: _Origin, checkpoint: bytes) -> bool:
        """Whether the checkpoint is here now."""
        client = CheckpointClient(
            self._http,
            self._store,
            origin.rules,
            self._sources,
            balancer=Balancer(),
            connections=self._connections,
            progress_timeout_s=self._progress_timeout_s,
            patience_s=self._patience_s,
            on_bytes=self._on_bytes,
        )
        try:
            manifest = await client.download(checkpoint)
        except NodeError as error:  # a relay lives on whatever one checkpoint does to it
            log.warning("pull checkpoint=%s error=%r", checkpoint.hex()[:12], error.message[:300])
            self._forget(checkpoint)
            self._wanted.append(checkpoint)  # the others get their turn first
            return False
        self._forget(checkpoint)
        log.info("pulled step=%d bytes=%d", manifest.record.step, manifest.record.total_bytes)
        return True

    def _forget(self, checkpoint: bytes) -> None:
        self._wanted = [each for each in self._wanted if each != checkpoint]

    def _sources(self) -> Sequence[Source]:
        return [self._origin.source] if self._origin is not None else []

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

"""A relay's side of SHARDCAST: pull what the trainer announces or the head names, from the origin and other relays.

The origin gives each shard to a few relays (p2p.shardcast.fan_out), which give it to the others. No relay has a fixed
place: whoever has a shard is asked for it, and one that dies is
not asked again. Shards are served on from the moment they are verified. Leaves out how other relays are found.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from p2p.contacts import Contact
from p2p.http import PROGRESS_TIMEOUT_S, HttpClient
from p2p.shardcast.balance import Balancer
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.patch_client import PatchClient
from p2p.shardcast.sources import OnBytes, OnMisdeed, Source
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules
from protocol.errors import NodeError

log = logging.getLogger(__name__)

CONNECTIONS: Final = 6
PATIENCE_S: Final = 20.0
FIRST_RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 15.0
MISDEED_PAUSE_S: Final = 3.0
"""Short: the origin may be all there is, and a broken disk or proxy may be what spoils its bytes."""
MAX_WANTED: Final = 3
"""Checkpoints that are still worth pulling when the trainer is ahead."""


class CheckpointPuller:
    """Pulls into `store`; `run` is started in a nursery. The other methods are plain calls in trio's thread."""

    def __init__(
        self,
        http: HttpClient,
        store: CheckpointStore,
        *,
        patches: PatchClient | None = None,
        connections: int = CONNECTIONS,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        on_bytes: OnBytes | None = None,
        on_misdeed: OnMisdeed | None = None,
    ) -> None:
        self._http = http
        self._store = store
        self._patches = patches
        self._connections = connections
        self._progress_timeout_s = progress_timeout_s
        self._patience_s = patience_s
        self._on_bytes = on_bytes
        self._on_misdeed = on_misdeed
        self._origin: Source | None = None
        self._peers: list[Source] = []
        self._client: CheckpointClient | None = None
        self._wanted: list[bytes] = []
        self._news = trio.Event()

    def set_origin(self, origin: Contact, *, rules: CheckpointRules) -> None:
        """Where to pull from, from an OriginNotice that was checked against the run's manifest."""
        self._origin = Source(origin.peer, origin.url, origin)
        self.set_rules(rules)

    def set_rules(self, rules: CheckpointRules) -> None:
        """What the run's manifest demands, once: then other relays can be asked, even without an origin."""
        if self._client is None:
            self._client = self._make_client(rules)
            self._wake()

    def set_peers(self, peers: Sequence[Source]) -> None:
        """The run's other relays."""
        self._peers = list(peers)

    def want(self, checkpoint: bytes) -> None:
        """Pull this checkpoint next, unless it is here; older wishes come after it and are in the end forgotten."""
        if checkpoint not in self._wanted and self._store.local_dir(checkpoint) is None:
            self._wanted = [checkpoint, *self._wanted][:MAX_WANTED]
            self._wake()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pull what is announced or wanted, for ever; what goes wrong is logged and tried again later."""
        task_status.started()
        while self._client is None:
            news = self._news
            await news.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._client.follow)
            nursery.start_soon(self._pull_loop, self._client)

    async def _pull_loop(self, client: CheckpointClient) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            news = self._news
            if not self._wanted:
                await news.wait()
                continue
            if await self._pull(client, self._wanted[0]):
                retry_s = FIRST_RETRY_S
                continue
            with trio.move_on_after(retry_s):
                await news.wait()
            retry_s = min(LONGEST_RETRY_S, 2 * retry_s)

    async def _pull(self, client: CheckpointClient, checkpoint: bytes) -> bool:
        """Whether the checkpoint is here now."""
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

    def _make_client(self, rules: CheckpointRules) -> CheckpointClient:
        return CheckpointClient(
            self._http,
            self._store,
            rules,
            self._sources,
            balancer=Balancer(misdeed_pause_s=MISDEED_PAUSE_S),
            patches=self._patches,
            connections=self._connections,
            progress_timeout_s=self._progress_timeout_s,
            patience_s=self._patience_s,
            on_bytes=self._on_bytes,
            on_misdeed=self._on_misdeed,
        )

    def _forget(self, checkpoint: bytes) -> None:
        self._wanted = [each for each in self._wanted if each != checkpoint]

    def _sources(self) -> Sequence[Source]:
        return [*([self._origin] if self._origin is not None else []), *self._peers]

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

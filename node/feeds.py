"""Following every relay's feed: one long poll a relay, items in one bounded channel, cursors kept on disk.

A cursor is saved only after its items were taken from the channel and `done` was called, so a crash repeats items and
never skips one. Consumers treat repeats as no news. Without a path each start reads the feeds from their beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import trio

from node.relay_client import FeedItem, RelayClient
from protocol.atomic import write_atomically
from protocol.errors import DataDirError, ProtocolError, RelayError
from protocol.identity import PeerId

log = logging.getLogger(__name__)

POLL_WAIT_S = 20.0
RETRY_S = 2.0
REFRESH_S = 2.0


class Feeds:
    """Feeds of all relays that `clients` names, now and later."""

    def __init__(
        self,
        clients: Callable[[], Sequence[RelayClient]],
        *,
        kinds: Sequence[str],
        cursors_path: Path | None,
        about: PeerId | None = None,
    ) -> None:
        self._clients = clients
        self._kinds = tuple(kinds)
        self._about = about
        self._path = cursors_path
        self._cursors = _load_cursors(cursors_path) if cursors_path else {}
        self._silent: set[PeerId] = set()
        self._send, self._receive = trio.open_memory_channel[tuple[RelayClient, FeedItem]](256)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow for ever; relays that appear later are followed from then on."""
        task_status.started()
        following: set[PeerId] = set()
        async with trio.open_nursery() as nursery:
            while True:
                for client in self._clients():
                    if client.peer_id not in following:
                        following.add(client.peer_id)
                        nursery.start_soon(self._follow, client.peer_id)
                await trio.sleep(REFRESH_S)

    @property
    def silent(self) -> frozenset[PeerId]:
        """Relays whose feed did not answer when it was last asked: they may hold items that nobody has seen."""
        return frozenset(self._silent)

    async def next(self) -> tuple[RelayClient, FeedItem]:
        """The next item and the relay that has it."""
        return await self._receive.receive()

    def done(self, client: RelayClient, item: FeedItem) -> None:
        """The item's consequences are durable: do not ask for it again after a restart, if the disk can keep that."""
        key = str(client.peer_id)
        if self._path is not None and item.seq > self._cursors.get(key, 0):
            self._cursors[key] = item.seq
            try:
                write_atomically(self._path, msgspec.json.encode(self._cursors), sync=False)
            except DataDirError as error:  # costs a second look at most
                log.warning("feed relay=%s place not kept error=%r", client.peer_id.short, error.message)

    async def _follow(self, peer_id: PeerId) -> None:
        after = self._cursors.get(str(peer_id), 0)
        while True:
            client = next((one for one in self._clients() if one.peer_id == peer_id), None)
            if client is None:
                await trio.sleep(RETRY_S)
                continue
            try:
                items = await client.feed(after, kinds=self._kinds, about=self._about, wait_s=POLL_WAIT_S)
            except (RelayError, ProtocolError) as error:
                log.info("feed relay=%s error=%r", peer_id.short, error.message)
                self._silent.add(peer_id)
                await trio.sleep(RETRY_S)
                continue
            self._silent.discard(peer_id)
            for item in items:
                await self._send.send((client, item))
                after = item.seq


def _load_cursors(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}

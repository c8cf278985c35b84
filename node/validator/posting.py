"""Bringing a validator's verdicts to every relay: each one until the relay has it or refuses it for good."""

from __future__ import annotations

import logging
from typing import Final

import trio

from node.relay_client import RelayClient
from node.swarm import Swarm
from node.validator.docket import Docket
from protocol.errors import ProtocolError, RefusedError, RelayError

log = logging.getLogger(__name__)

RETRY_S: Final = 2.0


class Poster:
    """`run` it; `wake` when the docket has a new verdict."""

    def __init__(self, swarm: Swarm, docket: Docket) -> None:
        self._swarm = swarm
        self._docket = docket
        self._new = trio.Event()

    def wake(self) -> None:
        self._new.set()
        self._new = trio.Event()

    async def run(self) -> None:
        while True:
            changed = self._new
            await self.post()
            with trio.move_on_after(RETRY_S):
                await changed.wait()

    async def post(self) -> None:
        """Hand to every relay what it lacks."""
        async with trio.open_nursery() as nursery:
            for client in self._swarm.clients:
                nursery.start_soon(self._post_to, client)

    async def _post_to(self, client: RelayClient) -> None:
        for key, envelope in self._docket.unposted(client.peer_id):
            try:
                await client.post_verdict(envelope)
            except RefusedError as error:
                log.warning("post verdict relay=%s code=%s error=%r", client.peer_id.short, error.code, error.message)
                if error.code in ("no-manifest", "busy"):
                    return
            except (RelayError, ProtocolError) as error:
                log.info("post verdict relay=%s error=%r", client.peer_id.short, error.message)
                return
            self._docket.posted(key, client.peer_id)

"""Bringing a validator's verdicts to every relay: each one until the relay has it or refuses it for good."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import trio

from node.relay_client import RECORD_CODES, RelayClient
from node.swarm import Swarm
from node.validator.docket import Docket
from protocol.errors import DataDirError, ProtocolError, RefusedError, RelayError
from protocol.identity import PeerId

log = logging.getLogger(__name__)

RETRY_S: Final = 2.0
MAX_REFUSED: Final = 4
"""Refusals of single verdicts after which a relay's round ends."""
FINAL_CODES: Final = frozenset({"already-judged", *RECORD_CODES})
"""Refusals that a relay would repeat for the same verdict for ever: they are about its bytes, and what the relay has.
All others may pass (a full disk, a busy relay, a fault of its own, a code that this program does not know)."""
RELAY_CODES: Final = frozenset(
    {"no-manifest", "busy", "too-many-requests", "over-budget", "disk-full", "unauthorized", "stale-challenge"}
)
"""Of those that may pass: what a relay would say of every other verdict as well."""


class Poster:
    """`run` it; `wake` when the docket has a new verdict."""

    def __init__(self, swarm: Swarm, docket: Docket) -> None:
        self._swarm = swarm
        self._docket = docket
        self._passed_over: dict[PeerId, tuple[bytes, str]] = {}
        """By relay: behind which verdict its next round begins, and with which code it refused one last."""
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
        clients = self._swarm.clients
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(self._post_to, client)
        with suppress(DataDirError):  # the next time
            self._docket.forget_but([client.peer_id for client in clients])

    async def _post_to(self, client: RelayClient) -> None:
        try:
            await self._post_waiting(client)
        except DataDirError as error:  # what cannot be noted as posted is posted again
            log.warning("post verdict relay=%s not noted error=%r", client.peer_id.short, error.message)

    async def _post_waiting(self, client: RelayClient) -> None:
        """From behind the verdict that ended the last round, to the end or some refusals that may pass."""
        relay, refused = client.peer_id, 0
        behind, said = self._passed_over.pop(relay, (b"", ""))
        while page := self._docket.unposted(relay, behind=behind):
            for key, envelope in page:
                try:
                    await client.post_verdict(envelope)
                except RefusedError as error:
                    self._say(client, error, again=said)
                    if error.code in RELAY_CODES:
                        self._passed_over[relay] = (behind, error.code)
                        return
                    behind, said = key, error.code
                    if error.code not in FINAL_CODES:
                        refused += 1
                        if refused == MAX_REFUSED:
                            self._passed_over[relay] = (key, error.code)
                            return
                        continue
                except (RelayError, ProtocolError) as error:
                    log.info("post verdict relay=%s error=%r", relay.short, error.message)
                    return
                self._docket.posted(key, relay, envelope)
                behind = key
        if refused:
            self._passed_over[relay] = (b"", said)  # from the oldest on

    def _say(self, client: RelayClient, error: RefusedError, *, again: str) -> None:
        """Said once for each reason: a full disk refuses every round for hours."""
        level = logging.DEBUG if again == error.code else logging.WARNING
        log.log(level, "post verdict relay=%s code=%s error=%r", client.peer_id.short, error.code, error.message)

"""Bringing a validator's verdicts to every relay: each one until the relay has it or refuses it for good."""

from __future__ import annotations

import logging
from typing import Final

import trio

from node.relay_client import RelayClient
from node.swarm import Swarm
from node.validator.docket import Docket
from protocol.errors import DataDirError, ProtocolError, RefusedError, RelayError
from protocol.identity import PeerId

log = logging.getLogger(__name__)

RETRY_S: Final = 2.0
MAX_WAITING: Final = 1024
"""Of what one relay lacks, so many of the oldest are looked at in a round."""
FINAL_CODES: Final = frozenset(
    {"already-judged", "malformed", "bad-signature", "wrong-author", "wrong-run", "wrong-version", "too-large"}
)
"""Refusals that a relay would repeat for the same verdict for ever: they are about its bytes, and what the relay has.
All others may pass (a full disk, a busy relay, a fault of its own, a code that this program does not know)."""


class Poster:
    """`run` it; `wake` when the docket has a new verdict."""

    def __init__(self, swarm: Swarm, docket: Docket) -> None:
        self._swarm = swarm
        self._docket = docket
        self._put_off: dict[PeerId, tuple[bytes, str]] = {}
        """By relay: the verdict that it refused last, though not for good, and with which code."""
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
        try:
            await self._post_waiting(client)
        except DataDirError as error:  # what cannot be noted as posted is posted again
            log.warning("post verdict relay=%s not noted error=%r", client.peer_id.short, error.message)

    async def _post_waiting(self, client: RelayClient) -> None:
        """Until a refusal that may pass: what was refused waits for the next round, and is the last one in it."""
        for key, envelope in self._waiting(client.peer_id):
            try:
                await client.post_verdict(envelope)
            except RefusedError as error:
                if error.code not in FINAL_CODES:
                    self._put_off_at(client, key, error)
                    return
                log.warning("post verdict relay=%s code=%s error=%r", client.peer_id.short, error.code, error.message)
            except (RelayError, ProtocolError) as error:
                log.info("post verdict relay=%s error=%r", client.peer_id.short, error.message)
                return
            self._docket.posted(key, client.peer_id)
            if key == self._put_off.get(client.peer_id, (b"", ""))[0]:
                del self._put_off[client.peer_id]

    def _waiting(self, relay: PeerId) -> list[tuple[bytes, bytes]]:
        """What a relay lacks, from behind the one that it refused last and round again: none holds up the others."""
        lacking = self._docket.unposted(relay, limit=MAX_WAITING)
        last, _ = self._put_off.get(relay, (b"", ""))
        begin = 1 + next((place for place, (key, _) in enumerate(lacking) if key == last), -1)
        return lacking[begin:] + lacking[:begin]

    def _put_off_at(self, client: RelayClient, key: bytes, error: RefusedError) -> None:
        """Said once for each reason: a full disk refuses every round for hours."""
        _, code = self._put_off.get(client.peer_id, (b"", ""))
        level = logging.DEBUG if code == error.code else logging.WARNING
        said = (client.peer_id.short, error.code, error.message)
        log.log(level, "post verdict relay=%s code=%s tried_again=later error=%r", *said)
        self._put_off[client.peer_id] = (key, error.code)

"""A contributor's way into a run that asks for one: prove that the key cost something, show an invite, be written down.

The proof is looked for in a thread, with its progress in the status, and survives a restart. The admission is signed
anew at each start and handed to relays until one of them says that the ledger has it. Work may begin once a relay has
taken it; what is handed in before the ledger has it is tried again.
"""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Final

import msgspec
import trio

from node.clock import now_ms
from node.relay_client import RelayClient
from node.swarm import Swarm
from node.version import SOFTWARE
from protocol.atomic import write_atomically
from protocol.constants import PROTOCOL_VERSION
from protocol.envelope import seal
from protocol.errors import NodeError, ProtocolError, RefusedError, RelayError
from protocol.identity import Identity, PeerId
from protocol.records import Admission
from protocol.work import NONCE_BYTES, expected_tries, find_work, work_holds

log = logging.getLogger(__name__)

WORK_FILE: Final = "proof-of-work"
SAVE_EVERY: Final = 64
"""Tries between two notes on the disk of how far the search is."""
ASK_AGAIN_S: Final = 2.0
PREFIX: Final = "admission-"


class NotAdmitted(NodeError):
    """Raised when every relay that answers says that this key cannot be admitted."""


class _Search(msgspec.Struct):
    """How far the search for a proof is; of one key and run."""

    run_id: bytes
    key: bytes
    tries: int = 0
    nonce: bytes = b""
    """Empty until it is found."""


class Entrance:
    """`run` ends once this key is admitted; until `waits_for` is None nothing should be generated."""

    def __init__(self, identity: Identity, swarm: Swarm, *, directory: Path, invite: bytes = b"") -> None:
        """`invite` is the operator's envelope, empty without one."""
        self._identity = identity
        self._swarm = swarm
        self._path = directory / WORK_FILE
        self._invite = invite
        self._spec = swarm.manifest.record.admission
        self._stopped = threading.Event()
        self._running = False
        self.waits_for: str | None = "to be admitted" if self._spec.is_asked_for else None

    async def run(self) -> None:
        """Raises NotAdmitted."""
        if self._running or not self._spec.is_asked_for:
            return
        self._running = True
        nonce = await self._proof() if self._spec.work_bits else bytes(NONCE_BYTES)
        self.waits_for = "a relay to take its admission"
        await self._ask(self._sealed(nonce))
        log.info("admitted run=%s", self._swarm.manifest.id.hex()[:12])

    def _sealed(self, nonce: bytes) -> bytes:
        record = Admission(
            run_id=self._swarm.manifest.id,
            protocol=PROTOCOL_VERSION,
            software=SOFTWARE,
            nonce=nonce,
            invite=self._invite,
            issued_at_ms=now_ms(),
        )
        return seal(record, self._identity)

    # The proof of work.

    async def _proof(self) -> bytes:
        search, bits = self._remembered(), self._spec.work_bits
        if search.nonce:
            return search.nonce
        log.info("proof of work begins bits=%d tries_on_average=%d", bits, expected_tries(bits))
        try:
            search.nonce = await trio.to_thread.run_sync(self._find, search, abandon_on_cancel=True)
        finally:
            self._stopped.set()
        self._save(search)
        log.info("proof of work found tries=%d bits=%d", search.tries + 1, bits)
        return search.nonce

    def _find(self, search: _Search) -> bytes:
        def tried(tries: int) -> None:
            if self._stopped.is_set():
                raise InterruptedError
            search.tries = tries
            share = 100 * tries // expected_tries(self._spec.work_bits)
            self.waits_for = f"proving that this key cost something: {share} % of the tries that it takes on average"
            if tries % SAVE_EVERY == 0:
                self._save(search)

        tried(search.tries)
        author, run_id = self._identity.peer_id, self._swarm.manifest.id
        return find_work(author, run_id, bits=self._spec.work_bits, first=search.tries, each=tried)

    def _remembered(self) -> _Search:
        author, run_id = self._identity.peer_id, self._swarm.manifest.id
        fresh = _Search(run_id, author.public_key)
        try:
            search = msgspec.msgpack.decode(self._path.read_bytes(), type=_Search)
        except (OSError, msgspec.MsgspecError):
            return fresh
        if (search.run_id, search.key) != (fresh.run_id, fresh.key) or not 0 <= search.tries < 1 << 60:
            return fresh
        if search.nonce and not work_holds(author, run_id, search.nonce, bits=self._spec.work_bits):
            return fresh
        return search

    def _save(self, search: _Search) -> None:
        write_atomically(self._path, msgspec.msgpack.encode(search), sync=False)

    # Asking relays.

    async def _ask(self, admission: bytes) -> None:
        while True:
            refusals: dict[PeerId, RefusedError] = {}
            clients = random.sample(self._swarm.clients, len(self._swarm.clients))
            for client in clients:
                if await self._ask_one(client, admission, refusals):
                    return
            if refusals and len(refusals) == len(clients):
                raise _not_admitted(next(iter(refusals.values())))
            await trio.sleep(ASK_AGAIN_S)

    async def _ask_one(self, client: RelayClient, admission: bytes, refusals: dict[PeerId, RefusedError]) -> bool:
        """Whether this key is admitted by now."""
        try:
            admitted = await client.post_admission(admission)
        except RefusedError as error:
            if error.code.startswith(PREFIX):
                refusals[client.peer_id] = error
            log.info("admission relay=%s code=%s error=%r", client.peer_id.short, error.code, error.message)
            return False
        except (RelayError, ProtocolError) as error:
            log.info("admission relay=%s error=%r", client.peer_id.short, error.message)
            return False
        self.waits_for = None
        return admitted


def _not_admitted(error: RefusedError) -> NotAdmitted:
    return NotAdmitted(f"this node cannot take part in the run: {error.message}", hint=error.hint)

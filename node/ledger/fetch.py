"""A run's ledger from its relays into a directory, by somebody who is no node of it: for audits from outside.

Joins for a moment as a client with a key made for it. The entries are kept as they come, whatever they say, if each is
signed by its author and they lead to the tip that the trainer's newest head names; a relay whose entries are not or do
not is passed over. Writes what node.ledger.material finds again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from node.dht_show import joined
from node.ledger.forked import look_for_forks
from node.ledger.log import require_signatures
from node.ledger.material import CHECKPOINTS, LEDGER, MANIFEST
from node.ledger.pull import pull
from node.ledger.segments import SegmentWriter, read_segments
from node.ledger.spool import Spool
from node.ledger.witness import HEAD_FILE
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from p2p.bridge import AioThread
from p2p.contacts import Contacts
from p2p.discovery import P2PNode
from p2p.http import HttpClient
from protocol.atomic import write_atomically
from protocol.envelope import Signed
from protocol.errors import NodeError, ProtocolError, RelayError
from protocol.identity import Identity
from protocol.ledger import open_entry
from protocol.records import Head, Trained
from protocol.run import RunAddress

HEAD_WAIT_S: Final = 10.0
"""After the manifest: relays answer with a head at once, if they have one."""
RETRY_S: Final = 0.5
LAST_CHECKPOINTS: Final = 8
"""Relays keep the newest few."""
BLOCK_ENTRIES: Final = 500

Say = Callable[[str], None]


def fetch_ledger(
    out: Path, *, data_dir: Path, run: str | None, bootstrap: Sequence[str], timeout_s: float, say: Say
) -> None:
    """Fill an empty directory. `timeout_s` is for finding the run; what is fetched takes as long as it takes.

    Raises NodeError when nobody could be asked, RelayError when no relay has the ledger.
    """

    async def ask(node: P2PNode, address: RunAddress, left_s: float) -> dict[str, Any]:
        async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
            swarm = _swarm(node, address, http)
            await nursery.start(swarm.run)
            with trio.move_on_after(left_s) as finding:
                await swarm.wait_manifest()
            if finding.cancelled_caught:
                raise RelayError(f"nobody knows the run {address}", hint="check --run, and that its trainer is up")
            await fetch_records(swarm, out, say)
            nursery.cancel_scope.cancel()
        return {}

    joined(data_dir, run, bootstrap, ask, timeout_s=timeout_s)


def _swarm(node: P2PNode, address: RunAddress, http: HttpClient) -> Swarm:
    identity = Identity(os.urandom(32))
    return Swarm(
        address,
        http,
        contacts=Contacts(identity, address.digest),
        find_relays=node.find_relays,
        find_manifest=partial(node.find_run, address),
        board=StatusBoard(role="audit", peer_id=identity.peer_id, run=str(address)),
    )


async def fetch_records(swarm: Swarm, out: Path, say: Say) -> None:
    """The same through a swarm that knows its manifest. Raises RelayError."""
    with trio.move_on_after(HEAD_WAIT_S) as waiting:
        head = await swarm.wait_head()
    if waiting.cancelled_caught:
        raise RelayError("no relay has heard from the run's trainer", hint="try again while its trainer is up")
    (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    write_atomically(out / MANIFEST, swarm.manifest.data)
    say(f"fetching {head.record.ledger_length} entries of the ledger")
    await _fetch_entries(swarm, out, head)
    write_atomically(out / HEAD_FILE, head.data)
    await look_for_forks(swarm, out, out / LEDGER, head)
    say("fetching the manifests of the newest checkpoints")
    for checkpoint in _newest_checkpoints(out):
        await _fetch_checkpoint(swarm, checkpoint, out)


async def _fetch_entries(swarm: Swarm, out: Path, head: Signed[Head]) -> None:
    errors: list[str] = []
    for _ in range(3):
        for client in swarm.clients:
            try:
                with Spool(out, length=0, tip=swarm.manifest.id) as spool:
                    await _from(client, spool, head, swarm.manifest.id)
                    await trio.to_thread.run_sync(_keep, spool, out, swarm.manifest.id)
                    return
            except (RelayError, ProtocolError) as error:
                errors.append(f"{client.name}: {error.message}")
        await trio.sleep(RETRY_S)
    raise RelayError(
        f"no relay has the ledger of {head.record.ledger_length} entries that the trainer's head names: "
        f"{'; '.join(dict.fromkeys(errors)) or 'none was found'}"[:1000],
        hint="try again in a moment; if it lasts, audit the data directory of a node: --from DIR",
    )


async def _from(client: RelayClient, spool: Spool, head: Signed[Head], run_id: bytes) -> None:
    await pull(client, spool, length=head.record.ledger_length, held=(), run_id=run_id)
    if spool.tip != head.record.ledger_tip:
        raise ProtocolError("its entries do not lead to the tip that the trainer signed")
    await trio.to_thread.run_sync(require_signatures, spool)


def _keep(spool: Spool, out: Path, run_id: bytes) -> None:
    (out / LEDGER).mkdir(parents=True, exist_ok=True)
    with closing(SegmentWriter(out / LEDGER, start=run_id)) as writer:
        block: list[bytes] = []
        for entry in spool:
            block.append(entry)
            while len(block) >= BLOCK_ENTRIES:
                block = block[len(writer.append(block)) :]
        while block:
            block = block[len(writer.append(block)) :]
        if not spool.length:
            writer.append([])


def _newest_checkpoints(out: Path) -> list[bytes]:
    """Ids from the ledger's last `trained` entries."""
    found: list[bytes] = []
    for segment in read_segments(out / LEDGER):
        for entry in segment.entries:
            try:
                record = open_entry(entry, signature_checked=True).record
            except ProtocolError:
                continue
            if isinstance(record, Trained):
                found = [*found, record.checkpoint][-LAST_CHECKPOINTS:]
    return found


async def _fetch_checkpoint(swarm: Swarm, checkpoint: bytes, out: Path) -> None:
    for client in swarm.clients:
        try:
            manifest = await client.checkpoint(checkpoint)
        except (NodeError, ProtocolError):
            continue
        if manifest is not None:
            write_atomically(out / CHECKPOINTS / checkpoint.hex(), manifest.data)
            return

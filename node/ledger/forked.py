"""Asking every relay of a run for its head, so that an audit from outside sees two ledgers where a trainer signed two.

Each relay keeps to the ledger that it met first, so a fork shows in what different ones say. A head that contradicts
what was fetched becomes a proof in the directory `forks`; one that continues it, or lags behind, says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import trio

from node.ledger.pull import pull
from node.ledger.segments import read_segments
from node.ledger.spool import Spool
from node.ledger.witness import DIRECTORY, ForkWitness
from node.relay_client import RelayClient
from node.swarm import Swarm
from protocol.envelope import Signed, id_of
from protocol.errors import NodeError
from protocol.forks import MAX_BETWEEN, Fork
from protocol.ledger import next_tip
from protocol.records import Head

HEAD_TIMEOUT_S: Final = 10.0
"""For one relay's answer; all are asked at once."""
LEDGER_TIMEOUT_S: Final = 600.0
"""For the ledger of a relay whose head is longer than the fetched one and does not continue it."""


async def look_for_forks(swarm: Swarm, out: Path, ledger: Path, head: Signed[Head]) -> None:
    """Prove what contradicts the ledger that was fetched for a head. Relays that fail are passed over."""
    witness = ForkWitness(swarm.manifest, out / DIRECTORY)
    for client, other in (await _heads(swarm)).items():
        if other.id == head.id:
            continue
        if other.record.ledger_length <= head.record.ledger_length:
            await trio.to_thread.run_sync(_compare_shorter, witness, ledger, head, other)
        else:
            with trio.move_on_after(LEDGER_TIMEOUT_S):
                await _compare_longer(witness, client, out, head, other)


async def _heads(swarm: Swarm) -> dict[RelayClient, Signed[Head]]:
    found: dict[RelayClient, Signed[Head]] = {}

    async def ask(client: RelayClient) -> None:
        try:
            with trio.move_on_after(HEAD_TIMEOUT_S):
                if (head := await client.head()) is not None:
                    found[client] = head
        except NodeError:
            return  # it says nothing, and so contradicts nothing

    async with trio.open_nursery() as nursery:
        for client in swarm.clients:
            nursery.start_soon(ask, client)
    return found


def _compare_shorter(witness: ForkWitness, ledger: Path, head: Signed[Head], other: Signed[Head]) -> Fork | None:
    """A head of a length that was fetched."""
    entries = (entry for segment in read_segments(ledger) for entry in segment.entries)
    return _testify(witness, entries, shorter=other, longer=head)


async def _compare_longer(
    witness: ForkWitness, client: RelayClient, out: Path, head: Signed[Head], other: Signed[Head]
) -> None:
    try:
        with Spool(out, length=head.record.ledger_length, tip=head.record.ledger_tip) as spool:
            await pull(client, spool, length=other.record.ledger_length, held=(), run_id=head.record.run_id)
            if spool.tip == other.record.ledger_tip:
                return
        with Spool(out, length=0, tip=head.record.run_id) as spool:
            await pull(client, spool, length=other.record.ledger_length, held=(), run_id=head.record.run_id)
            if spool.tip == other.record.ledger_tip:
                await trio.to_thread.run_sync(lambda: _testify(witness, spool, shorter=head, longer=other))
    except NodeError:
        return  # it does not have what its head names, and so shows nothing


def _testify(
    witness: ForkWitness, entries: Iterator[bytes] | Spool, *, shorter: Signed[Head], longer: Signed[Head]
) -> Fork | None:
    """With the entries that lead to the longer head's tip. Contradicts nothing: None."""
    tip, between, start = shorter.record.run_id, list[bytes](), shorter.record.ledger_length
    if longer.record.ledger_length - start > MAX_BETWEEN:
        return None
    for number, entry in enumerate(entries):
        if number < start:
            tip = next_tip(tip, id_of(entry))
        else:
            between.append(id_of(entry))
    return None if tip == shorter.record.ledger_tip else witness.testify(shorter, longer, base=tip, between=between)

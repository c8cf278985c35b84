"""A node's copy of the ledger: what relays give is taken only if it leads to the tip that the trainer signed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from factories import make_submission, make_verdict
from relay_world import MANIFEST, Relay, loopback, make_head, serving

from node.ledger_file import LedgerFile
from node.ledger_follow import LedgerFollower
from node.relay_client import RelayClient
from protocol.identity import Identity
from protocol.ledger import LedgerState, next_tip, open_entry
from protocol.records import Head

ALICE, BOB, CAROL = (Identity.from_phrase(name) for name in ("alice", "bob", "carol"))


class FakeSwarm:
    """Relays and heads as a test sets them."""

    def __init__(self, clients: list[RelayClient]) -> None:
        self.clients = clients
        self.head: Any = None
        self._changed = trio.Event()

    def set_head(self, head: Any) -> None:
        self.head = head
        self._changed.set()
        self._changed = trio.Event()

    async def wait_head(self, after: int) -> Any:
        while self.head is None or self.head.record.sequence <= after:
            await self._changed.wait()
        return self.head


def head_over(entries: list[bytes], sequence: int) -> Any:
    tip = MANIFEST.id
    for entry in entries:
        tip = next_tip(tip, open_entry(entry).id)
    return make_head(sequence, ledger_length=len(entries), ledger_tip=tip)


def entries_of(who: Identity) -> list[bytes]:
    submissions = [make_submission(who, MANIFEST.id, index=index) for index in range(3)]
    return [data for one in submissions for data in (one.data, make_verdict(one).data)]


@asynccontextmanager
async def following(tmp_path: Path, *served: list[bytes]) -> AsyncIterator[tuple[FakeSwarm, LedgerFollower]]:
    """A follower of relays that serve these entries, whatever any head says."""
    async with loopback() as (aio, http), trio.open_nursery() as nursery:
        clients = []
        for identity, entries in zip((BOB, CAROL), served, strict=False):
            relay = Relay(identity, tmp_path / identity.peer_id.short, aio)
            relay.meet_trainer()
            relay.desk.ledger_entries = lambda start, limit, held=entries: held[start : start + limit]
            await nursery.start(serve, aio, relay)
            clients.append(relay.client(http))
        swarm = FakeSwarm(clients)
        state = LedgerState(MANIFEST.id, MANIFEST.record)
        follower = LedgerFollower(swarm, LedgerFile(tmp_path / "copy", state))
        await nursery.start(follower.run)
        yield swarm, follower
        nursery.cancel_scope.cancel()


async def serve(aio: Any, relay: Relay, *, task_status: Any) -> None:
    relay.service = type(relay.service)(aio, relay.desk, relay.store)
    async with serving(aio, relay):
        task_status.started()
        await trio.sleep_forever()


async def until_length(follower: LedgerFollower, length: int) -> None:
    while follower.state.length < length:
        await follower.wait_changed()


async def test_copy_keeps_up_with_the_head(tmp_path: Path) -> None:
    entries = entries_of(ALICE)
    with trio.fail_after(20):
        async with following(tmp_path, entries) as (swarm, follower):
            swarm.set_head(head_over(entries[:2], 2))
            await until_length(follower, 2)
            assert follower.state.length == 2  # not what the relay has beyond the head
            swarm.set_head(head_over(entries, 3))
            await until_length(follower, 6)
            assert follower.state.contributors[ALICE.peer_id].accepted == 3
    again = LedgerFile(tmp_path / "copy", LedgerState(MANIFEST.id, MANIFEST.record))
    assert again.state.length == 6


async def test_false_entries_are_not_taken_and_another_relay_is_asked(tmp_path: Path) -> None:
    """A relay gives a contributor a record that it does not have."""
    true, false = entries_of(ALICE), entries_of(BOB)
    with trio.fail_after(20):
        async with following(tmp_path, false, true) as (swarm, follower):
            swarm.set_head(head_over(true, 2))
            await until_length(follower, 6)
            assert set(follower.state.contributors) == {ALICE.peer_id}


async def test_relay_that_is_behind_is_asked_again(tmp_path: Path) -> None:
    entries = entries_of(ALICE)
    served: list[bytes] = entries[:2]
    with trio.fail_after(20):
        async with following(tmp_path, served) as (swarm, follower):
            head: Head = head_over(entries, 2)
            swarm.set_head(head)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert follower.state.length == 0
            served += entries[2:]
            await until_length(follower, 6)

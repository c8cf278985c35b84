"""A trainer's collector with a ledger of its own, and relays that say what a test has them say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import trio
import trio.testing
from factories import OPERATOR, VALIDATOR, make_manifest, make_verdict

from node.feeds import Feeds
from node.ledger.log import LedgerLog
from node.relay_client import FeedItem
from node.trainer.collector import Collector
from protocol.envelope import Signed, kind_of
from protocol.errors import RelayError
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.ledger_memory import LedgerMemory
from protocol.records import Manifest

RUN = b"r" * 32
ALICE, BOB = Identity.from_phrase("alice"), Identity.from_phrase("bob")
CARL, DAVE = Identity.from_phrase("carl"), Identity.from_phrase("dave")
THREE = tuple(who.peer_id.public_key for who in (VALIDATOR, CARL, DAVE))


class FakeRelay:
    """Has every file, unless it is told to be away."""

    def __init__(self) -> None:
        self.peer_id = Identity.from_phrase("relay").peer_id
        self.away = False
        self.fetched = 0

    async def file(self, submission: Signed[Any], path: Path) -> None:
        await trio.lowlevel.checkpoint()
        if self.away:
            raise RelayError("the relay is away")
        self.fetched += 1
        path.write_bytes(b"rollouts")


class FakeFeeds:
    """Items are handed over one by one."""

    def __init__(self) -> None:
        self.relay, self.silent = FakeRelay(), frozenset[Any]()
        self._send, self._receive = trio.open_memory_channel[FeedItem](100)
        self.taken = 0

    def say(self, *records: Signed[Any]) -> None:
        for number, signed in enumerate(records):
            self._send.send_nowait(FeedItem(seq=number + 1, signed=signed))

    async def next(self) -> tuple[FakeRelay, FeedItem]:
        return self.relay, await self._receive.receive()

    def done(self, relay: FakeRelay, item: FeedItem) -> None:
        self.taken += 1


class World:
    """A trainer's collector and its ledger."""

    def __init__(self, directory: Path, manifest: Manifest, *, memory: LedgerMemory | None = None) -> None:
        self.feeds = FakeFeeds()
        self.relay = self.feeds.relay
        self.ledger = LedgerLog(directory / "ledger", LedgerState(RUN, manifest, memory=memory))
        self.collector = Collector(OPERATOR, self.ledger, cast(Feeds, self.feeds), directory / "rollouts")

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    def standing(self, who: Identity) -> str:
        return self.state.contributors[who.peer_id].standing

    def kinds(self) -> list[str]:
        return [kind_of(entry) for entry in self.ledger.entries(0, 99)]

    async def hear(self, *records: Signed[Any]) -> None:
        """Let the collector take these items, and nothing after them."""
        wanted = self.feeds.taken + len(records)
        self.feeds.say(*records)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.collector.run)
                while self.feeds.taken < wanted:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                nursery.cancel_scope.cancel()


def worlds(tmp_path: Path, **manifest: Any) -> World:
    return World(tmp_path, make_manifest(**manifest))


def hard(submission: Signed[Any], by: Identity) -> Signed[Any]:
    return make_verdict(submission, by=by, outcome="reject", hard=True, reason="seed: made up")

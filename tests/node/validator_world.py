"""A validator's role among real relays on loopback, with a trainer that signs heads and keeps a ledger.

What the children compute is made up here, unless a test hands in a real one: who cheats, what crashes, what is alike.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import trio
from factories import OPERATOR, VALIDATOR
from relay_world import (
    MANIFEST,
    RUN,
    Relay,
    contacts,
    loopback,
    make_advert,
    make_head,
    make_notice,
    serving_routes,
    submission_of,
)

from node.compute.reader import RolloutReader
from node.feeds import Feeds
from node.ledger.follow import LedgerFollower
from node.ledger.log import LedgerLog
from node.policies import Policies
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.swarm import Swarm
from node.validator.docket import Docket
from node.validator.duplicates import AnswerIndex
from node.validator.role import ValidatorParts, ValidatorRole
from node.validator.suspicion import Suspicions
from p2p.bridge import AioThread
from p2p.http import HttpClient
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.origin import checkpoint_routes
from p2p.shardcast.store import CheckpointStore
from protocol.checkpoint import CheckpointRules
from protocol.envelope import Signed
from protocol.errors import ComputeCrashed
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import Head, Submission, Verdict


def accepting(**changes: Any) -> dict[str, Any]:
    return {"outcome": "accept", "hard": False, "reason": "every check passed", "checks": []} | changes


class FakeChild:
    """A compute process whose answers are a function of the submission; a crash counts as a restart."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.answer: Callable[[Submission], dict[str, Any]] = lambda submission: accepting()
        self.crashes: dict[int, float] = {}
        """How often the submission with an index still makes the process crash."""
        self.restarts = 0
        self.asked: list[Submission] = []

    async def call(self, method: str, /, *, timeout_s: float, **params: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if method == "load":
            return {"held": [params["checkpoint_id"]]}
        assert method == self.method
        submission = msgspec.msgpack.decode(params["submission"], type=Submission)
        self.asked.append(submission)
        if self.crashes.get(submission.index, 0) > 0:
            self.crashes[submission.index] -= 1
            self.restarts += 1
            raise ComputeCrashed("the process was killed by signal 9")
        return self.answer(submission)


class FakeReader:
    """Believes every file."""

    async def read(self, path: Path, *, timeout_s: float, **limits: Any) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return []


@dataclass
class Trainer:
    """Signs heads for every relay and writes the ledger that they name."""

    checkpoint: bytes
    ledger: LedgerLog
    relays: list[Relay]
    sequence: int = 0
    heads: list[Signed[Head]] = field(default_factory=list)

    def beat(self, **changes: Any) -> Signed[Head]:
        state = self.ledger.state
        previous, self.sequence = self.sequence, self.sequence + 1
        head = make_head(
            self.sequence,
            previous_sequence=previous,
            checkpoint=self.checkpoint,
            ledger_length=state.length,
            ledger_tip=state.tip,
            **changes,
        )
        self.heads.append(head)
        for relay in self.relays:
            relay.desk.extend_ledger(self.ledger.entries(relay.desk.ledger.state.length, 10**6), head)
            relay.desk.accept_head(head.data)
        return head


class World:
    """The validator and everything around it."""

    def __init__(self, tmp_path: Path, aio: AioThread, http: HttpClient, relays: list[Relay]) -> None:
        self.tmp_path, self.aio, self.http, self.relays = tmp_path, aio, http, relays
        self.screening, self.compute = FakeChild("screen"), FakeChild("judge")
        self.docket = Docket(tmp_path / "docket.sqlite")
        self.answers = AnswerIndex(tmp_path / "answers.sqlite")
        self.suspicions = Suspicions(tmp_path / "docket.sqlite")
        self.store = CheckpointStore(tmp_path / "checkpoints")
        self.board = StatusBoard(role="validator", peer_id=VALIDATOR.peer_id, run=str(RUN))
        self.shelves: list[CheckpointStore] = []
        """What each relay has of checkpoints."""
        self.checkpoint = b""
        self._files = 0
        self.trainer: Trainer

    async def submit(
        self, author: Identity, index: int, *, relay: int = 0, content: bytes | None = None, **changes: Any
    ) -> Signed[Submission]:
        """Hand in a submission, through a relay's door."""
        self._files += 1
        content = content or self._files.to_bytes(4, "big")
        path = self.tmp_path / f"{self._files}.parquet"
        path.write_bytes(content)
        record = {"checkpoint": self.checkpoint, "index": index} | changes
        submission = submission_of(author, content, **record)
        await self.relays[relay].client(self.http, by=author).submit(submission.data, path)
        return submission

    def client(self, relay: int = 0) -> RelayClient:
        return self.relays[relay].client(self.http)

    async def verdict(self, submission: Signed[Submission], *, relay: int = 0) -> Verdict:
        """What the relay's feed says of a submission, as soon as it does."""
        after = 0
        while True:
            for item in await self.client(relay).feed(after, wait_s=5.0):
                after = item.seq
                if isinstance(item.signed.record, Verdict) and item.signed.record.submission == submission.id:
                    return item.signed.record

    async def until_noticed(self, count: int) -> None:
        while len(self.docket.opened(10**6)) + sum(self.docket.outcomes().values()) < count:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def publish(store: CheckpointStore, directory: Path, *, step: int = 0) -> bytes:
    """A policy of the run in a store; its id."""
    await trio.Path(directory).mkdir()
    await trio.Path(directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    source = {"identity": OPERATOR, "run_id": MANIFEST.id, "step": step, "shard_bytes": 4096}
    return (await store.publish(directory, **source)).id


@asynccontextmanager
async def world(
    tmp_path: Path,
    *relay_names: str,
    reader: Literal["real", "fake"] = "fake",
    role: type[ValidatorRole] = ValidatorRole,
) -> AsyncIterator[World]:
    """Relays with a head each, a published checkpoint, and a running validator."""
    async with loopback() as (aio, http), AsyncExitStack() as stack:
        relays = [Relay(Identity.from_phrase(name), tmp_path / name, aio) for name in relay_names or ("carol",)]
        made = World(tmp_path, aio, http, relays)
        made.checkpoint = await publish(made.store, tmp_path / "policy")
        ledger = LedgerLog(tmp_path / "ledger", LedgerState(MANIFEST.id, MANIFEST.record))
        made.trainer = Trainer(made.checkpoint, ledger, relays, sequence=1)
        first = make_head(1, previous_sequence=0, checkpoint=made.checkpoint)
        for relay in relays:
            relay.desk.accept_origin(MANIFEST.data, make_notice(relay.identity).data, first.data)
            made.shelves.append(CheckpointStore(tmp_path / f"shelf-{len(made.shelves)}"))
            routes = [*relay.service.routes(), *checkpoint_routes(made.shelves[-1])]
            relay.url = await stack.enter_async_context(serving_routes(aio, routes, relay.service.middleware))
            stack.callback(relay.close)
        async with trio.open_nursery() as nursery:
            real = await _start_reader(tmp_path, nursery) if reader == "real" else None
            await _start_validator(made, nursery, real, role)
            yield made
            nursery.cancel_scope.cancel()


async def _start_reader(tmp_path: Path, nursery: trio.Nursery) -> RolloutReader:
    reader = RolloutReader(log_path=tmp_path / "reader.log")
    await nursery.start(reader.run)
    return reader


async def _start_validator(
    made: World, nursery: trio.Nursery, reader: RolloutReader | None, role: type[ValidatorRole]
) -> None:
    adverts = [make_advert(relay.identity, relay.url) for relay in made.relays]

    async def find_relays() -> Any:
        await trio.lowlevel.checkpoint()
        return adverts

    async def no_manifest() -> None:
        await trio.sleep(math.inf)

    find: dict[str, Callable[[], Awaitable[Any]]] = {"find_relays": find_relays, "find_manifest": no_manifest}
    swarm = Swarm(RUN, made.http, contacts=contacts(VALIDATOR), board=made.board, manifest=MANIFEST, **find)
    await nursery.start(swarm.run)
    client = CheckpointClient(made.http, made.store, CheckpointRules.of_run(MANIFEST), swarm.sources)
    feeds = Feeds(lambda: swarm.clients, kinds=[Submission.KIND], cursors_path=None)
    copy = LedgerLog(made.tmp_path / "copy", LedgerState(MANIFEST.id, MANIFEST.record))
    ledger = LedgerFollower(swarm, copy)
    for service in (feeds.run, ledger.run):
        await nursery.start(service)
    parts = ValidatorParts(
        identity=VALIDATOR,
        swarm=swarm,
        policies=Policies(made.store, client, swarm, made.board),
        compute=made.compute,
        screening=made.screening,
        reader=reader or FakeReader(),
        docket=made.docket,
        answers=made.answers,
        suspicions=made.suspicions,
        ledger=ledger,
        feeds=feeds,
        board=made.board,
        work_dir=made.tmp_path / "work",
    )
    await swarm.wait_head(0)
    nursery.start_soon(role(parts).run)

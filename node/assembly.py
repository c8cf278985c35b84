"""Where a role's objects are built and handed to each other: one function a role, read from top to bottom.

Services that a role needs are started in the nursery it is given, in the order in which they depend on one another.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Protocol

import trio

from node.compute.process import ComputeProcess
from node.compute.reader import RolloutReader
from node.config import NodeConfig
from node.dashboard import tokenizer
from node.dashboard.sources import Sources, from_relay_store, from_relays
from node.dashboard.watch import WatchParts, WatchRole
from node.datadir import DataDir
from node.feeds import Feeds
from node.inference.outbox import Outbox
from node.inference.role import InferenceParts, InferenceRole
from node.ledger.follow import LedgerFollower
from node.ledger.log import LedgerLog
from node.ledger.witness import DIRECTORY as FORKS
from node.ledger.witness import HEAD_FILE, ForkWitness
from node.policies import Policies
from node.progress import DownloadProgress
from node.relay.desk import RelayDesk
from node.relay.door import DoorLimits
from node.relay.role import RelayParts, RelayRole
from node.relay.store import RelayStore
from node.run_create import require_model
from node.run_pointer import run_pointer
from node.run_show import load_run
from node.status import StatusBoard
from node.swarm import Swarm
from node.trainer.collector import Collector
from node.trainer.monitor import build_monitor
from node.trainer.role import TrainerParts, TrainerRole
from node.validator.docket import Docket
from node.validator.duplicates import AnswerIndex
from node.validator.role import ValidatorParts, ValidatorRole
from node.validator.suspicion import Suspicions
from p2p.bridge import AioThread
from p2p.contacts import Contacts
from p2p.discovery import P2PNode
from p2p.http import HttpClient, HttpServer
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.fan_out import FanOut
from p2p.shardcast.origin import OriginDoor, origin_routes
from p2p.shardcast.patches import PatchStore
from p2p.shardcast.store import CheckpointStore
from p2p.tls import load_or_create_certificate
from protocol.checkpoint import CheckpointRules
from protocol.envelope import Signed
from protocol.errors import BootstrapError, ConfigError, NodeError, RelayError
from protocol.identity import Identity, PeerId
from protocol.ledger import LedgerState
from protocol.records import Manifest, Submission, Verdict
from protocol.run import RunAddress
from trainer.recipe import load_recipe

log = logging.getLogger(__name__)

SPARE_CHECKPOINTS: Final = 3
"""Policies kept beyond the staleness bound, for submissions that are still on their way."""
EXPLAIN_S: Final = 2.0
EXPLAIN_EVERY: Final = 5
SHOW_DISCOVERY_S: Final = 5.0


@dataclass(frozen=True)
class Node:
    """What every role is built upon."""

    config: NodeConfig
    data: DataDir
    identity: Identity
    board: StatusBoard
    aio: AioThread
    http: HttpClient
    sources: Sources
    """What its dashboard shows."""

    @property
    def address(self) -> RunAddress:
        return self.config.run_address

    @cached_property
    def contacts(self) -> Contacts:
        """How this node is let in at relays."""
        return Contacts(self.identity, self.address.digest)

    def path(self, name: str) -> Path:
        return self.data.path / name


class Role(Protocol):
    """A role under way: `run` until it is done, `leave` when a signal asks for it."""

    async def run(self) -> None: ...

    async def leave(self, deadline_s: float) -> None: ...


@dataclass(frozen=True)
class InferenceKind:
    """What makes an inference node: its compute process and its role. A simulation of a cheat replaces one of them."""

    module: str = "node.inference.compute"
    args: Sequence[str] = ()
    new_role: Callable[[InferenceParts], Role] = InferenceRole


async def build_role(node: Node, services: trio.Nursery, kind: InferenceKind) -> Role:
    """The role that the configuration names, its services running. Raises NodeError."""
    match node.config.role:
        case "relay":
            return await _relay(node, services)
        case "trainer":
            return await _trainer(node, services)
        case "validator":
            return await _validator(node, services)
        case "inference":
            return await _inference(node, services, kind)
        case "watch":
            return await _watch(node, services)


async def _relay(node: Node, services: trio.Nursery) -> Role:
    p2p = P2PNode(
        node.identity,
        listen=node.config.listen,
        announce=node.config.announce,
        bootstrap=node.config.bootstrap,
        dht_server=True,
        run_address=node.address,
        data_dir=node.data.path,
    )
    await services.start(p2p.run)
    services.start_soon(_show_discovery, p2p, node.board)
    store = RelayStore(
        node.data.sub("relay"),
        max_bytes=node.config.disk_quota_bytes,
        max_node_bytes=node.config.node_quota_bytes,
        max_step_bytes=node.config.step_quota_bytes,
    )
    desk = RelayDesk(node.address, node.identity, store=store, ledger_path=node.path("ledger"))
    checkpoints = CheckpointStore(node.data.sub("checkpoints"))
    node.sources.ledger = lambda: desk.ledger.state if desk.ledger else None
    node.sources.obtain = from_relay_store(store)
    node.sources.tokenizer = tokenizer.of_newest_policy(checkpoints)
    return RelayRole(
        RelayParts(
            run=node.address,
            identity=node.identity,
            aio=node.aio,
            http=node.http,
            discovery=p2p,
            store=store,
            desk=desk,
            checkpoints=checkpoints,
            patches=PatchStore(checkpoints, node.data.sub("patches")),
            board=node.board,
            contacts=node.contacts,
            certificate=load_or_create_certificate(node.data.path),
            limits=_door_limits(node.config),
            connections_per_address=node.config.connections_per_address,
            http_host=node.config.http_host,
            http_port=node.config.http_port,
            public_url=node.config.public_url,
            stay=node.config.stay,
        )
    )


def _door_limits(config: NodeConfig) -> DoorLimits:
    return DoorLimits(
        requests_per_s=config.requests_per_s,
        bytes_per_s=config.bytes_per_s,
        upload_bytes_per_s=config.upload_bytes_per_s,
        relay_requests_per_s=config.relay_requests_per_s,
        relay_bytes_per_s=config.relay_bytes_per_s,
        address_requests_per_s=config.address_requests_per_s,
        address_bytes_per_s=config.address_bytes_per_s,
        bytes_per_day=config.bytes_per_day,
        allow=frozenset(map(PeerId.parse, config.allow)),
    )


async def _inference(node: Node, services: trio.Nursery, kind: InferenceKind) -> Role:
    compute = await _compute(node, services, kind.module, kind.args)
    _, swarm = await _swarm(node, services)
    outbox = Outbox(node.path("outbox.sqlite"))
    services.start_soon(node.sources.follow, partial(_follower, node, swarm, _witness(node, swarm)))
    node.sources.obtain = from_relays(swarm, node.data.sub("shown"), own=outbox)
    return kind.new_role(
        InferenceParts(
            identity=node.identity,
            swarm=swarm,
            policies=await _policies(node, services, swarm),
            compute=compute,
            outbox=outbox,
            feeds=await _feeds(node, services, swarm, kinds=[Verdict.KIND], about=node.identity.peer_id, keep=True),
            board=node.board,
            work_dir=node.data.sub("rollouts"),
            tests_itself=kind == InferenceKind(),
        )
    )


async def _validator(node: Node, services: trio.Nursery) -> Role:
    compute = await _compute(node, services, "node.validator.compute")
    screening = await _compute(node, services, "node.validator.screening", log_name="screening.log")
    reader = await _reader(node, services)
    _, swarm = await _swarm(node, services)
    _require_validator(swarm.manifest, node.identity.peer_id, node.config)
    ledger = _follower(node, swarm, _witness(node, swarm))
    await services.start(ledger.run)
    node.sources.ledger = lambda: ledger.state
    node.sources.obtain = from_relays(swarm, node.data.sub("shown"))
    return ValidatorRole(
        ValidatorParts(
            identity=node.identity,
            swarm=swarm,
            policies=await _policies(node, services, swarm),
            compute=compute,
            screening=screening,
            reader=reader,
            docket=Docket(node.path("docket.sqlite")),
            answers=AnswerIndex(node.path("answers.sqlite")),
            suspicions=Suspicions(node.path("docket.sqlite")),
            ledger=ledger,
            feeds=await _feeds(node, services, swarm, kinds=[Submission.KIND], keep=True),
            board=node.board,
            work_dir=node.data.sub("rollouts"),
        )
    )


async def _trainer(node: Node, services: trio.Nursery) -> Role:
    manifest = _own_run(node)
    run_dir = node.path("run")
    compute = await _compute(
        node, services, "node.trainer.compute", [str(node.data.sub("training")), str(run_dir / "recipe.toml")]
    )
    ledger = LedgerLog(node.path("ledger"), LedgerState(manifest.id, manifest.record))
    store = CheckpointStore(node.data.sub("checkpoints"), keep=manifest.record.batch.max_staleness + SPARE_CHECKPOINTS)
    door = OriginDoor()
    certificate = load_or_create_certificate(node.data.path)
    origin = HttpServer(
        node.aio,
        origin_routes(
            store,
            ledger.entries,
            segments=ledger,
            patches=PatchStore(store, node.data.sub("patches")),
            fan_out=FanOut(door.holder, node.config.fan_out),
        ),
        host=node.config.http_host,
        port=node.config.http_port,
        certificate=certificate,
        middlewares=[door.middleware],
    )
    address = await services.start(origin.run)
    p2p, swarm = await _swarm(node, services, manifest)
    services.start_soon(p2p.publish_run, partial(run_pointer, node.identity, manifest))
    feeds = await _feeds(node, services, swarm, kinds=[Submission.KIND, Verdict.KIND], keep=False)
    node.sources.ledger = lambda: ledger.state
    node.sources.obtain = from_relays(swarm, node.data.sub("shown"))
    node.sources.tokenizer = tokenizer.of_newest_policy(store)
    return TrainerRole(
        TrainerParts(
            identity=node.identity,
            manifest=manifest,
            swarm=swarm,
            store=store,
            ledger=ledger,
            collector=Collector(node.identity, ledger, feeds, node.data.sub("rollouts")),
            compute=compute,
            reader=await _reader(node, services),
            monitor=await build_monitor(
                node.data.sub("metrics"),
                manifest,
                load_recipe(run_dir / "recipe.toml"),
                board=node.board,
                start=partial(_compute, node, services, essential=False),
            ),
            board=node.board,
            origin_url=node.config.public_url or address.url,
            origin_fingerprint=certificate.fingerprint,
            origin_token=door.token_for,
            discovery_state=lambda: p2p.bootstrap_state,
        )
    )


async def _watch(node: Node, services: trio.Nursery) -> Role:
    _, swarm = await _swarm(node, services)
    services.start_soon(node.sources.follow, partial(_follower, node, swarm, _witness(node, swarm)))
    node.sources.obtain = from_relays(swarm, node.data.sub("shown"))
    node.sources.tokenizer = tokenizer.from_relays(swarm, node.http, node.data.sub("tokenizer"))
    return WatchRole(WatchParts(swarm=swarm, sources=node.sources, board=node.board))


def _follower(node: Node, swarm: Swarm, witness: ForkWitness) -> LedgerFollower:
    manifest = swarm.manifest
    ledger = LedgerLog(node.path("ledger"), LedgerState(manifest.id, manifest.record), mends=True)
    return LedgerFollower(swarm, ledger, witness)


def _witness(node: Node, swarm: Swarm) -> ForkWitness:
    """Heads that contradict each other are noticed by every role that sees heads."""
    witness = ForkWitness(swarm.manifest, node.path(FORKS), board=node.board, keep_head=node.path("ledger") / HEAD_FILE)
    swarm.on_head(witness.see)
    return witness


async def _swarm(node: Node, services: trio.Nursery, manifest: Signed[Manifest] | None = None) -> tuple[P2PNode, Swarm]:
    """Join discovery as a client: find the run's manifest and relays, follow its head. Raises NodeError."""
    if not node.config.bootstrap and not any(node.path(name).exists() for name in ("peers.json", "swarm.cache")):
        raise BootstrapError(
            "no bootstrap address is given, and this node remembers no peers from an earlier start",
            hint="ask the run's operator for one and give it: --bootstrap /ip4/…/tcp/8471/p2p/<relay's peer id>",
        )
    p2p = P2PNode(
        node.identity,
        listen=(),
        announce=(),
        bootstrap=node.config.bootstrap,
        dht_server=False,
        run_address=node.address,
        data_dir=node.data.path,
    )
    swarm = Swarm(
        node.address,
        node.http,
        contacts=node.contacts,
        find_relays=p2p.find_relays,
        find_manifest=partial(p2p.find_run, node.address),
        board=node.board,
        manifest=manifest,
        cache_path=node.path("swarm.cache"),
        follow_head=manifest is None,
    )
    await services.start(p2p.run)
    services.start_soon(_show_discovery, p2p, node.board)
    await services.start(swarm.run)
    async with _explaining(node.board, lambda: f"the run's manifest; {p2p.bootstrap_state}"):
        with trio.move_on_after(node.config.join_timeout_s or math.inf) as joining:
            await swarm.wait_manifest()
    if joining.cancelled_caught:
        raise _not_found(node, p2p)
    return p2p, swarm


async def _show_discovery(p2p: P2PNode, board: StatusBoard) -> None:
    """Keep on the board whom this node knows in the DHT, for `intellect-node peers`."""
    while True:
        board.details(discovery=p2p.describe())
        await trio.sleep(SHOW_DISCOVERY_S)


def _not_found(node: Node, p2p: P2PNode) -> NodeError:
    """Why a node that was never in its run could not join."""
    waited = f"within {node.config.join_timeout_s:g} s"
    if not p2p.dht_peers:
        return BootstrapError(
            f"no bootstrap peer could be reached {waited}: {p2p.bootstrap_state}",
            hint="check the addresses and this computer's network, or ask the operator for another --bootstrap",
        )
    return RelayError(
        f"nobody knows the run {node.address} {waited}; {p2p.dht_peers} peers were asked",
        hint="check --run letter by letter with the operator, and that the run's trainer is up",
    )


@asynccontextmanager
async def _explaining(board: StatusBoard, waits_for: Callable[[], str]) -> AsyncIterator[None]:
    """Say on the board, and now and then in the log, what a block waits for."""

    async def explain() -> None:
        for count in itertools.count():
            board.waiting(waits_for())
            if count % EXPLAIN_EVERY == EXPLAIN_EVERY - 1:
                log.info("waiting for %s", waits_for())
            await trio.sleep(EXPLAIN_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(explain)
        yield
        nursery.cancel_scope.cancel()


async def _policies(node: Node, services: trio.Nursery, swarm: Swarm) -> Policies:
    store = CheckpointStore(
        node.data.sub("checkpoints"),
        keep=swarm.manifest.record.batch.max_staleness + SPARE_CHECKPOINTS,
        max_bytes=node.config.policies_quota_bytes,
    )
    node.board.details(policies_quota=node.config.policies_quota_bytes, policies_bytes=store.held_bytes)
    client = CheckpointClient(
        node.http,
        store,
        CheckpointRules.of_run(swarm.manifest),
        swarm.sources,
        on_bytes=swarm.downloaded,
        on_misdeed=swarm.bad_download,
        on_progress=DownloadProgress(node.board),
    )
    policies = Policies(store, client, swarm, node.board, budget=node.http.budget)
    node.sources.tokenizer = tokenizer.of_newest_policy(store)
    await services.start(policies.run)
    return policies


async def _feeds(
    node: Node, services: trio.Nursery, swarm: Swarm, *, kinds: Sequence[str], about: PeerId | None = None, keep: bool
) -> Feeds:
    path = node.path("feeds.json") if keep else None
    feeds = Feeds(lambda: swarm.clients, kinds=kinds, cursors_path=path, about=about)
    await services.start(feeds.run)
    return feeds


async def _compute(
    node: Node,
    services: trio.Nursery,
    module: str,
    args: Sequence[str] = (),
    *,
    log_name: str = "compute.log",
    essential: bool = True,
) -> ComputeProcess:
    """A compute process under way. One that is `essential` ends the node where it cannot be started."""
    config = node.config
    settings = {**config.engine_settings, "INTELLECT_CAPACITY_FILE": str(node.path("capacity.json"))}
    compute = ComputeProcess(
        module,
        name=f"{node.config.role} {log_name.removesuffix('.log')}",
        log_path=node.path(log_name),
        args=args,
        env=settings,
        threads=config.threads,
    )
    await services.start(compute.run)
    if essential:
        services.start_soon(compute.wait_first_start)
    return compute


async def _reader(node: Node, services: trio.Nursery) -> RolloutReader:
    reader = RolloutReader(log_path=node.path("reader.log"))
    await services.start(reader.run)
    return reader


def _own_run(node: Node) -> Signed[Manifest]:
    """The run that this operator created in this data directory. Raises NodeError."""
    manifest = node.address.open_manifest(load_run(node.data.path).data)
    if manifest.record.trainer_id != node.identity.peer_id:
        raise ConfigError(
            f"the trainer of {node.address} is {manifest.record.trainer_id}, not this node, {node.identity.peer_id}",
            hint="start the trainer with the data directory that `intellect-node run create` was given",
        )
    require_model(node.path("run") / "policy-0", manifest.record.model)
    return manifest


def _require_validator(manifest: Signed[Manifest], peer_id: PeerId, config: NodeConfig) -> None:
    if peer_id not in manifest.record.validator_ids:
        raise ConfigError(
            f"this node, {peer_id}, is no validator of the run {manifest.record.name!r}",
            hint=f"the operator names validators: intellect-node run create --validator {peer_id} …",
        )
    if config.dtype != "float32":
        raise ConfigError(
            f"a validator computes in float32, not {config.dtype}: the run's limits are distances from that",
            hint="start it without --dtype",
        )

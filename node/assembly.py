"""Where a role's objects are built and handed to each other: one function a role, read from top to bottom.

Services that a role needs are started in the nursery it is given, in the order in which they depend on one another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol, TypeVar

import trio

from node.admission.entrance import Entrance
from node.admission.invites import kept_invite
from node.compute.process import ComputeProcess
from node.compute.reader import RolloutReader
from node.config import NodeConfig
from node.dashboard import tokenizer
from node.dashboard.sources import from_relay_store, from_relays
from node.dashboard.watch import WatchParts, WatchRole
from node.feeds import Feeds
from node.heartbeats import Heartbeats, Pulse
from node.inference.outbox import Outbox
from node.inference.role import InferenceParts, InferenceRole
from node.joining import Node, join_swarm, show_discovery
from node.ledger.follow import LedgerFollower
from node.ledger.log import LedgerLog
from node.ledger.memory import live_ledger
from node.ledger.witness import DIRECTORY as FORKS
from node.ledger.witness import HEAD_FILE, ForkWitness
from node.machine_check import require_machine
from node.policies import Policies
from node.progress import DownloadProgress
from node.relay.desk import RelayDesk
from node.relay.door import DoorLimits
from node.relay.role import FIRST_LOOK_S, RelayParts, RelayRole
from node.relay.store import RelayStore
from node.run_create import require_model
from node.run_link import join_line, known_peers
from node.run_pointer import run_pointer
from node.run_show import load_run
from node.swarm import Swarm
from node.trainer.collector import Collector
from node.trainer.monitor import build_monitor
from node.trainer.role import TrainerParts, TrainerRole
from node.validator.bench import judging_kinds
from node.validator.docket import Docket
from node.validator.duplicates import AnswerIndex
from node.validator.role import ValidatorParts, ValidatorRole
from node.validator.suspicion import Suspicions
from p2p.discovery import P2PNode
from p2p.http import HttpServer
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.fan_out import FanOut
from p2p.shardcast.origin import OriginDoor, origin_routes
from p2p.shardcast.patches import PatchStore
from p2p.shardcast.store import CheckpointStore
from p2p.tls import Certificate, load_or_create_certificate
from protocol.checkpoint import CheckpointRules
from protocol.envelope import Signed
from protocol.errors import ConfigError
from protocol.identity import PeerId
from protocol.records import Admission, Appeal, Manifest, Submission, Verdict
from trainer.recipe import load_recipe

log = logging.getLogger(__name__)

T = TypeVar("T")
SPARE_CHECKPOINTS: Final = 3
"""Policies kept beyond the staleness bound, for submissions that are still on their way."""
MAX_SPARE: Final = 64


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


@dataclass(frozen=True)
class ValidatorKind:
    """What makes a validator: its role. A simulation of one that lies replaces it."""

    new_role: Callable[[ValidatorParts], Role] = ValidatorRole


Kind = InferenceKind | ValidatorKind


async def build_role(node: Node, services: trio.Nursery, kind: Kind | None = None) -> Role:
    """The role that the configuration names, its services running; `kind` if it is of that role. Raises NodeError."""
    match node.config.role:
        case "relay":
            return await _relay(node, services)
        case "trainer":
            return await _trainer(node, services)
        case "validator":
            return await _validator(node, services, kind if isinstance(kind, ValidatorKind) else ValidatorKind())
        case "inference":
            return await _inference(node, services, kind if isinstance(kind, InferenceKind) else InferenceKind())
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
    services.start_soon(show_discovery, p2p, node.board)
    store = RelayStore(
        node.data.sub("relay"),
        max_bytes=node.config.disk_quota_bytes,
        max_node_bytes=node.config.node_quota_bytes,
        max_step_bytes=node.config.step_quota_bytes,
    )
    desk = await _replayed(
        node, partial(RelayDesk, node.address, node.identity, store=store, ledger_path=node.path("ledger"))
    )
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
            data_dir=node.data.path,
            stay=node.config.stay,
            first_look_s=FIRST_LOOK_S if node.config.bootstrap else 0.0,
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
    _, swarm = await join_swarm(node, services)
    await require_machine(swarm.manifest.record.environment)
    run = swarm.manifest.record
    outbox = Outbox(node.path("outbox.sqlite"), quorum=run.quorum, validators=len(run.validators))
    invite = kept_invite(node.data.path, node.config.invite, swarm.manifest)
    _start_heart(node, services, swarm, role="inference")
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
            entrance=Entrance(node.identity, swarm, directory=node.data.path, invite=invite),
            tests_itself=kind == InferenceKind(),
        )
    )


async def _validator(node: Node, services: trio.Nursery, kind: ValidatorKind) -> Role:
    compute = await _compute(node, services, "node.validator.compute")
    screening = await _compute(node, services, "node.validator.screening", log_name="screening.log")
    reader = await _reader(node, services)
    _, swarm = await join_swarm(node, services)
    _require_validator(swarm.manifest, node.identity.peer_id, node.config)
    await require_machine(swarm.manifest.record.environment)
    _start_heart(node, services, swarm, role="validator")
    ledger = await _replayed(node, partial(_follower, node, swarm, _witness(node, swarm)))
    await services.start(ledger.run)
    node.sources.ledger = lambda: ledger.state
    node.sources.obtain = from_relays(swarm, node.data.sub("shown"))
    return kind.new_role(
        ValidatorParts(
            identity=node.identity,
            swarm=swarm,
            policies=await _policies(node, services, swarm, spare=_spare_for_appeals(swarm.manifest.record)),
            compute=compute,
            screening=screening,
            reader=reader,
            docket=Docket(node.path("docket.sqlite")),
            answers=AnswerIndex(node.path("answers.sqlite")),
            suspicions=Suspicions(node.path("docket.sqlite")),
            ledger=ledger,
            feeds=await _feeds(node, services, swarm, kinds=judging_kinds(swarm.manifest.record), keep=True),
            board=node.board,
            work_dir=node.data.sub("rollouts"),
        )
    )


async def _trainer(node: Node, services: trio.Nursery) -> Role:
    manifest = _own_run(node)
    run_dir = node.path("run")
    recipe = load_recipe(run_dir / "recipe.toml")
    if recipe.evaluation.every_steps:
        await require_machine(manifest.record.environment)
    compute = await _compute(
        node, services, "node.trainer.compute", [str(node.data.sub("training")), str(run_dir / "recipe.toml")]
    )
    ledger = await _replayed(node, partial(live_ledger, node.path("ledger"), manifest))
    store = CheckpointStore(node.data.sub("checkpoints"), keep=manifest.record.batch.max_staleness + SPARE_CHECKPOINTS)
    door = OriginDoor()
    certificate = load_or_create_certificate(node.data.path)
    origin = _origin(node, store, ledger, door=door, certificate=certificate)
    address = await services.start(origin.run)
    p2p, swarm = await join_swarm(node, services, manifest)
    services.start_soon(p2p.publish_run, partial(run_pointer, node.identity, manifest))
    node.board.details(join=join_line(node.address, node.config.bootstrap or known_peers(node.data.path)))
    _start_heart(node, services, swarm, role="trainer")
    feeds = await _feeds(
        node, services, swarm, kinds=[Submission.KIND, Verdict.KIND, Admission.KIND, Appeal.KIND], keep=False
    )
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
                recipe,
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
    _, swarm = await join_swarm(node, services)
    services.start_soon(node.sources.follow, partial(_follower, node, swarm, _witness(node, swarm)))
    node.sources.obtain = from_relays(swarm, node.data.sub("shown"))
    node.sources.tokenizer = tokenizer.from_relays(swarm, node.http, node.data.sub("tokenizer"))
    return WatchRole(WatchParts(swarm=swarm, sources=node.sources, board=node.board))


async def _replayed(node: Node, make: Callable[[], T]) -> T:
    """What `make` makes of the ledger on this disk; in a thread, as a long one takes seconds."""
    node.board.working("replaying its copy of the ledger")
    return await trio.to_thread.run_sync(make)


def _follower(node: Node, swarm: Swarm, witness: ForkWitness) -> LedgerFollower:
    ledger = live_ledger(node.path("ledger"), swarm.manifest, mends=True)
    return LedgerFollower(swarm, ledger, witness)


def _origin(
    node: Node, store: CheckpointStore, ledger: LedgerLog, *, door: OriginDoor, certificate: Certificate
) -> HttpServer:
    """What relays fetch policies and entries from."""
    return HttpServer(
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


def _start_heart(
    node: Node, services: trio.Nursery, swarm: Swarm, *, role: Literal["trainer", "inference", "validator"]
) -> None:
    pulse = Pulse(node.identity, swarm.manifest.id, node.board, role=role, data_dir=node.data.path)
    services.start_soon(Heartbeats(pulse, swarm, node.board, obeys_clocks=role != "trainer").run)


def _witness(node: Node, swarm: Swarm) -> ForkWitness:
    """Heads that contradict each other are noticed by every role that sees heads."""
    witness = ForkWitness(swarm.manifest, node.path(FORKS), board=node.board, keep_head=node.path("ledger") / HEAD_FILE)
    swarm.on_head(witness.see)
    return witness


def _spare_for_appeals(manifest: Manifest) -> int:
    """Policies that a validator keeps beyond others: what was rejected within the window may come before it again."""
    return min(manifest.credits.maturity_steps, MAX_SPARE) if len(manifest.validators) > manifest.quorum else 0


async def _policies(node: Node, services: trio.Nursery, swarm: Swarm, *, spare: int = 0) -> Policies:
    store = CheckpointStore(
        node.data.sub("checkpoints"),
        keep=swarm.manifest.record.batch.max_staleness + SPARE_CHECKPOINTS + spare,
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
    clients = (lambda: swarm.clients) if about is None else partial(swarm.near, about)
    feeds = Feeds(clients, kinds=kinds, cursors_path=path, about=about)
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

"""One process of a broadcast that is measured: the trainer's origin, a relay, or a client. Not a benchmark itself.

`python -m bench.cast_node ROLE DIRECTORY` reads orders from standard input and says what happens on standard output, a
line of JSON each; times are the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import gc
import logging
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import trio

from p2p.bridge import AioThread
from p2p.contacts import Contact
from p2p.http import BoundAddress, HttpClient, HttpServer
from p2p.shardcast.client import CheckpointClient
from p2p.shardcast.fan_out import FanOut
from p2p.shardcast.origin import OriginDoor, checkpoint_routes, origin_routes
from p2p.shardcast.puller import CheckpointPuller
from p2p.shardcast.sources import Source
from p2p.shardcast.store import CheckpointStore
from p2p.tls import Certificate, load_or_create_certificate
from protocol.checkpoint import CheckpointRules
from protocol.identity import Identity, PeerId

TRAINER: Final = Identity.from_phrase("bench trainer")
RUN_ID: Final = bytes(32)
TOTAL_STEPS: Final = 1000


class Upstream(msgspec.Struct):
    """Somebody to fetch from."""

    peer: str
    url: str
    fingerprint: bytes = b""
    token: str = "none"

    def source(self) -> Source:
        peer = PeerId.parse(self.peer)
        contact = Contact(peer, self.url, self.fingerprint, token=self.token) if self.fingerprint else None
        return Source(peer, self.url, contact)


class Setup(msgspec.Struct):
    """The first order."""

    shard_bytes: int
    host: str = "127.0.0.1"
    secure: bool = True
    fan_out: int = 4
    relays: list[str] = []
    """Peer ids of the relays that an origin gives tokens to."""


class Order(msgspec.Struct):
    """`upstream`: fetch from these; `publish`: a directory as the policy of a step; `report`: say what it cost."""

    do: Literal["upstream", "publish", "report"]
    upstream: list[Upstream] = []
    path: str = ""
    step: Annotated[int, msgspec.Meta(ge=0)] = 0


@dataclass
class Node:
    """What the process is built from, and what it counts."""

    role: str
    setup: Setup
    directory: Path
    http: HttpClient
    aio: AioThread
    store: CheckpointStore
    certificate: Certificate | None
    identity: Identity
    cpu_before: float = 0.0
    received: dict[str, int] = field(default_factory=dict)
    upstream: list[Source] = field(default_factory=list)
    on_upstream: Callable[[list[Source]], None] = lambda _: None
    first_shard: bool = False
    memory: int = 0
    """Most anonymous memory seen whenever something changed."""

    @property
    def rules(self) -> CheckpointRules:
        return CheckpointRules(RUN_ID, TRAINER.peer_id, self.setup.shard_bytes, TOTAL_STEPS)

    def count(self, peer: PeerId, received: int) -> None:
        self.received[str(peer)] = self.received.get(str(peer), 0) + received


def say(event: str, **more: Any) -> None:
    """One line to whoever started this process."""
    sys.stdout.buffer.write(msgspec.json.encode({"event": event, "at": time.monotonic(), **more}) + b"\n")
    sys.stdout.buffer.flush()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


async def main(role: str, directory: Path) -> None:
    gc.freeze()  # as node.app does
    setup = await order(Setup)
    async with AioThread() as aio, HttpClient(aio, connections_per_host=64) as http, trio.open_nursery() as nursery:
        node = Node(
            role=role,
            setup=setup,
            directory=directory,
            http=http,
            aio=aio,
            store=CheckpointStore(directory / "store"),
            certificate=load_or_create_certificate(directory) if setup.secure else None,
            identity=TRAINER if role == "origin" else Identity.from_phrase(str(directory)),
        )
        listening = await {"origin": start_origin, "relay": start_relay, "client": start_client}[role](node, nursery)
        nursery.start_soon(watch, node)
        node.cpu_before = cpu_s()
        say("ready", peer=str(node.identity.peer_id), **listening)
        while (next_order := await order(Order)) is not None:
            await obey(node, next_order)
        nursery.cancel_scope.cancel()


async def obey(node: Node, what: Order) -> None:
    match what.do:
        case "upstream":
            node.upstream = [each.source() for each in what.upstream]
            node.on_upstream(node.upstream)
        case "publish":
            say("publishing")
            manifest = await node.store.publish(
                Path(what.path),
                identity=TRAINER,
                run_id=RUN_ID,
                step=what.step,
                shard_bytes=node.setup.shard_bytes,
            )
            say("published", id=manifest.id.hex())
        case "report":
            say("report", cpu_s=cpu_s() - node.cpu_before, memory=node.memory, received=node.received)


async def start_origin(node: Node, nursery: trio.Nursery) -> dict[str, Any]:
    door = OriginDoor()
    if not node.setup.secure:  # a token would travel in clear
        return where(node, await serve(node, nursery, checkpoint_routes(node.store)))
    routes = origin_routes(node.store, lambda first, limit: [], fan_out=FanOut(door.holder, node.setup.fan_out))
    address = await serve(node, nursery, routes, door)
    return where(node, address) | {"tokens": {each: door.token_for(PeerId.parse(each)) for each in node.setup.relays}}


async def start_relay(node: Node, nursery: trio.Nursery) -> dict[str, Any]:
    puller = CheckpointPuller(node.http, node.store, on_bytes=node.count)
    puller.set_rules(node.rules)
    node.on_upstream = puller.set_peers
    nursery.start_soon(puller.run)
    return where(node, await serve(node, nursery, checkpoint_routes(node.store)))


async def start_client(node: Node, nursery: trio.Nursery) -> dict[str, Any]:
    def progress(done: int, total: int, relays: object) -> None:
        if not node.first_shard:
            node.first_shard = True
            say("first-shard", done=done)

    client = CheckpointClient(
        node.http, node.store, node.rules, lambda: node.upstream, on_bytes=node.count, on_progress=progress
    )
    nursery.start_soon(client.follow)
    return {}


async def watch(node: Node) -> None:
    """Say when a checkpoint is complete; look at the memory at every change."""
    token = trio.lowlevel.current_trio_token()
    changed = [trio.Event()]

    def wake() -> None:
        changed[0].set()

    node.store.subscribe(lambda: token.run_sync_soon(wake, idempotent=True))
    known: set[bytes] = set()
    while True:
        changed[0] = trio.Event()
        node.memory = max(node.memory, anonymous_bytes())
        for step, checkpoint in node.store.complete():
            if checkpoint not in known:
                known.add(checkpoint)
                say("complete", step=step, id=checkpoint.hex())
        await changed[0].wait()


async def serve(node: Node, nursery: trio.Nursery, routes: Any, door: OriginDoor | None = None) -> BoundAddress:
    server = HttpServer(
        node.aio,
        routes,
        host=node.setup.host,
        port=0,
        certificate=node.certificate,
        middlewares=[door.middleware] if door is not None else [],
    )
    address: BoundAddress = await nursery.start(server.run)
    return address


def where(node: Node, address: BoundAddress) -> dict[str, Any]:
    fingerprint = node.certificate.fingerprint if node.certificate is not None else b""
    return {"url": address.url, "fingerprint": msgspec.to_builtins(fingerprint)}


async def order(kind: Callable[..., Any]) -> Any:
    """The next line of standard input, or None at its end."""
    line = await trio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True)
    return msgspec.json.decode(line, type=kind) if line.strip() else None


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    trio.run(main, sys.argv[1], Path(sys.argv[2]))

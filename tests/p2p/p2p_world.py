"""Hosts, attackers and signed records for the tests of p2p, all on loopback."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
from factories import make_manifest
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from p2p.dht import RunDHT
from p2p.discovery import P2PNode
from p2p.guard import Guard
from p2p.host import build_host, running
from p2p.kad import Asker
from p2p.kad_message import Known
from protocol.envelope import seal
from protocol.identity import Identity
from protocol.records import RelayAdvert, RunPointer
from protocol.run import RunAddress

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ALICE = Identity.from_phrase("alice")
BOB = Identity.from_phrase("bob")
CAROL = Identity.from_phrase("carol")
MALLORY = Identity.from_phrase("mallory")
RUN = RunAddress(ALICE.peer_id, "test")
"""Alice operates the run that all tests are about."""
MANIFEST = seal(make_manifest(trainer=ALICE.peer_id.public_key), ALICE)


def now_ms() -> int:
    return int(time.time() * 1000)


def pointer(sequence: int = 1, *, by: Identity = ALICE, **changes: Any) -> bytes:
    record = RunPointer(
        name="test", sequence=sequence, issued_at_ms=now_ms(), valid_until_ms=now_ms() + 600_000, manifest=MANIFEST
    )
    return seal(msgspec.structs.replace(record, **changes), by)


def advert(sequence: int = 1, *, by: Identity = BOB, **changes: Any) -> bytes:
    record = RelayAdvert(
        run=RUN.digest,
        sequence=sequence,
        issued_at_ms=now_ms(),
        valid_until_ms=now_ms() + 600_000,
        multiaddrs=(),
        http_url="https://127.0.0.1:1",
        tls_fingerprint=b"f" * 32,
        software="test",
    )
    return seal(msgspec.structs.replace(record, **changes), by)


def make_node(identity: Identity, path: Path, *, serves: bool = False, bootstrap: Any = ()) -> P2PNode:
    return P2PNode(
        identity,
        listen=[LOOPBACK] if serves else [],
        announce=[],
        bootstrap=bootstrap,
        dht_server=serves,
        run_address=RUN,
        data_dir=path / identity.peer_id.short,
    )


@asynccontextmanager
async def running_nodes(*nodes: P2PNode) -> AsyncIterator[trio.Nursery]:
    """Nodes started in order; all stop on the way out."""
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.run)
        yield nursery
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def running_host(
    identity: Identity, *, listens: bool = True, guard: Guard | None = None, at: str = LOOPBACK
) -> AsyncIterator[Any]:
    host = build_host(identity, guard=guard)
    async with running(host, [Multiaddr(at)] if listens else []):
        yield host


@asynccontextmanager
async def hosts_of(identities: Iterable[Identity]) -> AsyncIterator[list[Any]]:
    """Hosts that listen and all leave at once."""

    async def keep(identity: Identity, *, task_status: trio.TaskStatus[Any]) -> None:
        async with running_host(identity) as host:
            task_status.started(host)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        yield [await nursery.start(keep, identity) for identity in identities]
        nursery.cancel_scope.cancel()


def make_dht(host: Any, identity: Identity, *, serve: bool = True, servers: Any = ()) -> RunDHT:
    made = RunDHT(host, identity.peer_id, RUN, serve=serve, clock=time.time)
    made.bootstrap = {server.get_id() for server in servers}
    for server in servers:
        host.get_peerstore().add_addrs(server.get_id(), server.get_transport_addrs(), 600)
    return made


async def request(host: Any, peer_id: Any, message: Any) -> Any:
    """One request, past all that the own client would check before it sends."""
    return await Asker(host).request(Known(peer_id), message)


def info(host: Any) -> Any:
    return PeerInfo(host.get_id(), host.get_transport_addrs())


def port_of(host: Any) -> int:
    return int(host.get_transport_addrs()[0].value_for_protocol("tcp"))


async def until(condition: Any) -> None:
    """Wait for what another task brings about; the caller's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 (the state is libp2p's)
        await trio.sleep(0.01)


async def works(host: Any, other: Any) -> bool:
    """Whether `other` can connect to a host and open a stream there."""
    await other.connect(info(host))
    stream = await other.new_stream(host.get_id(), ["/ipfs/ping/1.0.0"])
    await stream.write(b"p" * 32)
    answer: bytes = await stream.read(32)
    await stream.reset()
    return answer == b"p" * 32

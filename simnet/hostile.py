"""A hostile peer of the DHT: `python -m simnet.hostile ATTACK --run … --bootstrap … --listen … --data-dir …`.

Does one of `simnet.attacks` for as long as it runs, and shows a status as a node does. It takes part in nothing else:
what contributors can lie about is in `simnet.zoo`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
import trio.lowlevel

from node.identity import load_or_create_identity
from node.logs import set_up_logging
from node.signals import leave_on_signal
from node.status import StatusBoard, serve_status
from p2p.bridge import AioThread
from p2p.lean import import_libp2p
from protocol.identity import Identity, PeerId
from protocol.run import RunAddress
from simnet.attacks import ATTACKS

log = logging.getLogger(__name__)

SYBILS: Final = 8
DRAWN: Final = 400
REJOIN_S: Final = 10.0
IDENTITY_S: Final = 20.0
"""Longest that an attack goes on under one identity; one that is shut out goes earlier."""
FLOODERS: Final = 4
PAUSE_S: Final = 0.2
JUNK_BYTES: Final = 5000


@dataclass
class Field:
    """Where an attack takes place."""

    run: RunAddress
    bootstrap: Sequence[str]
    host: str
    board: StatusBoard
    seed: int
    acts: int = 0

    def count(self, what: str) -> None:
        """Show what is being done, and how often it was."""
        self.acts += 1
        self.board.working(f"attacking: {what}")
        self.board.details(acts=self.acts)

    def targets(self) -> list[tuple[str, int]]:
        """IP addresses and ports of the bootstrap peers."""
        parts = [address.split("/") for address in self.bootstrap]
        return [(part[2], int(part[4])) for part in parts]


@asynccontextmanager
async def joined(field: Field, identity: Identity, *, listens: bool = True) -> AsyncIterator[tuple[Any, Any]]:
    """A host and its view of the DHT, with the bootstrap peers dialled."""
    from multiaddr import Multiaddr

    from p2p.dht import RunDHT
    from p2p.host import build_host, dial, running

    host = build_host(identity)
    async with running(host, [Multiaddr(f"/ip4/{field.host}/tcp/0")] if listens else []):
        dht = RunDHT(host, identity.peer_id, field.run, serve=listens, clock=time.time)
        for text in field.bootstrap:
            address = Multiaddr(text)
            peer = PeerId.parse(address.value_for_protocol("p2p"))
            await _attempt(partial(_enter, host, dht, dial, peer, address))
        yield host, dht


async def _enter(host: Any, dht: Any, dial: Any, peer: PeerId, address: Any) -> None:
    from multiaddr import Multiaddr

    from p2p.host import to_libp2p

    known = to_libp2p(peer)
    plain = Multiaddr(str(address).split("/p2p/", maxsplit=1)[0])
    await dial(host, known, [plain], timeout_s=5.0)
    dht.bootstrap.add(known)
    await dht.join()


async def eclipse(field: Field) -> None:
    """Surround the key under which the run's relays are found."""
    hosts: list[Any] = []
    async with trio.open_nursery() as nursery:
        for identity in _around_the_key(field):
            await nursery.start(_sybil, field, identity, hosts)


async def _sybil(
    field: Field, identity: Identity, hosts: list[Any], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    from p2p.kad_message import KAD_PROTOCOL

    async with joined(field, identity) as (host, dht):
        hosts.append(host)
        host.set_stream_handler(KAD_PROTOCOL, partial(_lie, field, hosts))
        task_status.started()
        while True:
            await _attempt(dht.join)
            await trio.sleep(REJOIN_S)


async def _lie(field: Field, hosts: Sequence[Any], stream: Any) -> None:
    """Answer every question with the others of this kind, and name relays that are not there."""
    from p2p.framing import Frames
    from p2p.host import to_libp2p
    from p2p.kad_message import MAX_REQUEST_BYTES, Message, name_peer

    frames = Frames(stream, max_bytes=MAX_REQUEST_BYTES)
    with suppress(Exception):  # whoever asked is gone
        while (data := await frames.receive(idle_s=20)) is not None:
            asked = Message.FromString(data)
            answer = Message(type=asked.type, key=asked.key)
            for other in hosts:
                name_peer(answer.closerPeers.add(), other.get_id(), other.get_transport_addrs(), b"")
            if asked.type == Message.MessageType.GET_PROVIDERS:
                for other in hosts:
                    invented = to_libp2p(PeerId(os.urandom(32)))
                    name_peer(answer.providerPeers.add(), invented, other.get_transport_addrs(), b"")
            await frames.send(answer.SerializeToString())
            field.count("answering with accomplices")


async def flood(field: Field) -> None:
    """Ask and store without pause, under one identity after the other."""
    await _under_many_names(field, "flood", _flood_as)


async def _under_many_names(field: Field, what: str, act: Callable[[Field, Identity], Awaitable[None]]) -> None:
    """Act under one identity until it is shut out or old, and then under another."""
    for number in itertools.count():
        identity = Identity.from_phrase(f"{what} {field.seed} {os.getpid()} {number}")
        with trio.move_on_after(IDENTITY_S):
            await act(field, identity)
        field.board.details(identities=number + 1)
        await trio.sleep(PAUSE_S)


async def _flood_as(field: Field, identity: Identity) -> None:
    async with joined(field, identity, listens=False) as (host, dht), trio.open_nursery() as nursery:
        for _ in range(FLOODERS):
            nursery.start_soon(_flood_servers, field, dht)
        while _connected(host, dht):  # noqa: ASYNC110 (the state is libp2p's); whom nobody talks to goes away
            await trio.sleep(PAUSE_S)
        nursery.cancel_scope.cancel()


async def _flood_servers(field: Field, dht: Any) -> None:
    from p2p.kad_message import Known

    while True:
        for peer in {*dht.servers(), *dht.bootstrap}:
            for message in _forgeries(field):
                await _attempt(partial(dht.asker.request, Known(peer), message))
                field.count("flooding servers")
        await trio.lowlevel.checkpoint()
        if not dht.servers():
            await trio.sleep(PAUSE_S)


def _connected(host: Any, dht: Any) -> bool:
    return any(host.get_network().get_connections(peer) for peer in {*dht.servers(), *dht.bootstrap})


def _forgeries(field: Field) -> list[Any]:
    from p2p.dht_records import relay_key, relays_key
    from p2p.kad_message import Message

    kind = Message.MessageType
    forged = Message(type=kind.PUT_VALUE, key=relay_key(field.run, PeerId(os.urandom(32))).encode())
    forged.record.key, forged.record.value = forged.key, os.urandom(500)
    provider = Message(type=kind.ADD_PROVIDER, key=relays_key(field.run))
    provider.providerPeers.add().id = os.urandom(38)
    return [Message(type=kind.FIND_NODE, key=os.urandom(32)), forged, provider]


async def garbage(field: Field) -> None:
    """Noise on every socket and stream, and to whoever asks."""
    await _under_many_names(field, "garbage", _garbage_as)


async def _garbage_as(field: Field, identity: Identity) -> None:
    from p2p.kad_message import KAD_PROTOCOL

    async with joined(field, identity) as (host, dht):
        host.set_stream_handler(KAD_PROTOCOL, _answer_noise)
        while _connected(host, dht):
            for address, port in field.targets():
                await _attempt(partial(_noise_on_socket, address, port))
            for peer in {*dht.servers(), *dht.bootstrap}:
                await _attempt(partial(_noise_on_stream, host, peer, KAD_PROTOCOL))
            field.count("sending noise")
            await trio.sleep(PAUSE_S)


async def _answer_noise(stream: Any) -> None:
    with suppress(Exception):  # whoever asked is gone
        await stream.write(os.urandom(JUNK_BYTES))
        await stream.close()


async def _noise_on_socket(address: str, port: int) -> None:
    async with await trio.open_tcp_stream(address, port) as stream:
        await stream.send_all(os.urandom(JUNK_BYTES))


async def _noise_on_stream(host: Any, peer: Any, protocol: str) -> None:
    stream = await host.new_stream(peer, [protocol])
    await stream.write(os.urandom(JUNK_BYTES))
    await stream.reset()


def _around_the_key(field: Field) -> list[Identity]:
    """Identities that lie around the key of the run's relays: drawn until there are enough of them."""
    from p2p.dht_records import relays_key
    from p2p.host import to_libp2p
    from p2p.routing import key_of, target_of

    target = target_of(relays_key(field.run))
    drawn = [Identity.from_phrase(f"sybil {field.seed} {os.getpid()} {number}") for number in range(DRAWN)]
    return sorted(drawn, key=lambda each: key_of(to_libp2p(each.peer_id)) ^ target)[:SYBILS]


async def _attempt(act: Callable[[], Awaitable[object]]) -> None:
    """Do it, whatever comes of it: who is attacked may refuse, hang up or ban."""
    with trio.move_on_after(10):
        try:
            await act()
        except (TypeError, AttributeError):
            raise  # a mistake of this module
        except Exception as error:  # libp2p raises what the other side brings about
            log.debug("an act failed error=%r", error)
            await trio.sleep(PAUSE_S)


ACTS: Final[dict[str, Callable[[Field], Awaitable[None]]]] = {"eclipse": eclipse, "flood": flood, "garbage": garbage}


async def run(
    field: Field, data_dir: Path, act: Callable[[Field], Awaitable[None]], *, listen: str, identity: Identity
) -> None:
    """Attack until a signal comes."""
    async with AioThread() as aio, trio.open_nursery() as nursery:
        await nursery.start(partial(leave_on_signal, nursery.cancel_scope.cancel))
        await nursery.start(partial(_show, field.board, aio, data_dir))
        log.info("hostile peer peer_id=%s listen=%s", identity.peer_id, listen)
        await act(field)


async def _show(board: StatusBoard, aio: AioThread, data_dir: Path, *, task_status: trio.TaskStatus[str]) -> None:
    await serve_status(board, aio, data_dir=data_dir, task_status=task_status)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simnet.hostile", description=__doc__)
    parser.add_argument("attack", choices=sorted(ATTACKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", required=True)
    parser.add_argument("--bootstrap", action="append", default=[])
    parser.add_argument("--listen", required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    given = parser.parse_args()
    set_up_logging("info")
    import_libp2p()
    identity = load_or_create_identity(given.data_dir)
    board = StatusBoard(role="hostile", peer_id=identity.peer_id, run=given.run)
    field = Field(RunAddress.parse(given.run), given.bootstrap, given.listen.split("/")[2], board, given.seed)
    trio.run(partial(run, field, given.data_dir, ACTS[given.attack], listen=given.listen, identity=identity))


if __name__ == "__main__":
    main()

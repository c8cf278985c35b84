"""One process of `bench dht`: a number of DHT servers, ours or libp2p's own, that obey lines of JSON on stdin.

The stock ones are what `libp2p.new_host` and `KadDHT` give by default, without this project's repairs; they check
values with this project's rules, so that both do the same work.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import psutil
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.records.validator import NamespacedValidator
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from p2p.dht import RunDHT
from p2p.dht_records import NAMESPACE, RecordValidator, relay_key
from p2p.host import build_host, dial, running
from protocol.envelope import seal
from protocol.identity import Identity
from protocol.records import RelayAdvert
from protocol.run import RunAddress

LISTEN: Final = Multiaddr("/ip4/127.0.0.1/tcp/0")
RUN: Final = RunAddress(Identity.from_phrase("bench dht").peer_id, "bench")
STOCK_TIMEOUT_S: Final = 60.0


def advert(identity: Identity, sequence: int) -> bytes:
    """A value of the size and form that relays put."""
    now_ms = time.time_ns() // 1_000_000
    record = RelayAdvert(
        run=RUN.digest,
        sequence=sequence,
        issued_at_ms=now_ms,
        valid_until_ms=now_ms + 600_000,
        multiaddrs=("/ip4/127.0.0.1/tcp/4001",),
        http_url="https://127.0.0.1:4002",
        tls_fingerprint=bytes(32),
        software="bench",
    )
    return seal(record, identity)


class Ours:
    """This project's DHT server."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.host = build_host(identity)

    async def start(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(running(self.host, [LISTEN]))
        self.dht = RunDHT(self.host, self.identity.peer_id, RUN, serve=True, clock=time.time)

    async def join(self, bootstrap: str) -> None:
        info = info_from_p2p_addr(Multiaddr(bootstrap))
        if info.peer_id == self.host.get_id():
            return
        self.dht.bootstrap = {info.peer_id}
        await dial(self.host, info.peer_id, info.addrs, timeout_s=10)
        await self.dht.join()

    async def adopt(self) -> None:
        await self.dht.adopt()

    async def settle(self) -> None:
        """What a node does some seconds after its table has grown."""
        await self.dht.adopt()
        await self.dht.join()

    async def put(self, sequence: int) -> bool:
        key = relay_key(RUN, self.identity.peer_id)
        return (await self.dht.put(key, advert(self.identity, sequence)))[1] > 0

    async def get(self, whose: Identity, least: int) -> bool:
        found = await self.dht.get(relay_key(RUN, whose.peer_id))
        return found is not None and found.record.sequence >= least

    @property
    def sent(self) -> int:
        return self.dht.asker.sent.total()

    @property
    def known(self) -> int:
        return self.dht.peers


class Stock:
    """libp2p's own, as it comes."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.host = new_host(key_pair=create_new_key_pair(identity.seed))
        self.sent = 0

    async def start(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.host.run([LISTEN]))
        validator = NamespacedValidator({NAMESPACE: RecordValidator()}, strict_validation=True)
        self.dht = KadDHT(self.host, DHTMode.SERVER, validator=validator, validator_changed=True)
        await stack.enter_async_context(background_trio_service(self.dht))
        self._count_streams()

    def _count_streams(self) -> None:
        original = self.host.new_stream

        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.sent += 1
            return await original(*args, **kwargs)

        self.host.new_stream = counted

    async def join(self, bootstrap: str) -> None:
        info = info_from_p2p_addr(Multiaddr(bootstrap))
        if info.peer_id == self.host.get_id():
            return
        await self.host.connect(PeerInfo(info.peer_id, info.addrs))
        await self.dht.add_peer(info.peer_id)
        await self.dht.peer_routing.find_closest_peers_network(self.host.get_id().to_bytes())

    async def adopt(self) -> None:
        """Stock takes in by itself whoever asks."""
        await trio.lowlevel.checkpoint()

    settle = adopt

    async def put(self, sequence: int) -> bool:
        await self.dht.put_value(relay_key(RUN, self.identity.peer_id), advert(self.identity, sequence))
        return True

    async def get(self, whose: Identity, least: int) -> bool:
        self.dht.value_store.remove(relay_key(RUN, whose.peer_id).encode())
        value = await self.dht.get_value(relay_key(RUN, whose.peer_id), quorum=1)
        if value is None:
            return False
        return RecordValidator().open(relay_key(RUN, whose.peer_id), value).record.sequence >= least

    @property
    def known(self) -> int:
        return int(self.dht.routing_table.size())


async def serve(kind: str, numbers: range) -> None:
    """Start the nodes, then answer each line until stdin ends."""
    nodes = [(Ours if kind == "ours" else Stock)(Identity.from_phrase(f"bench dht {number}")) for number in numbers]
    base_kib = psutil.Process().memory_info().rss // 1024
    async with AsyncExitStack() as stack:
        for node in nodes:
            await node.start(stack)
        say({"addresses": [str(node.host.get_addrs()[0]) for node in nodes], "base_kib": base_kib})
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            request = json.loads(line)
            say(await answer(nodes, numbers, request))
            if request["do"] == "stop":
                sys.exit(0)  # closing each host politely is not what is measured


async def answer(nodes: list[Any], numbers: range, request: dict[str, Any]) -> dict[str, Any]:
    """Do what a line asks for with one node, or look at all of them."""
    match request["do"]:
        case "look" | "stop":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            return {
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "rss_kib": psutil.Process().memory_info().rss // 1024,
                "sent": sum(node.sent for node in nodes),
                "known": [node.known for node in nodes],
            }
        case "join":
            return await timed(nodes[request["node"] - numbers.start].join, request["bootstrap"])
        case "adopt" | "settle":
            return await timed(getattr(nodes[request["node"] - numbers.start], request["do"]))
        case "put":
            return await timed(nodes[request["node"] - numbers.start].put, request["sequence"])
        case "get":
            whose = Identity.from_phrase(f"bench dht {request['whose']}")
            return await timed(nodes[request["node"] - numbers.start].get, whose, request["sequence"])
        case unknown:
            raise ValueError(unknown)


async def timed(work: Callable[..., Awaitable[Any]], *args: Any) -> dict[str, Any]:
    began = time.perf_counter()
    with trio.move_on_after(STOCK_TIMEOUT_S):
        try:
            done = await work(*args)
            return {"ok": done is not False, "s": time.perf_counter() - began}
        except Exception as error:  # libp2p raises what it likes; it is a failure either way
            return {"ok": False, "s": time.perf_counter() - began, "error": repr(error)[:200]}
    return {"ok": False, "s": time.perf_counter() - began, "error": "timeout"}


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(serve, sys.argv[1], range(int(sys.argv[2]), int(sys.argv[3])))

"""The asking side of Kademlia: one request to one peer, and the walk towards the peers closest to a key.

Written anew over libp2p's wire format, because the library's own client trusts its local copies, hides whether a put
was stored, takes whom it is told about into its routing table unasked, and waits 10 s for the silent. Kademlia: A
Peer-to-peer Information System Based on the XOR Metric, sections 2.2 and 2.3.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.utils import maybe_consume_signed_record
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError, env_to_send_in_RPC
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from p2p import patches
from p2p.host import DialError, dial

log = logging.getLogger(__name__)

REPLICAS: Final = 8
"""Peers closest to a key that hold its value."""
PARALLEL_REQUESTS: Final = 8
MAX_VISITS: Final = 32
"""Most peers that one walk asks, however many it is told about."""
MAX_CLOSER_PEERS: Final = 20
MAX_RESPONSE_BYTES: Final = 512 * 1024
REQUEST_TIMEOUT_S: Final = 3.0
_HANG_UP_TIMEOUT_S: Final = 1.0
_MAX_PEER_ID_BYTES: Final = 64
_ADDRESS_LIFETIME_S: Final = 3600


class RequestError(Exception):
    """Raised when a peer did not answer a request, or answered nonsense."""


@dataclass(frozen=True)
class Known:
    """A peer somebody told us about: unproved until it has answered."""

    peer_id: Any
    addresses: tuple[Any, ...] = ()


async def request(host: Any, peer_id: Any, message: Any, *, addresses: Iterable[Any] = ()) -> Any:
    """Send one message to one peer and return its answer, within REQUEST_TIMEOUT_S. Raises RequestError."""
    try:
        with trio.fail_after(REQUEST_TIMEOUT_S):
            await dial(host, peer_id, addresses_of(host, peer_id, addresses), timeout_s=REQUEST_TIMEOUT_S)
            return await _exchange(host, peer_id, message)
    except trio.TooSlowError:
        await _hang_up(host, peer_id)
        raise RequestError(f"no answer within {REQUEST_TIMEOUT_S:g} s") from None
    except DialError as error:
        raise RequestError(str(error)) from None
    except Exception as error:  # libp2p raises what a peer's bytes bring about: a peer's fault ends its request only
        raise RequestError(patches.cut(repr(error))) from error


async def _hang_up(host: Any, peer_id: Any) -> None:
    """End the connection to a silent peer: one that froze keeps its sockets, and would look connected for ever."""
    with trio.move_on_after(_HANG_UP_TIMEOUT_S):
        for connection in host.get_network().get_connections(peer_id):
            await connection.close()


async def _exchange(host: Any, peer_id: Any, message: Any) -> Any:
    message.senderRecord = env_to_send_in_RPC(host)[0]
    data = message.SerializeToString()
    stream = await host.new_stream(peer_id, [patches.KAD_PROTOCOL])
    try:
        await stream.write(encode_varint_prefixed(data))
        answer = Message.FromString(await read_varint_prefixed_bytes_limited(stream, MAX_RESPONSE_BYTES))
    except BaseException:
        with trio.move_on_after(0.5, shield=True):
            await stream.reset()
        raise
    await stream.close()
    if answer.type != message.type:
        raise RequestError(f"answered {message.type} with {answer.type}")
    if not maybe_consume_signed_record(answer, host, peer_id):
        raise RequestError("its peer record is not its own")
    return answer


def addresses_of(host: Any, peer_id: Any, told: Iterable[Any] = ()) -> list[Any]:
    """Addresses to dial a peer at: those it signed or that were dialled before, then those that others told."""
    try:
        known = list(host.get_peerstore().addrs(peer_id))
    except PeerStoreError:
        known = []
    return list(dict.fromkeys([*known, *told]))


def closer_peers(host: Any, answer: Any) -> list[Known]:
    """Whom an answer names as closer; signed addresses are kept, unsigned ones go along with the name."""
    return [known for proto in answer.closerPeers[:MAX_CLOSER_PEERS] if (known := _known(host, proto))]


def providers(host: Any, answer: Any, *, limit: int) -> list[Known]:
    """Whom an answer names as providers."""
    return [known for proto in answer.providerPeers[:limit] if (known := _known(host, proto))]


def _known(host: Any, proto: Any) -> Known | None:
    if not 0 < len(proto.id) <= _MAX_PEER_ID_BYTES or proto.id == host.get_id().to_bytes():
        return None
    maybe_consume_signed_record(proto, host)
    return Known(ID(bytes(proto.id)), parse_addresses(proto.addrs))


def parse_addresses(raw: Iterable[bytes], *, limit: int = 4) -> tuple[Any, ...]:
    """The first few multiaddrs that parse and are of sane length."""
    parsed: list[Any] = []
    for data in raw:
        if len(parsed) == limit:
            break
        try:
            if len(data) <= 256:
                address = Multiaddr(data)
                str(address)
                parsed.append(address)
        except Exception as error:  # multiaddr raises whatever its codecs raise
            log.debug("bad_address error=%s", patches.cut(repr(error)))
    return tuple(parsed)


def distance(peer_id: Any, target: bytes) -> int:
    """XOR distance of a peer to a key, both hashed, as libp2p's routing tables have it."""
    return int.from_bytes(hashlib.sha256(peer_id.to_bytes()).digest(), "big") ^ int.from_bytes(target, "big")


@dataclass
class Walk:
    """Ask the peers closest to a key, learning of closer ones from each answer.

    `ask` gets a Known and returns the peers it named; it raises RequestError when the peer is of no use. The walk ends
    when the REPLICAS closest of those that answer have been asked, at MAX_VISITS, or when `enough` says so.
    """

    key: bytes
    ask: Callable[[Known], Awaitable[list[Known]]]
    enough: Callable[[], bool] = lambda: False
    answered: list[Any] = field(default_factory=list)
    _pool: dict[Any, Known] = field(default_factory=dict)
    _asked: set[Any] = field(default_factory=set)
    _failed: set[Any] = field(default_factory=set)

    async def run(self, seeds: Iterable[Known]) -> list[Any]:
        """Return the ids of the peers that answered, closest first."""
        target = hashlib.sha256(self.key).digest()
        self._add(seeds)
        while (batch := self._next(target)) and not self.enough():
            async with trio.open_nursery() as nursery:
                for known in batch:
                    self._asked.add(known.peer_id)
                    nursery.start_soon(self._visit, known, nursery.cancel_scope)
        return sorted(self.answered, key=lambda peer: distance(peer, target))

    def _add(self, found: Iterable[Known]) -> None:
        for known in found:
            self._pool.setdefault(known.peer_id, known)

    def _next(self, target: bytes) -> list[Known]:
        alive = [peer for peer in self._pool if peer not in self._failed]
        closest = sorted(alive, key=lambda peer: distance(peer, target))[:REPLICAS]
        room = min(PARALLEL_REQUESTS, MAX_VISITS - len(self._asked))
        return [self._pool[peer] for peer in closest if peer not in self._asked][: max(room, 0)]

    async def _visit(self, known: Known, batch: trio.CancelScope) -> None:
        try:
            found = await self.ask(known)
        except RequestError as error:
            log.debug("request_failed peer=%s error=%s", known.peer_id, error)
            self._failed.add(known.peer_id)
            return
        self.answered.append(known.peer_id)
        self._add(found)
        if self.enough():
            batch.cancel()

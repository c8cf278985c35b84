"""The DHT as a run uses it: put, get, provide and find providers, over a running host.

Asking is done in p2p.kad, answering in p2p.kad_server; who is known is in p2p.routing, what may be stored in
p2p.dht_records, and where in p2p.dht_stores. Readers take the highest sequence that any of several peers has.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError
from libp2p.records.record import make_put_record

from p2p.addresses import Scope, scope_of
from p2p.dht_records import Clock, Pointing, RecordValidator, digest_hex, parse_key, relays_key
from p2p.dht_stores import MAX_PROVIDERS, ProviderStore, ValueStore
from p2p.kad import MAX_VISITS, REPLICAS, Asker, RefusedRequest, RequestError, Walk, addresses_of, merged
from p2p.kad_message import KAD_PROTOCOL, MAX_ADDRESSES, MAX_CLOSER_PEERS, Known, closer_peers, providers
from p2p.kad_server import KadServer
from p2p.patches import guard_of
from p2p.routing import RoutingTable, target_of
from p2p.text import cut
from protocol.errors import ClockError, NodeError, VersionError
from protocol.identity import PeerId
from protocol.run import RunAddress

log = logging.getLogger(__name__)

READ_QUORUM: Final = 3
"""Answers with a valid value after which a read need not wait for more."""
PUT_WIDTH: Final = 20
FAR_REPLICAS: Final = 8
"""Copies beside those nearest to a key, at peers drawn from the rest, for when the nearest are made up."""
HOLDERS_S: Final = 600.0
"""How long the peers that took a value are told the next one without looking for them anew."""
WALK_TIMEOUT_S: Final = 12.0
ADOPT_AGAIN_S: Final = 60.0
SILENT_S: Final = 300.0
CHECKS_AT_A_TIME: Final = 8

Reach = Callable[[Any, list[Any]], Awaitable[bool]]
"""Whether a peer can be dialled at one of its addresses, by a connection of its own."""


@dataclass(frozen=True)
class _Holders:
    peers: list[Any]
    servers: set[Any]
    until: float


class RunDHT:
    """One node's view of the DHT. A server also holds values for others; a client only asks."""

    def __init__(
        self,
        host: Any,
        identity_peer: PeerId,
        address: RunAddress,
        *,
        serve: bool,
        clock: Clock,
        reach: Reach | None = None,
    ) -> None:
        self.host = host
        self.serves = serve
        self.validator = RecordValidator(clock)
        self.bootstrap: set[Any] = set()
        """Peers that walks begin with, beside the routing table."""
        self.grown = trio.Event()
        """Set, and replaced, when another server joins the routing table."""
        self.refused = 0
        """Peers that ended the stream instead of taking the last value that was put."""
        self.asker = Asker(host)
        self.table = RoutingTable(host.get_id())
        self._reach = reach
        self._holders: dict[bytes, _Holders] = {}
        self._asked: dict[Any, float] = {}
        self._values = ValueStore(self.validator, run_digest=digest_hex(address), own=identity_peer, clock=clock)
        self._providers = ProviderStore(own_key=relays_key(address), own=host.get_id(), clock=clock)
        self.server = KadServer(
            host, table=self.table, values=self._values, providers=self._providers, guard=guard_of(host)
        )
        if serve:
            self.server.attach()

    @property
    def peers(self) -> int:
        """DHT servers in the routing table."""
        return len(self.table)

    def servers(self) -> list[Any]:
        """Ids of the DHT servers in the routing table."""
        return [contact.peer_id for contact in self.table]

    def forget(self, peer_id: Any) -> None:
        """Take a peer out of the routing table."""
        self.table.remove(peer_id)

    @property
    def stored_values(self) -> int:
        return self._values.size()

    async def join(self, through: Iterable[Any] = ()) -> int:
        """Look for the peers closest to this node, filling the routing table; return how many answered."""
        key = self.host.get_id().to_bytes()
        return len(await self._walk(key, self._asking(Message.MessageType.FIND_NODE, key), through=through))

    async def adopt(self) -> None:
        """Ask connected peers that say they are DHT servers; those that answer enter the routing table."""
        now = trio.current_time()
        self._asked = {peer: at for peer, at in self._asked.items() if now - at < ADOPT_AGAIN_S}
        known = {*self.servers(), *self._asked}
        new = [peer for peer in self.host.get_connected_peers() if peer not in known and self._says_it_serves(peer)]
        self._asked.update((peer, now) for peer in new)
        if new:
            await self.join(new)

    async def ping(self, peer: Any) -> None:
        """Ask whether a peer is a DHT server of this network. Raises RequestError if it does not say so."""
        await self._request(Known(peer), Message(type=Message.MessageType.PING))

    async def check_silent(self) -> None:
        """Ask contacts that have said nothing for long whether they are there."""

        async def check(peer: Any) -> None:
            try:
                await self.ping(peer)
            except RequestError as error:
                log.debug("contact_silent peer=%s error=%s", peer, error)

        async with trio.open_nursery() as nursery:
            for contact in self.table.silent_for(SILENT_S)[:CHECKS_AT_A_TIME]:
                nursery.start_soon(check, contact.peer_id)

    def _says_it_serves(self, peer: Any) -> bool:
        try:
            return KAD_PROTOCOL in self.host.get_peerstore().get_protocols(peer)
        except PeerStoreError:
            return False

    async def expire(self) -> None:
        """Drop what is past its time."""
        self._values.cleanup_expired()
        self._providers.cleanup_expired()
        for stream in self.asker.close_idle():
            with trio.move_on_after(1.0):
                await stream.close()

    async def put(self, key: str, value: bytes) -> tuple[bool, int]:
        """Store a value here, if this node serves, and at the closest peers.

        Returns whether it is held here and how many peers took it. Raises ProtocolError if it breaks the rules.
        """
        self.validator.validate(key, value)
        data = key.encode("ascii")
        record = make_put_record(data, value)
        if self.serves:
            self._values.put_record(data, record)
        message = Message(type=Message.MessageType.PUT_VALUE, key=data, record=record)
        return self.serves, await self._tell_holders(data, Message.MessageType.GET_VALUE, message)

    async def provide(self, key: bytes) -> int:
        """Tell the closest peers that this node is a provider; return how many took it."""
        own = PeerInfo(self.host.get_id(), self.host.get_addrs())
        if self.serves:
            self._providers.add_provider(key, own)
        proto = Message.Peer(id=own.peer_id.to_bytes(), addrs=[address.to_bytes() for address in own.addrs])
        message = Message(type=Message.MessageType.ADD_PROVIDER, key=key, providerPeers=[proto])
        return await self._tell_holders(key, Message.MessageType.GET_PROVIDERS, message)

    async def _tell_holders(self, key: bytes, kind: Any, message: Any) -> int:
        """Tell the peers closest to a key. Who they are is remembered until some are gone or others have come."""
        known = self._holders.get(key)
        if known is not None and known.until > trio.current_time() and known.servers == set(self.servers()):
            taken = await self._tell(known.peers, message)
            if taken >= len(known.peers):
                return taken
        peers = _holders(await self._walk(key, self._asking(kind, key), width=PUT_WIDTH))
        taken = await self._tell(peers, message)
        self._holders[key] = _Holders(peers, set(self.servers()), trio.current_time() + HOLDERS_S)
        return taken

    async def get(self, key: str) -> Pointing | None:
        """The value with the highest sequence that this node or any of several peers holds; never just the own.

        Raises VersionError where there is none and the one who may sign it proves to speak another protocol version.
        """
        reading = self._reading(key)
        data = key.encode("ascii")

        async def ask(known: Known) -> list[Known]:
            answer = await self._request(known, Message(type=Message.MessageType.GET_VALUE, key=data))
            reading.note(answer.record.value)
            return self._closer(known, answer)

        await self._walk(data, ask, enough=lambda: reading.votes >= READ_QUORUM, width=MAX_VISITS)
        if reading.best is None and reading.other_version is not None:
            raise reading.other_version
        return reading.best

    async def get_from(self, known: Known, key: str) -> Pointing | None:
        """What one peer holds under a key, or this node, whichever is newer. Raises RequestError."""
        reading = self._reading(key)
        if known.peer_id != self.host.get_id():
            message = Message(type=Message.MessageType.GET_VALUE, key=key.encode("ascii"))
            reading.note((await self._request(known, message)).record.value)
        return reading.best

    async def providers(self, key: bytes) -> list[Known]:
        """Peers that anyone lists as providers of a key.

        Looks past those nearest to it: they may be made up to lie there. No number of answers is enough, for nobody
        has signed them.
        """
        told = [[Known(info.peer_id, tuple(info.addrs)) for info in self._providers.get_providers(key)]]

        async def ask(known: Known) -> list[Known]:
            answer = await self._request(known, Message(type=Message.MessageType.GET_PROVIDERS, key=key))
            scope = self.asker.scope_of(known.peer_id)
            told.append(providers(answer, own=self.host.get_id(), scope=scope, limit=MAX_PROVIDERS))
            return self._closer(known, answer)

        await self._walk(key, ask, width=MAX_VISITS)
        return _in_turn(told, limit=2 * MAX_PROVIDERS)

    def _reading(self, key: str) -> _Reading:
        reading = _Reading(key, self.validator)
        if held := self._values.get(key.encode("ascii")):
            reading.note(held.value)
            reading.votes = 0
        return reading

    def _asking(self, kind: Any, key: bytes) -> Callable[[Known], Awaitable[list[Known]]]:
        """A question that is asked for the closer peers in its answer."""

        async def ask(known: Known) -> list[Known]:
            return self._closer(known, await self._request(known, Message(type=kind, key=key)))

        return ask

    def _closer(self, known: Known, answer: Any) -> list[Known]:
        """Whom an answer names. A node on the internet is sent to no private address, whoever names it."""
        scope = max(self.asker.scope_of(known.peer_id), Scope.GLOBAL if self._is_public() else Scope.LOOPBACK)
        named = closer_peers(answer, own=self.host.get_id(), teller=known.peer_id, scope=scope)
        return named[:MAX_CLOSER_PEERS]

    def _is_public(self) -> bool:
        return any(scope_of(address) == Scope.GLOBAL for address in self.host.get_addrs())

    async def _walk(
        self,
        key: bytes,
        ask: Callable[[Known], Awaitable[list[Known]]],
        *,
        enough: Callable[[], bool] = lambda: False,
        width: int = REPLICAS,
        through: Iterable[Any] = (),
    ) -> list[Any]:
        closest = self.table.closest(target_of(key), REPLICAS)
        seeds = {contact.peer_id: Known(contact.peer_id, contact.addresses) for contact in closest}
        seeds.update((peer, Known(peer)) for peer in [*through, *self._starting_points(len(seeds))])
        walk = Walk(key, ask, enough, width, usable=lambda known: not self.asker.is_paused(known.peer_id))
        with trio.move_on_after(WALK_TIMEOUT_S):
            return await walk.run(seeds.values())
        return list(walk.answered)

    def _starting_points(self, known: int) -> list[Any]:
        """Bootstrap peers to ask as well: all while few are known, then one, so that they are not asked by everyone.

        One always: peers that lie around a key, or around this node, cannot be all that it hears of.
        """
        connected = [peer for peer in self.bootstrap if self.host.get_network().get_connections(peer)]
        if known < REPLICAS or not connected:
            return list(self.bootstrap)
        return [random.choice(connected)]

    async def _request(self, known: Known, message: Any) -> Any:
        try:
            answer = await self.asker.request(known, message)
        except RefusedRequest:
            raise
        except RequestError:
            self.table.failed(known.peer_id)
            raise
        await self._note_server(known)
        return answer

    async def _note_server(self, known: Known) -> None:
        """Take a peer that has answered a Kademlia request into the routing table."""
        addresses = [each for each in addresses_of(self.host, known) if scope_of(each) >= self._least_scope(known)]
        if known.peer_id not in self.table and not await self._can_be_dialled(known.peer_id, addresses):
            return
        if self.table.answered(known.peer_id, tuple(addresses[:MAX_ADDRESSES]), self.asker.ip_of(known.peer_id)):
            self.grown.set()
            self.grown = trio.Event()

    def _least_scope(self, known: Known) -> Scope:
        return Scope.GLOBAL if self._is_public() else min(self.asker.scope_of(known.peer_id), Scope.PRIVATE)

    async def _can_be_dialled(self, peer_id: Any, addresses: list[Any]) -> bool:
        """Only what others can dial is worth naming to them: a server that dialled this node has to be tried."""
        connections = self.host.get_network().get_connections(peer_id)
        if self._reach is None or any(connection.direction.name == "OUTBOUND" for connection in connections):
            return True
        return await self._reach(peer_id, addresses)

    async def _tell(self, peers: Iterable[Any], message: Any) -> int:
        """Send a message to several peers; return how many took it."""
        taken: list[Any] = []
        self.refused = 0

        async def tell(peer: Any) -> None:
            try:
                await self._request(Known(peer), message)
                taken.append(peer)
            except RequestError as error:
                self.refused += isinstance(error, RefusedRequest)
                log.debug("put_refused peer=%s error=%s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(tell, peer)
        return len(taken)


def _holders(answered: list[Any]) -> list[Any]:
    """Where a value is put: at the peers nearest to its key, and at a few of the others that have answered."""
    near, far = answered[:REPLICAS], answered[REPLICAS:]
    return [*near, *random.sample(far, min(FAR_REPLICAS, len(far)))]


def _in_turn(lists: Iterable[Sequence[Known]], *, limit: int) -> list[Known]:
    """The first of each list, then the second of each: no list, however long, keeps the others' out."""
    found: dict[Any, Known] = {}
    for known in (each for row in itertools.zip_longest(*lists) for each in row if each is not None):
        if known.peer_id in found:
            found[known.peer_id] = merged(found[known.peer_id], known)
        elif len(found) < limit:
            found[known.peer_id] = known
    return list(found.values())


class _Reading:
    """Collects what peers hold under one key."""

    def __init__(self, key: str, validator: RecordValidator) -> None:
        self._key, self._validator = key, validator
        self._author = parse_key(key)[2]
        self.other_version: VersionError | None = None
        """Said under the signature of the key's author."""
        self.best: Pointing | None = None
        self.votes = 0

    def note(self, value: bytes) -> None:
        if not value:
            return
        try:
            signed = self._validator.open(self._key, value)
        except ClockError as error:
            log.warning("dht_value_refused key=%s error=%s next=%s", self._key, error.message, error.hint)
            return
        except VersionError as error:
            log.warning("dht_value_refused key=%s error=%s next=%s", self._key, error.message, error.hint)
            if error.author == self._author:
                self.other_version = error
            return
        except NodeError as error:
            log.info("dht_value_refused key=%s error=%s", self._key, cut(error.message))
            return
        self.votes += 1
        if self.best is None or signed.record.sequence > self.best.record.sequence:
            self.best = signed

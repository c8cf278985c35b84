"""The DHT as a run uses it: put, get, provide and find providers, over a running host.

libp2p's KadDHT serves requests and keeps the routing table. Asking is done in p2p.kad; what may be stored is in
p2p.dht_records, and where it is stored in p2p.dht_stores. Readers take the highest sequence that any of several peers
has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import trio
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError
from libp2p.records.record import make_signed_put_record
from libp2p.records.validator import NamespacedValidator

from p2p import patches
from p2p.dht_records import NAMESPACE, Clock, Pointing, RecordValidator, digest_hex, relays_key
from p2p.dht_stores import MAX_PROVIDERS, ProviderStore, ValueStore
from p2p.kad import REPLICAS, Known, RequestError, Walk, addresses_of, closer_peers, providers, request
from protocol.errors import NodeError
from protocol.identity import PeerId
from protocol.run import RunAddress

log = logging.getLogger(__name__)

READ_QUORUM: Final = 3
"""Answers with a valid value after which a read need not wait for more."""
WALK_TIMEOUT_S: Final = 12.0
PING_TIMEOUT_S: Final = 3.0
ADOPT_AGAIN_S: Final = 60.0


class RunDHT:
    """One node's view of the DHT. A server also holds values for others; a client only asks."""

    def __init__(self, host: Any, identity_peer: PeerId, address: RunAddress, *, serve: bool, clock: Clock) -> None:
        self.host = host
        self.serves = serve
        self.validator = RecordValidator(clock)
        self.bootstrap: set[Any] = set()
        """Peers to begin every walk with, beside the routing table."""
        self.grown = trio.Event()
        """Set, and replaced, when another server joins the routing table."""
        self._asked: dict[Any, float] = {}
        self._kad = KadDHT(
            host,
            DHTMode.SERVER if serve else DHTMode.CLIENT,
            validator=NamespacedValidator({NAMESPACE: self.validator}, strict_validation=True),
            validator_changed=True,  # otherwise the namespaces pk and ipns are let in
            strict_validation=True,
        )
        self._values = ValueStore(self.validator, run_digest=digest_hex(address), own=identity_peer, clock=clock)
        self._providers = ProviderStore(own_key=relays_key(address), own=host.get_id(), clock=clock)
        self._kad.value_store, self._kad.provider_store = self._values, self._providers
        self._kad.add_peer = _ignore_asking_peer

    @property
    def peers(self) -> int:
        """DHT servers in the routing table."""
        return int(self._kad.routing_table.size())

    def servers(self) -> list[Any]:
        """Ids of the DHT servers in the routing table."""
        return list(self._kad.routing_table.get_peer_ids())

    def forget(self, peer_id: Any) -> None:
        """Take a peer out of the routing table."""
        self._kad.routing_table.remove_peer(peer_id)

    @property
    def stored_values(self) -> int:
        return self._values.size()

    def namespaces(self) -> list[str]:
        """Namespaces that values are accepted in."""
        return sorted(patches.namespaces(self._kad))

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

    def _says_it_serves(self, peer: Any) -> bool:
        try:
            return patches.KAD_PROTOCOL in self.host.get_peerstore().get_protocols(peer)
        except PeerStoreError:
            return False

    def expire(self) -> None:
        """Drop what is past its time."""
        self._values.cleanup_expired()
        self._providers.cleanup_expired()

    async def put(self, key: str, value: bytes) -> tuple[bool, int]:
        """Store a value here, if this node serves, and at the closest peers.

        Returns whether it is held here and how many peers took it. Raises ProtocolError if it breaks the rules.
        """
        self.validator.validate(key, value)
        data = key.encode("ascii")
        record = make_signed_put_record(data, value, self.host.get_private_key())
        if self.serves:
            self._values.put_record(data, record)
        peers = await self._walk(data, self._asking(Message.MessageType.GET_VALUE, data))
        message = Message(type=Message.MessageType.PUT_VALUE, key=data, record=record)
        return self.serves, await self._tell(peers[: 2 * REPLICAS], message)

    async def provide(self, key: bytes) -> int:
        """Tell the closest peers that this node is a provider; return how many took it."""
        own = PeerInfo(self.host.get_id(), self.host.get_addrs())
        if self.serves:
            self._providers.add_provider(key, own)
        peers = await self._walk(key, self._asking(Message.MessageType.GET_PROVIDERS, key))
        proto = Message.Peer(id=own.peer_id.to_bytes(), addrs=[address.to_bytes() for address in own.addrs])
        message = Message(type=Message.MessageType.ADD_PROVIDER, key=key, providerPeers=[proto])
        return await self._tell(peers[: 2 * REPLICAS], message)

    async def get(self, key: str) -> Pointing | None:
        """The value with the highest sequence that this node or any of several peers holds; never just the own."""
        reading = self._reading(key)
        data = key.encode("ascii")

        async def ask(known: Known) -> list[Known]:
            answer = await self._request(known, Message(type=Message.MessageType.GET_VALUE, key=data))
            reading.note(answer.record.value)
            return closer_peers(self.host, answer)

        await self._walk(data, ask, enough=lambda: reading.votes >= READ_QUORUM)
        return reading.best

    async def get_from(self, known: Known, key: str) -> Pointing | None:
        """What one peer holds under a key, or this node, whichever is newer. Raises RequestError."""
        reading = self._reading(key)
        if known.peer_id != self.host.get_id():
            message = Message(type=Message.MessageType.GET_VALUE, key=key.encode("ascii"))
            reading.note((await self._request(known, message)).record.value)
        return reading.best

    async def providers(self, key: bytes) -> list[Known]:
        """Peers that anyone lists as providers of a key."""
        found = {info.peer_id: Known(info.peer_id, tuple(info.addrs)) for info in self._providers.get_providers(key)}

        async def ask(known: Known) -> list[Known]:
            answer = await self._request(known, Message(type=Message.MessageType.GET_PROVIDERS, key=key))
            for provider in providers(self.host, answer, limit=MAX_PROVIDERS):
                if len(found) < 2 * MAX_PROVIDERS:
                    found.setdefault(provider.peer_id, provider)
            return closer_peers(self.host, answer)

        await self._walk(key, ask)
        return list(found.values())

    def _reading(self, key: str) -> _Reading:
        reading = _Reading(key, self.validator)
        if held := self._values.get(key.encode("ascii")):
            reading.note(held.value)
            reading.votes = 0
        return reading

    def _asking(self, kind: Any, key: bytes) -> Callable[[Known], Any]:
        """A question that is asked for the closer peers in its answer. FIND_NODE takes keys up to 50 bytes only."""

        async def ask(known: Known) -> list[Known]:
            return closer_peers(self.host, await self._request(known, Message(type=kind, key=key)))

        return ask

    async def _walk(
        self, key: bytes, ask: Any, *, enough: Callable[[], bool] = lambda: False, through: Iterable[Any] = ()
    ) -> list[Any]:
        closest = self._kad.routing_table.find_local_closest_peers(key, REPLICAS)
        walk = Walk(key, ask, enough)
        with trio.move_on_after(WALK_TIMEOUT_S):
            return await walk.run(Known(peer) for peer in dict.fromkeys([*through, *self.bootstrap, *closest]))
        return list(walk.answered)

    async def _request(self, known: Known, message: Any) -> Any:
        try:
            answer = await request(self.host, known.peer_id, message, addresses=known.addresses)
        except RequestError:
            self.forget(known.peer_id)
            raise
        await self._note_server(known)
        return answer

    async def _note_server(self, known: Known) -> None:
        """Take a peer that has answered a Kademlia request into the routing table."""
        if self._kad.routing_table.peer_in_table(known.peer_id):
            return
        info = PeerInfo(known.peer_id, addresses_of(self.host, known.peer_id, known.addresses))
        with trio.move_on_after(PING_TIMEOUT_S):  # a full bucket pings its oldest entry first
            if await self._kad.routing_table.add_peer(info):
                self.grown.set()
                self.grown = trio.Event()

    async def _tell(self, peers: Iterable[Any], message: Any) -> int:
        """Send a message to several peers; return how many took it."""
        taken: list[Any] = []

        async def tell(peer: Any) -> None:
            try:
                await self._request(Known(peer), Message.FromString(message.SerializeToString()))
                taken.append(peer)
            except RequestError as error:
                log.debug("put_refused peer=%s error=%s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(tell, peer)
        return len(taken)


async def _ignore_asking_peer(peer_id: Any, *, skip_server_mode_check: bool = False) -> bool:
    """libp2p takes whoever sends a request into the routing table; here only who answers one gets in."""
    return False


class _Reading:
    """Collects what peers hold under one key."""

    def __init__(self, key: str, validator: RecordValidator) -> None:
        self._key, self._validator = key, validator
        self.best: Pointing | None = None
        self.votes = 0

    def note(self, value: bytes) -> None:
        if not value:
            return
        try:
            signed = self._validator.open(self._key, value)
        except NodeError as error:
            log.info("dht_value_refused key=%s error=%s", self._key, patches.cut(error.args[0]))
            return
        self.votes += 1
        if self.best is None or signed.record.sequence > self.best.record.sequence:
            self.best = signed

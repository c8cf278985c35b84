"""What a run keeps in the DHT, and the rules for it.

Two kinds of values, both signed envelopes: a run's pointer under its operator's key and a relay's advert under its own;
and provider records that list the relays of a run. A server stores a value only if the peer that the key names has
signed it and it is in its time; a reader checks the same again and takes the highest sequence that any peer has.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import trio
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError
from libp2p.records.record import make_signed_put_record
from libp2p.records.validator import NamespacedValidator

from p2p import patches
from p2p.kad import REPLICAS, Known, RequestError, Walk, addresses_of, closer_peers, providers, request
from protocol.constants import MAX_CLOCK_SKEW_S, MAX_DHT_VALUE_BYTES
from protocol.envelope import Signed, open_envelope
from protocol.errors import ClockError, MalformedError, NodeError, ProtocolError, WrongRunError
from protocol.identity import PeerId
from protocol.records import RelayAdvert, RunPointer
from protocol.run import RunAddress

log = logging.getLogger(__name__)

NAMESPACE: Final = "intellect"
DIGEST_BYTES: Final = 20
MAX_KEY_BYTES: Final = 128
MAX_VALIDITY_MS: Final = 3600 * 1000
"""Longest time that a value may claim to be valid for. Bounds how long junk stays."""
MAX_VALUES: Final = 2048
MAX_PROVIDER_KEYS: Final = 64
MAX_PROVIDERS: Final = 64
PROVIDER_LIFETIME_S: Final = 900.0
READ_QUORUM: Final = 3
"""Answers with a valid value after which a read need not wait for more."""
WALK_TIMEOUT_S: Final = 12.0
PING_TIMEOUT_S: Final = 3.0
ADOPT_AGAIN_S: Final = 60.0
_KEY = re.compile(r"/intellect/(run|relay)/([0-9a-f]{40})/([1-9A-HJ-NP-Za-km-z]{40,64})")
_PROVIDER_KEY = re.compile(rb"/intellect/relays/[0-9a-f]{40}")

Clock = Callable[[], float]
Pointing = Signed[RunPointer] | Signed[RelayAdvert]


def run_key(address: RunAddress) -> str:
    """Where a run's pointer lies."""
    return f"/{NAMESPACE}/run/{_digest_hex(address)}/{address.operator}"


def relay_key(address: RunAddress, relay: PeerId) -> str:
    """Where a relay's advert for a run lies."""
    return f"/{NAMESPACE}/relay/{_digest_hex(address)}/{relay}"


def relays_key(address: RunAddress) -> bytes:
    """Provider key of "who relays for this run"."""
    return f"/{NAMESPACE}/relays/{_digest_hex(address)}".encode()


def _digest_hex(address: RunAddress) -> str:
    return address.digest[:DIGEST_BYTES].hex()


class RecordValidator:
    """The rules for a value, as libp2p asks for them: `validate` raises, `select` names the best."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock

    def validate(self, key: str, value: bytes) -> None:
        """Raise ProtocolError unless the value may lie under the key now."""
        self.open(key, value)

    def select(self, key: str, values: list[bytes]) -> int:
        """Index of the highest sequence; the last of equals, so that a repeated put is stored again."""
        ranked = [(self._sequence(key, value), index) for index, value in enumerate(values)]
        return max(ranked)[1]

    def _sequence(self, key: str, value: bytes) -> int:
        try:
            return self.open(key, value).record.sequence
        except ProtocolError:
            return -1

    def open(self, key: str, value: bytes) -> Pointing:
        """Check a value against its key and the clock, and return what it says."""
        kind, digest, author = _parse_key(key)
        if len(value) > MAX_DHT_VALUE_BYTES:
            raise MalformedError(f"a DHT value of {len(value)} bytes; at most {MAX_DHT_VALUE_BYTES} are allowed")
        signed: Pointing
        signed = self._open_pointer(value, digest, author) if kind == "run" else self._open_advert(value, digest)
        signed.require_author(author)
        self._check_time(signed)
        return signed

    def _open_pointer(self, value: bytes, digest: str, operator: PeerId) -> Signed[RunPointer]:
        signed = open_envelope(value, RunPointer).require_author(operator)
        address = RunAddress(operator, signed.record.name)
        if _digest_hex(address) != digest:
            raise WrongRunError(f"a pointer to {address} lies under another run's key")
        address.open_manifest(signed.record.manifest)
        return signed

    def _open_advert(self, value: bytes, digest: str) -> Signed[RelayAdvert]:
        signed = open_envelope(value, RelayAdvert)
        if signed.record.run[:DIGEST_BYTES].hex() != digest:
            raise WrongRunError(f"an advert of {signed.author.short} lies under another run's key")
        return signed

    def _check_time(self, signed: Pointing) -> None:
        record, now_ms = signed.record, int(self._clock() * 1000)
        name = f"the {record.KIND} of {signed.author.short}"
        if record.issued_at_ms > now_ms + MAX_CLOCK_SKEW_S * 1000:
            raise ClockError(
                f"{name} is dated {(record.issued_at_ms - now_ms) / 1000:.0f} s in the future",
                hint="compare both clocks: `timedatectl`, `chronyc tracking`",
            )
        if record.valid_until_ms <= now_ms:
            raise ClockError(f"{name} ended {(now_ms - record.valid_until_ms) / 1000:.0f} s ago")
        if record.valid_until_ms - record.issued_at_ms > MAX_VALIDITY_MS:
            raise MalformedError(f"{name} claims to be valid for more than {MAX_VALIDITY_MS // 1000} s")


def _parse_key(key: str) -> tuple[str, str, PeerId]:
    match = _KEY.fullmatch(key)
    if not match or len(key) > MAX_KEY_BYTES:
        raise MalformedError(f"not a key of this DHT: {key[:160]!r}")
    return match[1], match[2], PeerId.parse(match[3])


@dataclass(frozen=True)
class _Value:
    record: Any
    valid_until_s: float


class ValueStore:
    """Values that a DHT server holds: at most MAX_VALUES, none past its end, the node's own never evicted.

    Stands where libp2p's own store would, which keeps 50 000 values for a day each and evicts the oldest first. When
    full, a value of another run gives way before one of `run_digest`, so that strangers cannot push out a relay's run.
    """

    def __init__(self, validator: RecordValidator, *, run_digest: str, own: PeerId, clock: Clock = time.time) -> None:
        self._validator = validator
        self._run = f"/{run_digest}/".encode()
        self._own = f"/{own}".encode()
        self._clock = clock
        self._values: dict[bytes, _Value] = {}

    def get(self, key: bytes) -> Any | None:
        """The libp2p record under a key, if it is still valid."""
        held = self._values.get(key)
        if held is None or held.valid_until_s <= self._clock():
            self.remove(key)
            return None
        return held.record

    def put_record(self, key: bytes, record: Any) -> None:
        """Store a record. Raises ProtocolError if it breaks the rules."""
        signed = self._validator.open(key.decode("ascii", "replace"), record.value)
        if key not in self._values and len(self._values) >= MAX_VALUES:
            self._make_room()
        self._values[key] = _Value(record, signed.record.valid_until_ms / 1000)

    def remove(self, key: bytes) -> bool:
        return self._values.pop(key, None) is not None

    def cleanup_expired(self) -> int:
        """Drop what is past its end; return how many."""
        now = self._clock()
        expired = [key for key, held in self._values.items() if held.valid_until_s <= now]
        for key in expired:
            del self._values[key]
        return len(expired)

    def size(self) -> int:
        return len(self._values)

    def _make_room(self) -> None:
        if self.cleanup_expired():
            return
        foreign = [key for key in self._values if self._run not in key]
        others = foreign or [key for key in self._values if not key.endswith(self._own)]
        del self._values[random.choice(others)]


class ProviderStore:
    """Who relays for which run: bounded, expiring, the node's own runs never evicted.

    Stands where libp2p's own store would, which takes any key, keeps a dead provider for 48 h, and refuses all others
    once 20 have come.
    """

    def __init__(self, *, own_key: bytes, own: Any, clock: Clock = time.time) -> None:
        self._own_key, self._own, self._clock = own_key, own, clock
        self._providers: dict[bytes, dict[Any, tuple[Any, float]]] = {}

    def add_provider(self, key: bytes, provider: Any) -> None:
        """Note a provider of a key of this DHT; anything else is dropped."""
        if not _PROVIDER_KEY.fullmatch(key) or len(provider.addrs) > patches.MAX_ADDRESSES_PER_PEER:
            return
        if key not in self._providers and len(self._providers) >= MAX_PROVIDER_KEYS:
            del self._providers[random.choice([held for held in self._providers if held != self._own_key])]
        held = self._providers.setdefault(key, {})
        if provider.peer_id not in held and len(held) >= MAX_PROVIDERS:
            del held[random.choice([peer for peer in held if peer != self._own])]
        held[provider.peer_id] = (provider, self._clock() + PROVIDER_LIFETIME_S)

    def get_providers(self, key: bytes) -> list[Any]:
        """Providers of a key as libp2p's PeerInfo."""
        now = self._clock()
        return [provider for provider, until_s in self._providers.get(key, {}).values() if until_s > now]

    def cleanup_expired(self) -> None:
        now = self._clock()
        for key, held in list(self._providers.items()):
            self._providers[key] = {peer: entry for peer, entry in held.items() if entry[1] > now}
            if not self._providers[key]:
                del self._providers[key]

    def size(self) -> int:
        return sum(map(len, self._providers.values()))


class RunDHT:
    """The DHT as a run uses it, over a running host: put, get, provide, providers.

    libp2p's KadDHT serves requests and keeps the routing table; asking is done in p2p.kad.
    """

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
        self._values = ValueStore(self.validator, run_digest=_digest_hex(address), own=identity_peer, clock=clock)
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

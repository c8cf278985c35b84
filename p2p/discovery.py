"""A node's part in discovery: its host, its DHT, and the loops that keep both useful.

Bootstrapping never ends and never fails: peers that are down are tried again for ever, and `bootstrap_state` says in
words what is tried and since when. What is published is signed anew and put again before it ends. Relays are DHT
servers; everyone else only asks, listens nowhere, and is in nobody's routing table.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio
from multiaddr import Multiaddr

from p2p.dht import RunDHT
from p2p.dht_records import relay_key, relays_key, run_key
from p2p.host import DialError, build_host, dial, parse_announce, parse_listen, running, to_libp2p
from p2p.kad import REPLICAS, Known, RequestError, addresses_of
from p2p.peers import PeerBook, RememberedPeer
from protocol.envelope import Signed
from protocol.errors import BootstrapError, ConfigError, MalformedError, NodeError
from protocol.identity import Identity, PeerId
from protocol.records import Manifest, RelayAdvert, RunPointer
from protocol.run import RunAddress

log = logging.getLogger(__name__)

REPUBLISH_S: Final = 120.0
"""Between two puts of a value; a fifth of VALIDITY_S, so that four may fail."""
VALIDITY_S: Final = 600.0
"""How long published values should be valid: what callers write into `valid_until_ms`."""
FIND_TIMEOUT_S: Final = 20.0
MAX_RELAYS: Final = 64
_DIAL_TIMEOUT_S: Final = 8.0
_FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 60.0
_WATCH_S: Final = 10.0
_ADOPT_S: Final = 2.5
_SETTLE_S: Final = 1.0
_FIRST_REFRESH_S: Final = 3.0
_REFRESH_S: Final = 600.0
_REPUBLISH_RETRY_S: Final = 15.0
_PARALLEL_READS: Final = 8

Make = Callable[[int], bytes]
"""Seals a record with the sequence number given, issued now."""


@dataclass
class _Bootstrap:
    """One bootstrap peer: where it should be, and how trying went."""

    peer_id: Any
    address: Multiaddr
    since_s: float = field(default_factory=time.time)
    tries: int = 0
    connected: bool = False
    problem: str = ""

    def became(self, *, connected: bool, problem: str = "") -> None:
        if connected != self.connected or (not connected and problem != self.problem):
            self.since_s = time.time()
        self.tries = 0 if connected else self.tries + 1
        self.connected, self.problem = connected, problem

    def describe(self) -> str:
        age_s = time.time() - self.since_s
        if self.connected:
            return f"{self.address}: connected for {age_s:.0f} s"
        return f"{self.address}: {self.problem or 'not tried yet'} (try {self.tries}, for {age_s:.0f} s)"


class P2PNode:
    """A node in the swarm of one run. Build it, then `await nursery.start(node.run)`.

    Raises ConfigError for addresses that make no sense and BootstrapError for bootstrap addresses that cannot be used.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str],
        bootstrap: Sequence[str],
        dht_server: bool,
        run_address: RunAddress,
        data_dir: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if dht_server != bool(listen):
            raise ConfigError(
                "a DHT server needs an address to listen on" if dht_server else "only a DHT server listens",
                hint="relays: --listen /ip4/0.0.0.0/tcp/4001; other roles: no --listen",
            )
        self._identity, self._address, self._clock = identity, run_address, clock
        self._listen = [parse_listen(text) for text in listen]
        self._announce = [parse_announce(text) for text in announce]
        self._bootstrap = _parse_bootstraps(bootstrap, own=identity.peer_id)
        self._book = PeerBook(data_dir / "peers.json")
        self._serves = dht_server
        self._last_sequence = 0
        self._host: Any = None
        self._dht: RunDHT | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def peer_id(self) -> PeerId:
        return self._identity.peer_id

    @property
    def multiaddrs(self) -> list[str]:
        """Where this node can be dialled, each ending in its peer id; empty unless it listens and runs."""
        return [str(address) for address in self._host.get_addrs()] if self._host else []

    @property
    def dht_peers(self) -> int:
        """DHT servers known to answer."""
        return self._dht.peers if self._dht else 0

    @property
    def bootstrap_state(self) -> str:
        """What bootstrapping has come to, peer by peer, in words."""
        if not self._bootstrap:
            return f"no bootstrap peers given; {self.dht_peers} DHT servers known"
        connected = sum(entry.connected for entry in self._bootstrap)
        head = f"{connected} of {len(self._bootstrap)} bootstrap peers connected, {self.dht_peers} DHT servers known"
        return "; ".join([head, *(entry.describe() for entry in self._bootstrap)])

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Raises PortError."""
        host = build_host(self._identity, announce=self._announce)
        async with running(host, self._listen):
            self._host = host
            self._dht = RunDHT(host, self.peer_id, self._address, serve=self._serves, clock=self._clock)
            self._dht.bootstrap = {entry.peer_id for entry in self._bootstrap}
            log.info("p2p_started peer=%s serves=%s addresses=%s", self.peer_id, self._serves, self.multiaddrs)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for entry in self._bootstrap:
                    nursery.start_soon(self._keep_bootstrapped, entry)
                nursery.start_soon(self._keep_known)
                nursery.start_soon(self._keep_fresh)
                task_status.started()

    async def publish_run(self, make: Make) -> None:
        """Publish the run's pointer and keep it published; return once it is held by someone."""
        await self._running_nursery().start(self._keep_published, run_key(self._address), make, None)

    async def publish_advert(self, make: Make) -> None:
        """Publish this relay's advert and its being a provider, and keep both; return once they are held by someone."""
        key = relay_key(self._address, self.peer_id)
        await self._running_nursery().start(self._keep_published, key, make, relays_key(self._address))

    async def find_run(self, address: RunAddress, *, timeout_s: float = FIND_TIMEOUT_S) -> Signed[Manifest] | None:
        """The manifest that an address leads to, or None if nobody had it in time. Asks again until then."""
        found: list[Signed[Manifest]] = []

        async def attempt() -> bool:
            pointer = await self._running_dht().get(run_key(address))
            if pointer is not None and isinstance(pointer.record, RunPointer):
                found.append(address.open_manifest(pointer.record.manifest))
            return bool(found)

        await self._until(attempt, timeout_s)
        return found[-1] if found else None

    async def find_relays(self, *, timeout_s: float = FIND_TIMEOUT_S) -> list[Signed[RelayAdvert]]:
        """Valid adverts of the run's relays, the newest of each. Asks again until there is one, or time ends."""
        found: dict[PeerId, Signed[RelayAdvert]] = {}

        async def attempt() -> bool:
            await self._collect_adverts(found)
            return bool(found)

        await self._until(attempt, timeout_s)
        return list(found.values())

    async def _until(self, attempt: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        dht = self._running_dht()
        pause_s = 0.25
        with trio.move_on_after(timeout_s):
            while not await attempt():
                with trio.move_on_after(_jittered(pause_s)):
                    await dht.grown.wait()
                pause_s = min(2 * pause_s, 4.0)

    async def _collect_adverts(self, found: dict[PeerId, Signed[RelayAdvert]]) -> None:
        dht = self._running_dht()
        limit = trio.CapacityLimiter(_PARALLEL_READS)

        async def read(known: Known) -> None:
            async with limit:
                advert = await self._read_advert(dht, known)
            if advert is not None:
                found[advert.author] = advert

        async with trio.open_nursery() as nursery:
            for known in (await dht.providers(relays_key(self._address)))[:MAX_RELAYS]:
                nursery.start_soon(read, known)

    async def _read_advert(self, dht: RunDHT, known: Known) -> Signed[RelayAdvert] | None:
        """The relay itself has its newest advert; if it cannot be reached, others may."""
        try:
            key = relay_key(self._address, PeerId.parse(str(known.peer_id)))
        except MalformedError:
            return None
        try:
            signed = await dht.get_from(known, key)
        except RequestError:
            signed = await dht.get(key)
        return signed if signed is not None and isinstance(signed.record, RelayAdvert) else None

    async def _keep_published(
        self, key: str, make: Make, provide: bytes | None, *, task_status: trio.TaskStatus[None]
    ) -> None:
        started, retry_s = False, _FIRST_RETRY_S
        while True:
            copies = await self._publish(key, make, provide)
            if copies and not started:
                started = True
                task_status.started()
            retry_s = _FIRST_RETRY_S if copies else min(2 * retry_s, _REPUBLISH_RETRY_S)
            await self._wait_to_republish(_jittered(REPUBLISH_S if copies else retry_s))

    async def _publish(self, key: str, make: Make, provide: bytes | None) -> int:
        dht = self._running_dht()
        try:
            held_here, remote = await dht.put(key, make(self._next_sequence()))
        except NodeError as error:  # the caller's record breaks a rule, or its clock is wrong
            log.error("publish_refused key=%s error=%s", key, error)
            return 0
        if provide is not None:
            await dht.provide(provide)
        copies = remote + held_here
        log.log(
            logging.INFO if copies else logging.WARNING,
            "published key=%s here=%s remote=%d servers_known=%d",
            key,
            held_here,
            remote,
            dht.peers,
        )
        return copies

    async def _wait_to_republish(self, pause_s: float) -> None:
        """Sleep, but while servers are few not past the arrival of one, which has not got the value yet."""
        dht = self._running_dht()
        with trio.move_on_after(pause_s):
            await dht.grown.wait()
            await trio.sleep(_jittered(_SETTLE_S) if dht.peers <= REPLICAS else math.inf)

    def _next_sequence(self) -> int:
        """Milliseconds, so that sequences go on rising after a restart."""
        self._last_sequence = max(self._last_sequence + 1, int(self._clock() * 1000))
        return self._last_sequence

    async def _keep_bootstrapped(self, entry: _Bootstrap) -> None:
        pause_s = _FIRST_RETRY_S
        while True:
            connected = await self._try_bootstrap(entry)
            pause_s = _FIRST_RETRY_S if connected else min(2 * pause_s, _LAST_RETRY_S)
            await trio.sleep(_jittered(_WATCH_S if connected else pause_s))

    async def _try_bootstrap(self, entry: _Bootstrap) -> bool:
        if self._host.get_network().get_connections(entry.peer_id):
            entry.became(connected=True)
            return True
        try:
            await dial(self._host, entry.peer_id, [entry.address], timeout_s=_DIAL_TIMEOUT_S)
        except DialError as error:
            problem = str(error)
            if error.other_peer:
                problem = f"answers as {error.other_peer} instead of {entry.peer_id}; correct --bootstrap"
            entry.became(connected=False, problem=problem)
            log.log(
                _level(entry.tries), "bootstrap_failed address=%s try=%d error=%s", entry.address, entry.tries, problem
            )
            return False
        entry.became(connected=True)
        answered = await self._running_dht().join()
        log.info("bootstrap_connected address=%s answered=%d", entry.address, answered)
        return True

    async def _keep_known(self) -> None:
        """Remember who answers; while nobody does, dial those remembered from before."""
        while True:
            await trio.sleep(_jittered(_ADOPT_S))
            await self._running_dht().adopt()
            if not self.dht_peers:
                await self._dial_remembered()
            elif self._book.note(self._seen()):
                await self._save_book()

    async def _save_book(self) -> None:
        try:
            await trio.to_thread.run_sync(self._book.save)
        except OSError as error:
            log.error("peer_book_unwritable error=%s next=check_the_data_directory", error)

    def _seen(self) -> list[RememberedPeer]:
        now_ms = int(time.time() * 1000)
        seen = []
        for peer in self._running_dht().servers():
            if addresses := addresses_of(self._host, peer):
                seen.append(RememberedPeer(str(peer), [str(address) for address in addresses[:4]], now_ms))
        return seen

    async def _dial_remembered(self) -> None:
        for peer in random.sample(self._book.peers, min(8, len(self._book.peers))):
            try:
                peer_id = to_libp2p(PeerId.parse(peer.peer_id))
                addresses = [parse_announce(text) for text in peer.addresses]
                await dial(self._host, peer_id, addresses, timeout_s=_DIAL_TIMEOUT_S / 2)
            except DialError as error:
                log.debug("remembered_peer_failed peer=%s error=%s", peer.peer_id, error)
            except NodeError as error:
                log.warning("remembered_peer_malformed peer=%r error=%s", peer.peer_id, error.message)
            else:
                await self._running_dht().join([peer_id])
                return

    async def _keep_fresh(self) -> None:
        """Look for peers often at first, when others are starting too, then seldom: a look costs tens of ms of CPU."""
        pause_s = _FIRST_REFRESH_S
        while True:
            await trio.sleep(_jittered(pause_s))
            pause_s = min(2 * pause_s, _REFRESH_S)
            dht = self._running_dht()
            dht.expire()
            await dht.join()

    def _running_dht(self) -> RunDHT:
        if self._dht is None:
            raise RuntimeError("P2PNode.run is not running")
        return self._dht

    def _running_nursery(self) -> trio.Nursery:
        if self._nursery is None:
            raise RuntimeError("P2PNode.run is not running")
        return self._nursery


def _level(tries: int) -> int:
    """Powers of two are told, the rest is for debugging: a peer that is down for days fills no log."""
    return logging.WARNING if tries & (tries - 1) == 0 else logging.DEBUG


def _jittered(seconds: float) -> float:
    """Between 80 and 120 % of a time, so that nodes started together do not act together."""
    return seconds * random.uniform(0.8, 1.2)


def _parse_bootstraps(texts: Sequence[str], *, own: PeerId) -> list[_Bootstrap]:
    parsed = {text: _parse_bootstrap(text) for text in texts}
    return [entry for entry in parsed.values() if entry.peer_id != to_libp2p(own)]


def _parse_bootstrap(text: str) -> _Bootstrap:
    hint = "write --bootstrap /ip4/<address>/tcp/<port>/p2p/<peer id>, as a relay prints it when it starts"
    transport, found, peer = text.rpartition("/p2p/")
    if not found:
        raise BootstrapError(f"a bootstrap address without a peer id: {text[:160]!r}", hint=hint)
    try:
        return _Bootstrap(to_libp2p(PeerId.parse(peer)), parse_announce(transport))
    except (ConfigError, MalformedError) as error:
        raise BootstrapError(f"cannot use the bootstrap address {text[:160]!r}: {error.message}", hint=hint) from error

"""A node's part in discovery: its host, its DHT, and the loops that keep both useful.

Bootstrapping (p2p.bootstrap) never ends and never fails; `bootstrap_state` says in words what is tried and since when.
What is published is signed anew and put again before it ends. Relays are DHT servers and ask others to dial them back;
everyone else only asks, listens nowhere, and is in nobody's routing table.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from multiaddr import Multiaddr

from p2p.bootstrap import DIAL_TIMEOUT_S, Bootstraps, ResolveTxt, Target, jittered
from p2p.canary import Canary
from p2p.dht import RunDHT
from p2p.dht_records import Pointing, relay_key, relays_key, run_key
from p2p.guard import Guard, hang_up
from p2p.host import DialError, DialProblem, build_host, dial, parse_announce, parse_listen, running, to_libp2p
from p2p.kad import REPLICAS, ForeignPeer, RequestError
from p2p.kad_message import Known
from p2p.peers import PeerBook, RememberedPeer
from p2p.reachability import (
    FIRST_CHECK_S,
    PEERS_TO_ASK,
    DialBack,
    Question,
    Reachability,
    can_be_dialled,
    conclude,
    until_next,
)
from p2p.scores import Scores
from protocol.envelope import Signed
from protocol.errors import ConfigError, DataDirError, MalformedError, NodeError, VersionError
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
MAX_DESCRIBED: Final = 200
_FIRST_RETRY_S: Final = 1.0
_ADOPT_S: Final = 2.5
_SETTLE_S: Final = 1.0
_FIRST_REFRESH_S: Final = 3.0
_REFRESH_S: Final = 600.0
_REPUBLISH_RETRY_S: Final = 15.0
_PARALLEL_READS: Final = 8
_MERGE_PAUSE_S: Final = 5.0
_REMEMBERED_AT_ONCE: Final = 4

Make = Callable[[int], bytes]
"""Seals a record with the sequence number given, issued now."""


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
        resolve_txt: ResolveTxt | None = None,
    ) -> None:
        if dht_server != bool(listen):
            raise ConfigError(
                "a DHT server needs an address to listen on" if dht_server else "only a DHT server listens",
                hint="relays: --listen /ip4/0.0.0.0/tcp/4001; other roles: no --listen",
            )
        self._identity, self._address, self._clock = identity, run_address, clock
        self._listen = [parse_listen(text) for text in listen]
        self._announce = [parse_announce(text) for text in announce]
        self._bootstraps = Bootstraps(bootstrap, own=identity.peer_id, resolve_txt=resolve_txt)
        self._book = PeerBook(data_dir / "peers.json")
        self.scores = Scores(data_dir / "bans.json", clock=clock)
        self.canary = Canary()
        self.reachability = Reachability()
        self._public_url = ""
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
        targets = self._bootstraps.targets
        if not self._bootstraps.entries:
            return f"no bootstrap peers given; {self.dht_peers} DHT servers known"
        connected = sum(target.connected for target in targets)
        head = f"{connected} of {len(targets)} bootstrap peers connected, {self.dht_peers} DHT servers known"
        return "; ".join([head, *self._bootstraps.describe()])

    def describe(self) -> dict[str, Any]:
        """Discovery as plain values for people: bootstrap, reachability, known servers, misdeeds, lag of the loop."""
        return {
            "serves": self._serves,
            "multiaddrs": self.multiaddrs,
            "bootstrap": self._bootstraps.describe(),
            "reachability": str(self.reachability) if self._serves else "listens nowhere, needs no open port",
            "peers": self._describe_peers()[:MAX_DESCRIBED],
            "misdeeds": self.scores.describe()[:MAX_DESCRIBED],
            "asked": dict(self._dht.asker.sent) if self._dht else {},
            "answered": dict(self._dht.server.answered) if self._dht else {},
            "worst_lag_s": round(self.canary.worst_s, 2),
            "loop": self.canary.describe(),
        }

    def _describe_peers(self) -> list[dict[str, Any]]:
        if self._dht is None:
            return []
        now, network = trio.current_time(), self._host.get_network()
        return [
            {
                "peer_id": str(contact.peer_id),
                "addresses": [str(address) for address in contact.addresses],
                "connected": bool(network.get_connections(contact.peer_id)),
                "silent_s": round(now - contact.seen_at),
                "failures": contact.failures,
            }
            for contact in self._dht.table
        ]

    async def get_record(self, key: str) -> Pointing | None:
        """The newest record that several peers hold under a key."""
        return await self._running_dht().get(key)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Raises PortError."""
        guard = Guard(self.scores)
        host = build_host(self._identity, announce=self._announce, guard=guard)
        async with running(host, self._listen):
            self._host = host
            reach = partial(can_be_dialled, dials=guard.dials)
            self._dht = RunDHT(host, self.peer_id, self._address, serve=self._serves, clock=self._clock, reach=reach)
            log.info("p2p_started peer=%s serves=%s addresses=%s", self.peer_id, self._serves, self.multiaddrs)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._bootstraps.run, self._dial_bootstrap, self._bootstrapped)
                for task in (self._keep_known, self._keep_fresh, self._keep_merged, self.canary.run):
                    nursery.start_soon(task)
                if self._serves:
                    nursery.start_soon(self._keep_reachable, DialBack(host))
                task_status.started()

    async def publish_run(self, make: Make) -> None:
        """Publish the run's pointer and keep it published; return once it is held by someone."""
        await self._running_nursery().start(self._keep_published, run_key(self._address), make, None)

    async def publish_advert(self, make: Make) -> None:
        """Publish this relay's advert and its being a provider, and keep both; return once they are held by someone."""
        key = relay_key(self._address, self.peer_id)
        await self._running_nursery().start(self._keep_published, key, make, relays_key(self._address))

    async def find_run(self, address: RunAddress, *, timeout_s: float = FIND_TIMEOUT_S) -> Signed[Manifest] | None:
        """The manifest that an address leads to, or None if nobody had it in time. Asks again until then.

        Raises VersionError where the run's operator has published it for another protocol version.
        """
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

    async def find_advert(self, peer_id: PeerId) -> Signed[RelayAdvert] | None:
        """The newest advert of one relay of the run that this node or others hold; None where there is none."""
        signed = await self._get_of_this_version(self._running_dht(), relay_key(self._address, peer_id))
        return signed if signed is not None and isinstance(signed.record, RelayAdvert) else None

    async def _until(self, attempt: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        dht = self._running_dht()
        pause_s = 0.25
        with trio.move_on_after(timeout_s):
            while not await attempt():
                with trio.move_on_after(jittered(pause_s)):
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
            signed = await self._get_of_this_version(dht, key)
        return signed if signed is not None and isinstance(signed.record, RelayAdvert) else None

    async def _get_of_this_version(self, dht: RunDHT, key: str) -> Pointing | None:
        try:
            return await dht.get(key)
        except VersionError:  # a relay that was upgraded: of no use to this node
            return None

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
            await self._wait_to_republish(jittered(REPUBLISH_S if copies else retry_s))

    async def _publish(self, key: str, make: Make, provide: bytes | None) -> int:
        dht = self._running_dht()
        try:
            value = make(self._next_sequence())
            signed = dht.validator.open(key, value)
            if isinstance(signed.record, RelayAdvert):
                self._public_url = signed.record.http_url  # to be checked from outside
            held_here, remote = await dht.put(key, value)
        except NodeError as error:  # the caller's record breaks a rule, or its clock is wrong
            log.error("publish_refused key=%s error=%s", key, error)
            return 0
        if provide is not None:
            await dht.provide(provide)
        copies = remote + held_here
        if dht.refused > remote:
            log.warning(
                "publish_refused key=%s by=%d taken_by=%d next=compare_this_clock:_timedatectl",
                key,
                dht.refused,
                remote,
            )
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
            await trio.sleep(jittered(_SETTLE_S) if dht.peers <= REPLICAS else math.inf)

    def _next_sequence(self) -> int:
        """Milliseconds, so that sequences go on rising after a restart."""
        self._last_sequence = max(self._last_sequence + 1, int(self._clock() * 1000))
        return self._last_sequence

    async def _dial_bootstrap(self, peer_id: Any, address: Multiaddr) -> None:
        dht = self._running_dht()
        dht.bootstrap = self._bootstraps.peer_ids
        await dial(self._host, peer_id, [address], timeout_s=DIAL_TIMEOUT_S)
        if peer_id not in dht.table:
            await self._require_answer(dht, peer_id, address)

    async def _require_answer(self, dht: RunDHT, peer_id: Any, address: Multiaddr) -> None:
        """Who has banned this node, and who is of another network, takes the connection at first. Raises DialError."""
        try:
            await dht.ping(peer_id)
        except RequestError as error:
            log.debug("bootstrap_silent address=%s error=%s", address, error)
            await hang_up(self._host, peer_id)
            if isinstance(error, ForeignPeer):
                raise DialError("is no DHT server of this network", DialProblem.NOT_A_NODE, address=address) from error
            raise DialError("took the connection and does not answer", DialProblem.HUNG_UP, address=address) from error

    async def _bootstrapped(self, target: Target) -> None:
        dht = self._running_dht()
        dht.asker.forgive()
        answered = await dht.join([target.peer_id])
        log.info("bootstrap_connected address=%s answered=%d", target.address, answered)

    async def _keep_known(self) -> None:
        """Remember who answers; while nobody does, dial those remembered from before."""
        while True:
            await trio.sleep(jittered(_ADOPT_S))
            await self._running_dht().adopt()
            if not self.dht_peers:
                await self._dial_remembered()
            elif self._book.note(self._seen()):
                await self._save(self._book.save)
            if self.scores.unsaved:
                await self._save(self.scores.save)

    async def _save(self, save: Callable[[], None]) -> None:
        try:
            await trio.to_thread.run_sync(save)
        except (OSError, DataDirError) as error:
            log.error("peers_unwritable error=%s next=check_the_data_directory", error)

    def _seen(self) -> list[RememberedPeer]:
        now_ms = int(time.time() * 1000)
        return [
            RememberedPeer(str(contact.peer_id), [str(address) for address in contact.addresses], now_ms)
            for contact in self._running_dht().table
        ]

    async def _dial_remembered(self) -> None:
        """Several at a time, those drawn at random, until one answers."""
        peers = random.sample(self._book.peers, min(2 * _REMEMBERED_AT_ONCE, len(self._book.peers)))
        limit = trio.CapacityLimiter(_REMEMBERED_AT_ONCE)
        async with trio.open_nursery() as nursery:

            async def attempt(peer: RememberedPeer) -> None:
                async with limit:
                    if await self._dial_one_remembered(peer):
                        nursery.cancel_scope.cancel()

            for peer in peers:
                nursery.start_soon(attempt, peer)

    async def _dial_one_remembered(self, peer: RememberedPeer) -> bool:
        try:
            peer_id = to_libp2p(PeerId.parse(peer.peer_id))
            addresses = [parse_announce(text) for text in peer.addresses]
            await dial(self._host, peer_id, addresses, timeout_s=DIAL_TIMEOUT_S / 2)
        except DialError as error:
            log.debug("remembered_peer_failed peer=%s error=%s", peer.peer_id, error)
            return False
        except NodeError as error:
            log.warning("remembered_peer_malformed peer=%r error=%s", peer.peer_id, error.message)
            return False
        return bool(await self._running_dht().join([peer_id]))

    async def _keep_reachable(self, dial_back: DialBack) -> None:
        """Answer others that ask to be dialled back, and ask some oneself now and then."""
        dial_back.attach()
        pause_s = FIRST_CHECK_S
        while True:
            await trio.sleep(jittered(pause_s))
            result = await self._check_reachability(dial_back)
            if str(result) != str(self.reachability):
                log.log(logging.WARNING if result.problem else logging.INFO, "reachability %s", result)
            self.reachability = result
            pause_s = until_next(result)

    async def _check_reachability(self, dial_back: DialBack) -> Reachability:
        own = [str(address).rpartition("/p2p/")[0] for address in self._host.get_addrs()]
        question = Question(own[0] if own else "", self._public_url)
        findings = []
        others = dial_back.others()
        for peer in random.sample(others, min(PEERS_TO_ASK, len(others))):
            if (finding := await dial_back.ask(peer, question)) is not None:
                findings.append(finding)
        return conclude(findings, question)

    async def _keep_merged(self) -> None:
        """Look around anew whenever a server joins: what it knows may be the other half of the network."""
        dht = self._running_dht()
        while True:
            await dht.grown.wait()
            await trio.sleep(jittered(_MERGE_PAUSE_S))
            await dht.join()

    async def _keep_fresh(self) -> None:
        """Look for peers often at first, when others are starting too, then seldom: a look costs tens of ms of CPU."""
        pause_s = _FIRST_REFRESH_S
        while True:
            await trio.sleep(jittered(pause_s))
            pause_s = min(2 * pause_s, _REFRESH_S)
            dht = self._running_dht()
            await dht.expire()
            await dht.check_silent()
            await dht.join()

    def _running_dht(self) -> RunDHT:
        if self._dht is None:
            raise RuntimeError("P2PNode.run is not running")
        return self._dht

    def _running_nursery(self) -> trio.Nursery:
        if self._nursery is None:
            raise RuntimeError("P2PNode.run is not running")
        return self._nursery

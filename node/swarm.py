"""The swarm as a node that is no relay sees it: which relays there are, what the run is, and where it stands.

Relays come from the DHT and are kept while the DHT is away; manifest and relays are remembered on disk, so that a
restart needs no bootstrap peer. The head is followed at up to three relays at once: the highest sequence that the
trainer signed wins, so one relay that lags or lies changes nothing. What relays do wrong is counted by kind, and
costs them their turn.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import trio

from node.clock import clock_fault, now_ms
from node.relay_client import RelayClient
from node.status import StatusBoard
from p2p.contacts import Contacts
from p2p.http import HttpClient
from p2p.shardcast.sources import Source
from protocol.atomic import write_atomically
from protocol.envelope import Signed, open_envelope
from protocol.errors import (
    ChecksumError,
    NodeError,
    ProtocolError,
    RefusedError,
    RelayError,
    VersionError,
    WrongRunError,
)
from protocol.identity import PeerId
from protocol.records import Head, Manifest, RelayAdvert
from protocol.run import RunAddress

log = logging.getLogger(__name__)

REFRESH_S: Final = 30.0
IMPATIENT_REFRESH_S: Final = 2.0
"""Between lookups while no relay is known, and in the first minute: relays may be starting too."""
IMPATIENT_S: Final = 60.0
LOOKUP_TIMEOUT_S: Final = 25.0
RETRY_S: Final = 1.0
POLL_WAIT_S: Final = 20.0
MIN_POLL_S: Final = 1.0
"""A relay that answers a long poll at once with nothing is not asked again sooner than this."""
HEAD_RELAYS: Final = 3
NEAR_RELAYS: Final = 3
"""At which a contributor hears of its verdicts: all relays have them, and it must not cost each of them a poll."""
MAX_RELAYS: Final = 64
MAX_BACKOFF_S: Final = 30.0
MISDEEDS_TO_SHUN: Final = 3
SHUN_S: Final = 600.0

FindRelays = Callable[[], Awaitable[Iterable[Signed[RelayAdvert]]]]
FindManifest = Callable[[], Awaitable[Signed[Manifest] | None]]


@dataclass
class _Relay:
    """A relay and how it has behaved. Times are trio's monotonic clock."""

    advert: Signed[RelayAdvert]
    client: RelayClient
    failures: int = 0
    """In a row."""
    retry_at: float = 0.0
    shunned_until: float = 0.0
    polled_at: float = 0.0
    polling: bool = False
    evicts: str | None = None
    """What it said when it last turned this node away as evicted; empty: it let it in; None: not known."""
    misdeeds: Counter[str] = field(default_factory=Counter)


class _Cache(msgspec.Struct, array_like=True):
    """What is remembered on disk: envelopes, checked again on loading."""

    manifest: bytes
    adverts: list[bytes]


def remembered_manifest(cache_path: Path) -> Signed[Manifest] | None:
    """The manifest that a node's cache remembers, without a network; None when there is none that can be used."""
    try:
        cache = msgspec.msgpack.decode(cache_path.read_bytes(), type=_Cache)
        return open_envelope(cache.manifest, Manifest) if cache.manifest else None
    except (OSError, msgspec.MsgspecError, ProtocolError):
        return None


class Swarm:
    """Run it in a nursery; everything else may be used from trio's thread at any time."""

    def __init__(
        self,
        run: RunAddress,
        http: HttpClient,
        *,
        contacts: Contacts,
        find_relays: FindRelays,
        find_manifest: FindManifest,
        board: StatusBoard,
        manifest: Signed[Manifest] | None = None,
        cache_path: Path | None = None,
        follow_head: bool = True,
    ) -> None:
        self._run = run
        self._http = http
        self._contacts = contacts
        self._find_relays = find_relays
        self._find_manifest = find_manifest
        self._board = board
        self._cache_path = cache_path
        self._follow_head = follow_head
        self._relays: dict[PeerId, _Relay] = {}
        self._manifest = manifest
        self._head: Signed[Head] | None = None
        self._changed = trio.Event()
        self._listeners: list[Callable[[Signed[Head]], object]] = []
        self._warned_clock = False
        self._load_cache()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep relays, manifest and head up to date, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._refresh_loop)
            if self._manifest is None:
                nursery.start_soon(self._manifest_loop)
            if self._follow_head:
                for _ in range(HEAD_RELAYS):
                    nursery.start_soon(self._head_loop)
            task_status.started()

    # Relays.

    @property
    def clients(self) -> list[RelayClient]:
        """Relays that may be asked, those that failed least first. Shunned ones are left out."""
        now = trio.current_time()
        usable = [relay for relay in self._relays.values() if relay.shunned_until <= now]
        return [relay.client for relay in sorted(usable, key=lambda relay: relay.failures)]

    def choose_relay(self, *, avoid: PeerId | None = None) -> RelayClient | None:
        """Any relay that answered when it was last asked, drawn at random; None if none is ready now."""
        ready = [relay.client for relay in self._ready() if relay.client.peer_id != avoid]
        return random.choice(ready) if ready else None

    def near(self, peer_id: PeerId) -> list[RelayClient]:
        """A few relays, by a node's key the same each time; for those that fail, others if there are."""
        now = trio.current_time()

        def place(relay: _Relay) -> tuple[bool, bytes]:
            distance = hashlib.sha256(peer_id.public_key + relay.client.peer_id.public_key).digest()
            return relay.retry_at > now, distance

        usable = [relay for relay in self._relays.values() if relay.shunned_until <= now]
        return [relay.client for relay in sorted(usable, key=place)[:NEAR_RELAYS]]

    def failed(self, peer_id: PeerId) -> None:
        """Leave a relay alone for a while, longer each time in a row. Again within that while changes nothing."""
        relay = self._relays.get(peer_id)
        now = trio.current_time()
        if relay is not None and relay.retry_at <= now:
            relay.failures += 1
            relay.retry_at = now + min(MAX_BACKOFF_S, 0.5 * 2.0 ** min(relay.failures, 10)) * random.uniform(0.75, 1.25)

    def sources(self) -> list[Source]:
        """Relays as p2p.shardcast.client takes them; it has its own memory of which ones are fast and honest."""
        return [Source(client.peer_id, client.url, client.contact) for client in self.clients]

    @property
    def misdeeds(self) -> dict[PeerId, dict[str, int]]:
        """By relay and kind of error: answers that no honest relay gives."""
        return {peer_id: dict(relay.misdeeds) for peer_id, relay in self._relays.items() if relay.misdeeds}

    # The run.

    @property
    def manifest(self) -> Signed[Manifest]:
        """What the run is. Raises RelayError before `wait_manifest` has returned."""
        if self._manifest is None:
            raise RelayError("the run's manifest is not known yet: neither the DHT nor a relay has given it")
        return self._manifest

    async def wait_manifest(self) -> Signed[Manifest]:
        await self._wait_until(lambda: self._manifest is not None)
        return self.manifest

    @property
    def head(self) -> Signed[Head] | None:
        """The newest head that any relay gave."""
        return self._head

    async def wait_head(self, after_sequence: int = 0) -> Signed[Head]:
        """The newest head, as soon as its sequence is above `after_sequence`."""
        while self._head is None or self._head.record.sequence <= after_sequence:
            await self._changed.wait()
        return self._head

    async def wait_finished(self) -> Signed[Head]:
        """The head that says the run is finished, as soon as there is one."""
        head = await self.wait_head()
        while not head.record.finished:
            head = await self.wait_head(head.record.sequence)
        return head

    async def wait_evicted(self) -> str:
        """What relays say when they turn this node away as evicted, once no relay that answers lets it in."""
        await self._wait_until(lambda: self._eviction() is not None)
        return self._eviction() or ""

    def forget_eviction(self) -> None:
        """This node is let in again: ask the relays that turned it away, now."""
        for relay in self._relays.values():
            if relay.evicts:
                relay.evicts, relay.failures, relay.retry_at = None, 0, 0.0

    def _eviction(self) -> str | None:
        said = [relay.evicts for relay in self._relays.values() if relay.evicts is not None]
        return said[0] if said and all(said) else None

    def on_head(self, listener: Callable[[Signed[Head]], object]) -> None:
        """Have a function called with every newer head; it must not block or raise."""
        self._listeners.append(listener)

    # What clients report (node.relay_client.RelayObserver).

    def traffic(self, client: RelayClient, *, bytes_in: int = 0, bytes_out: int = 0, failures: int = 0) -> None:
        """Count what went over the wire; an answer clears a relay's failures."""
        self._board.relay(client.peer_id, client.url, bytes_in=bytes_in, bytes_out=bytes_out, failures=failures)
        if failures:
            self.failed(client.peer_id)
        elif (relay := self._relays.get(client.peer_id)) is not None:
            relay.failures, relay.retry_at = 0, 0.0

    def misdeed(self, client: RelayClient, error: ProtocolError) -> None:
        """Count a lie by its kind. Every third one costs the relay ten minutes of silence."""
        self._blame(client.peer_id, type(error).__name__, error.message)

    def downloaded(self, peer_id: PeerId, received: int) -> None:
        """Count bytes of a checkpoint; p2p.shardcast.client's `on_bytes`."""
        if (relay := self._relays.get(peer_id)) is not None:
            self.traffic(relay.client, bytes_in=received)

    def bad_download(self, peer_id: PeerId, what: str) -> None:
        """Count a bad shard or manifest; p2p.shardcast.client's `on_misdeed`."""
        self._blame(peer_id, ChecksumError.__name__, what)

    def _blame(self, peer_id: PeerId, kind: str, what: str) -> None:
        log.warning("misdeed relay=%s kind=%s what=%r", peer_id.short, kind, what)
        relay = self._relays.get(peer_id)
        if relay is None:
            return
        self._board.relay(peer_id, relay.client.url, failures=1)
        relay.misdeeds[kind] += 1
        relay.retry_at = 0.0
        self.failed(peer_id)
        if relay.misdeeds.total() % MISDEEDS_TO_SHUN == 0:
            relay.shunned_until = trio.current_time() + SHUN_S

    # Loops.

    async def _refresh_loop(self) -> None:
        patient_at = trio.current_time() + IMPATIENT_S
        while True:
            try:
                with trio.move_on_after(LOOKUP_TIMEOUT_S):
                    self._meet(await self._find_relays())
            except NodeError as error:
                log.info("relays known=%d lookup failed: %s", len(self._relays), error.message)
            patient = self._relays and trio.current_time() > patient_at
            await trio.sleep(REFRESH_S if patient else IMPATIENT_REFRESH_S)

    def _meet(self, adverts: Iterable[Signed[RelayAdvert]]) -> None:
        for advert in adverts:
            if self._is_news(advert):
                self._add(advert)
                self._notify()
                self._save_cache()

    def _is_news(self, advert: Signed[RelayAdvert]) -> bool:
        if advert.record.run != self._run.digest:
            return False
        known = self._relays.get(advert.author)
        if known is not None:
            return advert.record.sequence > known.advert.record.sequence
        return len(self._relays) < MAX_RELAYS or self._drop_one()

    def _drop_one(self) -> bool:
        """Make room by forgetting a relay that is both silent and past its advert's time, if there is one."""
        now = now_ms()
        for peer_id, relay in self._relays.items():
            if relay.failures and relay.advert.record.valid_until_ms < now and not relay.polling:
                del self._relays[peer_id]
                return True
        return False

    def _add(self, advert: Signed[RelayAdvert]) -> None:
        known = self._relays.get(advert.author)
        if known is not None:
            known.advert = advert
            if known.client.contact is not self._contacts.of(advert):
                known.client = self._client(advert)
                known.failures, known.retry_at = 0, 0.0
            return
        self._relays[advert.author] = _Relay(advert, self._client(advert))
        self._board.details(relays_known=len(self._relays))
        log.info("relay=%s url=%s found", advert.author.short, advert.record.http_url)

    def _client(self, advert: Signed[RelayAdvert]) -> RelayClient:
        contact = self._contacts.of(advert)
        client = RelayClient(
            self._http, contact.url, peer_id=advert.author, run=self._run, observer=self, contact=contact
        )
        if self._manifest is not None:
            client.trust(self._manifest)
        return client

    async def _manifest_loop(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_until_known, self._ask_dht)
            nursery.start_soon(self._ask_until_known, self._ask_relays)
            await self.wait_manifest()
            nursery.cancel_scope.cancel()

    async def _ask_until_known(self, ask: FindManifest) -> None:
        while self._manifest is None:
            found = await ask()
            if found is not None:
                self._take_manifest(found)
                return
            await trio.sleep(RETRY_S)

    async def _ask_dht(self) -> Signed[Manifest] | None:
        try:
            with trio.move_on_after(LOOKUP_TIMEOUT_S):
                return await self._find_manifest()
        except VersionError as error:
            if error.author == self._run.operator:
                raise
            log.warning("manifest lookup failed: %s", error.message)
        except NodeError as error:
            log.info("manifest lookup failed: %s", error.message)
        return None

    async def _ask_relays(self) -> Signed[Manifest] | None:
        for relay in self._ready():
            found = await self._ask_relay(relay.client)
            if found is not None:
                return found
        return None

    async def _ask_relay(self, client: RelayClient) -> Signed[Manifest] | None:
        try:
            return await client.manifest()
        except VersionError as error:
            if error.author == self._run.operator:
                raise
            log.warning("manifest relay=%s error=%r", client.peer_id.short, error.message)
        except (RelayError, ProtocolError) as error:
            log.info("manifest relay=%s error=%r", client.peer_id.short, error.message)
        return None

    def _take_manifest(self, manifest: Signed[Manifest]) -> None:
        if self._manifest is not None:
            return
        log.info("manifest=%s name=%s known", manifest.id.hex()[:12], manifest.record.name)
        self._manifest = manifest
        for relay in self._relays.values():
            relay.client.trust(manifest)
        self._notify()
        self._save_cache()

    async def _head_loop(self) -> None:
        """One of the long polls: always at the ready relay that was asked the longest ago."""
        await self.wait_manifest()
        while True:
            idle = [relay for relay in self._ready() if not relay.polling]
            if not idle:
                await self._pause()
                continue
            relay = min(idle, key=lambda one: one.polled_at)
            relay.polling, relay.polled_at = True, trio.current_time()
            try:
                await self._poll(relay.client)
            finally:
                relay.polling = False

    async def _poll(self, client: RelayClient) -> None:
        began = trio.current_time()
        after = self._head.record.sequence if self._head else 0
        try:
            head = await client.head(after, wait_s=POLL_WAIT_S)
        except (RelayError, ProtocolError) as error:
            log.info("head relay=%s error=%r", client.peer_id.short, error.message)
            self.failed(client.peer_id)
            self._note_standing(client.peer_id, error)
            return
        self._note_standing(client.peer_id, None)
        if head is not None:
            self._take_head(head)
        else:
            await trio.sleep(max(0.0, began + MIN_POLL_S - trio.current_time()))

    def _note_standing(self, peer_id: PeerId, error: NodeError | None) -> None:
        relay = self._relays.get(peer_id)
        if relay is None:
            return
        if error is None:
            relay.evicts = ""
        elif isinstance(error, RefusedError):
            relay.evicts = error.message if error.code == "evicted" else relay.evicts
            self._notify()
        else:
            relay.evicts = None

    def _take_head(self, head: Signed[Head]) -> None:
        if self._head is not None and head.record.sequence <= self._head.record.sequence:
            return
        if self._head is None or head.record.step != self._head.record.step:
            log.info("head step=%d checkpoint=%d", head.record.step, head.record.checkpoint_step)
        self._head = head
        self._warn_of_clock(head)
        self._board.update(step=head.record.step, head_sequence=head.record.sequence)
        self._board.details(newest_checkpoint_step=head.record.checkpoint_step)
        for listener in self._listeners:
            listener(head)
        self._notify()

    def _warn_of_clock(self, head: Signed[Head]) -> None:
        fault = clock_fault((head.record.issued_at_ms - now_ms()) / 1000)
        if fault and not self._warned_clock:
            self._warned_clock = True
            log.warning("%s", fault)

    def _ready(self) -> list[_Relay]:
        now = trio.current_time()
        return [relay for relay in self._relays.values() if max(relay.retry_at, relay.shunned_until) <= now]

    async def _pause(self) -> None:
        """Until a relay is met, or one's back-off may be over."""
        with trio.move_on_after(MIN_POLL_S):
            await self._changed.wait()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # Memory.

    def _load_cache(self) -> None:
        if self._cache_path is None:
            return
        try:
            cache = msgspec.msgpack.decode(self._cache_path.read_bytes(), type=_Cache)
            if cache.manifest and self._manifest is None:
                self._manifest = self._run.open_manifest(cache.manifest)
            for data in cache.adverts[:MAX_RELAYS]:
                self._recall(open_envelope(data, RelayAdvert))
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, ProtocolError) as error:
            log.warning("relays remembered in %s cannot be used: %s", self._cache_path, error)

    def _recall(self, advert: Signed[RelayAdvert]) -> None:
        if advert.record.run != self._run.digest:
            raise WrongRunError("it is of another run")
        self._add(advert)

    def _save_cache(self) -> None:
        if self._cache_path is None:
            return
        manifest = self._manifest.data if self._manifest else b""
        cache = _Cache(manifest, [relay.advert.data for relay in self._relays.values()])
        write_atomically(self._cache_path, msgspec.msgpack.encode(cache), sync=False)

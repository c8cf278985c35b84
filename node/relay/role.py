"""The relay role: be found, serve, keep up with the trainer.

Knows only the run's address at first and serves that much at once; manifest, head and the way to the origin come from
the trainer, the manifest from the DHT too. Every new head sets the checkpoint puller and the ledger mirror to work.
What the parts do is theirs; here they are started, connected and shown.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import trio

from node.clock import now_ms
from node.heartbeats import Pulse, SecondInstance, beat_at_home
from node.instance import own_instance
from node.relay.desk import RelayDesk
from node.relay.door import NO_LIMITS, DoorLimits
from node.relay.mirror import LedgerMirror, origin_contact
from node.relay.service import RelayService
from node.relay.sole import SoleInstance
from node.relay.store import RelayStore
from node.run_link import join_line
from node.status import StatusBoard
from node.version import SOFTWARE
from p2p.bridge import AioThread
from p2p.contacts import Contacts
from p2p.http import BoundAddress, HttpClient, HttpServer
from p2p.shardcast.origin import checkpoint_routes
from p2p.shardcast.patch_client import PatchClient
from p2p.shardcast.patches import PatchStore, patch_routes
from p2p.shardcast.puller import CheckpointPuller
from p2p.shardcast.sources import Source
from p2p.shardcast.store import CheckpointStore
from p2p.tls import Certificate
from protocol.checkpoint import CheckpointRules
from protocol.envelope import Signed, seal
from protocol.errors import ConfigError, DataDirError, NodeError, ProtocolError
from protocol.identity import Identity, PeerId
from protocol.records import Manifest, RelayAdvert
from protocol.run import RunAddress

log = logging.getLogger(__name__)

ADVERT_VALIDITY_S: Final = 600.0
FINISH_GRACE_S: Final = 6.0
"""After the last head: time for everyone to hear of it, and for the last checkpoint and entries to arrive."""
SHOW_S: Final = 1.0
BUDGET_SAVE_S: Final = 60.0
MANIFEST_RETRY_S: Final = 2.0
OTHERS_S: Final = 30.0
IMPATIENT_OTHERS_S: Final = 3.0
"""Between lookups of other relays in the first IMPATIENT_S, when they may be starting too."""
IMPATIENT_S: Final = 60.0
LOOKUP_TIMEOUT_S: Final = 25.0
FIRST_LOOK_S: Final = 4.0
"""How long a relay looks for others, and for another one with its key, before it can be found itself."""
MAX_OTHERS: Final = 64
MAX_CONNECTIONS: Final = 2048
CONNECTIONS_PER_ADDRESS: Final = 1024
FILE_LIMIT: Final = 8192
MAX_MULTIADDRS: Final = 8


class Discovery(Protocol):
    """What the role needs of the DHT (p2p.discovery.P2PNode)."""

    @property
    def multiaddrs(self) -> list[str]: ...

    @property
    def dht_peers(self) -> int: ...

    async def publish_advert(self, make: Callable[[int], bytes]) -> None: ...

    async def find_relays(self) -> Iterable[Signed[RelayAdvert]]: ...

    async def find_advert(self, peer_id: PeerId) -> Signed[RelayAdvert] | None: ...

    async def find_run(self, address: RunAddress) -> Signed[Manifest] | None: ...


@dataclass(frozen=True)
class RelayParts:
    """What the role is built from; node.app makes and starts them."""

    run: RunAddress
    identity: Identity
    aio: AioThread
    http: HttpClient
    discovery: Discovery
    store: RelayStore
    desk: RelayDesk
    checkpoints: CheckpointStore
    patches: PatchStore
    board: StatusBoard
    contacts: Contacts
    """How this relay is let in at others."""
    certificate: Certificate
    http_host: str
    http_port: int
    public_url: str = ""
    limits: DoorLimits = NO_LIMITS
    connections_per_address: int = CONNECTIONS_PER_ADDRESS
    data_dir: Path | None = None
    """Where its instance lies; without one it has no heartbeat."""
    stay: bool = False
    finish_grace_s: float = FINISH_GRACE_S
    first_look_s: float = FIRST_LOOK_S


class RelayRole:
    """A relay's node. `run` ends some seconds after the run is finished, unless the relay is to stay."""

    def __init__(self, parts: RelayParts) -> None:
        self._p = parts
        instance = "" if parts.data_dir is None else own_instance(parts.data_dir).hex()
        self._service = RelayService(parts.aio, parts.desk, parts.store, parts.limits, instance=instance)
        self._patch_client = PatchClient(parts.checkpoints, keep=parts.patches)
        self._puller = CheckpointPuller(parts.http, parts.checkpoints, patches=self._patch_client)
        self._mirror = LedgerMirror(parts.http, parts.desk)
        self._changed = trio.Event()
        self._notice_id: bytes | None = None
        self._url = ""
        self._leaving = False
        self._made_pulse: Pulse | None = None
        self._looked = trio.Event()
        """Once it was seen which relays there are."""
        self._instance = instance

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve; the task status gives the URL. Raises PortError."""
        self._listen_to_desk(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as nursery:
            address = await nursery.start(self._server().run)
            self._url = self._p.public_url.rstrip("/") or public_url(address, self._p.discovery.multiaddrs)
            log.info("relay run=%s url=%s", self._p.run, self._url)
            self._p.board.details(join=join_line(self._p.run, self._p.discovery.multiaddrs))
            for task in (self._puller.run, self._mirror.run, self._follow_loop, self._show_loop, self._budget_loop):
                nursery.start_soon(task)
            nursery.start_soon(beat_at_home, self._pulse, self._service.membership.hearts.hear)
            nursery.start_soon(self._find_manifest)
            sole = self._sole()
            nursery.start_soon(self._find_others, sole)
            nursery.start_soon(sole.run)
            nursery.start_soon(self._publish)
            task_status.started(self._url)
            await self._finished()
            nursery.cancel_scope.cancel()

    async def leave(self, deadline_s: float) -> None:
        """Nothing is lost by stopping at any point; say so and go."""
        self._leaving = True
        self._p.board.state("stopping", "everything that was handed in is on disk")
        with trio.move_on_after(deadline_s):
            await trio.lowlevel.checkpoint()

    async def _publish(self) -> None:
        """Be found; not before it was seen whether another relay is found by this key, if that can be seen at once."""
        with trio.move_on_after(self._p.first_look_s):
            await self._looked.wait()
        await self._p.discovery.publish_advert(self._advert)

    def _sole(self) -> SoleInstance:
        return SoleInstance(
            self._p.run,
            self._p.identity.peer_id,
            http=self._p.http,
            contacts=self._p.contacts,
            board=self._p.board,
            instance=self._instance,
            pulse=self._pulse,
        )

    def _pulse(self) -> Pulse | None:
        desk = self._p.desk
        if self._made_pulse is None and desk.manifest is not None and self._p.data_dir is not None:
            self._made_pulse = Pulse(
                self._p.identity, desk.manifest.id, self._p.board, role="relay", data_dir=self._p.data_dir
            )
        return self._made_pulse

    def _server(self) -> HttpServer:
        _raise_file_limit()
        return HttpServer(
            self._p.aio,
            [*self._service.routes(), *checkpoint_routes(self._p.checkpoints), *patch_routes(self._p.patches)],
            host=self._p.http_host,
            port=self._p.http_port,
            certificate=self._p.certificate,
            middlewares=[self._service.middleware],
            on_answer=self._service.door.on_answer,
            max_connections=MAX_CONNECTIONS,
            max_connections_per_host=self._p.connections_per_address,
        )

    def _listen_to_desk(self, token: trio.lowlevel.TrioToken) -> None:
        """The desk changes in the HTTP thread too; the loops here wake in trio's."""

        def changed() -> None:
            try:
                token.run_sync_soon(self._wake, idempotent=True)
            except trio.RunFinishedError:
                log.debug("desk changed after the end")

        self._p.desk.subscribe(changed)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _follow_loop(self) -> None:
        while True:
            changed = self._changed
            self._follow()
            self._show()
            await changed.wait()

    def _follow(self) -> None:
        """Let puller and mirror know what the desk knows."""
        desk = self._p.desk
        if desk.manifest is not None and desk.notice is not None and desk.notice.id != self._notice_id:
            self._notice_id = desk.notice.id
            self._puller.set_origin(origin_contact(desk.notice), rules=CheckpointRules.of_run(desk.manifest))
        elif desk.manifest is not None:
            self._puller.set_rules(CheckpointRules.of_run(desk.manifest))
        if desk.head is not None:
            self._puller.want(desk.head.record.checkpoint)
        self._mirror.wake()

    async def _find_manifest(self) -> None:
        """Ask the DHT until the manifest is known; the trainer may be quicker."""
        while self._p.desk.manifest is None:
            found = await self._p.discovery.find_run(self._p.run)
            if found is None:
                await trio.sleep(MANIFEST_RETRY_S)
                continue
            try:
                await trio.to_thread.run_sync(self._p.desk.accept_manifest, found.data)
            except ProtocolError as error:
                log.warning("manifest from the DHT: %s", error.message)
                return
            except DataDirError as error:  # the relay serves on, and looks again whether there is room
                log.warning("manifest not kept error=%r next=%r", error.message, error.hint)
                await trio.sleep(MANIFEST_RETRY_S)

    async def _find_others(self, sole: SoleInstance) -> None:
        """Other relays to pull from: the origin serves a few, who serve the rest. Raises SecondInstance."""
        began = trio.current_time()
        while True:
            try:
                with trio.move_on_after(LOOKUP_TIMEOUT_S):
                    adverts = list(await self._p.discovery.find_relays())
                    self._meet(adverts)
                    if trio.current_time() - began <= IMPATIENT_S:
                        twin = await self._p.discovery.find_advert(self._p.identity.peer_id)
                        adverts += [twin] if twin else []
                    await sole.meet(adverts, own_url=self._url)
            except SecondInstance:
                raise
            except NodeError as error:
                log.info("lookup of other relays failed: %s", error.message)
            self._looked.set()
            await trio.sleep(OTHERS_S if trio.current_time() - began > IMPATIENT_S else IMPATIENT_OTHERS_S)

    def _meet(self, adverts: Iterable[Signed[RelayAdvert]]) -> None:
        """Pull from other relays, and let them pull at relays' rates."""
        now = now_ms()
        others = [
            advert
            for advert in adverts
            if advert.author != self._p.identity.peer_id
            and advert.record.run == self._p.run.digest
            and advert.record.valid_until_ms > now
        ][:MAX_OTHERS]
        self._service.door.know_relays({advert.author: advert.record.valid_until_ms for advert in others})
        contacts = [self._p.contacts.of(advert) for advert in others]
        self._puller.set_peers([Source(contact.peer, contact.url, contact) for contact in contacts])

    def _advert(self, sequence: int) -> bytes:
        now = now_ms()
        advert = RelayAdvert(
            run=self._p.run.digest,
            sequence=sequence,
            issued_at_ms=now,
            valid_until_ms=now + int(ADVERT_VALIDITY_S * 1000),
            multiaddrs=tuple(self._p.discovery.multiaddrs[:MAX_MULTIADDRS]),
            http_url=self._url,
            tls_fingerprint=self._p.certificate.fingerprint,
            software=SOFTWARE,
        )
        return seal(advert, self._p.identity)

    async def _finished(self) -> None:
        while self._p.stay or not self._is_finished():
            await self._changed.wait()
        self._p.board.state("finished", "the run is finished; serving a little longer")
        await trio.sleep(self._p.finish_grace_s)

    def _is_finished(self) -> bool:
        head = self._p.desk.head
        return head is not None and head.record.finished

    async def _budget_loop(self) -> None:
        """A relay that starts again today goes on with today's budget."""
        while True:
            await trio.sleep(BUDGET_SAVE_S)
            try:
                await trio.to_thread.run_sync(self._service.door.save_budget, self._p.store)
            except DataDirError as error:  # a relay that starts again today has what it sent since then once more
                log.warning("traffic of today not kept error=%r next=%r", error.message, error.hint)

    async def _show_loop(self) -> None:
        while True:
            self._show()
            await trio.sleep(SHOW_S)

    def _show(self) -> None:
        desk, board = self._p.desk, self._p.board
        held = [step for step, _ in self._p.checkpoints.complete()]
        board.update(checkpoint_step=max(held, default=None))
        if desk.head is not None:
            board.update(step=desk.head.record.step, head_sequence=desk.head.record.sequence)
        if desk.witness is not None and desk.witness.warning:
            board.details(fork=desk.witness.warning)
        self._show_state()
        stats = self._p.store.stats()
        board.details(
            http_url=self._url,
            multiaddrs=self._p.discovery.multiaddrs,
            dht_peers=self._p.discovery.dht_peers,
            checkpoints=held,
            submissions=stats.submissions,
            verdicts_held=stats.verdicts,
            file_bytes=stats.file_bytes,
            ledger_length=desk.ledger.state.length if desk.ledger else 0,
            evicted=len(desk.evicted),
            active_nodes=self._service.membership.hearts.active_count(),
            bytes_in=self._service.traffic.bytes_in,
            bytes_out=self._service.traffic.bytes_out,
            **vars(self._patch_client.savings),
            refused_at_door=self._service.door.refusals,
            disk_quota_bytes=self._p.store.max_bytes,
            bytes_today=self._service.door.budget.spent[1],
            bytes_per_day=self._p.limits.bytes_per_day,
        )

    def _show_state(self) -> None:
        if self._p.desk.head is None and not self._leaving:
            self._p.board.waiting("the run's trainer to find this relay")
        elif not self._leaving and not self._is_finished():
            self._p.board.working("serving the run")
        elif not self._leaving and self._p.stay:
            self._p.board.working("serving the finished run")


def public_url(address: BoundAddress, multiaddrs: list[str]) -> str:
    """The URL to advertise when none is configured: the bound address, or what the DHT host is reached by.

    Raises ConfigError if neither names a host.
    """
    if address.host not in ("0.0.0.0", "::"):
        return address.url
    for multiaddr in multiaddrs:
        _, protocol, host, *_ = multiaddr.split("/")
        if protocol in ("ip4", "dns4", "ip6", "dns6") and host not in ("0.0.0.0", "::"):
            return BoundAddress(host, address.port, address.scheme).url
    raise ConfigError(
        f"listening on {address.host}, so the address that others reach this relay at is unknown",
        hint=f"give --public-url https://<this computer's public address>:{address.port}",
    )


def _raise_file_limit() -> None:
    """A file descriptor a connection: the usual soft limit of 1024 is less than a relay takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILE_LIMIT if hard == resource.RLIM_INFINITY else min(FILE_LIMIT, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""A relay on loopback, and what a trainer, a contributor and a validator say to it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import trio
from factories import CHECKPOINT, OPERATOR, make_manifest, make_submission, sealed

from node.clock import now_ms
from node.relay.desk import RelayDesk
from node.relay.door import NO_LIMITS
from node.relay.service import RelayService
from node.relay.store import RelayStore
from node.relay_client import RelayClient, RelayObserver
from p2p.bridge import AioThread
from p2p.contacts import Contact, Contacts
from p2p.http import HttpClient, HttpServer
from p2p.tls import Certificate, load_or_create_certificate
from protocol.envelope import Signed
from protocol.errors import ProtocolError
from protocol.identity import Identity
from protocol.records import Head, Manifest, OriginNotice, RelayAdvert, Submission
from protocol.run import RunAddress

RUN = RunAddress(OPERATOR.peer_id, "test")
MANIFEST: Signed[Manifest] = sealed(make_manifest(), OPERATOR)
ALICE = Identity.from_phrase("alice")
CAROL = Identity.from_phrase("carol")


@cache
def certificate() -> Certificate:
    """One for all relays and origins of the tests."""
    with tempfile.TemporaryDirectory() as directory:
        made = load_or_create_certificate(Path(directory))
        made.server_context()
        keep = Path(tempfile.mkdtemp()) / "tls.pem"
        keep.write_bytes(made.path.read_bytes())
    return Certificate(keep, made.fingerprint)


def contacts(identity: Identity = ALICE) -> Contacts:
    return Contacts(identity, RUN.digest)


def contact(url: str, *, by: Identity = ALICE, at: Identity = CAROL) -> Contact:
    """How somebody is let in at a relay of the tests."""
    return contacts(by).at(at.peer_id, url, certificate().fingerprint)


def make_head(sequence: int = 1, *, by: Identity = OPERATOR, **changes: Any) -> Signed[Head]:
    head = Head(
        run_id=MANIFEST.id,
        sequence=sequence,
        previous_sequence=max(0, sequence - 1),
        issued_at_ms=now_ms(),
        step=0,
        collecting=True,
        checkpoint_step=0,
        checkpoint=CHECKPOINT,
        oldest_checkpoint_step=0,
        ledger_length=0,
        ledger_tip=MANIFEST.id,
        finished=False,
    )
    return sealed(msgspec.structs.replace(head, **changes), by)


def make_notice(relay: Identity = CAROL, *, by: Identity = OPERATOR, **changes: Any) -> Signed[OriginNotice]:
    notice = OriginNotice(
        run_id=MANIFEST.id,
        relay=relay.peer_id.public_key,
        issued_at_ms=now_ms(),
        http_url="https://127.0.0.1:9",
        tls_fingerprint=certificate().fingerprint,
        token="0123456789abcdef",
    )
    return sealed(msgspec.structs.replace(notice, **changes), by)


def make_advert(relay: Identity, url: str, sequence: int = 1, **changes: Any) -> Signed[RelayAdvert]:
    advert = RelayAdvert(
        run=RUN.digest,
        sequence=sequence,
        issued_at_ms=now_ms(),
        valid_until_ms=now_ms() + 60_000,
        multiaddrs=(),
        http_url=url,
        tls_fingerprint=certificate().fingerprint,
        software="test",
    )
    return sealed(msgspec.structs.replace(advert, **changes), relay)


def submission_of(author: Identity, content: bytes, **changes: Any) -> Signed[Submission]:
    digest = hashlib.sha256(content).digest()
    run_id = changes.pop("run_id", MANIFEST.id)
    return make_submission(author, run_id, **{"sha256": digest, "size": len(content), **changes})


def write_file(directory: Path, content: bytes) -> Path:
    path = directory / hashlib.sha256(content).hexdigest()
    path.write_bytes(content)
    return path


class Watcher:
    """Remembers what clients report."""

    def __init__(self) -> None:
        self.misdeeds: list[ProtocolError] = []
        self.bytes_in = self.bytes_out = self.failures = 0

    def traffic(self, client: RelayClient, *, bytes_in: int = 0, bytes_out: int = 0, failures: int = 0) -> None:
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        self.failures += failures

    def misdeed(self, client: RelayClient, error: ProtocolError) -> None:
        self.misdeeds.append(error)


class Relay:
    """A running relay's parts."""

    def __init__(self, identity: Identity, directory: Path, aio: AioThread, **options: Any) -> None:
        self.identity = identity
        directory.mkdir(exist_ok=True, parents=True)
        clock: Callable[[], int] = options.pop("clock", now_ms)
        quotas = {name: options.pop(name) for name in ("max_node_bytes", "max_step_bytes") if name in options}
        self.store = RelayStore(directory, max_bytes=options.pop("max_bytes", 1 << 24), **quotas)
        self.desk = RelayDesk(RUN, identity, store=self.store, ledger_path=directory / "ledger", clock=clock)
        self.service = RelayService(aio, self.desk, self.store, options.pop("limits", NO_LIMITS))
        self.url = ""

    def meet_trainer(self, head: Signed[Head] | None = None) -> None:
        head = head or make_head()
        self.desk.accept_origin(MANIFEST.data, make_notice(self.identity).data, head.data)

    def contact(self, by: Identity = ALICE) -> Contact:
        return contact(self.url, by=by, at=self.identity)

    def client(self, http: HttpClient, observer: RelayObserver | None = None, *, by: Identity = ALICE) -> RelayClient:
        peer_id, entry = self.identity.peer_id, self.contact(by)
        client = RelayClient(http, self.url, peer_id=peer_id, run=RUN, observer=observer, contact=entry)
        client.trust(MANIFEST)
        return client

    def close(self) -> None:
        self.desk.close()
        self.store.close()


@asynccontextmanager
async def loopback() -> AsyncIterator[tuple[AioThread, HttpClient]]:
    async with AioThread() as aio, HttpClient(aio) as http:
        yield aio, http


@asynccontextmanager
async def serving(aio: AioThread, relay: Relay, **settings: Any) -> AsyncIterator[Relay]:
    service = relay.service
    settings = {"on_answer": service.door.on_answer, **settings}
    async with serving_routes(aio, service.routes(), service.middleware, **settings) as url:
        relay.url = url
        yield relay
    relay.close()


@asynccontextmanager
async def serving_routes(
    aio: AioThread, routes: Any, *middlewares: Any, tls: bool = True, **settings: Any
) -> AsyncIterator[str]:
    settings = {"host": "127.0.0.1", "port": 0, "certificate": certificate() if tls else None, **settings}
    async with trio.open_nursery() as nursery:
        server = HttpServer(aio, routes, middlewares=middlewares, **settings)
        address = await nursery.start(server.run)
        yield address.url
        nursery.cancel_scope.cancel()

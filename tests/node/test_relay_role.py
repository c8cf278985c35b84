"""The relay role with a trainer's origin on loopback: checkpoints, ledger, advert, the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from disk_kit import full_disk
from factories import OPERATOR, make_verdict
from relay_world import (
    CAROL,
    MANIFEST,
    RUN,
    certificate,
    contact,
    contacts,
    loopback,
    make_advert,
    make_head,
    make_notice,
    serving_routes,
    submission_of,
)

from node.relay import role
from node.relay.desk import RelayDesk
from node.relay.door import BUDGET, DoorLimits
from node.relay.role import RelayParts, RelayRole, public_url
from node.relay.store import RelayStore
from node.relay_client import RelayClient
from node.status import StatusBoard
from p2p.bridge import AioThread
from p2p.http import BoundAddress, HttpClient
from p2p.shardcast.origin import OriginDoor, origin_routes
from p2p.shardcast.patches import PatchStore
from p2p.shardcast.store import CheckpointStore
from protocol.envelope import Signed, open_envelope
from protocol.errors import ConfigError, RefusedError
from protocol.identity import Identity, PeerId
from protocol.ledger import next_tip, open_entry
from protocol.records import CheckpointManifest, Head, Manifest, RelayAdvert
from protocol.run import RunAddress

Border = tuple[AioThread, HttpClient]
ALICE = Identity.from_phrase("alice")
WEIGHTS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without tensors."""


@pytest.fixture
async def border() -> AsyncIterator[Border]:
    async with loopback() as both:
        yield both


class FakeDiscovery:
    """A DHT that remembers the advert and may know the manifest."""

    def __init__(self, manifest: Signed[Manifest] | None = None) -> None:
        self.manifest = manifest
        self.advert: Signed[RelayAdvert] | None = None
        self.adverts: list[Signed[RelayAdvert]] = []
        self.lookups = 0
        self.multiaddrs = ["/ip4/127.0.0.1/tcp/1/p2p/x"]
        self.dht_peers = 0

    async def publish_advert(self, make: Callable[[int], bytes]) -> None:
        await trio.lowlevel.checkpoint()
        self.advert = open_envelope(make(1), RelayAdvert)

    async def find_relays(self) -> list[Signed[RelayAdvert]]:
        await trio.lowlevel.checkpoint()
        self.lookups += 1
        return self.adverts

    async def find_advert(self, peer_id: PeerId) -> Signed[RelayAdvert] | None:
        await trio.lowlevel.checkpoint()
        return next((one for one in self.adverts if one.author == peer_id), None)

    async def find_run(self, address: RunAddress) -> Signed[Manifest] | None:
        await trio.lowlevel.checkpoint()
        return self.manifest if address == RUN else None


class Origin:
    """A trainer's origin: one checkpoint, a ledger, a token for the relay."""

    def __init__(self, directory: Path) -> None:
        self.door = OriginDoor()
        self.store = CheckpointStore(directory)
        self.entries: list[bytes] = []
        self.url = ""

    async def publish(self, directory: Path) -> Signed[CheckpointManifest]:
        await trio.Path(directory).mkdir()
        await trio.Path(directory / "model.safetensors").write_bytes(WEIGHTS)
        return await self.store.publish(directory, identity=OPERATOR, run_id=MANIFEST.id, step=0, shard_bytes=4096)

    def read(self, start: int, limit: int) -> list[bytes]:
        return self.entries[start : start + limit]

    def notice(self) -> bytes:
        return make_notice(http_url=self.url, token=self.door.token_for(CAROL.peer_id)).data


def make_parts(border: Border, directory: Path, discovery: Any, **options: Any) -> RelayParts:
    directory.mkdir(exist_ok=True)
    store = RelayStore(directory, max_bytes=1 << 24)
    return RelayParts(
        run=RUN,
        identity=CAROL,
        aio=border[0],
        http=border[1],
        discovery=discovery,
        store=store,
        desk=RelayDesk(RUN, CAROL, store=store, ledger_path=directory / "ledger"),
        checkpoints=(checkpoints := CheckpointStore(directory / "checkpoints")),
        patches=PatchStore(checkpoints, directory / "patches"),
        board=StatusBoard(role="relay", peer_id=CAROL.peer_id, run=str(RUN)),
        contacts=contacts(CAROL),
        certificate=certificate(),
        http_host="127.0.0.1",
        http_port=0,
        **{"finish_grace_s": 0.0, **options},
    )


def close(parts: RelayParts) -> None:
    parts.desk.close()
    parts.store.close()


def client_of(border: Border, url: str, *, by: Identity = ALICE) -> RelayClient:
    client = RelayClient(border[1], url, peer_id=CAROL.peer_id, run=RUN, contact=contact(url, by=by))
    client.trust(MANIFEST)
    return client


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - there is no event for what a test alone wants to see
        await trio.sleep(0.01)


def head_with(checkpoint: bytes, sequence: int, entries: list[bytes], **changes: Any) -> Signed[Head]:
    tip = MANIFEST.id
    for entry in entries:
        tip = next_tip(tip, open_entry(entry).id)
    return make_head(sequence, checkpoint=checkpoint, ledger_length=len(entries), ledger_tip=tip, **changes)


async def test_relay_keeps_up_with_the_trainer_and_ends_with_the_run(border: Border, tmp_path: Path) -> None:
    origin, discovery = Origin(tmp_path / "origin"), FakeDiscovery()
    parts = make_parts(border, tmp_path / "relay", discovery)
    submission = submission_of(ALICE, b"rollouts")
    entries = [submission.data, make_verdict(submission).data]
    with trio.fail_after(30):
        checkpoint = await origin.publish(tmp_path / "policy")
        routes = origin_routes(origin.store, origin.read)
        async with (
            serving_routes(border[0], routes, origin.door.middleware) as origin.url,
            trio.open_nursery() as nursery,
        ):
            url = await nursery.start(RelayRole(parts).run)
            await until(lambda: discovery.advert)
            assert discovery.advert is not None
            assert discovery.advert.record.http_url == url
            client = client_of(border, url)
            assert (await client.info()).run == str(RUN)
            await client.post_origin(MANIFEST.data, origin.notice(), head_with(checkpoint.id, 1, []).data)
            await until(lambda: parts.checkpoints.complete() == [(0, checkpoint.id)])
            origin.entries = entries
            await client.post_head(head_with(checkpoint.id, 2, entries).data)
            await until(lambda: len(parts.desk.ledger_entries(0, 5)) == 2)
            assert [entry.data for entry in await client.ledger(0)] == entries
            await client.post_head(head_with(checkpoint.id, 3, entries, finished=True).data)
    assert parts.board.snapshot()["state"] == "finished"
    assert parts.board.snapshot()["head_sequence"] == 3
    close(parts)


async def test_false_ledger_is_not_mirrored_and_the_true_one_is_later(border: Border, tmp_path: Path) -> None:
    """Somebody between relay and origin serves a ledger of their own."""
    origin = Origin(tmp_path / "origin")
    parts = make_parts(border, tmp_path / "relay", FakeDiscovery())
    true, false = submission_of(ALICE, b"true"), submission_of(ALICE, b"false")
    with trio.fail_after(30):
        checkpoint = await origin.publish(tmp_path / "policy")
        routes = origin_routes(origin.store, origin.read)
        async with (
            serving_routes(border[0], routes, origin.door.middleware) as origin.url,
            trio.open_nursery() as nursery,
        ):
            url = await nursery.start(RelayRole(parts).run)
            client = client_of(border, url)
            origin.entries = [false.data]
            await client.post_origin(MANIFEST.data, origin.notice(), head_with(checkpoint.id, 1, [true.data]).data)
            await until(lambda: parts.checkpoints.complete())
            assert await client.ledger(0) == []
            origin.entries = [true.data]
            await until(lambda: parts.desk.ledger_entries(0, 5))
            assert [entry.id for entry in await client.ledger(0)] == [true.id]
            nursery.cancel_scope.cancel()
    close(parts)


async def test_manifest_comes_from_the_dht_before_the_trainer_comes(border: Border, tmp_path: Path) -> None:
    parts = make_parts(border, tmp_path / "relay", FakeDiscovery(MANIFEST))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(RelayRole(parts).run)
            await until(lambda: parts.desk.manifest)
            assert (await client_of(border, url).manifest()).id == MANIFEST.id
            assert parts.board.snapshot()["activity"] == "the run's trainer to find this relay"
            nursery.cancel_scope.cancel()
    close(parts)


async def test_a_full_disk_ends_no_relay(
    border: Border, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps neither what was sent today nor the run's manifest, goes on, and keeps both once there is room."""
    for name in ("BUDGET_SAVE_S", "MANIFEST_RETRY_S"):
        monkeypatch.setattr(role, name, 0.02)
    discovery = FakeDiscovery()
    parts = make_parts(border, tmp_path / "relay", discovery)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(RelayRole(parts).run)
            with full_disk():
                discovery.manifest = MANIFEST
                await until(lambda: "traffic of today not kept" in caplog.text)
                await until(lambda: "manifest not kept" in caplog.text)
                assert (await client_of(border, url).info()).run == str(RUN)
                assert parts.desk.manifest is None
            await until(lambda: parts.desk.manifest and parts.store.document(BUDGET))
            nursery.cancel_scope.cancel()
    close(parts)


async def test_relays_that_the_dht_knows_get_relays_rates_and_no_others(border: Border, tmp_path: Path) -> None:
    """Mallory's advert is of another run, Dave's has ended, and this relay's own makes it no other relay."""
    bob, mallory, dave = (Identity.from_phrase(name) for name in ("bob", "mallory", "dave"))
    discovery = FakeDiscovery(MANIFEST)
    discovery.adverts = [
        make_advert(bob, "https://127.0.0.1:9"),
        make_advert(mallory, "https://127.0.0.1:9", run=bytes(32)),
        make_advert(dave, "https://127.0.0.1:9", valid_until_ms=1),
        make_advert(CAROL, "https://127.0.0.1:9"),
    ]
    limits = DoorLimits(requests_per_s=0.05, relay_requests_per_s=100)
    parts = make_parts(border, tmp_path / "relay", discovery, limits=limits)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(RelayRole(parts).run)
            await until(lambda: parts.desk.manifest and discovery.lookups)
            for who, gets_in in ((bob, True), (mallory, False), (dave, False), (CAROL, False)):
                client = client_of(border, url, by=who)
                got = [await answered(client) for _ in range(5)]
                assert all(got) == gets_in
            nursery.cancel_scope.cancel()
    close(parts)


async def answered(client: RelayClient) -> bool:
    try:
        await client.manifest()
    except RefusedError as error:
        if error.code != "too-many-requests":
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("host", "multiaddrs", "url"),
    [
        ("127.0.0.1", [], "https://127.0.0.1:80"),
        ("0.0.0.0", ["/ip4/0.0.0.0/tcp/1", "/ip4/192.0.2.7/tcp/1/p2p/x"], "https://192.0.2.7:80"),
        ("::", ["/ip6/2001:db8::1/tcp/1"], "https://[2001:db8::1]:80"),
    ],
)
def test_advertised_url(host: str, multiaddrs: list[str], url: str) -> None:
    assert public_url(BoundAddress(host, 80, "https"), multiaddrs) == url


def test_unknown_public_address_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        public_url(BoundAddress("0.0.0.0", 80), [])
    assert "--public-url" in caught.value.hint

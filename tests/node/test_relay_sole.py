"""One key is one node, for relays: a second one ends before it is found, and nobody ends without cause."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from factories import make_heartbeat
from relay_world import CAROL, MANIFEST, Relay, loopback, make_advert, serving
from test_relay_role import Border, FakeDiscovery, close, make_parts

from node.clock import now_ms
from node.heartbeats import SecondInstance
from node.relay.role import RelayParts, RelayRole
from node.relay_client import RelayClient
from protocol.envelope import Signed
from protocol.errors import RefusedError
from protocol.identity import Identity
from protocol.records import RelayAdvert

DAVE = Identity.from_phrase("dave")
TOLD = "one key is one node"


@pytest.fixture
async def border() -> AsyncIterator[Border]:
    async with loopback() as both:
        yield both


def parts_in(border: Border, directory: Path, discovery: FakeDiscovery) -> RelayParts:
    directory.mkdir(exist_ok=True)
    return make_parts(border, directory / "relay", discovery, data_dir=directory)


class Running:
    """A relay under way."""

    def __init__(self, border: Border, directory: Path, adverts: Sequence[Signed[RelayAdvert]] = ()) -> None:
        self.discovery = FakeDiscovery(MANIFEST)
        self.discovery.adverts = list(adverts)
        self.parts = parts_in(border, directory, self.discovery)
        self.url = ""

    async def ends(self) -> SecondInstance:
        """How it ends by itself."""
        with (
            trio.fail_after(20),
            pytest.RaisesGroup(SecondInstance, allow_unwrapped=True, flatten_subgroups=True) as it,
        ):
            await RelayRole(self.parts).run()
        close(self.parts)
        found: Any = it.value
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        assert isinstance(found, SecondInstance)
        return found

    async def __aenter__(self) -> Running:
        self._nursery = trio.open_nursery()
        nursery = await self._nursery.__aenter__()
        self.url = await nursery.start(RelayRole(self.parts).run)
        self._cancel = nursery.cancel_scope.cancel
        return self

    async def __aexit__(self, *problem: Any) -> None:
        self._cancel()
        await self._nursery.__aexit__(*problem)
        close(self.parts)


async def published(relay: Running) -> Signed[RelayAdvert]:
    with trio.fail_after(20):
        while relay.discovery.advert is None:  # noqa: ASYNC110 - there is no event for what a test alone wants to see
            await trio.sleep(0.01)
    return relay.discovery.advert


@pytest.mark.parametrize("copied", [True, False], ids=["whole-directory", "key-alone"])
async def test_second_relay_with_one_key_ends_before_it_is_found(border: Border, tmp_path: Path, copied: bool) -> None:
    """A relay's data directory, or its key, is copied to a second computer and started there."""
    async with Running(border, tmp_path / "first") as first:
        advert = await published(first)
        if copied:
            (tmp_path / "second").mkdir()
            shutil.copy(tmp_path / "first" / "instance", tmp_path / "second" / "instance")
        second = Running(border, tmp_path / "second", [advert])
        error = await second.ends()
        assert second.discovery.advert is None
    assert first.url in error.message
    assert TOLD in (error.hint or "")


async def test_earlier_addresses_of_the_same_relay_hinder_nothing(
    border: Border, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart at another address: adverts of before are in the DHT, and lead nowhere, or to this very process."""
    monkeypatch.setattr("node.relay.role.IMPATIENT_OTHERS_S", 0.1)
    async with Running(border, tmp_path / "relay", [make_advert(CAROL, "https://127.0.0.1:9")]) as relay:
        await published(relay)
        relay.discovery.adverts = [make_advert(CAROL, relay.url.replace("127.0.0.1", "localhost"))]
        lookups = relay.discovery.lookups
        with trio.fail_after(20):
            while relay.discovery.lookups < lookups + 2:  # noqa: ASYNC110
                await trio.sleep(0.05)
    assert relay.parts.board.detail("second_instance") is None


async def test_relay_with_the_key_of_any_other_node_ends(border: Border, tmp_path: Path) -> None:
    """A contributor's key is used for a relay as well: they meet at another relay."""
    async with serving(border[0], Relay(DAVE, tmp_path / "other", border[0])) as other:
        other.meet_trainer()
        beat = make_heartbeat(CAROL, MANIFEST.id, issued_at_ms=now_ms())
        other.service.membership.hearts.hear(beat.data, CAROL.peer_id)
        error = await Running(border, tmp_path / "relay", [make_advert(DAVE, other.url)]).ends()
    assert TOLD in (error.hint or "")


@pytest.mark.parametrize("who", [None, DAVE], ids=["no-evidence", "of_another"])
async def test_relay_that_proves_no_second_node_keeps_no_relay_out(
    border: Border, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: Identity | None
) -> None:
    """The only other relay says to each that its key works elsewhere."""
    told = trio.Event()
    evidence = b"" if who is None else make_heartbeat(who, MANIFEST.id, issued_at_ms=now_ms()).data

    async def lie(self: RelayClient, envelope: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if told_once:
            told.set()
        told_once.append(envelope)
        raise RefusedError("another node has this key", code="second-instance", evidence=evidence)

    told_once: list[bytes] = []
    monkeypatch.setattr(RelayClient, "post_heartbeat", lie)
    monkeypatch.setattr("node.relay.sole.BEAT_S", 0.05)
    async with serving(border[0], Relay(DAVE, tmp_path / "other", border[0])) as other:
        running = Running(border, tmp_path / "relay", [make_advert(DAVE, other.url)])
        with trio.fail_after(20):
            async with running:
                await told.wait()


async def test_any_other_node_with_the_key_of_a_relay_is_refused_elsewhere(border: Border, tmp_path: Path) -> None:
    """The same, the relay first: it speaks at other relays too."""
    async with serving(border[0], Relay(DAVE, tmp_path / "other", border[0])) as other:
        other.meet_trainer()
        async with Running(border, tmp_path / "relay", [make_advert(DAVE, other.url)]):
            with trio.fail_after(20):
                while not other.service.membership.hearts.active():  # noqa: ASYNC110
                    await trio.sleep(0.01)
            beat = make_heartbeat(CAROL, MANIFEST.id, issued_at_ms=now_ms())
            with pytest.raises(Exception, match="another node with the key"):
                other.service.membership.hearts.hear(beat.data, CAROL.peer_id)

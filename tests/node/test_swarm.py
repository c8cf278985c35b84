"""What a node knows of its swarm: from relays that come, go, lag and lie."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from aiohttp import web
from factories import OPERATOR, make_eviction, make_manifest, make_verdict, sealed
from relay_world import (
    MANIFEST,
    RUN,
    Relay,
    contacts,
    loopback,
    make_advert,
    make_head,
    serving,
    serving_routes,
    submission_of,
)

from node.status import StatusBoard
from node.swarm import MISDEEDS_TO_SHUN, NEAR_RELAYS, Swarm
from p2p.bridge import AioThread
from p2p.http import HttpClient, msgpack_response
from p2p.tokens import TokenMint
from protocol.envelope import Signed, open_envelope
from protocol.errors import BootstrapError, ChecksumError, RelayError, VersionError
from protocol.identity import Identity
from protocol.ledger import next_tip, open_entry
from protocol.records import Head, Hello, Manifest, RelayAdvert

ALICE, BOB, CAROL = (Identity.from_phrase(name) for name in ("alice", "bob", "carol"))
Border = tuple[AioThread, HttpClient]


@pytest.fixture
async def border() -> AsyncIterator[Border]:
    async with loopback() as both:
        yield both


@pytest.fixture
def offline() -> Border:
    """For tests on trio's autojump clock, which must not meet real threads."""
    aio = AioThread()
    return aio, HttpClient(aio)


class FakeDht:
    """A DHT that knows what it was told, or is away."""

    def __init__(self, *adverts: Signed[RelayAdvert], manifest: Signed[Manifest] | None = None) -> None:
        self.adverts = list(adverts)
        self.manifest = manifest
        self.away = False
        self.lookups = 0

    async def find_relays(self) -> list[Signed[RelayAdvert]]:
        await trio.lowlevel.checkpoint()
        self.lookups += 1
        if self.away:
            raise BootstrapError("nobody answers")
        return self.adverts

    async def find_manifest(self) -> Signed[Manifest] | None:
        await trio.lowlevel.checkpoint()
        if self.away:
            raise BootstrapError("nobody answers")
        return self.manifest


def make_swarm(border: Border, dht: FakeDht, **options: Any) -> Swarm:
    board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run=str(RUN))
    find = {"find_relays": dht.find_relays, "find_manifest": dht.find_manifest}
    return Swarm(RUN, border[1], contacts=contacts(), **{"board": board, **find, **options})


@asynccontextmanager
async def running(swarm: Swarm) -> AsyncIterator[Swarm]:
    async with trio.open_nursery() as nursery:
        await nursery.start(swarm.run)
        yield swarm
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def relays(border: Border, tmp_path: Path, *heads: tuple[Identity, Signed[Head]]) -> AsyncIterator[list[Relay]]:
    async with AsyncExitStack() as stack:
        started = []
        for identity, head in heads:
            relay = Relay(identity, tmp_path / identity.peer_id.short, border[0])
            relay.meet_trainer(head)
            started.append(await stack.enter_async_context(serving(border[0], relay)))
        yield started


def advert_of(relay: Relay, sequence: int = 1) -> Signed[RelayAdvert]:
    return make_advert(relay.identity, relay.url, sequence)


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - there is no event for what a test alone wants to see
        await trio.sleep(0.01)


async def test_highest_head_of_several_relays_wins(border: Border, tmp_path: Path) -> None:
    """One relay lags behind; it holds nobody back."""
    with trio.fail_after(20):
        async with relays(border, tmp_path, (BOB, make_head(3)), (CAROL, make_head(7, step=2))) as both:
            dht = FakeDht(*map(advert_of, both), manifest=MANIFEST)
            async with running(make_swarm(border, dht)) as swarm:
                head = await swarm.wait_head(3)
                assert (head.record.sequence, head.record.step) == (7, 2)
                assert swarm.head == head
                both[0].desk.accept_head(make_head(8).data)
                assert (await swarm.wait_head(7)).record.sequence == 8
                assert swarm.misdeeds == {}


async def test_listeners_hear_of_every_newer_head(border: Border, tmp_path: Path) -> None:
    heard: list[int] = []
    with trio.fail_after(20):
        async with relays(border, tmp_path, (BOB, make_head(1))) as (relay,):
            swarm = make_swarm(border, FakeDht(advert_of(relay)), manifest=MANIFEST)
            swarm.on_head(lambda head: heard.append(head.record.sequence))
            async with running(swarm):
                await swarm.wait_head()
                relay.desk.accept_head(make_head(2, finished=True).data)
                assert (await swarm.wait_finished()).record.sequence == 2
    assert heard == [1, 2]


async def test_manifest_comes_from_a_relay_when_the_dht_has_none(border: Border, tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with relays(border, tmp_path, (BOB, make_head(1))) as (relay,):
            swarm = make_swarm(border, FakeDht(advert_of(relay)))
            with pytest.raises(RelayError, match="not known yet"):
                _ = swarm.manifest
            async with running(swarm):
                assert (await swarm.wait_manifest()).id == MANIFEST.id
                assert swarm.manifest.id == MANIFEST.id
                await swarm.wait_head()


def lying(answer: bytes) -> list[web.RouteDef]:
    """A relay whose door is honest and whose every answer is not."""
    mint = TokenMint(CAROL.peer_id, RUN.digest)

    async def hello(request: web.Request) -> web.Response:
        said = msgspec.msgpack.decode(await request.read())
        if "key" in said:
            return msgpack_response({"nonce": mint.challenge(said["key"])})
        peer = mint.check_hello(open_envelope(said["hello"], Hello))
        return msgpack_response({"token": mint.token(peer), "valid_s": 60.0})

    async def handle(_: web.Request) -> web.Response:
        return msgpack_response(answer)

    return [web.post("/v1/hello", hello), web.get("/{path:.*}", handle)]


async def test_lying_relay_is_counted_and_shunned_and_the_honest_one_followed(border: Border, tmp_path: Path) -> None:
    """A relay makes up a head with a huge sequence, to send everybody astray."""
    forged = make_head(10**9, by=ALICE).data
    with trio.fail_after(30):
        async with (
            relays(border, tmp_path, (BOB, make_head(1))) as (honest,),
            serving_routes(border[0], lying(forged)) as url,
        ):
            dht = FakeDht(advert_of(honest), make_advert(CAROL, url), manifest=MANIFEST)
            async with running(make_swarm(border, dht)) as swarm:
                await until(lambda: swarm.misdeeds.get(CAROL.peer_id, {}).get("WrongAuthorError", 0))
                assert (await swarm.wait_head()).record.sequence == 1
                for _ in range(MISDEEDS_TO_SHUN):
                    swarm.bad_download(CAROL.peer_id, "shard 3")
                assert [client.peer_id for client in swarm.clients] == [BOB.peer_id]
                assert [source[:2] for source in swarm.sources()] == [(BOB.peer_id, honest.url)]


async def test_a_run_of_another_protocol_version_ends_the_node_when_its_operator_says_so(border: Border) -> None:
    """Attack: anyone says that a newer program is needed. The run's operator alone is believed."""
    dht = FakeDht()
    errors = [VersionError("speaks 2", author=CAROL.peer_id), VersionError("speaks 2", author=OPERATOR.peer_id)]

    async def find_manifest() -> Signed[Manifest] | None:
        raise errors.pop(0)

    dht.find_manifest = find_manifest  # type: ignore[method-assign]
    swarm = make_swarm(border, dht)
    with trio.fail_after(20), pytest.RaisesGroup(VersionError, flatten_subgroups=True) as caught:
        await swarm.run()
    assert errors == []
    assert caught.value.exceptions


async def test_forged_manifest_is_not_believed(border: Border, tmp_path: Path) -> None:
    """A relay serves a manifest of its own with its own trainer."""
    forged = sealed(make_manifest(trainer=CAROL.peer_id.public_key), CAROL)
    with trio.fail_after(20):
        async with serving_routes(border[0], lying(forged.data)) as url:
            dht = FakeDht(make_advert(CAROL, url))
            async with running(make_swarm(border, dht)) as swarm:
                await until(lambda: swarm.misdeeds)
                dht.manifest = MANIFEST
                assert (await swarm.wait_manifest()).author == OPERATOR.peer_id


async def test_relays_are_kept_while_the_dht_is_away(offline: Border, autojump_clock: Any) -> None:
    """Every bootstrap peer dies after the first lookup."""
    dht = FakeDht(make_advert(BOB, "https://127.0.0.1:9"))
    swarm = make_swarm(offline, dht, manifest=MANIFEST, follow_head=False)
    async with running(swarm):
        await until(lambda: swarm.clients)
        dht.away = True
        await until(lambda: dht.lookups > 3)
        assert [client.peer_id for client in swarm.clients] == [BOB.peer_id]


async def test_relay_that_moved_is_found_at_its_new_url(offline: Border, autojump_clock: Any) -> None:
    dht = FakeDht(make_advert(BOB, "https://127.0.0.1:9", 5))
    swarm = make_swarm(offline, dht, manifest=MANIFEST, follow_head=False)
    async with running(swarm):
        await until(lambda: swarm.clients)
        dht.adverts = [make_advert(BOB, "https://127.0.0.1:8", 4), make_advert(ALICE, "https://x", run=b"x" * 32)]
        await until(lambda: dht.lookups > 2)
        assert [client.url for client in swarm.clients] == ["https://127.0.0.1:9"]
        dht.adverts = [make_advert(BOB, "https://127.0.0.1:8", 6)]
        await until(lambda: swarm.clients[0].url == "https://127.0.0.1:8")


async def test_restart_needs_no_dht(border: Border, tmp_path: Path) -> None:
    cache = tmp_path / "swarm.cache"
    with trio.fail_after(20):
        async with relays(border, tmp_path, (BOB, make_head(1))) as (relay,):
            first = make_swarm(border, FakeDht(advert_of(relay), manifest=MANIFEST), cache_path=cache)
            async with running(first):
                await first.wait_head()
            dht = FakeDht()
            dht.away = True
            again = make_swarm(border, dht, cache_path=cache)
            assert again.manifest.id == MANIFEST.id
            async with running(again):
                assert (await again.wait_head()).record.sequence == 1


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x92\xc4\x01x\x90", b"\x92\xc4\x00\x91\xc4\x01x"])
async def test_damaged_cache_is_ignored(border: Border, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cache").write_bytes(content)
    assert make_swarm(border, FakeDht(), cache_path=tmp_path / "cache").clients == []


async def test_failed_relay_gets_a_rest(offline: Border, autojump_clock: Any) -> None:
    dht = FakeDht(make_advert(BOB, "https://127.0.0.1:9"), make_advert(CAROL, "https://127.0.0.1:8"))
    swarm = make_swarm(offline, dht, manifest=MANIFEST, follow_head=False)
    async with running(swarm):
        await until(lambda: len(swarm.clients) == 2)
        swarm.failed(BOB.peer_id)
        chosen = {swarm.choose_relay() for _ in range(20)}
        assert {client and client.peer_id for client in chosen} == {CAROL.peer_id}
        assert swarm.choose_relay(avoid=CAROL.peer_id) is None
        assert swarm.clients[-1].peer_id == BOB.peer_id
        await trio.sleep(5)
        retried = swarm.choose_relay(avoid=CAROL.peer_id)
        assert retried is not None
        assert retried.peer_id == BOB.peer_id


async def test_a_node_keeps_to_a_few_relays_of_many_and_leaves_those_that_fail(
    offline: Border, autojump_clock: Any
) -> None:
    """With a poll at every relay, each of a thousand contributors would cost each of a hundred relays one."""
    named = [Identity.from_phrase(f"relay {number}") for number in range(8)]
    dht = FakeDht(*(make_advert(each, f"https://127.0.0.1:{port}") for port, each in enumerate(named, start=9)))
    swarm = make_swarm(offline, dht, manifest=MANIFEST, follow_head=False)
    async with running(swarm):
        await until(lambda: len(swarm.clients) == 8)
        near = [client.peer_id for client in swarm.near(ALICE.peer_id)]
        assert near == [client.peer_id for client in swarm.near(ALICE.peer_id)]
        assert len(near) == NEAR_RELAYS
        assert len({tuple(c.peer_id for c in swarm.near(Identity.from_phrase(x).peer_id)) for x in "abcdef"}) > 1
        swarm.failed(near[0])
        others = [client.peer_id for client in swarm.near(ALICE.peer_id)]
        assert others[:2] == near[1:]
        assert len(others) == NEAR_RELAYS
        for client in swarm.clients:
            swarm.failed(client.peer_id)
        assert len(swarm.near(ALICE.peer_id)) == NEAR_RELAYS  # better asked again than nobody


async def test_dead_relay_is_left_for_another(border: Border, tmp_path: Path) -> None:
    """The relay that a node has always used disappears."""
    with trio.fail_after(30):
        async with relays(border, tmp_path, (CAROL, make_head(1))) as (stays,):
            async with relays(border, tmp_path, (BOB, make_head(2))) as (goes,):
                dht = FakeDht(advert_of(stays), advert_of(goes), manifest=MANIFEST)
                swarm = make_swarm(border, dht)
                async with trio.open_nursery() as nursery:
                    await nursery.start(swarm.run)
                    await swarm.wait_head(1)
                    nursery.cancel_scope.cancel()
            async with running(swarm):
                stays.desk.accept_head(make_head(3).data)
                assert (await swarm.wait_head(2)).record.sequence == 3


async def test_board_counts_bytes_by_relay(border: Border, tmp_path: Path) -> None:
    board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run=str(RUN))
    with trio.fail_after(20):
        async with relays(border, tmp_path, (BOB, make_head(4, step=1))) as (relay,):
            dht = FakeDht(advert_of(relay), manifest=MANIFEST)
            async with running(make_swarm(border, dht, board=board)) as swarm:
                await swarm.wait_head()
                swarm.downloaded(BOB.peer_id, 1_000_000)
                swarm.misdeed(swarm.clients[0], ChecksumError("a wrong shard"))
    snapshot = board.snapshot()
    (row,) = snapshot["relays"]
    assert (row["peer_id"], row["url"]) == (str(BOB.peer_id), relay.url)
    assert row["bytes_in"] > 1_000_000
    assert row["failures"] == 1
    assert (snapshot["step"], snapshot["head_sequence"]) == (1, 4)


def make_evicted(relay: Relay, who: Identity) -> None:
    submission = submission_of(who, b"rollouts")
    verdict = make_verdict(submission, outcome="reject", hard=True, reason="seed: not its own prompts")
    entries = [submission.data, verdict.data, make_eviction(verdict)]
    tip = MANIFEST.id
    for entry in entries:
        tip = next_tip(tip, open_entry(entry).id)
    head = make_head(2, ledger_length=3, ledger_tip=tip)
    relay.desk.extend_ledger(entries, head)
    relay.desk.accept_head(head.data)


async def test_a_node_learns_that_it_is_evicted_when_no_relay_lets_it_in(border: Border, tmp_path: Path) -> None:
    """One relay alone may be wrong, or lie."""
    with trio.fail_after(30):
        async with relays(border, tmp_path, (BOB, make_head(1)), (CAROL, make_head(1))) as both:
            dht = FakeDht(*map(advert_of, both), manifest=MANIFEST)
            async with running(make_swarm(border, dht)) as swarm:
                await until(lambda: all(relay.evicts == "" for relay in swarm._relays.values()) and swarm._relays)
                make_evicted(both[0], ALICE)
                await until(lambda: any(relay.evicts for relay in swarm._relays.values()))
                with trio.move_on_after(0.1) as waiting:
                    await swarm.wait_evicted()
                assert waiting.cancelled_caught
                make_evicted(both[1], ALICE)
                assert "not its own prompts" in await swarm.wait_evicted()


async def test_relay_with_a_new_certificate_is_found_by_its_new_advert(offline: Border, autojump_clock: Any) -> None:
    dht = FakeDht(make_advert(BOB, "https://127.0.0.1:9", 1))
    swarm = make_swarm(offline, dht, manifest=MANIFEST, follow_head=False)
    async with running(swarm):
        await until(lambda: swarm.clients)
        dht.adverts = [make_advert(BOB, "https://127.0.0.1:9", 2, tls_fingerprint=b"n" * 32)]
        await until(lambda: swarm.clients[0].contact and swarm.clients[0].contact.fingerprint == b"n" * 32)

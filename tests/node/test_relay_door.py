"""The relay's door over real TLS: who gets in, how often, and how much; each attack by its name."""

from __future__ import annotations

import base64
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from aiohttp import web
from factories import OPERATOR, VALIDATOR, make_eviction, make_verdict
from relay_world import (
    ALICE,
    CAROL,
    MANIFEST,
    RUN,
    Relay,
    contact,
    loopback,
    make_head,
    serving,
    serving_routes,
    submission_of,
    write_file,
)

from node.clock import now_ms
from node.relay.door import DoorLimits, address_key, is_bulk
from node.relay.service import MAX_UPLOADS_EACH, RECORD_HEADER
from node.relay_client import RelayClient
from p2p.bridge import AioThread
from p2p.http import HttpClient, msgpack_response
from protocol.envelope import seal
from protocol.errors import RefusedError, RelayError
from protocol.identity import Identity
from protocol.ledger import next_tip, open_entry
from protocol.records import Hello

BOB, MALLORY = (Identity.from_phrase(name) for name in ("bob", "mallory"))
CONTENT = b"rollouts" * 5000
Border = tuple[AioThread, HttpClient]


@pytest.fixture
async def border() -> AsyncIterator[Border]:
    async with loopback() as both:
        yield both


async def refused(ask: Callable[[], Any], code: str) -> RefusedError:
    with trio.fail_after(20), pytest.raises(RefusedError) as caught:
        await ask()
    assert caught.value.code == code
    return caught.value


class Guarded:
    """A relay with limits, and clients of it."""

    def __init__(self, border: Border, tmp_path: Path, **limits: Any) -> None:
        quotas = {name: limits.pop(name) for name in list(limits) if name.endswith("_bytes")}
        self.http, self.tmp_path = border[1], tmp_path
        self.relay = Relay(CAROL, tmp_path / "relay", border[0], limits=DoorLimits(**limits), **quotas)
        self.relay.meet_trainer()
        self.served = serving(border[0], self.relay)

    async def __aenter__(self) -> Guarded:
        await self.served.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.served.__aexit__(*error)

    def client(self, by: Identity = ALICE) -> RelayClient:
        return self.relay.client(self.http, by=by)

    async def submit(self, by: Identity = ALICE, content: bytes = CONTENT, **changes: Any) -> None:
        await self.client(by).submit(submission_of(by, content, **changes).data, write_file(self.tmp_path, content))

    def evict(self, who: Identity) -> None:
        submission = submission_of(who, CONTENT)
        verdict = make_verdict(submission, outcome="reject", hard=True, reason="seed: not its own prompts")
        entries = [submission.data, verdict.data, make_eviction(verdict)]
        tip = MANIFEST.id
        for entry in entries:
            tip = next_tip(tip, open_entry(entry).id)
        self.relay.desk.extend_ledger(entries, make_head(2, ledger_length=3, ledger_tip=tip))


# Who gets in.


@pytest.mark.parametrize("path", ["/v1/head", "/v1/manifest", "/v1/feed", "/v1/ledger", "/v1/nothing"])
async def test_strangers_see_what_the_relay_is_and_nothing_else(border: Border, tmp_path: Path, path: str) -> None:
    async with Guarded(border, tmp_path) as guarded:
        entry = contact(guarded.relay.url)
        stranger = type(entry)(CAROL.peer_id, entry.url, entry.fingerprint, token="made-up")
        with trio.fail_after(10):
            assert (await border[1].get(f"{entry.url}/v1/info", contact=stranger)).status == 200
        await refused(lambda: border[1].get(f"{entry.url}{path}", contact=stranger), "unauthorized")


async def test_a_client_signs_in_by_itself_and_again_after_a_restart(border: Border, tmp_path: Path) -> None:
    """The relay's process, and with it every token, is gone; clients notice nothing."""
    async with Guarded(border, tmp_path) as guarded:
        client = guarded.client()
        with trio.fail_after(20):
            assert await client.head() is not None
            mint = guarded.relay.service.door._mint
            mint._secret = bytes(32)
            assert await client.head() is not None
            mint._secret = bytes(range(32))
            await client.submit(submission_of(ALICE, CONTENT).data, write_file(tmp_path, CONTENT))
            mint._secret = bytes(32)
            await client.file(submission_of(ALICE, CONTENT), tmp_path / "back")


async def test_many_requests_share_one_hello(border: Border, tmp_path: Path) -> None:
    async with Guarded(border, tmp_path) as guarded:
        client, hellos = guarded.client(), []
        door = guarded.relay.service.door
        token = door._mint.token
        door._mint.token = lambda peer: hellos.append(peer) or token(peer)  # type: ignore[func-returns-value, method-assign]
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(client.ledger, 0)
    assert hellos == [ALICE.peer_id]


async def test_a_hello_to_another_relay_is_of_no_use(border: Border, tmp_path: Path) -> None:
    """Mallory's relay passes our relay's challenge on to Alice, to be let in here as her."""
    async with Guarded(border, tmp_path) as guarded:
        url, post = f"{guarded.relay.url}/v1/hello", border[1].post
        entry = type(guarded.relay.contact())(CAROL.peer_id, guarded.relay.url, contact(guarded.relay.url).fingerprint)
        with trio.fail_after(10):
            asked = await post(url, msgspec.msgpack.encode({"key": ALICE.peer_id.public_key}), contact=entry)
        nonce = msgspec.msgpack.decode(asked.body)["nonce"]
        hello = Hello(run=RUN.digest, relay=MALLORY.peer_id.public_key, nonce=nonce)
        body = msgspec.msgpack.encode({"hello": seal(hello, ALICE)})
        await refused(lambda: post(url, body, contact=entry), "wrong-author")


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa3key\xc4\x01x", b"\x81\xa5hello\xc4\x01x", b"\x81\xa1x\x01"]
)
async def test_any_hello_is_answered_by_name(border: Border, tmp_path: Path, body: bytes) -> None:
    async with Guarded(border, tmp_path) as guarded:
        entry = guarded.relay.contact()
        await refused(lambda: border[1].post(f"{entry.url}/v1/hello", body, contact=entry), "malformed")


async def test_the_evicted_are_refused_at_hello_and_at_every_request(border: Border, tmp_path: Path) -> None:
    """A cheat that is out goes on with the token it has, then asks for a new one."""
    async with Guarded(border, tmp_path) as guarded:
        client = guarded.client(MALLORY)
        with trio.fail_after(10):
            assert await client.head() is not None
        guarded.evict(MALLORY)
        error = await refused(client.head, "evicted")
        assert "not its own prompts" in error.message
        await refused(guarded.client(MALLORY).head, "evicted")
        with trio.fail_after(10):
            assert await guarded.client(ALICE).head() is not None


async def test_an_allow_list_lets_in_whom_it_names_and_the_runs_own(border: Border, tmp_path: Path) -> None:
    async with Guarded(border, tmp_path, allow=frozenset([ALICE.peer_id])) as guarded:
        for welcome in (ALICE, OPERATOR, VALIDATOR):
            with trio.fail_after(10):
                assert await guarded.client(welcome).head() is not None
        error = await refused(guarded.client(BOB).head, "not-allowed")
        assert str(BOB.peer_id) in error.hint


# How often, and how much.


async def test_an_identity_that_asks_too_often_is_told_how_long_to_wait(border: Border, tmp_path: Path) -> None:
    """One node hammers the relay; another one does not feel it."""
    async with Guarded(border, tmp_path, requests_per_s=0.05) as guarded:
        error = await refused(lambda: repeat(guarded.client(BOB).head, 5), "too-many-requests")
        assert error.retry_after_s > 10
        with trio.fail_after(10):
            assert await guarded.client(ALICE).head() is not None


async def repeat(ask: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        await ask()


async def test_a_client_keeps_quiet_for_as_long_as_it_was_told(border: Border, tmp_path: Path) -> None:
    async with Guarded(border, tmp_path, requests_per_s=0.01) as guarded:
        client = guarded.client(BOB)
        await refused(lambda: repeat(client.head, 5), "too-many-requests")
        turned_away = guarded.relay.service.door.refusals
        error = await refused(client.head, "too-many-requests")
        assert "has asked not to be asked" in error.message
        assert guarded.relay.service.door.refusals == turned_away


async def test_a_short_wait_is_waited_out(border: Border, tmp_path: Path) -> None:
    async with Guarded(border, tmp_path, requests_per_s=2) as guarded:
        with trio.fail_after(20):
            await repeat(guarded.client(BOB).head, 12)
        assert guarded.relay.service.door.refusals >= 1


async def test_an_address_that_asks_too_often_is_refused_whoever_it_is(border: Border, tmp_path: Path) -> None:
    """One computer makes a new identity for every request."""
    async with Guarded(border, tmp_path, address_requests_per_s=1) as guarded:

        async def sybils() -> None:
            for number in range(8):
                await guarded.client(Identity.from_phrase(f"sybil {number}")).head()

        await refused(sybils, "too-many-requests")


async def test_trainer_and_validators_are_not_held_back(border: Border, tmp_path: Path) -> None:
    async with Guarded(border, tmp_path, requests_per_s=0.05, bytes_per_s=1, upload_bytes_per_s=1) as guarded:
        with trio.fail_after(20):
            for who in (OPERATOR, VALIDATOR):
                await repeat(guarded.client(who).head, 10)


async def test_a_relay_of_the_run_has_rates_of_its_own(border: Border, tmp_path: Path) -> None:
    """Bob's relay pulls more than a contributor may, until its advert ends; and no more than a relay may."""
    limits = {"requests_per_s": 0.05, "bytes_per_s": 1, "relay_requests_per_s": 2, "relay_bytes_per_s": 1000}
    async with Guarded(border, tmp_path, **limits) as guarded:
        door, submission = guarded.relay.service.door, submission_of(ALICE, CONTENT)
        await guarded.submit()
        door.know_relays({BOB.peer_id: now_ms() + 60_000})
        with trio.fail_after(20):
            await repeat(guarded.client(BOB).head, 5)
            await guarded.client(BOB).file(submission, tmp_path / "one")
        error = await refused(lambda: guarded.client(BOB).file(submission, tmp_path / "two"), "too-many-requests")
        assert 20 < error.retry_after_s < 40  # a relay's debt, in seconds of a relay's rate
        await refused(lambda: repeat(guarded.client(MALLORY).head, 5), "too-many-requests")
        door.know_relays({BOB.peer_id: now_ms() - 1})
        await refused(lambda: repeat(guarded.client(BOB).head, 5), "too-many-requests")


async def test_an_address_does_not_get_more_by_saying_to_be_a_relay(
    border: Border, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One computer publishes an advert for each of many identities, and asks with all of them."""
    for module in ("contacts", "http.client"):
        monkeypatch.setattr(f"p2p.{module}.MAX_PATIENCE_S", 0.5)
    async with Guarded(border, tmp_path, requests_per_s=1, address_requests_per_s=4) as guarded:
        sybils = [Identity.from_phrase(f"sybil {number}") for number in range(8)]
        guarded.relay.service.door.know_relays({each.peer_id: now_ms() + 60_000 for each in sybils})

        async def ask() -> None:
            for each in sybils:
                await guarded.client(each).head()

        await refused(ask, "too-many-requests")


async def test_bytes_are_paid_off_before_more_are_sent(border: Border, tmp_path: Path) -> None:
    """One node downloads files over and over, to use up the relay's uplink."""
    async with Guarded(border, tmp_path, bytes_per_s=1000) as guarded:
        await guarded.submit()
        submission = submission_of(ALICE, CONTENT)
        with trio.fail_after(10):
            await guarded.client(BOB).file(submission, tmp_path / "one")
        error = await refused(lambda: guarded.client(BOB).file(submission, tmp_path / "two"), "too-many-requests")
        assert 20 < error.retry_after_s < 40
        with trio.fail_after(10):
            assert await guarded.client(BOB).head() is not None
            await guarded.client(ALICE).file(submission, tmp_path / "three")


async def test_a_spent_day_ends_bulk_and_never_control(border: Border, tmp_path: Path) -> None:
    async with Guarded(border, tmp_path, bytes_per_day=30_000) as guarded:
        await guarded.submit()
        submission = submission_of(ALICE, CONTENT)
        with trio.fail_after(10):
            await guarded.client().file(submission, tmp_path / "one")
        await refused(lambda: guarded.client(VALIDATOR).file(submission, tmp_path / "two"), "over-budget")
        with trio.fail_after(10):
            assert await guarded.client().head() is not None
            await guarded.submit(BOB)
        guarded.relay.service.door.save_budget(guarded.relay.store)
        again = Relay(CAROL, tmp_path / "relay", border[0], limits=DoorLimits(bytes_per_day=30_000))
        assert again.service.door.budget.wait_s() > 0
        again.close()


# Uploads.


async def test_a_copied_submission_is_refused(border: Border, tmp_path: Path) -> None:
    """Mallory hands in what Alice signed, to have it received under a file of her choice, or before Alice."""
    submission, path = submission_of(ALICE, CONTENT), write_file(tmp_path, CONTENT)
    async with Guarded(border, tmp_path) as guarded:
        await refused(lambda: guarded.client(MALLORY).submit(submission.data, path), "not-yours")
        with trio.fail_after(10):
            await guarded.client(ALICE).submit(submission.data, path)


async def test_uploads_are_paid_off_before_the_next_one(border: Border, tmp_path: Path) -> None:
    """One node fills the relay's disk as fast as its line allows."""
    async with Guarded(border, tmp_path, upload_bytes_per_s=1000) as guarded:
        await guarded.submit()
        await refused(lambda: guarded.submit(index=1), "too-many-requests")
        await guarded.submit(BOB)


async def test_one_contributor_cannot_fill_the_disk(border: Border, tmp_path: Path) -> None:
    async with Guarded(border, tmp_path, max_node_bytes=len(CONTENT)) as guarded:
        await guarded.submit()
        await refused(lambda: guarded.submit(content=b"one more", index=1), "node-quota")
        await guarded.submit(BOB)


async def test_one_step_cannot_fill_the_disk(border: Border, tmp_path: Path) -> None:
    """Many new identities hand in for one step, so that nothing is left for the next ones."""
    async with Guarded(border, tmp_path, max_step_bytes=len(CONTENT)) as guarded:
        await guarded.submit()
        await refused(lambda: guarded.submit(BOB), "step-quota")
        guarded.relay.desk.accept_head(make_head(2, step=1).data)
        await guarded.submit(BOB, step=1)


async def test_one_contributor_cannot_hold_all_upload_slots(border: Border, tmp_path: Path) -> None:
    """Mallory begins many uploads and lets them trickle."""
    async with Guarded(border, tmp_path) as guarded:
        begun = [trio.Event() for _ in range(MAX_UPLOADS_EACH)]
        async with trio.open_nursery() as nursery:
            for index, event in enumerate(begun):
                nursery.start_soon(trickle, guarded, index, event)
            with trio.fail_after(20):
                for event in begun:
                    await event.wait()
                while sum(guarded.relay.service._uploads._used.values()) < MAX_UPLOADS_EACH:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            extra = submission_of(MALLORY, CONTENT, step=1, index=0)
            path = write_file(tmp_path, CONTENT)
            await refused(lambda: guarded.client(MALLORY).submit(extra.data, path), "busy")
            with trio.fail_after(10):
                await guarded.submit(BOB)
            nursery.cancel_scope.cancel()


async def trickle(guarded: Guarded, index: int, begun: trio.Event) -> None:
    """An upload whose body never ends."""
    content = CONTENT + bytes([index])
    submission = submission_of(MALLORY, content, index=index, sha256=hashlib.sha256(content).digest())
    client = guarded.client(MALLORY)
    await client.head()
    token = client.contact._token if client.contact else ""
    head = (
        f"POST /v1/submissions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"{RECORD_HEADER}: {base64.b64encode(submission.data).decode()}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    stream = await tls_stream(guarded.relay.url)
    try:
        await stream.send_all(head.encode())
        begun.set()
        await trio.sleep_forever()
    finally:
        await trio.aclose_forcefully(stream)


async def tls_stream(url: str) -> trio.SSLStream[trio.SocketStream]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = url.removeprefix("https://").partition(":")
    stream = trio.SSLStream(await trio.open_tcp_stream(host, int(port)), context)
    await stream.do_handshake()
    return stream


# Parts.


@pytest.mark.parametrize(
    ("path", "bulk"),
    [
        ("/v1/checkpoints/ab/shards/3", True),
        ("/v1/checkpoints/ab/patches/cd/3", True),
        ("/v1/checkpoints/ab/packed/3", True),
        ("/v1/checkpoints/ab/manifest", False),
        ("/v1/checkpoints/next", False),
        ("/v1/submissions/ab/file", True),
        ("/v1/submissions", False),
        ("/v1/ledger", False),
        ("/v1/hello", False),
        ("/", False),
    ],
)
def test_bulk_is_what_a_budget_is_for(path: str, bulk: bool) -> None:
    assert is_bulk(path) is bulk


@pytest.mark.parametrize(
    ("remote", "key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2:3", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_an_address_counts_as_its_network(remote: str | None, key: str) -> None:
    """One IPv6 customer has 2^64 addresses."""

    class Request:
        pass

    request: Any = Request()
    request.remote = remote
    assert address_key(request) == key


async def test_a_relay_that_lies_at_its_door_is_a_relay_error(border: Border, tmp_path: Path) -> None:
    for answer in ({"nonce": b""}, {"nonce": b"n" * 500}, {}, {"nonce": b"n" * 56, "token": 5, "valid_s": 1.0}, 7):

        async def hello(_: web.Request, answer: Any = answer) -> web.Response:
            return msgpack_response(answer)

        async with serving_routes(border[0], [web.post("/v1/hello", hello)]) as url:
            with trio.fail_after(10), pytest.raises(RelayError):
                await border[1].get(f"{url}/v1/head", contact=contact(url))

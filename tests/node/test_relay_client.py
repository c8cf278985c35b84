"""What a client believes of what a relay answers: nothing that is not signed by the right key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from aiohttp import web
from factories import OPERATOR, make_manifest, make_verdict, sealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relay_world import (
    CAROL,
    MANIFEST,
    RUN,
    Relay,
    Watcher,
    loopback,
    make_head,
    serving,
    serving_routes,
    submission_of,
    write_file,
)

from node.relay_client import FeedItem, RelayClient
from p2p.bridge import AioThread
from p2p.http import HttpClient, msgpack_response
from protocol.errors import (
    ChecksumError,
    MalformedError,
    ProtocolError,
    RefusedError,
    RelayError,
    StaleRecordError,
    WrongAuthorError,
    WrongRunError,
)
from protocol.identity import Identity
from protocol.records import Receipt

ALICE = Identity.from_phrase("alice")
CONTENT = b"rollouts" * 100
SUBMISSION = submission_of(ALICE, CONTENT)
Ask = Callable[[RelayClient, Path], Awaitable[Any]]


@pytest.fixture
async def border() -> AsyncIterator[tuple[AioThread, HttpClient]]:
    async with loopback() as both:
        yield both


def make_receipt(by: Identity = CAROL, **changes: Any) -> bytes:
    receipt = Receipt(run_id=MANIFEST.id, submission=SUBMISSION.id, head_sequence=1, received_at_ms=1)
    return sealed(msgspec.structs.replace(receipt, **changes), by).data


def answering(body: bytes, *, status: int = 200) -> list[web.RouteDef]:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return msgpack_response(body, status=status)

    return [web.route("*", "/{path:.*}", answer)]


async def ask_liar(border: tuple[AioThread, HttpClient], body: bytes, ask: Ask, tmp_path: Path) -> Watcher:
    watcher = Watcher()
    async with serving_routes(border[0], answering(body), tls=False) as url:
        client = RelayClient(border[1], url, peer_id=CAROL.peer_id, run=RUN, observer=watcher)
        client.trust(MANIFEST)
        with trio.fail_after(10), pytest.raises(ProtocolError) as caught:
            await ask(client, tmp_path)
    assert CAROL.peer_id.short in caught.value.message
    assert url in caught.value.message
    assert watcher.misdeeds == [caught.value]
    return watcher


def feed_of(*rows: tuple[int, str, bytes, bytes]) -> bytes:
    return msgspec.msgpack.encode(rows)


async def ask_head(client: RelayClient, _: Path) -> Any:
    return await client.head(5)


async def ask_manifest(client: RelayClient, _: Path) -> Any:
    return await client.manifest()


async def ask_receipt(client: RelayClient, directory: Path) -> Any:
    return await client.submit(SUBMISSION.data, write_file(directory, CONTENT))


async def ask_feed(client: RelayClient, _: Path) -> Any:
    return await client.feed(5)


async def ask_ledger(client: RelayClient, _: Path) -> Any:
    return await client.ledger(0)


ROW = (6, "submission", SUBMISSION.data, make_receipt())
VERDICT = make_verdict(SUBMISSION)
BOB = Identity.from_phrase("bob")
STRAY = submission_of(ALICE, CONTENT, run_id=b"x" * 32)
LIES: list[tuple[str, Ask, bytes, type[ProtocolError]]] = [
    ("a head of another signer", ask_head, make_head(9, by=ALICE).data, WrongAuthorError),
    ("a head of another run", ask_head, make_head(9, run_id=b"x" * 32).data, WrongRunError),
    ("an old head", ask_head, make_head(5).data, StaleRecordError),
    ("no head at all", ask_head, b"\xc1", MalformedError),
    ("a manifest of another operator", ask_manifest, sealed(make_manifest(), ALICE).data, WrongAuthorError),
    ("a manifest of another run", ask_manifest, sealed(make_manifest(name="x"), OPERATOR).data, MalformedError),
    ("a receipt of another relay", ask_receipt, make_receipt(BOB), WrongAuthorError),
    ("a receipt for something else", ask_receipt, make_receipt(submission=b"x" * 32), MalformedError),
    ("a feed that goes back", ask_feed, feed_of((5, *ROW[1:])), StaleRecordError),
    ("a feed that repeats", ask_feed, feed_of(ROW, ROW), StaleRecordError),
    ("a submission without a receipt", ask_feed, feed_of((6, "submission", SUBMISSION.data, b"")), MalformedError),
    (
        "a stranger's verdict",
        ask_feed,
        feed_of((6, "verdict", make_verdict(SUBMISSION, by=BOB).data, b"")),
        ProtocolError,
    ),
    ("a verdict under another name", ask_feed, feed_of((6, "submission", VERDICT.data, b"")), MalformedError),
    ("an unknown kind", ask_feed, feed_of((6, "gossip", VERDICT.data, b"")), MalformedError),
    ("an entry of another run", ask_ledger, msgspec.msgpack.encode([STRAY.data]), WrongRunError),
    ("an entry of no kind", ask_ledger, msgspec.msgpack.encode([make_head().data]), ProtocolError),
]


@pytest.mark.parametrize(("ask", "body", "error"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
async def test_lying_relay_is_named(
    border: tuple[AioThread, HttpClient], tmp_path: Path, ask: Ask, body: bytes, error: type[ProtocolError]
) -> None:
    """A relay makes something up: it is named, with its URL, and reported."""
    watcher = await ask_liar(border, body, ask, tmp_path)
    assert isinstance(watcher.misdeeds[0], error)


async def test_feed_that_answers_another_question_is_named(
    border: tuple[AioThread, HttpClient], tmp_path: Path
) -> None:
    """A relay floods a contributor with other contributors' items."""

    async def about_bob(client: RelayClient, _: Path) -> list[FeedItem]:
        return await client.feed(0, about=BOB.peer_id)

    async def verdicts_only(client: RelayClient, _: Path) -> list[FeedItem]:
        return await client.feed(0, kinds=["verdict"])

    for ask in (about_bob, verdicts_only):
        await ask_liar(border, feed_of(ROW), ask, tmp_path)


async def test_wrong_file_is_named_and_does_not_appear(border: tuple[AioThread, HttpClient], tmp_path: Path) -> None:
    """A relay serves other rollouts than were handed in."""

    async def ask(client: RelayClient, directory: Path) -> None:
        await client.file(SUBMISSION, directory / "file")

    watcher = await ask_liar(border, CONTENT[::-1], ask, tmp_path)
    assert isinstance(watcher.misdeeds[0], ChecksumError)
    assert not await trio.Path(tmp_path / "file").exists()


@given(body=st.binary(max_size=200))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_answer_gives_a_value_or_a_named_error(body: bytes) -> None:
    """Fuzzing the decoders with whatever a relay may send."""

    async def main() -> None:
        async with loopback() as border, serving_routes(border[0], answering(body), tls=False) as url:
            client = RelayClient(border[1], url, peer_id=CAROL.peer_id, run=RUN)
            client.trust(MANIFEST)
            for ask in (client.info, client.head, client.manifest, lambda: client.feed(0), lambda: client.ledger(0)):
                with suppress(ProtocolError):
                    await ask()

    trio.run(main)


async def test_silence_is_a_failure_not_a_misdeed(border: tuple[AioThread, HttpClient]) -> None:
    watcher = Watcher()
    async with serving_routes(border[0], answering(b""), tls=False) as url:
        pass
    client = RelayClient(border[1], url, peer_id=CAROL.peer_id, run=RUN, observer=watcher)
    with trio.fail_after(10), pytest.raises(RelayError):
        await client.info()
    assert (watcher.failures, watcher.misdeeds) == (1, [])


async def test_refusal_is_an_honest_answer(border: tuple[AioThread, HttpClient], tmp_path: Path) -> None:
    watcher = Watcher()
    relay = Relay(CAROL, tmp_path / "relay", border[0])
    async with serving(border[0], relay):
        with trio.fail_after(10), pytest.raises(RefusedError) as caught:
            await relay.client(border[1], watcher).manifest()
    assert caught.value.code == "no-manifest"
    assert (watcher.failures, watcher.misdeeds) == (0, [])


async def test_bytes_are_counted(border: tuple[AioThread, HttpClient], tmp_path: Path) -> None:
    watcher = Watcher()
    relay = Relay(CAROL, tmp_path / "relay", border[0])
    relay.meet_trainer()
    with trio.fail_after(10):
        async with serving(border[0], relay):
            client = relay.client(border[1], watcher)
            await client.submit(SUBMISSION.data, write_file(tmp_path, CONTENT))
            await client.file(SUBMISSION, tmp_path / "back")
    assert watcher.bytes_out == len(CONTENT)
    assert watcher.bytes_in > len(CONTENT)


async def test_nothing_can_be_checked_before_the_manifest_is_known(border: tuple[AioThread, HttpClient]) -> None:
    client = RelayClient(border[1], "http://127.0.0.1:9", peer_id=CAROL.peer_id, run=RUN)
    with trio.fail_after(10), pytest.raises(RelayError, match="manifest is not known"):
        await client.head()

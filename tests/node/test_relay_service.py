"""A relay over real HTTP: what it takes, what it refuses and how it says so."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import trio
from factories import OPERATOR, make_eviction, make_manifest, make_verdict, sealed
from relay_world import (
    CAROL,
    MANIFEST,
    RUN,
    Relay,
    loopback,
    make_head,
    make_notice,
    serving,
    submission_of,
    write_file,
)

from node.clock import now_ms
from node.relay.desk import RelayDesk
from node.relay.service import RECORD_HEADER
from node.relay_client import RelayClient
from p2p.bridge import AioThread
from p2p.http import HttpClient
from protocol.envelope import Signed, seal
from protocol.errors import DataDirError, ProtocolError, RefusedError
from protocol.identity import Identity
from protocol.ledger import next_tip, open_entry
from protocol.manifest import max_file_bytes
from protocol.records import Submission
from protocol.run import RunAddress

CONTENT = b"rollouts" * 5000


@pytest.fixture
def alice() -> Identity:
    return Identity.from_phrase("alice")


@pytest.fixture
def bob() -> Identity:
    return Identity.from_phrase("bob")


@pytest.fixture
async def border() -> AsyncIterator[tuple[AioThread, HttpClient]]:
    async with loopback() as both:
        yield both


@pytest.fixture
async def relay(border: tuple[AioThread, HttpClient], tmp_path: Path) -> AsyncIterator[Relay]:
    """A relay that knows its run."""
    relay = Relay(CAROL, tmp_path / "relay", border[0])
    relay.meet_trainer()
    async with serving(border[0], relay):
        yield relay


@pytest.fixture
def client(relay: Relay, border: tuple[AioThread, HttpClient]) -> RelayClient:
    return relay.client(border[1])


async def refusal(client: RelayClient, submission: Signed[Submission], path: Path) -> RefusedError:
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await client.submit(submission.data, path)
    return caught.value


async def test_submission_is_stored_announced_and_served(
    relay: Relay, client: RelayClient, tmp_path: Path, alice: Identity
) -> None:
    submission = submission_of(alice, CONTENT)
    with trio.fail_after(10):
        receipt = await client.submit(submission.data, write_file(tmp_path, CONTENT))
        assert (receipt.author, receipt.record.head_sequence) == (CAROL.peer_id, 1)
        (item,) = await client.feed(0)
        assert (item.signed.id, item.receipt) == (submission.id, receipt)
        await client.file(submission, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == CONTENT
    assert relay.service.traffic.bytes_in >= len(CONTENT)


async def test_same_submission_twice_gives_the_same_receipt(
    relay: Relay, client: RelayClient, tmp_path: Path, alice: Identity
) -> None:
    submission, path = submission_of(alice, CONTENT), write_file(tmp_path, CONTENT)
    with trio.fail_after(10):
        first = await client.submit(submission.data, path)
        relay.desk.accept_head(make_head(2, step=5, oldest_checkpoint_step=4, finished=True).data)
        assert await client.submit(submission.data, path) == first
        assert len(await client.feed(0)) == 1


async def test_second_submission_with_an_index_is_refused(client: RelayClient, tmp_path: Path, alice: Identity) -> None:
    """Cherry-picking: a contributor generates twice and hands in both for one index."""
    with trio.fail_after(10):
        await client.submit(submission_of(alice, CONTENT).data, write_file(tmp_path, CONTENT))
    error = await refusal(client, submission_of(alice, b"other"), write_file(tmp_path, b"other"))
    assert error.code == "duplicate-index"
    assert "--data-dir" in error.hint


async def test_bytes_that_were_not_signed_leave_nothing_behind(
    client: RelayClient, tmp_path: Path, alice: Identity
) -> None:
    """A file swapped after signing."""
    error = await refusal(client, submission_of(alice, CONTENT), write_file(tmp_path, CONTENT[::-1]))
    assert error.code == "bad-hash"
    kept = [path.name for path in (tmp_path / "relay").rglob("*") if path.is_file()]
    assert not [name for name in kept if "sqlite" not in name and name != "ledger"]
    with trio.fail_after(10):
        assert await client.feed(0) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run_id": b"x" * 32}, "wrong-run"),
        ({"index": 4}, "over-cap"),
        ({"size": max_file_bytes(MANIFEST.record) + 1}, "too-large"),
        ({"checkpoint_step": 3}, "stale-step"),
        ({"step": 7, "checkpoint_step": 5}, "stale-step"),
        ({"step": 9, "checkpoint_step": 6}, "future-step"),
        ({"issued_at_ms": now_ms() + 1000_000}, "bad-clock"),
    ],
)
async def test_records_are_refused_by_name(
    relay: Relay, client: RelayClient, tmp_path: Path, alice: Identity, changes: dict[str, int], code: str
) -> None:
    relay.desk.accept_head(make_head(2, step=7, checkpoint_step=6, oldest_checkpoint_step=6).data)
    submission = submission_of(alice, CONTENT, **{"step": 7, "checkpoint_step": 6, **changes})
    error = await refusal(client, submission, write_file(tmp_path, CONTENT))
    assert error.code == code
    assert error.hint


async def test_wrong_clock_is_said(client: RelayClient, tmp_path: Path, alice: Identity) -> None:
    submission = submission_of(alice, CONTENT, issued_at_ms=now_ms() + 600_000)
    error = await refusal(client, submission, write_file(tmp_path, CONTENT))
    assert "600 s in the future" in error.message or "599 s in the future" in error.message
    assert "timedatectl" in error.hint


async def test_too_large_is_refused_before_the_body(
    relay: Relay, border: tuple[AioThread, HttpClient], alice: Identity, tmp_path: Path
) -> None:
    """Filling the disk: a body far beyond what its record names."""
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(64 << 20)
    headers = {RECORD_HEADER: base64.b64encode(submission_of(alice, CONTENT).data).decode()}
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await border[1].post_file(f"{relay.url}/v1/submissions", big, headers=headers, contact=relay.contact())
    assert caught.value.code == "too-large"
    assert relay.store.stats().file_bytes == 0


async def test_full_disk_is_refused_by_name(
    border: tuple[AioThread, HttpClient], tmp_path: Path, alice: Identity
) -> None:
    small = Relay(CAROL, tmp_path / "relay", border[0], max_bytes=10_000)
    small.meet_trainer()
    async with serving(border[0], small):
        error = await refusal(small.client(border[1]), submission_of(alice, CONTENT), write_file(tmp_path, CONTENT))
    assert error.code == "disk-full"


async def test_evicted_contributor_is_told_why(
    relay: Relay, border: tuple[AioThread, HttpClient], client: RelayClient, tmp_path: Path, bob: Identity
) -> None:
    alice = Identity.from_phrase("alice")
    submission = submission_of(alice, CONTENT)
    verdict = make_verdict(submission, outcome="reject", hard=True, reason="seed: not its own prompts")
    entries = [submission.data, verdict.data, make_eviction(verdict)]
    tip = MANIFEST.id
    for entry in entries:
        tip = next_tip(tip, open_entry(entry).id)
    relay.desk.extend_ledger(entries, make_head(2, ledger_length=3, ledger_tip=tip))
    path = write_file(tmp_path, CONTENT)
    error = await refusal(client, submission_of(alice, CONTENT, index=1), path)
    assert error.code == "evicted"
    assert "not its own prompts" in error.message
    with trio.fail_after(10):
        others = relay.client(border[1], by=bob)
        await others.submit(submission_of(bob, CONTENT).data, path)
        assert [entry.data for entry in await others.ledger(1)] == entries[1:]


async def test_finished_run_takes_nothing_more(
    relay: Relay, client: RelayClient, tmp_path: Path, alice: Identity
) -> None:
    relay.desk.accept_head(make_head(2, finished=True).data)
    error = await refusal(client, submission_of(alice, CONTENT), write_file(tmp_path, CONTENT))
    assert error.code == "finished"


async def test_record_without_a_valid_signature_is_refused(
    relay: Relay, border: tuple[AioThread, HttpClient], alice: Identity
) -> None:
    """Forgery: a record with one bit of its signature changed."""
    forged = bytearray(submission_of(alice, CONTENT).data)
    forged[-1] ^= 1
    headers = {RECORD_HEADER: base64.b64encode(bytes(forged)).decode()}
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await border[1].post(f"{relay.url}/v1/submissions", CONTENT, headers=headers, contact=relay.contact())
    assert caught.value.code == "bad-signature"


async def test_missing_record_header_is_refused(relay: Relay, border: tuple[AioThread, HttpClient]) -> None:
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await border[1].post(f"{relay.url}/v1/submissions", CONTENT, contact=relay.contact())
    assert caught.value.code == "malformed"


async def test_head_never_goes_back(relay: Relay, client: RelayClient) -> None:
    """Rollback: a trainer restored from a back-up, or an attacker who kept an old head."""
    with trio.fail_after(10):
        assert await client.post_head(make_head(9).data) == 9
        for older in (make_head(8), make_head(9, step=1)):
            with pytest.raises(RefusedError) as caught:
                await client.post_head(older.data)
            assert caught.value.code == "stale"
        assert (await client.head()) == relay.desk.head
    assert relay.desk.head is not None
    assert relay.desk.head.record.sequence == 9


async def test_head_of_another_is_refused(client: RelayClient, alice: Identity) -> None:
    """Usurpation: a head that somebody else signed."""
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await client.post_head(make_head(9, by=alice).data)
    assert caught.value.code == "wrong-author"


async def test_verdict_of_a_stranger_is_refused(client: RelayClient, alice: Identity) -> None:
    """A contributor judges itself."""
    submission = submission_of(alice, CONTENT)
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await client.post_verdict(make_verdict(submission, by=alice).data)
    assert caught.value.code == "wrong-author"
    with trio.fail_after(10):
        await client.post_verdict(make_verdict(submission).data)
        await client.post_verdict(make_verdict(submission).data)
        assert [item.about for item in await client.feed(0)] == [alice.peer_id]


async def test_long_polls_wake(client: RelayClient, alice: Identity) -> None:
    async def tell() -> None:
        await client.post_head(make_head(2).data)
        await client.post_verdict(make_verdict(submission_of(alice, CONTENT)).data)

    heads: list[int] = []
    seqs: list[int] = []

    async def poll_head() -> None:
        head = await client.head(1, wait_s=30)
        heads.append(head.record.sequence if head else 0)

    async def poll_feed() -> None:
        seqs.extend(item.seq for item in await client.feed(0, wait_s=30, about=alice.peer_id))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll_head)
            nursery.start_soon(poll_feed)
            nursery.start_soon(tell)
    assert (heads, seqs) == ([2], [1])


async def test_polls_end_empty(client: RelayClient) -> None:
    with trio.fail_after(10):
        assert await client.head(1, wait_s=0.05) is None
        assert await client.feed(0, wait_s=0.05) == []


async def test_relay_learns_its_run_from_the_trainer(border: tuple[AioThread, HttpClient], tmp_path: Path) -> None:
    relay = Relay(CAROL, tmp_path / "relay", border[0])
    async with serving(border[0], relay):
        client = relay.client(border[1])
        with trio.fail_after(10):
            assert (await client.info()).run == str(RUN)
            for ask in (client.manifest(), client.post_head(make_head().data)):
                with pytest.raises(RefusedError) as caught:
                    await ask
                assert caught.value.code == "no-manifest"
            assert await client.head() is None
            relay.desk.accept_manifest(MANIFEST.data)
            with pytest.raises(RefusedError) as caught:
                await client.post_head(make_head().data)
            assert caught.value.code == "no-origin"
            assert await client.post_origin(MANIFEST.data, make_notice().data, make_head(3).data) == 3
            assert await client.post_origin(MANIFEST.data, make_notice().data, make_head(2).data) == 3
            assert (await client.manifest()).id == MANIFEST.id


async def test_origin_notice_is_for_one_relay_and_by_the_trainer(client: RelayClient, alice: Identity) -> None:
    """Hijacking: a relay is sent to pull checkpoints from somebody else."""
    others = make_notice(alice), make_notice(by=alice), make_notice(issued_at_ms=1)
    for notice, code in zip(others, ("wrong-author", "wrong-author", "stale"), strict=True):
        with trio.fail_after(10), pytest.raises(RefusedError) as caught:
            await client.post_origin(MANIFEST.data, notice.data, make_head(2).data)
        assert caught.value.code == code


async def test_manifest_of_another_run_is_refused(client: RelayClient, alice: Identity) -> None:
    """A relay is talked into serving a run that its address does not name, or a changed one."""
    strangers = sealed(make_manifest(), alice), sealed(make_manifest(name="other"), OPERATOR)
    changed = sealed(make_manifest(issued_at_ms=2), OPERATOR)
    for manifest, code in zip((*strangers, changed), ("wrong-author", "malformed", "wrong-run"), strict=True):
        with trio.fail_after(10), pytest.raises(RefusedError) as caught:
            await client.post_origin(manifest.data, make_notice().data, make_head(2).data)
        assert caught.value.code == code


async def test_restarted_relay_serves_at_once(
    border: tuple[AioThread, HttpClient], tmp_path: Path, alice: Identity
) -> None:
    submission = submission_of(alice, CONTENT)
    first = Relay(CAROL, tmp_path / "relay", border[0])
    first.meet_trainer()
    with trio.fail_after(20):
        async with serving(border[0], first):
            receipt = await first.client(border[1]).submit(submission.data, write_file(tmp_path, CONTENT))
            items = await first.client(border[1]).feed(0)
        again = Relay(CAROL, tmp_path / "relay", border[0])
        assert again.desk.notice is not None
        async with serving(border[0], again):
            client = again.client(border[1])
            assert await client.head() == first.desk.head
            assert await client.feed(0) == items
            assert await client.submit(submission.data, write_file(tmp_path, CONTENT)) == receipt
            await client.file(submission, tmp_path / "back")


async def test_directory_of_another_run_is_refused(tmp_path: Path, relay: Relay) -> None:
    other = RunAddress(OPERATOR.peer_id, "other")
    with pytest.raises(DataDirError, match="holds the records of the run"):
        RelayDesk(other, CAROL, store=relay.store, ledger_path=tmp_path / "ledger")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/head?after=-1",
        "/v1/head?after=x",
        "/v1/head?wait_s=nan",
        "/v1/feed?kinds=gossip",
        "/v1/feed?about=zz",
        "/v1/feed?after=" + "9" * 30,
        "/v1/ledger?from=1.5",
        "/v1/submissions/12/file",
    ],
)
async def test_nonsense_is_named(relay: Relay, border: tuple[AioThread, HttpClient], path: str) -> None:
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await border[1].get(relay.url + path, contact=relay.contact())
    assert caught.value.code == "malformed"


@pytest.mark.parametrize("path", ["/v1/origin", "/v1/head", "/v1/verdicts", "/v1/submissions"])
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", msgspec.msgpack.encode([b"", b"", b""])])
async def test_garbage_is_malformed(relay: Relay, border: tuple[AioThread, HttpClient], path: str, body: bytes) -> None:
    """Bytes that claim to be four thousand million items, and worse."""
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await border[1].post(relay.url + path, body, contact=relay.contact())
    assert caught.value.code == "malformed"


async def test_ledger_mirror_refuses_what_the_trainer_did_not_sign_for(
    relay: Relay, client: RelayClient, alice: Identity
) -> None:
    """A false origin serves a ledger of its own."""
    submission = submission_of(alice, CONTENT)
    with pytest.raises(ProtocolError, match="do not lead to the tip"):
        relay.desk.extend_ledger([submission.data], make_head(2, ledger_length=1, ledger_tip=b"t" * 32))
    with trio.fail_after(10):
        assert await client.ledger(0) == []


async def test_envelope_of_another_kind_is_refused(client: RelayClient) -> None:
    """A head posted as a verdict."""
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await client.post_verdict(seal(make_head().record, OPERATOR))
    assert caught.value.code == "malformed"

"""A node's copy of the ledger: what relays give is taken only if it leads to the tip that the trainer signed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio
from disk_kit import full_disk
from factories import OPERATOR, make_submission, make_verdict
from relay_world import MANIFEST, Relay, loopback, make_head, make_notice, serving

from node.feeds import Feeds
from node.ledger import fetch, follow, pull
from node.ledger.follow import LedgerFollower
from node.ledger.inspect import audit_material
from node.ledger.keeper import LedgerKeeper
from node.ledger.log import LedgerLog
from node.ledger.material import find_material
from node.ledger.spool import Spool
from node.ledger.witness import ForkWitness
from node.relay.desk import RelayDesk
from node.relay.mirror import LedgerMirror
from node.relay_client import RelayClient
from node.status import StatusBoard
from protocol.envelope import signature_of
from protocol.errors import DataDirError, ProtocolError, RelayError
from protocol.forks import open_proof
from protocol.identity import Identity
from protocol.ledger import LedgerState, next_tip, open_entry
from protocol.records import Head, Verdict

BOARD = StatusBoard(role="watch", peer_id="test", run="test")
ALICE, BOB, CAROL = (Identity.from_phrase(name) for name in ("alice", "bob", "carol"))


class FakeSwarm:
    """Relays and heads as a test sets them."""

    def __init__(self, clients: list[RelayClient]) -> None:
        self.clients = clients
        self.head: Any = None
        self._changed = trio.Event()

    def set_head(self, head: Any) -> None:
        self.head = head
        self._changed.set()
        self._changed = trio.Event()

    async def wait_head(self, after: int) -> Any:
        while self.head is None or self.head.record.sequence <= after:
            await self._changed.wait()
        return self.head


def head_over(entries: list[bytes], sequence: int) -> Any:
    tip = MANIFEST.id
    for entry in entries:
        tip = next_tip(tip, open_entry(entry).id)
    return make_head(sequence, ledger_length=len(entries), ledger_tip=tip)


def entries_of(who: Identity) -> list[bytes]:
    submissions = [make_submission(who, MANIFEST.id, index=index) for index in range(3)]
    return [data for one in submissions for data in (one.data, make_verdict(one).data)]


def open_log(path: Path) -> LedgerLog:
    """With a segment for about every four entries."""
    return LedgerLog(path, LedgerState(MANIFEST.id, MANIFEST.record), mends=True, segment_bytes=2000)


def hold(path: Path, entries: list[bytes]) -> LedgerLog:
    """What a relay has in segments: every entry that the rules allow."""
    log = open_log(path)
    log.append(entries)
    return log


@asynccontextmanager
async def following(tmp_path: Path, *served: list[bytes]) -> AsyncIterator[tuple[FakeSwarm, LedgerFollower]]:
    """A follower of relays that serve these entries, whatever any head says."""
    async with loopback() as (aio, http), trio.open_nursery() as nursery:
        clients = []
        for identity, entries in zip((BOB, CAROL), served, strict=False):
            relay = Relay(identity, tmp_path / identity.peer_id.short, aio)
            relay.meet_trainer()
            held = hold(tmp_path / f"held-{len(list(tmp_path.glob('held-*')))}", entries)
            relay.desk.ledger_entries = lambda start, limit, held=entries: held[start : start + limit]
            relay.desk.segments, relay.desk.open_segment = held.segments, held.open_segment
            await nursery.start(serve, aio, relay)
            clients.append(relay.client(http))
        swarm = FakeSwarm(clients)
        copy = open_log(tmp_path / "copy")
        witness = ForkWitness(MANIFEST, tmp_path / "forks", board=BOARD, keep_head=tmp_path / "copy" / "head")
        follower = LedgerFollower(swarm, copy, witness)
        await nursery.start(follower.run)
        yield swarm, follower
        nursery.cancel_scope.cancel()


async def serve(aio: Any, relay: Relay, *, task_status: Any) -> None:
    relay.service = type(relay.service)(aio, relay.desk, relay.store)
    async with serving(aio, relay):
        task_status.started()
        await trio.sleep_forever()


async def until_length(follower: LedgerFollower, length: int) -> None:
    while follower.state.length < length:
        await follower.wait_changed()


async def test_copy_keeps_up_with_the_head(tmp_path: Path) -> None:
    entries = entries_of(ALICE)
    with trio.fail_after(20):
        async with following(tmp_path, entries) as (swarm, follower):
            swarm.set_head(head_over(entries[:2], 2))
            await until_length(follower, 2)
            assert follower.state.length == 2  # not what the relay has beyond the head
            swarm.set_head(head_over(entries, 3))
            await until_length(follower, 6)
            assert follower.state.contributors[ALICE.peer_id].accepted == 3
    assert open_log(tmp_path / "copy").state.length == 6


async def test_a_full_disk_ends_no_follower(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries wait on disk until they are checked; where there is no room for them, there may be some later."""
    monkeypatch.setattr(follow, "DISK_RETRY_S", 0.05)
    entries = entries_of(ALICE)
    with trio.fail_after(20):
        async with following(tmp_path, entries) as (swarm, follower):
            with full_disk():
                swarm.set_head(head_over(entries, 2))
                while "cannot be kept until they are checked" not in caplog.text:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert follower.state.length == 0
            await until_length(follower, 6)


async def test_a_feeds_place_that_cannot_be_kept_is_asked_again_after_a_restart(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "feeds.json"

    async def first(*, keep: bool) -> int:
        """What a node that starts now is told first; `keep` says whether its disk takes that it was."""
        async with trio.open_nursery() as nursery:
            feeds = Feeds(lambda: [relay.client(http)], kinds=[Verdict.KIND], cursors_path=path)
            await nursery.start(feeds.run)
            client, item = await feeds.next()
            with nullcontext() if keep else full_disk():
                feeds.done(client, item)
            nursery.cancel_scope.cancel()
        return item.seq

    with trio.fail_after(20):
        async with loopback() as (aio, http), trio.open_nursery() as nursery:
            relay = Relay(BOB, tmp_path / "relay", aio)
            relay.meet_trainer()
            await nursery.start(serve, aio, relay)
            for index in range(2):
                relay.store.add_verdict(make_verdict(make_submission(ALICE, MANIFEST.id, index=index)))
            assert [await first(keep=False), await first(keep=True), await first(keep=True)] == [1, 1, 2]
            assert caplog.text.count("place not kept") == 1
            nursery.cancel_scope.cancel()


async def test_false_entries_are_not_taken_and_another_relay_is_asked(tmp_path: Path) -> None:
    """A relay gives a contributor a record that it does not have."""
    true, false = entries_of(ALICE), entries_of(BOB)
    with trio.fail_after(20):
        async with following(tmp_path, false, true) as (swarm, follower):
            swarm.set_head(head_over(true, 2))
            await until_length(follower, 6)
            assert set(follower.state.contributors) == {ALICE.peer_id}


async def test_relay_that_is_behind_is_asked_again(tmp_path: Path) -> None:
    entries = entries_of(ALICE)
    served: list[bytes] = entries[:2]
    with trio.fail_after(20):
        async with following(tmp_path, served) as (swarm, follower):
            head: Head = head_over(entries, 2)
            swarm.set_head(head)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert follower.state.length == 0
            served += entries[2:]
            await until_length(follower, 6)


# Signatures. An entry's id, and so the chain's tip, leaves them out.


class Source:
    """A relay that gives these entries, looking at none."""

    def __init__(self, name: str, entries: list[bytes]) -> None:
        self.name = name
        self.entries = entries
        self.asked = 0

    async def head(self) -> None:
        """It has met none."""

    async def ledger_entries(self, start: int) -> list[bytes]:
        self.asked += 1
        return self.entries[start : start + 4]

    async def ledger_segments(self, first: int) -> list[Any]:
        return []


def spoilt(entries: list[bytes]) -> list[bytes]:
    """The last verdict's signature with another bit: the chain's tip is the same."""
    signature = signature_of(entries[-1])
    other = bytes([signature[0] ^ 1]) + signature[1:]
    return [*entries[:-1], entries[-1].replace(signature, other)]


def test_signatures_are_checked_before_anything_is_taken_in(tmp_path: Path) -> None:
    entries = long_ledger(4)
    tip = head_over(entries, 2).record.ledger_tip
    copy = open_log(tmp_path / "copy")
    with pytest.raises(ProtocolError, match="entry 7 as it was sent does not hold"):
        copy.extend(spoilt(entries), length=8, tip=tip)
    assert (copy.state.length, copy.entries(0, 9), copy.state.contributors) == (0, [], {})
    copy.extend(entries, length=8, tip=tip)
    assert copy.state.tip == tip


async def test_a_copy_is_caught_up_only_when_the_disk_has_it(tmp_path: Path) -> None:
    """The last entries of a run meet a full disk: none that come later take them along."""
    entries = long_ledger(2)
    copy, head = open_log(tmp_path / "copy"), head_over(entries, 2)
    keeper, source = LedgerKeeper(copy), Source("honest", entries)
    with trio.fail_after(20):
        with full_disk(room=4096):
            for _ in range(2):
                with pytest.raises(DataDirError, match="index"):
                    await keeper.catch_up(source, head)
        await keeper.catch_up(source, head)
    assert copy.entries(0, 9) == entries


async def test_a_head_that_cannot_be_kept_is_no_hindrance(tmp_path: Path, caplog: Any) -> None:
    entries = long_ledger(2)
    copy, head = open_log(tmp_path / "copy"), head_over(entries, 2)
    witness = ForkWitness(MANIFEST, tmp_path / "forks", keep_head=tmp_path / "gone" / "head")
    with trio.fail_after(20):
        await LedgerKeeper(copy, witness).catch_up(Source("honest", entries), head)
    assert witness.held is head
    assert "cannot be written" in caplog.text


async def test_who_waits_hears_of_entries_that_the_disk_has_still_to_take(tmp_path: Path) -> None:
    """Otherwise nobody would, as the next try finds nothing new."""
    entries = long_ledger(2)
    swarm: Any = FakeSwarm([Source("honest", entries)])  # type: ignore[list-item]
    follower = LedgerFollower(swarm, open_log(tmp_path / "copy"))
    with trio.fail_after(20):
        with full_disk(room=4096):
            async with trio.open_nursery() as nursery:
                await nursery.start(follower.run)
                swarm.set_head(head_over(entries, 2))
                await until_length(follower, 4)
                nursery.cancel_scope.cancel()


def test_entries_that_cannot_be_read_back_are_named(tmp_path: Path) -> None:
    with Spool(tmp_path, length=0, tip=MANIFEST.id) as spool:
        spool.add(entries_of(ALICE))
        os.close(spool._file.fileno())
        with pytest.raises(DataDirError, match="until they are checked"):
            list(spool)


async def test_a_relay_that_has_an_eviction_acts_on_it_before_the_disk_takes_it(tmp_path: Path) -> None:
    entries = long_ledger(2)
    heard: list[int] = []
    desk = SimpleNamespace(
        ledger=open_log(tmp_path / "copy"), notice=make_notice(), head=head_over(entries, 2), witness=None
    )
    desk.ledger_extended = lambda: heard.append(desk.ledger.state.length)

    async def get(url: str, **_: Any) -> Any:
        return SimpleNamespace(body=msgspec.msgpack.encode(entries))

    http: Any = SimpleNamespace(get=get)
    mirror = LedgerMirror(http, cast(RelayDesk, desk))
    with trio.fail_after(20):
        with full_disk(room=4096):
            async with trio.open_nursery() as nursery:
                await nursery.start(mirror.run)
                await trio.testing.wait_all_tasks_blocked(0.05)
                while not heard:  # noqa: ASYNC110 - a list gives no event
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
    assert (heard, desk.ledger.entries(0, 9)) == ([4], [])


async def test_follower_asks_the_next_relay_when_one_spoils_a_signature(tmp_path: Path) -> None:
    entries = long_ledger(4)
    liar, honest = Source("liar", spoilt(entries)), Source("honest", entries)
    swarm: Any = FakeSwarm([liar, honest])
    follower = LedgerFollower(swarm, open_log(tmp_path / "copy"))
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(follower.run)
            swarm.set_head(head_over(entries, 2))
            await until_length(follower, 8)
            nursery.cancel_scope.cancel()
    assert liar.asked
    assert open_log(tmp_path / "copy").entries(0, 9) == entries


async def test_one_lying_relay_makes_no_audit_accuse_an_innocent_validator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay spoils a verdict's signature for whoever audits the run from outside; another relay is honest."""
    monkeypatch.setattr(fetch, "RETRY_S", 0)
    entries = long_ledger(4)
    liar, honest = Source("liar", spoilt(entries)), Source("honest", entries)
    head = head_over(entries, 2)
    swarm = SimpleNamespace(clients=[liar, honest], manifest=MANIFEST, wait_head=partial(ready, head))
    out = tmp_path / "out"
    with trio.fail_after(20):
        await fetch.fetch_records(swarm, out, lambda _: None)
        assert liar.asked
        assert audit_material(find_material(out), say=lambda _: None, processes=0).breaches == []
        swarm.clients = [liar]
        with pytest.raises(RelayError, match="liar: ledger entry 7 as it was sent does not hold"):
            await fetch.fetch_records(swarm, tmp_path / "other", lambda _: None)


async def ready(head: Any) -> Any:
    return head


@pytest.mark.parametrize("lengths", [(12, 12), (12, 6), (6, 12)])
async def test_an_audit_from_outside_sees_that_relays_hold_two_ledgers(
    tmp_path: Path, lengths: tuple[int, int]
) -> None:
    """A trainer shows one relay another ledger than the rest; whoever audits asks both, and keeps the proof."""
    from typer.testing import CliRunner

    from cli import app

    true, other = [*entries_of(ALICE), *entries_of(BOB)], [*entries_of(BOB), *entries_of(ALICE)]
    heads = [
        head_over(ledger[:length], at)
        for at, (ledger, length) in enumerate(zip((true, other), lengths, strict=True), 2)
    ]
    out = tmp_path / "out"
    with trio.fail_after(30):
        async with loopback() as (aio, http):
            relays = [Relay(who, tmp_path / name, aio) for who, name in ((CAROL, "one"), (ALICE, "two"))]
            async with serving(aio, relays[0]), serving(aio, relays[1]):
                for relay, ledger, head in zip(relays, (true, other), heads, strict=True):
                    relay.meet_trainer(head)
                    relay.desk.extend_ledger(ledger[: head.record.ledger_length], head)
                clients = [relay.client(http) for relay in relays]
                swarm: Any = SimpleNamespace(clients=clients, manifest=MANIFEST, wait_head=partial(ready, heads[0]))
                await fetch.fetch_records(swarm, out, lambda _: None)
    (proof,) = (out / "forks").iterdir()
    assert {open_proof(proof.read_bytes()).shorter.id, open_proof(proof.read_bytes()).longer.id} == {
        head.id for head in heads
    }
    report = audit_material(find_material(out), say=lambda _: None, processes=0)
    assert report.breaches_by_kind == {"fork": 1}
    assert (report.breaches[0].who, str(proof) in report.breaches[0].what) == (str(OPERATOR.peer_id), True)
    checked = CliRunner().invoke(app, ["audit", "--fork", str(proof)])
    assert (checked.exit_code, "signed both" in checked.stdout) == (1, True)


async def test_relays_that_lag_or_are_ahead_are_no_fork(tmp_path: Path) -> None:
    """A run that goes on: each relay holds another length of one ledger."""
    entries = entries_of(ALICE)
    out = tmp_path / "out"
    with trio.fail_after(30):
        async with loopback() as (aio, http):
            relays = [Relay(who, tmp_path / str(at), aio) for at, who in enumerate((CAROL, ALICE, BOB))]
            async with serving(aio, relays[0]), serving(aio, relays[1]), serving(aio, relays[2]):
                for relay, length in zip(relays, (4, 2, 6), strict=True):
                    head = head_over(entries[:length], length)
                    relay.meet_trainer(head)
                    relay.desk.extend_ledger(entries[:length], head)
                clients = [relay.client(http) for relay in relays]
                head = head_over(entries[:4], 4)
                swarm: Any = SimpleNamespace(clients=clients, manifest=MANIFEST, wait_head=partial(ready, head))
                await fetch.fetch_records(swarm, out, lambda _: None)
    assert not (out / "forks").exists()
    assert audit_material(find_material(out), say=lambda _: None, processes=0).clean


# Far behind.


def long_ledger(count: int = 8) -> list[bytes]:
    submissions = [
        make_submission((ALICE, CAROL)[at // 8], MANIFEST.id, step=at % 8 // 4, index=at % 4) for at in range(count)
    ]
    return [data for one in submissions for data in (one.data, make_verdict(one).data)]


async def test_newcomer_fetches_whole_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "FAR_BEHIND", 5)
    asked: list[int] = []
    ask = RelayClient.ledger_entries

    async def counted(client: RelayClient, start: int) -> list[bytes]:
        asked.append(start)
        return await ask(client, start)

    monkeypatch.setattr(RelayClient, "ledger_entries", counted)
    entries = long_ledger(9)
    with trio.fail_after(20):
        async with following(tmp_path, entries) as (swarm, follower):
            swarm.set_head(head_over(entries[:3], 2))
            await until_length(follower, 3)
            swarm.set_head(head_over(entries[:17], 3))
            await until_length(follower, 17)
    assert asked == [0, 16], "from the middle of a segment to the end of the last full one they come in segments"


async def test_segment_that_was_tampered_with_is_a_misdeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay sends other bytes than its own list of hashes names; another relay has the ledger."""
    monkeypatch.setattr(pull, "FAR_BEHIND", 5)
    entries = long_ledger()
    with trio.fail_after(20):
        async with following(tmp_path, entries, entries) as (swarm, follower):
            path = tmp_path / "held-0" / "segment-00000001"
            content = bytearray(path.read_bytes())
            content[300] ^= 1
            path.write_bytes(content)
            swarm.set_head(head_over(entries, 2))
            await until_length(follower, 16)


# Two ledgers by one key.


def forked(count: int) -> list[bytes]:
    """The same first two entries as `long_ledger`, and then others."""
    submissions = [make_submission(ALICE, MANIFEST.id, index=1, sha256=b"x" * 32)]
    submissions += [make_submission(BOB, MANIFEST.id, step=at // 4, index=at % 4) for at in range(count)]
    return [*long_ledger(1), *(data for one in submissions for data in (one.data, make_verdict(one).data))]


def proofs(tmp_path: Path) -> list[Any]:
    return [open_proof(path.read_bytes()) for path in sorted((tmp_path / "forks").glob("fork-*"))]


async def until_proved(tmp_path: Path) -> None:
    while not proofs(tmp_path):  # noqa: ASYNC110 - a file gives no event
        await trio.sleep(0.01)


@pytest.mark.parametrize("length", [5, 6, 11])
async def test_two_trainers_with_one_key_are_proved(tmp_path: Path, length: int, caplog: Any) -> None:
    """A trainer is started from an old copy of its directory, and goes on: shorter, as long, or longer."""
    true, other = long_ledger(3), forked(4)
    with trio.fail_after(30):
        async with following(tmp_path, true, other) as (swarm, follower):
            swarm.set_head(head_over(true, 2))
            await until_length(follower, 6)
            swarm.set_head(head_over(other[:length], 3))
            await until_proved(tmp_path)
            assert (follower.state.length, BOB.peer_id in follower.state.contributors) == (6, False)
            (fork,) = proofs(tmp_path)
            lengths = [fork.shorter.record.ledger_length, fork.longer.record.ledger_length]
            assert lengths == sorted([6, length])
            more = long_ledger(4)
            true += more[6:]
            swarm.set_head(head_over(more, 4))
            await until_length(follower, 8)  # the true one goes on
    assert "FORK the trainer" in caplog.text
    assert "audit --fork" in BOARD.detail("fork")


async def test_a_restarted_follower_remembers_which_ledger_it_holds(tmp_path: Path) -> None:
    """The trainer's rewritten ledger comes while the node is off."""
    true, other = long_ledger(3), forked(4)
    with trio.fail_after(30):
        async with following(tmp_path, true) as (swarm, follower):
            swarm.set_head(head_over(true, 2))
            await until_length(follower, 6)
        async with following(tmp_path, other) as (swarm, follower):
            assert follower.state.length == 6
            swarm.set_head(head_over(other, 3))
            await until_proved(tmp_path)
            assert follower.state.length == 6


async def test_a_lying_relay_proves_nothing(tmp_path: Path) -> None:
    true = long_ledger(4)
    with trio.fail_after(20):
        async with following(tmp_path, forked(4), true) as (swarm, follower):
            swarm.set_head(head_over(true[:4], 2))
            await until_length(follower, 4)
            swarm.set_head(head_over(true, 3))
            await until_length(follower, 8)
    assert proofs(tmp_path) == []


def test_heads_of_one_length_are_compared_without_any_ledger(tmp_path: Path) -> None:
    """A contributor, which follows no ledger, sees heads alone."""
    witness = ForkWitness(MANIFEST, tmp_path / "forks")
    true, other = long_ledger(3), forked(4)
    for sequence, entries in enumerate((true[:2], true[:4], other[:2], true[:5]), start=1):
        assert witness.see(head_over(entries, sequence)) is None
    assert witness.see(head_over(other[:4], 5)) is not None
    assert len(proofs(tmp_path)) == 1

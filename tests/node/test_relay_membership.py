"""Who takes part, over real HTTP: admissions, appeals, heartbeats and standing, and every way to lie about them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from factories import (
    OPERATOR,
    VALIDATOR,
    make_admission,
    make_answer,
    make_appeal,
    make_batch,
    make_eviction,
    make_heartbeat,
    make_invite,
    make_manifest,
    make_reinstatement,
    make_submission,
    make_trained,
    make_verdict,
    sealed,
)
from relay_world import CAROL, MANIFEST, Relay, loopback, make_head, make_notice, serving, submission_of, write_file

from node.clock import now_ms
from node.membership import ACTIVE_S
from node.relay import desk
from node.relay.hearts import Hearts
from node.relay.standing import standing_of
from node.relay_client import RelayClient
from p2p.bridge import AioThread
from p2p.http import HttpClient
from p2p.limits import Rate
from protocol.envelope import Signed, open_envelope
from protocol.errors import RefusedError
from protocol.identity import Identity
from protocol.ledger import LedgerState, next_tip, open_entry
from protocol.records import AdmissionSpec, Appeal, BatchSpec, CreditSpec, Heartbeat, Manifest, Verdict

ALICE, BOB, MALLORY, DAVE = (Identity.from_phrase(name) for name in ("alice", "bob", "mallory", "dave"))
CONTENT = b"rollouts" * 500
BITS = 1
DAY_MS = 86_400_000


class Site:
    """A relay of a run of the test's own, its trainer's ledger, and clients."""

    def __init__(self, aio: AioThread, http: HttpClient, directory: Path, manifest: Signed[Manifest], **options: Any):
        self.manifest, self.http, self.directory = manifest, http, directory
        self.relay = Relay(CAROL, directory / "relay", aio, **options)
        head = make_head(run_id=manifest.id, ledger_tip=manifest.id)
        self.relay.desk.accept_origin(manifest.data, make_notice(CAROL, run_id=manifest.id).data, head.data)
        self.length, self.tip = 0, manifest.id

    def client(self, by: Identity) -> RelayClient:
        client = self.relay.client(self.http, by=by)
        client.trust(self.manifest)
        return client

    def enter(self, *entries: bytes) -> None:
        """The trainer writes entries, and the relay mirrors them."""
        for entry in entries:
            self.tip, self.length = next_tip(self.tip, open_entry(entry).id), self.length + 1
        head = make_head(2, run_id=self.manifest.id, ledger_length=self.length, ledger_tip=self.tip)
        self.relay.desk.extend_ledger(list(entries), head)

    def work(self, by: Identity, **changes: Any) -> Signed[Any]:
        return submission_of(by, CONTENT, run_id=self.manifest.id, **changes)

    async def submit(self, by: Identity) -> None:
        await self.client(by).submit(self.work(by).data, write_file(self.directory, CONTENT))


Build = Callable[..., Awaitable[Site]]


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Build]:
    async with loopback() as (aio, http), trio.open_nursery() as nursery:

        async def made(manifest: Manifest | None = None, **options: Any) -> Site:
            signed = MANIFEST if manifest is None else sealed(manifest, OPERATOR)
            site = Site(aio, http, tmp_path, signed, **options)
            await nursery.start(_serve, aio, site)
            return site

        yield made
        nursery.cancel_scope.cancel()


async def _serve(aio: AioThread, site: Site, *, task_status: trio.TaskStatus[None]) -> None:
    async with serving(aio, site.relay):
        task_status.started()
        await trio.sleep_forever()


async def refused(ask: Callable[[], Awaitable[Any]]) -> str:
    with trio.fail_after(10), pytest.raises(RefusedError) as caught:
        await ask()
    return caught.value.code


def recent(author: Identity, site: Site, **changes: Any) -> Signed[Any]:
    return make_admission(author, site.manifest.id, **{"issued_at_ms": now_ms(), **changes})


# Admission.


async def test_work_is_taken_only_of_keys_that_the_ledger_admitted(build: Build) -> None:
    """Free identities: whoever was evicted comes back under a key that cost nothing."""
    site = await build(make_manifest(admission=AdmissionSpec(work_bits=BITS)))
    assert await refused(lambda: site.submit(ALICE)) == "not-admitted"
    admission = recent(ALICE, site, bits=BITS)
    with trio.fail_after(10):
        assert not await site.client(ALICE).post_admission(admission.data)
        assert not await site.client(ALICE).post_admission(admission.data)
        (item,) = await site.client(OPERATOR).feed(0, kinds=["admission"])
        assert (item.signed.id, item.about) == (admission.id, ALICE.peer_id)
        assert await site.client(BOB).feed(0) == []  # nobody gets it who did not ask for admissions
    site.enter(admission.data)
    with trio.fail_after(10):
        assert await site.client(ALICE).post_admission(recent(ALICE, site).data)
        await site.submit(ALICE)
        assert (await site.client(ALICE).standing()).admitted


async def test_admission_to_an_open_run_is_a_matter_of_course(build: Build) -> None:
    site = await build()
    with trio.fail_after(10):
        assert await site.client(ALICE).post_admission(recent(ALICE, site).data)
        assert await site.client(OPERATOR).feed(0, kinds=["admission"]) == []


def unworked(author: Identity, site: Site) -> Signed[Any]:
    """An admission whose proof of work is none."""
    from protocol.work import work_holds

    nonces = (number.to_bytes(8, "big") for number in range(99))
    nonce = next(one for one in nonces if not work_holds(author.peer_id, site.manifest.id, one, bits=BITS))
    return recent(author, site, nonce=nonce)


async def test_admissions_that_lie_are_refused_by_name(build: Build) -> None:
    """No proof of work, another's, of another run, replayed after a day, from the future, by an old program."""
    site = await build(make_manifest(admission=AdmissionSpec(work_bits=BITS)))

    async def code(admission: Signed[Any] | bytes, by: Identity = ALICE) -> str:
        data = admission if isinstance(admission, bytes) else admission.data
        return await refused(lambda: site.client(by).post_admission(data))

    assert await code(unworked(ALICE, site)) == "admission-work"
    assert await code(recent(ALICE, site, bits=BITS), by=MALLORY) == "not-yours"
    assert await code(make_admission(ALICE, b"x" * 32, issued_at_ms=now_ms())) == "wrong-run"
    assert await code(recent(ALICE, site, issued_at_ms=now_ms() - 2 * DAY_MS)) == "bad-clock"
    assert await code(recent(ALICE, site, issued_at_ms=now_ms() + DAY_MS)) == "bad-clock"
    assert await code(recent(ALICE, site, protocol=9)) == "admission-protocol"
    assert await code(b"x" * 8192) == "too-large"
    assert await code(b"x" * 100) == "malformed"
    with trio.fail_after(10):
        assert await site.client(OPERATOR).feed(0, kinds=["admission"]) == []


async def test_allow_list_takes_its_keys_and_no_others(build: Build) -> None:
    site = await build(make_manifest(admission=AdmissionSpec(kind="allow-list", allowed=(ALICE.peer_id.public_key,))))
    with trio.fail_after(10):
        await site.client(ALICE).post_admission(recent(ALICE, site).data)
    assert await refused(lambda: site.client(BOB).post_admission(recent(BOB, site).data)) == "admission-not-allowed"


async def test_invite_is_good_for_one_key_and_for_its_time(build: Build) -> None:
    """An invite shared among friends, forged, of another run, or from last year."""
    site = await build(make_manifest(admission=AdmissionSpec(kind="invite")))
    invite = make_invite(site.manifest.id, valid_until_ms=now_ms() + DAY_MS)

    async def code(by: Identity, invite: bytes) -> str:
        return await refused(lambda: site.client(by).post_admission(recent(by, site, invite=invite).data))

    with trio.fail_after(10):
        admission = recent(ALICE, site, invite=invite.data)
        await site.client(ALICE).post_admission(admission.data)
    site.enter(admission.data)
    assert await code(BOB, invite.data) == "admission-invite-spent"
    assert await code(BOB, b"") == "admission-no-invite"
    assert await code(BOB, make_invite(site.manifest.id, 2, by=MALLORY).data) == "admission-invite"
    assert await code(BOB, make_invite(b"x" * 32, 3, valid_until_ms=now_ms() + DAY_MS).data) == "admission-invite"
    assert await code(BOB, make_invite(site.manifest.id, 4, valid_until_ms=1).data) == "admission-invite-expired"


# Appeals.

SHARED = make_manifest(validators=(VALIDATOR.peer_id.public_key, DAVE.peer_id.public_key))


class Rejected:
    """A contributor's submission that was rejected and got it evicted."""

    def __init__(self, site: Site, who: Identity = ALICE) -> None:
        self.work = site.work(who)
        self.verdict = make_verdict(self.work, outcome="reject", hard=True, reason="seed: not its own prompts")
        site.enter(self.work.data, self.verdict.data, make_eviction(self.verdict))
        site.relay.store.add_verdict(self.verdict)

    def appeal(self, by: Identity = ALICE, **changes: Any) -> Signed[Appeal]:
        return make_appeal(by, self.verdict, **{"issued_at_ms": now_ms(), **changes})


async def test_evicted_key_may_ask_why_and_appeal_and_nothing_else(build: Build) -> None:
    site = await build(SHARED)
    rejected, client = Rejected(site), site.client(ALICE)
    with trio.fail_after(10):
        (item,) = await client.feed(0, kinds=[Verdict.KIND], about=ALICE.peer_id)
        assert item.signed.id == rejected.verdict.id
        standing = await client.standing([rejected.work.id])
        assert (standing.standing, standing.evicted_for) == ("evicted", rejected.work.id)
        assert await client.post_appeal(rejected.appeal().data) == "taken"
    for ask in (
        client.head,
        lambda: client.feed(0),
        lambda: client.feed(0, kinds=[Verdict.KIND], about=BOB.peer_id),
        lambda: client.ledger(0),
        client.active,
        lambda: client.post_heartbeat(make_heartbeat(ALICE, site.manifest.id, issued_at_ms=now_ms()).data),
    ):
        assert await refused(ask) == "evicted"


async def test_evicted_key_is_held_to_a_rate(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheat that was thrown out floods the one thing it may still ask.

    The rate is so low here that however long the requests take, nothing comes back, and no client waits for it.
    """
    monkeypatch.setattr("node.relay.door.EVICTED_RATE", Rate(1e-4, 3.0))
    site = await build(SHARED)
    Rejected(site)
    client = site.client(ALICE)
    with trio.fail_after(60):
        for _ in range(3):
            assert (await client.standing()).standing == "evicted"
    assert await refused(client.standing) == "too-many-requests"
    assert site.relay.service.door.refusals == 1


async def test_granted_appeal_lets_the_key_in_again(build: Build) -> None:
    site = await build(SHARED)
    rejected = Rejected(site)
    appeal = rejected.appeal()
    answer = make_answer(rejected.work, appeal, by=DAVE)
    site.enter(appeal.data)
    with trio.fail_after(10):
        assert await site.client(ALICE).post_appeal(appeal.data) == "open"
        await site.client(DAVE).post_verdict(answer.data)
    site.enter(answer.data, make_reinstatement(answer, appeal).data)
    with trio.fail_after(10):
        assert await site.client(ALICE).post_appeal(appeal.data) == "granted"
        standing = await site.client(ALICE).standing()
        assert (standing.standing, standing.maturing) == ("active", rejected.work.record.output_tokens)
        assert [(row.state, row.answer) for row in standing.appeals] == [("granted", answer.id)]
        assert await site.client(ALICE).head() is not None


async def test_appeals_that_cannot_be_are_refused_by_name(build: Build) -> None:
    """Somebody else's, about nothing, a second time, of another run, and one that is a megabyte long."""
    site = await build(SHARED)
    rejected = Rejected(site)

    async def code(appeal: Signed[Any] | bytes, by: Identity = ALICE) -> str:
        data = appeal if isinstance(appeal, bytes) else appeal.data
        return await refused(lambda: site.client(by).post_appeal(data))

    assert await code(rejected.appeal(), by=BOB) == "not-yours"
    assert await code(rejected.appeal(BOB), by=BOB) == "appeal-not-yours"
    assert await code(rejected.appeal(submission=b"x" * 32)) == "appeal-unknown-submission"
    other = make_verdict(rejected.work, outcome="reject", issued_at_ms=9)
    assert await code(make_appeal(ALICE, other, issued_at_ms=now_ms())) == "appeal-not-rejected"
    assert await code(rejected.appeal(run_id=b"x" * 32)) == "wrong-run"
    assert await code(b"x" * (1 << 20)) == "too-large"
    with trio.fail_after(10):
        await site.client(ALICE).post_appeal(rejected.appeal().data)
    assert await code(rejected.appeal(reason="and again")) == "appeal-duplicate-appeal"


async def test_appeal_that_nobody_could_tell_is_filed_once_more_and_no_third_time(build: Build) -> None:
    """A second one before the first has ended, two at once, and a third one after the second has ended likewise."""
    site = await build(SHARED)
    rejected, client = Rejected(site), site.client(ALICE)
    appeals = [rejected.appeal(reason=reason) for reason in ("first", "second", "third", "fourth")]

    def nobody_could_tell(appeal: Signed[Appeal], reason: str) -> None:
        answer = make_answer(rejected.work, appeal, by=DAVE, outcome="undecided", reason=reason)
        site.enter(appeal.data, answer.data)

    with trio.fail_after(20):
        assert await client.post_appeal(appeals[0].data) == "taken"
        assert await refused(lambda: client.post_appeal(appeals[1].data)) == "appeal-duplicate-appeal"
        nobody_could_tell(appeals[0], "file: lost")
        assert await client.post_appeal(appeals[0].data) == "undecided"
        assert await client.post_appeal(appeals[1].data) == "taken"
        assert await client.post_appeal(appeals[1].data) == "taken"
        assert await refused(lambda: client.post_appeal(appeals[2].data)) == "appeal-duplicate-appeal"
        feed = await site.client(OPERATOR).feed(0, kinds=[Appeal.KIND])
        assert [item.signed.id for item in feed] == [one.id for one in appeals[:2]]
        nobody_could_tell(appeals[1], "file: lost")
        assert await client.post_appeal(appeals[1].data) == "undecided"
        assert await refused(lambda: client.post_appeal(appeals[3].data)) == "appeal-duplicate-appeal"
        assert [row.state for row in (await client.standing()).appeals] == ["undecided", "undecided"]


async def test_decision_that_follows_an_undecided_verdict_is_taken_and_no_other_one(build: Build) -> None:
    """A validator that says this first, then that, then this again."""
    site = await build(SHARED)
    work, client = site.work(ALICE), site.client(DAVE)
    sorry = make_verdict(work, by=DAVE, outcome="undecided", reason="internal: x")
    decision = make_verdict(work, by=DAVE)
    with trio.fail_after(10):
        for verdict in (sorry, sorry, decision, sorry, decision):
            await client.post_verdict(verdict.data)
        feed = await client.feed(0, kinds=[Verdict.KIND])
        assert [item.signed.id for item in feed] == [sorry.id, decision.id]
    for later in (
        make_verdict(work, by=DAVE, outcome="reject", reason="sampling: x"),
        make_verdict(work, by=DAVE, outcome="undecided", reason="internal: y"),
    ):
        assert await refused(lambda data=later.data: client.post_verdict(data)) == "already-judged"


async def test_appeal_of_yesterday_is_followed_and_not_taken_anew(build: Build) -> None:
    """The same command again, days later; and an appeal that was signed long ago and never reached a relay."""
    clock = Clock()
    site = await build(SHARED, clock=clock)
    rejected = Rejected(site)
    old, appeal = rejected.appeal(issued_at_ms=now_ms() - 2 * DAY_MS), rejected.appeal()
    assert await refused(lambda: site.client(ALICE).post_appeal(old.data)) == "bad-clock"
    with trio.fail_after(10):
        assert await site.client(ALICE).post_appeal(appeal.data) == "taken"
        clock.ms += 2 * DAY_MS
        assert await site.client(ALICE).post_appeal(appeal.data) == "taken"
        site.enter(appeal.data)
        assert await site.client(ALICE).post_appeal(appeal.data) == "open"


def trained(site: Site, steps: int) -> None:
    """Steps with work of BOB's."""
    for step in range(len(site.relay.desk.ledger.state.trained), steps):
        work = site.work(BOB, step=step, checkpoint_step=step, sha256=step.to_bytes(32, "big"))
        batch = make_batch(site.manifest.id, step, [work])
        site.enter(work.data, make_verdict(work).data, batch, make_trained(site.manifest.id, step))


async def test_files_are_kept_for_appeals_that_may_come_and_later_ones_are_told(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged late, appealed against as late as may be, and once more: its file is there until no appeal can come."""
    monkeypatch.setattr(desk, "KEEP_FILE_STEPS", 1)
    batch = BatchSpec(rollouts_per_step=4, max_staleness=0, total_steps=99)
    window = {"batch": batch, "credits": CreditSpec(maturity_steps=2)}
    site = await build(msgspec.structs.replace(SHARED, **window))
    work, client, heads = site.work(ALICE), site.client(ALICE), itertools.count(3)

    def beat(step: int) -> bool:
        """Whether the file is still there with this step's head."""
        state = site.relay.desk.ledger.state
        at = {"step": step, "checkpoint_step": step, "oldest_checkpoint_step": step}
        head = make_head(next(heads), run_id=site.manifest.id, ledger_length=state.length, ledger_tip=state.tip, **at)
        site.relay.desk.accept_head(head.data)
        return (site.directory / "relay" / "submissions" / work.id.hex()).exists()

    with trio.fail_after(20):
        await client.submit(work.data, write_file(site.directory, CONTENT))
        trained(site, 2)
        verdict = make_verdict(work, outcome="reject", reason="sampling: margin")
        site.enter(work.data, verdict.data)
        trained(site, 4)
        assert beat(4)
        first, second, third = (make_appeal(ALICE, verdict, reason=one, issued_at_ms=now_ms()) for one in "abc")
        assert await client.post_appeal(first.data) == "taken"
        site.enter(first.data)
        trained(site, 5)
        assert beat(5)  # long after it was rejected, but another validator needs it
        site.enter(make_answer(work, first, by=DAVE, outcome="undecided", reason="file: x").data)
        trained(site, 7)
        assert beat(7)
        assert await client.post_appeal(second.data) == "taken"
        trained(site, 8)
        assert not beat(8)
        with pytest.raises(RefusedError, match="more than 2 steps ago") as caught:
            await client.post_appeal(third.data)
    assert caught.value.code == "appeal-too-late"
    assert "relays keep the file no longer" in caught.value.hint


async def test_where_every_validator_has_judged_no_appeal_is_taken(build: Build) -> None:
    site = await build()
    rejected = Rejected(site)
    assert await refused(lambda: site.client(ALICE).post_appeal(rejected.appeal().data)) == "appeal-nobody-left"


# Standing, and what proves use.


async def test_standing_names_the_step_whose_batch_has_the_work(build: Build) -> None:
    site = await build(make_manifest(batch=msgspec.structs.replace(make_manifest().batch, rollouts_per_step=4)))
    work = site.work(ALICE)
    batch = make_batch(site.manifest.id, 0, [work])
    site.enter(work.data, make_verdict(work).data, batch)
    client = site.client(ALICE)
    with trio.fail_after(10):
        standing = await client.standing([work.id, b"x" * 32])
        assert [(row.submission, row.state, row.used_in) for row in standing.submissions] == [(work.id, "accepted", 0)]
        found, trained = await client.step_entries(0)
        assert (found.data, trained) == (batch, None)
    assert await refused(lambda: client.step_entries(1)) == "not-yet"
    site.enter(make_trained(site.manifest.id, 0))
    with trio.fail_after(10):
        assert (await client.step_entries(0))[1] is not None
        assert (await site.client(BOB).standing([work.id])).submissions == ()  # not its own


class LookedAt(dict[bytes, Any]):
    """Counts the appeals that are looked at."""

    count = 0

    def __getitem__(self, key: bytes) -> Any:
        self.count += 1
        return super().__getitem__(key)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


def test_standing_looks_at_no_appeals_of_others() -> None:
    judges = (VALIDATOR, CAROL)
    manifest = make_manifest(validators=tuple(judge.peer_id.public_key for judge in judges))
    state, looked = LedgerState(MANIFEST.id, manifest), []
    for author in (ALICE, *(Identity.from_phrase(f"contributor {number}") for number in range(30))):
        work = make_submission(author, MANIFEST.id)
        verdict = make_verdict(work, outcome="reject", reason="toploc: x")
        for entry in (work, verdict, appeal := make_appeal(author, verdict)):
            state.apply(entry.data)
        state._appeals.cases = cases = LookedAt(state.appeals)
        assert len(standing_of(state, ALICE.peer_id, []).appeals) == 1
        looked.append(cases.count)
    assert len(set(looked)) == 1
    assert [row.appeal for row in standing_of(state, author.peer_id, []).appeals] == [appeal.id]


async def test_standing_takes_no_question_that_is_too_long(build: Build) -> None:
    site = await build()
    assert await refused(lambda: site.client(ALICE).standing([bytes([n]) * 32 for n in range(65)])) == "malformed"
    assert await refused(lambda: site.client(ALICE).standing([b"x" * 32] * 200)) == "too-large"


# Heartbeats.


class Clock:
    def __init__(self) -> None:
        self.ms = now_ms()

    def __call__(self) -> int:
        return self.ms


async def test_silent_nodes_leave_the_active_set_and_come_back_by_speaking(build: Build) -> None:
    clock = Clock()
    site = await build(clock=clock)

    async def beat(by: Identity, sequence: int) -> int:
        record = make_heartbeat(by, site.manifest.id, sequence, issued_at_ms=clock.ms)
        return (await site.client(by).post_heartbeat(record.data)).active

    with trio.fail_after(10):
        assert await beat(ALICE, 1) == 1
        clock.ms += int(ACTIVE_S * 1000) - 1
        assert await beat(BOB, 1) == 2
        clock.ms += 2
        assert [one.author for one in await site.client(BOB).active()] == [BOB.peer_id]
        assert await beat(ALICE, 2) == 2
        assert [one.author for one in await site.client(BOB).active()] == [ALICE.peer_id, BOB.peer_id]
        assert [one.author for one in await site.client(BOB).active(1)] == [ALICE.peer_id]


async def test_one_key_is_one_node(build: Build) -> None:
    """A key copied to a second computer; the first one's restart goes on at once, and so does its successor later."""
    clock = Clock()
    site = await build(clock=clock)

    def beat(sequence: int, instance: bytes) -> Callable[[], Awaitable[Any]]:
        changes = {"instance": instance, "issued_at_ms": clock.ms}
        data = make_heartbeat(ALICE, site.manifest.id, sequence, **changes).data
        return lambda: site.client(ALICE).post_heartbeat(data)

    first, second = b"1" * 16, b"2" * 16
    with trio.fail_after(10):
        await beat(1, first)()
        with pytest.raises(RefusedError) as caught:
            await beat(9, second)()
        assert caught.value.code == "second-instance"
        assert open_envelope(caught.value.evidence, Heartbeat).record.instance == first  # who is refused can check it
        await beat(2, first)()
        clock.ms += int(ACTIVE_S * 1000)
        await beat(9, second)()
        assert await refused(beat(10, first)) == "second-instance"


async def test_heartbeats_that_lie_are_refused_by_name(build: Build) -> None:
    """A replay, another's, of another run, five minutes off either way, and one that is no heartbeat."""
    site = await build()

    async def code(by: Identity = ALICE, author: Identity = ALICE, **changes: Any) -> str:
        changes = {"issued_at_ms": now_ms(), **changes}
        data = make_heartbeat(author, changes.pop("run_id", site.manifest.id), **changes).data
        return await refused(lambda: site.client(by).post_heartbeat(data))

    with trio.fail_after(10):
        await site.client(ALICE).post_heartbeat(make_heartbeat(ALICE, site.manifest.id, 5, issued_at_ms=now_ms()).data)
    assert await code(sequence=4) == "stale"
    assert await code(by=MALLORY) == "not-yours"
    assert await code(run_id=b"x" * 32) == "wrong-run"
    assert await code(sequence=6, issued_at_ms=now_ms() - 310_000) == "bad-clock"
    assert await code(sequence=6, issued_at_ms=now_ms() + 310_000) == "bad-clock"
    assert await refused(lambda: site.client(ALICE).post_heartbeat(b"x" * 4096)) == "too-large"


async def test_keys_that_cost_nothing_push_no_contributor_out(build: Build) -> None:
    """A flood of heartbeats by made-up keys."""
    site = await build(make_manifest(admission=AdmissionSpec(work_bits=BITS)))
    site.enter(recent(ALICE, site, bits=BITS).data)
    hearts = Hearts(site.relay.desk, max_hearts=3)
    known = [ALICE, VALIDATOR]
    for who in [*known, *(Identity.from_phrase(f"stranger {number}") for number in range(5))]:
        hearts.hear(make_heartbeat(who, site.manifest.id, issued_at_ms=now_ms()).data, who.peer_id)
    authors = {open_heartbeat(data).author for data in hearts.active()}
    assert len(authors) == 3
    assert authors.issuperset({who.peer_id for who in known})


def open_heartbeat(data: bytes) -> Signed[Any]:
    from protocol.envelope import open_envelope
    from protocol.records import Heartbeat

    return open_envelope(data, Heartbeat)

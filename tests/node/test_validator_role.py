"""A validator among relays: every submission gets a verdict with a reason, whatever it is and whatever breaks."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from factories import make_tolerance, receipt_of
from relay_world import MANIFEST, submission_of
from validator_world import World, accepting, publish, world

from node.compute.process import ChildDiskError, NoChildError
from node.feeds import Feeds
from node.inference.outbox import Outbox
from node.relay_client import RelayClient
from node.status import StatusBoard
from node.validator import draws, own_faults, role
from node.validator.cases import Case, Cases
from node.validator.docket import Docket
from node.validator.findings import Findings
from node.validator.own_faults import OwnFaults
from node.validator.role import ValidatorRole
from protocol.draw import beacon_of, check_rate, is_drawn, is_first_after
from protocol.envelope import Signed, open_envelope
from protocol.errors import DataDirError, RefusedError, RelayError
from protocol.identity import Identity
from protocol.ledger import LedgerState, open_entry
from protocol.records import Head, Receipt, Submission, Verdict

ALICE, BOB, DAVE = (Identity.from_phrase(name) for name in ("alice", "bob", "dave"))
ROUNDS = [(step, index) for step in (0, 1) for index in range(4)]


async def enter(made: World, *submissions: Signed[Submission]) -> None:
    """Put submissions and their verdicts into the ledger, as the trainer does."""
    for submission in submissions:
        await made.verdict(submission)
        feed = await made.client().feed(0, kinds=[Verdict.KIND])
        verdict = next(item.signed for item in feed if item.signed.record.submission == submission.id)
        made.trainer.ledger.append([submission.data, verdict.data])


async def test_every_draw_of_a_run_can_be_made_again_from_public_records(tmp_path: Path) -> None:
    """From the relay's feed and ledger alone: who was drawn, at which rate, by which beacon."""
    with trio.fail_after(60):
        async with world(tmp_path) as made:
            for count, (step, index) in enumerate(ROUNDS, 1):
                handed_in = [await made.submit(who, index, step=step) for who in (ALICE, BOB, DAVE)]
                await made.until_noticed(3 * count)
                made.trainer.beat()
                await enter(made, *handed_in)
            made.trainer.beat()
            feed = await made.client().feed(0)
            entries = [entry.data for entry in await made.client().ledger(0)]
            computed = {(one.step, one.sha256) for one in made.compute.asked}
    receipts = {item.signed.id: item.receipt for item in feed if item.receipt}
    verdicts = [item.signed.record for item in feed if isinstance(item.signed.record, Verdict)]
    assert len(verdicts) == 3 * len(ROUNDS)
    outcomes = [draw_again(verdict, receipts, entries) for verdict in verdicts]
    assert outcomes == [verdict.draw.drawn for verdict in verdicts]
    submissions = {item.signed.id: item.signed.record for item in feed if item.receipt}
    drawn = {submissions[verdict.submission] for verdict in verdicts if verdict.draw.drawn}
    assert computed == {(one.step, one.sha256) for one in drawn}
    by_beacon = [verdict for verdict in verdicts if verdict.draw.beacon]
    assert len(by_beacon) >= 9  # from the fourth submission on, but for heads that came before their submission
    assert {verdict.draw.drawn for verdict in by_beacon} == {True, False}


def draw_again(verdict: Verdict, receipts: dict[bytes, Signed[Receipt]], entries: list[bytes]) -> bool:
    """Whether a submission had to be checked in full, from what anybody can ask a relay for."""
    contributor = next(open_entry(entry).author for entry in entries if open_entry(entry).id == verdict.submission)
    if not verdict.draw.beacon:  # nobody is excused without one
        return True
    beacon = open_envelope(verdict.draw.beacon, Head).require_author(MANIFEST.record.trainer_id)
    assert is_first_after(beacon.record, receipts[verdict.submission].record)
    state = LedgerState(MANIFEST.id, MANIFEST.record)
    for entry in entries[: beacon.record.ledger_length]:
        state.apply(entry)
    assert state.tip == beacon.record.ledger_tip
    rate = check_rate(state.record(contributor, state.length), MANIFEST.record.checks)
    assert rate == verdict.draw.rate
    return is_drawn(beacon_of(beacon), verdict.submission, rate=rate)


async def test_newcomers_are_checked_in_full_without_waiting_for_a_beacon(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            submission = await made.submit(ALICE, 0)
            verdict = await made.verdict(submission)
            assert (verdict.draw.drawn, verdict.draw.rate, verdict.draw.why) == (True, 1.0, "newcomer")
            assert [one.sha256 for one in made.compute.asked] == [submission.record.sha256]


async def test_policy_that_goes_back_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """Grinding: a contributor has used a newer policy, and hands in what an older one gave."""
    newer = {"step": 1, "checkpoint_step": 1, "checkpoint": b"n" * 32}
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.trainer.ledger.append([submission_of(ALICE, b"before", **newer).data])
            made.trainer.beat()
            while ledger_behind(made):  # noqa: ASYNC110 - a file's size gives no event
                await trio.sleep(0.01)
            verdict = await made.verdict(await made.submit(ALICE, 1, step=1, checkpoint_step=0))
            assert (verdict.outcome, verdict.hard) == ("reject", False)
            assert verdict.reason == "policy: checkpoint 0 after checkpoint 1, which it used at step 1"
            assert (await made.verdict(await made.submit(BOB, 0, step=1, checkpoint_step=0))).outcome == "accept"
            assert [one.index for one in made.compute.asked] == [0]


async def test_veteran_waits_for_its_beacon_while_others_are_judged(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            await make_veteran(made, ALICE)
            waiting = await made.submit(ALICE, 3)
            assert (await made.verdict(await made.submit(BOB, 0))).outcome == "accept"
            assert not made.docket.judged(waiting.id)
            beacon = made.trainer.beat()
            verdict = await made.verdict(waiting)
            assert open_envelope(verdict.draw.beacon, Head).id == beacon.id
            assert verdict.draw.rate == pytest.approx(2 / 3)


async def make_veteran(made: World, who: Identity, accepted: int = 3) -> None:
    for index in range(accepted):
        submission = await made.submit(who, index)
        await made.until_noticed(index + 1)
        made.trainer.beat()
        await enter(made, submission)
    made.trainer.beat()
    while made.docket.opened(9) or ledger_behind(made):  # noqa: ASYNC110 - a file's size gives no event
        await trio.sleep(0.01)


def ledger_behind(made: World) -> bool:
    copy, ledger = (made.tmp_path / name / "segment-00000000" for name in ("copy", "ledger"))
    return not copy.exists() or copy.stat().st_size < ledger.stat().st_size


async def test_without_a_beacon_everything_is_checked_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is away, or a relay's receipt names a head that never was."""
    monkeypatch.setattr(draws, "PATIENCE_S", 0.3)
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            await make_veteran(made, ALICE)
            verdict = await made.verdict(await made.submit(ALICE, 3))
            assert (verdict.draw.drawn, verdict.draw.why) == (True, "no beacon came")


async def test_checkpoint_that_no_relay_has_is_undecided_at_once_and_holds_up_nobody(tmp_path: Path) -> None:
    """A contributor names policies that do not exist, again and again."""
    with trio.fail_after(20):
        async with world(tmp_path, "carol", "erin") as made:
            strange = [await made.submit(ALICE, index, checkpoint=bytes([index]) * 32) for index in range(4)]
            honest = await made.submit(BOB, 0)
            assert (await made.verdict(honest)).outcome == "accept"
            for submission in strange:
                verdict = await made.verdict(submission)
                assert (verdict.outcome, verdict.hard) == ("undecided", False)
                assert verdict.reason.startswith("policy: no relay knows the checkpoint")


async def test_policy_that_only_a_relay_has_is_fetched(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with world(tmp_path, "carol", "erin") as made:
            checkpoint = await publish(made.shelves[1], tmp_path / "second", step=1)
            made.trainer.beat(step=1, checkpoint_step=1)
            submission = await made.submit(ALICE, 0, step=1, checkpoint_step=1, checkpoint=checkpoint)
            assert (await made.verdict(submission)).outcome == "accept"


async def test_policy_named_with_anothers_step_is_a_lie(tmp_path: Path) -> None:
    """A contributor passes an old policy off as a newer one, to slip through the staleness bound."""
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.trainer.beat(step=1)
            verdict = await made.verdict(await made.submit(ALICE, 0, step=1, checkpoint_step=1))
            assert (verdict.outcome, verdict.hard) == ("reject", True)
            assert verdict.reason == "policy: named as checkpoint 1, but it is checkpoint 0"


@pytest.mark.parametrize("content", [b"PAR1" + bytes(200) + b"PAR1", b"x"], ids=["parquet", "one byte"])
async def test_any_file_gets_a_verdict_and_the_contributor_learns_the_reason(tmp_path: Path, content: bytes) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    with trio.fail_after(20):
        async with world(tmp_path, reader="real") as made, trio.open_nursery() as nursery:
            submission = await made.submit(ALICE, 0, content=content)
            outbox.add(submission, tmp_path / "0")
            feeds = Feeds(lambda: [made.client()], kinds=[Verdict.KIND], cursors_path=None, about=ALICE.peer_id)
            await nursery.start(feeds.run)
            _, item = await feeds.next()
            assert outbox.judged(item.signed)
            nursery.cancel_scope.cancel()
    assert outbox.reasons() == {"schema": 1}
    assert item.signed.record.reason.startswith("schema: ")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little time passes until a validator tries again."""
    monkeypatch.setattr(own_faults, "RETRY_S", 0.02)
    monkeypatch.setattr(role, "RETRY_S", 0.02)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("owner", "method"),
    [(RelayClient, "file"), (Docket, "open"), (Docket, "add")],
    ids=["for the file", "for the case", "for the verdict"],
)
async def test_a_full_disk_of_the_validators_costs_the_contributor_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """What finds no room is done again later: the feed waits, the case waits, the findings are found again."""
    real, refusals = getattr(owner, method), iter([True, True])

    def no_room(*args: Any, **options: Any) -> Any:
        if next(refusals, False):
            raise DataDirError("cannot write it: No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(owner, method, no_room)
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            assert (await made.verdict(await made.submit(ALICE, 0))).outcome == "accept"
    assert next(refusals, False) is False


@pytest.mark.usefixtures("impatient")
async def test_without_room_nothing_is_fetched_or_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_faults, "ROOM_BYTES", 1 << 62)
    fetch, fetched = RelayClient.file, []

    async def noted(client: RelayClient, submission: Signed[Submission], path: Path) -> None:
        fetched.append(submission.id)
        await fetch(client, submission, path)

    monkeypatch.setattr(RelayClient, "file", noted)
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            submission = await made.submit(ALICE, 0)
            while "bytes of room" not in made.board.snapshot()["activity"]:  # noqa: ASYNC110 - a board gives no event
                await trio.sleep(0.01)
            assert (fetched, made.screening.asked, made.docket.judged(submission.id)) == ([], [], False)
            monkeypatch.setattr(own_faults, "ROOM_BYTES", 0)
            assert (await made.verdict(submission)).outcome == "accept"


async def test_a_file_that_is_too_large_for_the_disk_holds_up_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contributor hands in the largest files that a run takes, and they find no room beside the policies."""
    monkeypatch.setattr(own_faults, "ROOM_BYTES", 100)
    monkeypatch.setattr(own_faults, "shutil", SimpleNamespace(disk_usage=lambda directory: SimpleNamespace(free=1000)))
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            large = [await made.submit(ALICE, index, content=bytes(950)) for index in range(4)]
            assert (await made.verdict(await made.submit(BOB, 0))).outcome == "accept"
            assert not any(made.docket.judged(one.id) for one in large)


class AfterAnHour(ValidatorRole):
    """Own faults last for an hour, of which a test need not wait for more than a moment."""

    def _pause(self, case: Case, error: Exception) -> Findings | None:
        case.began -= 3600.0
        return super()._pause(case, error)


@pytest.mark.usefixtures("impatient")
async def test_after_an_hour_without_room_a_file_may_still_be_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = RelayClient.file
    troubles = iter([DataDirError("cannot write it: No space left on device"), RelayError("the relay went silent")])

    async def file(client: RelayClient, submission: Signed[Submission], path: Path) -> None:
        if (trouble := next(troubles, None)) is not None:
            raise trouble
        await fetch(client, submission, path)

    monkeypatch.setattr(RelayClient, "file", file)
    with trio.fail_after(20):
        async with world(tmp_path, role=AfterAnHour) as made:
            assert (await made.verdict(await made.submit(ALICE, 0))).outcome == "accept"


def test_no_case_has_waited_while_nobody_could_be_judged(tmp_path: Path) -> None:
    docket, now_s, waited = Docket(tmp_path / "docket.sqlite"), [0.0], []
    submission = submission_of(ALICE, b"content")
    docket.open(submission, receipt_of(submission), seen_sequence=1)
    cases = Cases(docket, lambda: now_s[0])
    for now_s[0], excused_s in ((0.0, 0.0), (100.0, 90.0)):
        cases.excuse(excused_s)
        assert list(cases.startable(lambda case, waited_s: waited.append(waited_s))) == []
    assert waited == [0.0, 10.0]


async def test_file_that_no_run_has_is_not_looked_for_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contributor signs for more bytes than any disk has, and a relay of its own for having them: nobody waits."""
    monkeypatch.setattr(role, "max_file_bytes", lambda manifest: 4)
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            verdict = await made.verdict(await made.submit(ALICE, 0, content=b"large"))
            assert (verdict.outcome, verdict.hard) == ("reject", True)
            assert verdict.reason == "schema: a rollout file of 5 bytes; this run's files have at most 4"
            assert (await made.verdict(await made.submit(BOB, 0))).outcome == "accept"


@pytest.mark.usefixtures("impatient")
async def test_evidence_counts_once_however_often_its_verdict_finds_no_room(tmp_path: Path) -> None:
    """Two submissions of a contributor are judged side by side, again and again, while the disk is full."""
    long = [answers(nats=1.0, tag=tag)[0] for tag in range(40)]
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.screening.answer = lambda submission: accepting(answers=long)
            made.compute.answer = lambda submission: accepting(evidence=[[0.0, 0.0, 0.0]] * 5)
            made.answers._db.row("PRAGMA max_page_count = 1")  # what it has is kept: it only grows no more
            handed_in = [await made.submit(ALICE, index) for index in range(2)]
            while [one.index for one in made.compute.asked].count(1) < 3:  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert not any(made.docket.judged(one.id) for one in handed_in)
            made.answers._db.row("PRAGMA max_page_count = 1000000")
            assert [(await made.verdict(one)).outcome for one in handed_in] == ["accept", "accept"]
            assert made.suspicions._read(ALICE.peer_id.public_key).soft[0].values == 10


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "fault",
    [
        ChildDiskError("DataDirError: cannot read it"),
        NoChildError("the engine cannot be started"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
    ids=["disk of a child", "no child", "disk"],
)
async def test_fault_of_this_computer_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(role, "GIVE_UP_S", 0.0)
    faults = iter([fault] * 4)

    def answer(submission: Submission) -> dict[str, Any]:
        for one in faults:
            raise one
        return accepting()

    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.compute.answer = answer
            assert (await made.verdict(await made.submit(ALICE, 0))).outcome == "accept"
            assert len(made.compute.asked) == 5


async def test_nothing_begins_for_a_while_after_a_fault_of_this_computer(autojump_clock: Any) -> None:
    faults, board = OwnFaults(), StatusBoard(role="validator", peer_id=ALICE.peer_id, run="test")
    await faults.wait(board)
    assert trio.current_time() == 0
    faults.met(DataDirError("cannot write it", hint="make room"))
    await faults.wait(board)
    assert trio.current_time() == own_faults.RETRY_S
    assert "cannot write it; make room" in board.snapshot()["activity"]


async def test_crash_is_forgiven_once_and_then_undecided(tmp_path: Path) -> None:
    """A submission on which the engine dies every time costs nobody anything, and the next one is judged."""
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.compute.crashes = {0: 1, 1: 10}
            first, second, third = [await made.submit(ALICE, index) for index in range(3)]
            assert (await made.verdict(first)).outcome == "accept"
            verdict = await made.verdict(second)
            assert (verdict.outcome, verdict.hard) == ("undecided", False)
            assert "killed by signal 9" in verdict.reason
            assert (await made.verdict(third)).outcome == "accept"
            assert [one.index for one in made.compute.asked].count(1) == 2


async def test_fault_of_the_program_itself_is_undecided(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.screening.answer = lambda submission: {"outcome": "maybe"} if submission.index == 0 else accepting()
            verdict = await made.verdict(await made.submit(ALICE, 0))
            assert (verdict.outcome, verdict.hard) == ("undecided", False)
            assert verdict.reason.startswith("internal: ValidationError")
            assert (await made.verdict(await made.submit(ALICE, 1))).outcome == "accept"


async def test_lost_file_is_undecided_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay signs for a file and does not give it."""
    monkeypatch.setattr(role, "GIVE_UP_S", 0.5)
    with trio.fail_after(20):
        async with world(tmp_path, "carol", "erin") as made:
            monkeypatch.setattr(made.relays[0].store, "open_file", refuse_file)
            lost = await made.submit(ALICE, 0)
            kept = await made.submit(BOB, 0, relay=1)
            assert (await made.verdict(kept, relay=1)).outcome == "accept"
            verdict = await made.verdict(lost)
            assert verdict.outcome == "undecided"
            assert verdict.reason.startswith("file: the rollouts, from a relay that said it has them, did not come")


def refuse_file(submission_id: bytes) -> None:
    raise RefusedError("it is lost", code="not-found")


def answers(*, nats: float, tag: int = 0) -> list[dict[str, Any]]:
    """What screening says of one long answer; equal tags are equal answers."""
    key = hashlib.sha256(bytes([tag])).digest()
    return [{"prompt": b"p" * 16, "answer": key[:16], "sketch": key * 8, "nats": nats}]


async def test_copy_of_anothers_answer_is_checked_in_full_and_rejected(tmp_path: Path) -> None:
    """A veteran hands in another contributor's answers and hopes not to be drawn."""
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.screening.answer = lambda submission: accepting(answers=answers(nats=90.0))
            original = await made.submit(BOB, 0)
            assert (await made.verdict(original)).outcome == "accept"
            made.trainer.beat()
            forged = {"outcome": "reject", "hard": False, "reason": "sampling: a token lost by 3.1", "checks": []}
            made.compute.answer = lambda submission: forged
            verdict = await made.verdict(await made.submit(ALICE, 0))
            assert (verdict.outcome, verdict.hard, verdict.draw.drawn) == ("reject", True, True)
            assert verdict.reason.startswith("duplicate: 1 of 1 long answers are copies of submission")
            assert BOB.peer_id.short in verdict.reason


async def test_answer_that_its_seeds_prove_is_accepted_whoever_came_first(tmp_path: Path) -> None:
    """A thief with a quicker relay hands in an honest node's answers first: the honest node loses nothing."""
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.screening.answer = lambda submission: accepting(answers=answers(nats=90.0))
            await made.verdict(await made.submit(BOB, 0))
            made.trainer.beat()
            verdict = await made.verdict(await made.submit(ALICE, 0))
            assert verdict.outcome == "accept"
            (check,) = [check for check in verdict.checks if check.name == "duplicate"]
            assert (check.outcome, check.numbers["copies"]) == ("pass", 1.0)


async def test_history_of_small_departures_is_a_reason(tmp_path: Path) -> None:
    """Every submission of a quantised model passes alone; all of them together do not."""
    far = 50 * make_tolerance().honest_margin
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            made.compute.answer = lambda submission: accepting(evidence=[[far, 0.0, 0.0]] * 400)
            verdict = await made.verdict(await made.submit(ALICE, 0))
            assert (verdict.outcome, verdict.hard) == ("reject", False)
            assert verdict.reason.startswith("history: ")

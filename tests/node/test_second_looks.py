"""What a validator could not tell is judged again: by itself, seldom, and all the way into the ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from factories import (
    OPERATOR,
    VALIDATOR,
    make_batch,
    make_eviction,
    make_head,
    make_manifest,
    make_submission,
    make_tolerance,
    make_trained,
    make_verdict,
    receipt_of,
    sealed,
)
from relay_world import MANIFEST
from validator_world import World, accepting, publish, world

from node.feeds import Feeds
from node.inference.outbox import Outbox
from node.trainer.collector import Collector
from node.validator import again, role
from node.validator.again import FIRST_WAIT_S, GROWTH, MAX_LOOKS, MAX_OF_CONTRIBUTOR, SecondLooks
from node.validator.bench import Bench
from node.validator.cases import Case
from node.validator.docket import Docket
from node.validator.draws import Draws
from node.validator.findings import Findings, undecided
from protocol.envelope import Signed
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import BatchSpec, CreditSpec, Draw, Submission, Verdict

ALICE, BOB, CARL, DAVE = (Identity.from_phrase(name) for name in ("alice", "bob", "carl", "dave"))
RELAY = Identity.from_phrase("relay").peer_id
TROUBLE = undecided("internal: the validator's engine failed: killed by signal 9")


# Through the role, a relay and the trainer's collector.


@asynccontextmanager
async def collecting(made: World) -> AsyncIterator[LedgerState]:
    """A trainer that reads the relay's feed into its ledger."""
    feeds = Feeds(lambda: [made.client()], kinds=[Submission.KIND, Verdict.KIND], cursors_path=None)
    collector = Collector(OPERATOR, made.trainer.ledger, feeds, made.tmp_path / "collected")
    async with trio.open_nursery() as nursery:
        await nursery.start(feeds.run)
        nursery.start_soon(collector.run)
        yield made.trainer.ledger.state
        nursery.cancel_scope.cancel()


async def until_state(ledger: LedgerState, submission: Signed[Submission], state: str) -> None:
    while submission.id not in ledger.submissions or ledger.submissions[submission.id].state != state:  # noqa: ASYNC110
        await trio.sleep(0.01)


async def outcomes(made: World, submission: Signed[Submission]) -> list[Verdict]:
    feed = await made.client().feed(0, kinds=[Verdict.KIND])
    return [one.signed.record for one in feed if one.signed.record.submission == submission.id]


async def test_policy_that_was_missing_comes_and_the_work_is_credited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(again, "FIRST_WAIT_S", 0.4)
    monkeypatch.setattr(again, "GROWTH", 1)
    with trio.fail_after(30):
        async with world(tmp_path) as made, collecting(made) as ledger:
            missing = await publish(made.shelves[0], tmp_path / "second", step=1)
            with monkeypatch.context() as away:
                for method in ("manifest", "draft"):
                    away.setattr(made.shelves[0], method, lambda checkpoint: None)
                made.trainer.beat(step=1, checkpoint_step=1)
                work = await made.submit(ALICE, 0, step=1, checkpoint_step=1, checkpoint=missing)
                assert (await made.verdict(work)).reason.startswith("policy: no relay knows the checkpoint")
                await until_state(ledger, work, "undecided")
                assert f"will judge {work.id.hex()[:12]} again at " in await told(made)
                assert "because policy: no relay knows the checkpoint" in await told(made)
            await until_state(ledger, work, "accepted")
            assert [one.outcome for one in await outcomes(made, work)] == ["undecided", "accept"]
            assert ledger.contributors[ALICE.peer_id].credits == work.record.output_tokens
            assert made.docket.looks() == []
            assert made.docket.outcomes() == {"accept": 1}


async def told(made: World) -> str:
    while not (text := made.board.snapshot()["details"].get("judges_again")):  # noqa: ASYNC110
        await trio.sleep(0.01)
    return str(text)


async def test_engine_that_recovers_decides_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two crashes end a case undecided, and two more the first look, which says nothing twice."""
    monkeypatch.setattr(role, "RETRY_S", 0.02)
    monkeypatch.setattr(again, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(again, "GROWTH", 1)
    with trio.fail_after(30):
        async with world(tmp_path) as made, collecting(made) as ledger:
            made.compute.crashes = {0: 4}
            work = await made.submit(ALICE, 0)
            await until_state(ledger, work, "accepted")
            assert [one.outcome for one in await outcomes(made, work)] == ["undecided", "accept"]
            assert len(made.compute.asked) == 5


async def test_file_that_a_relay_withholds_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look asks once: it does not wait as long as a look may take, which here is beyond the test's end."""
    monkeypatch.setattr(role, "RETRY_S", 0.02)
    monkeypatch.setattr(role, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(role, "LOOK_AGAIN_S", 10**6)
    monkeypatch.setattr(again, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(again, "GROWTH", 1)

    async def withheld(self: Any, *args: Any) -> bool:
        await trio.lowlevel.checkpoint()
        asked.append(args)
        return False

    asked: list[Any] = []
    monkeypatch.setattr(role.ValidatorRole, "_fetch_from", withheld)
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            assert (await made.verdict(await made.submit(ALICE, 0))).reason.startswith("file: ")
            assert made.docket.looks() or len(asked) >= MAX_LOOKS
            while made.docket.looks():  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert len(asked) > MAX_LOOKS


async def test_evidence_of_what_could_not_be_told_is_held_against_nobody(tmp_path: Path) -> None:
    """It would count once more at every look."""
    evidence = [[50 * make_tolerance().honest_margin, 0.0, 0.0]] * 400
    with trio.fail_after(20):
        async with world(tmp_path) as made:
            sorry = {"outcome": "undecided", "reason": "reward: the environment could not tell", "evidence": evidence}
            made.compute.answer = lambda submission: accepting(**sorry)
            verdict = await made.verdict(await made.submit(ALICE, 0))
    assert (verdict.outcome, verdict.reason) == ("undecided", sorry["reason"])


def test_contributor_keeps_the_decision_however_late_the_first_verdict_comes(tmp_path: Path) -> None:
    """Two relays, one of which is behind: what proves credit is not replaced by what proves nothing."""
    outbox = Outbox(tmp_path / "outbox.sqlite")
    work = make_submission(ALICE, MANIFEST.id)
    outbox.add(work, tmp_path / "0")
    first, decision = make_verdict(work, outcome="undecided", reason="internal: x"), make_verdict(work)
    assert [outbox.judged(one) for one in (first, decision, first)] == [True, True, False]
    assert [one.id for one in outbox.verdicts(work.id)] == [decision.id]
    assert outbox.count("accepted") == 1


# When, and how often.


class Court:
    """A validator's docket and ledger, with a clock that the test turns."""

    def __init__(self, tmp_path: Path, **manifest: Any) -> None:
        self.path = tmp_path / "docket.sqlite"
        self.manifest = sealed(make_manifest(credits=CreditSpec(maturity_steps=2), **manifest), OPERATOR)
        self.ledger = LedgerState(self.manifest.id, self.manifest.record)
        self.draws = Draws(self.ledger)
        self.draws.hear(make_head(self.manifest.id, 1, previous_sequence=0))
        self.bench = Bench(VALIDATOR.peer_id, self.ledger, self.draws)
        self.ms = 1_000_000
        self.start()

    def start(self) -> None:
        self.docket = Docket(self.path)
        self.looks = SecondLooks(self.docket, self.ledger, self.bench, clock_ms=lambda: self.ms)

    def judge(self, index: int = 0, *, who: Identity = ALICE, findings: Findings = TROUBLE) -> Signed[Submission]:
        """A submission's first verdict."""
        work = make_submission(who, self.manifest.id, index=index)
        self.docket.open(work, receipt_of(work), seen_sequence=1)
        opened = next(one for one in self.docket.opened(99) if one.submission.id == work.id)
        case = Case(opened, 0.0, relays=None)  # type: ignore[arg-type]
        self.looks.expect(case, findings)
        self.docket.add(make_verdict(work, outcome=findings.outcome, reason=findings.reason))
        return work

    def wait(self, seconds: float) -> Case | None:
        self.ms += int(1000 * seconds)
        return next(iter(self.looks.startable([RELAY])), None)

    def start_all(self, seconds: float) -> list[Case]:
        self.ms += int(1000 * seconds)
        return list(self.looks.startable([RELAY]))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            step = len(self.ledger.trained)
            work = make_submission(BOB, self.manifest.id, step=step, checkpoint_step=step)
            batch = make_batch(self.manifest.id, step, [work])
            for entry in (work.data, make_verdict(work).data, batch, make_trained(self.manifest.id, step)):
                self.ledger.apply(entry)

    def fails(self, case: Case, findings: Findings = TROUBLE) -> None:
        case.busy = False
        self.looks.concluded(case, findings)


@pytest.fixture
def court(tmp_path: Path) -> Court:
    return Court(tmp_path)


def test_looks_have_growing_waits_and_an_end(court: Court) -> None:
    """Never in a hot loop: a submission that breaks the engine each time is left alone soon, and for good."""
    work = court.judge()
    for look in range(MAX_LOOKS):
        wait_s = FIRST_WAIT_S * GROWTH**look
        assert court.wait(wait_s - 1) is None
        case = court.wait(1)
        assert case is not None
        assert (case.submission.id, case.again, list(case.relays)) == (work.id, True, [RELAY])
        assert court.wait(0) is None  # it is being worked on
        court.fails(case)
    assert court.wait(10**6) is None
    assert court.docket.looks() == []
    assert court.looks.text() == ""


def test_a_restart_forgets_neither_the_wait_nor_the_count(court: Court) -> None:
    """A submission that takes the whole validator down, again and again."""
    court.judge()
    for look in range(MAX_LOOKS):
        court.start()
        assert court.wait(FIRST_WAIT_S * GROWTH**look - 1) is None
        court.start()
        assert court.wait(1) is not None
    court.start()
    assert court.wait(10**6) is None


def test_a_look_that_decides_is_the_last(court: Court) -> None:
    work = court.judge()
    case = court.wait(FIRST_WAIT_S)
    assert case is not None
    assert court.docket.unposted(RELAY)[0][0] == work.id
    court.docket.posted(work.id, RELAY)
    decision = make_verdict(work)
    court.docket.add(decision)
    court.fails(case, Findings("accept", False, "every check passed"))
    assert court.wait(10**6) is None
    assert court.docket.unposted(RELAY) == [(work.id, decision.data)]  # relays that had the first one get this too
    court.docket.add(make_verdict(work, outcome="undecided"))
    assert court.docket.outcomes() == {"accept": 1}


@pytest.mark.parametrize(
    "findings",
    [
        Findings("accept", False, "every check passed"),
        undecided("policy: checkpoint 0 is gone; step 9 is the oldest that is still taken", passing=False),
    ],
    ids=["decided", "for good"],
)
def test_what_cannot_have_changed_is_not_judged_again(court: Court, findings: Findings) -> None:
    court.judge(findings=findings)
    assert court.wait(10**6) is None


def test_a_look_that_finds_the_cause_to_be_lasting_is_the_last(court: Court) -> None:
    court.judge()
    case = court.wait(FIRST_WAIT_S)
    assert case is not None
    court.fails(case, undecided("policy: checkpoint 0 is gone", passing=False))
    assert court.wait(10**6) is None


def test_what_others_settled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """Whatever a third validator says beside it, of which nobody knows whether it holds."""
    keys = tuple(one.peer_id.public_key for one in (VALIDATOR, CARL, DAVE))
    court = Court(tmp_path, validators=keys)
    work = court.judge()
    for entry in (work, make_verdict(work, outcome="undecided", reason="internal: x"), make_verdict(work, by=CARL)):
        court.ledger.apply(entry.data)
    excused = Draw(drawn=False, rate=0.1, why="beacon", beacon=b"", receipt=b"")
    court.bench.heard(make_verdict(work, by=DAVE, draw=excused))
    assert court.wait(FIRST_WAIT_S) is None
    assert court.docket.looks() == []


def test_work_of_who_was_evicted_meanwhile_is_left_alone(court: Court) -> None:
    court.judge()
    lie = make_submission(ALICE, court.manifest.id, sha256=b"l" * 32)
    verdict = make_verdict(lie, outcome="reject", hard=True, reason="seed: made up")
    for entry in (lie.data, verdict.data, make_eviction(verdict)):
        court.ledger.apply(entry)
    assert court.wait(FIRST_WAIT_S) is None


def test_past_the_validity_window_nothing_is_judged_again(tmp_path: Path) -> None:
    court = Court(tmp_path, batch=BatchSpec(rollouts_per_step=4, max_staleness=2, total_steps=9))
    court.judge()
    court.train(2)
    case = court.wait(FIRST_WAIT_S)
    assert case is not None
    court.fails(case)
    court.train(1)
    assert court.wait(10**6) is None
    assert court.docket.looks() == []


def test_one_contributor_fills_no_others_place(court: Court) -> None:
    """Sixteen thousand submissions whose policies do not exist, and one honest one that met a broken engine."""
    for index in range(MAX_OF_CONTRIBUTOR + 3):
        court.judge(index)
    honest = court.judge(who=BOB)
    looks = court.docket.looks()
    assert sum(look.contributor == ALICE.peer_id for look in looks) == MAX_OF_CONTRIBUTOR
    assert honest.id in {look.submission for look in looks}


def test_a_look_that_waits_keeps_no_other_contributor_waiting(court: Court) -> None:
    """A key names a policy that one relay alone offers, and never gives."""
    court.judge(0)
    court.judge(1)
    (waits,) = court.start_all(FIRST_WAIT_S)
    waits.busy, waits.due = False, 1e12
    honest = court.judge(who=BOB)
    assert [case.submission.id for case in court.start_all(FIRST_WAIT_S)] == [honest.id]


def test_contributors_take_turns(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen looks of one key are due before the only one of another."""
    monkeypatch.setattr(again, "MAX_BUSY", 1)
    for index in range(MAX_OF_CONTRIBUTOR):
        court.judge(index)
    court.ms += 1
    honest = court.judge(who=BOB)
    begun = []
    for _ in range(3):
        (case,) = court.start_all(FIRST_WAIT_S)
        begun.append(case.submission)
        court.fails(case)
    assert honest.id in [one.id for one in begun[:2]]
    assert begun[2].author == ALICE.peer_id


def test_as_many_as_may_be_worked_on_are_of_different_contributors(court: Court) -> None:
    for number in range(again.MAX_BEGUN + 3):
        court.judge(who=Identity.from_phrase(f"many {number}"))
        court.judge(1, who=Identity.from_phrase(f"many {number}"))
    busy = court.start_all(FIRST_WAIT_S)
    assert len({case.submission.author for case in busy}) == len(busy) == again.MAX_BUSY
    assert court.start_all(0) == []
    assert sum(look.looks for look in court.docket.looks()) == again.MAX_BEGUN


def test_without_a_relay_no_look_is_spent(court: Court) -> None:
    court.judge()
    court.ms += int(1000 * FIRST_WAIT_S)
    assert list(court.looks.startable([])) == []
    assert court.docket.looks()[0].looks == 0

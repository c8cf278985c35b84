"""Getting a rejection judged once more: who may ask, who may answer, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from factories import (
    OPERATOR,
    make_answer,
    make_appeal,
    make_batch,
    make_eviction,
    make_manifest,
    make_reinstatement,
    make_submission,
    make_trained,
    make_verdict,
)
from ledger_kit import refused

from protocol.draw import TrackRecord
from protocol.envelope import Signed, seal
from protocol.errors import WrongAuthorError
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import Appeal, BatchSpec, CreditSpec, Draw, Submission, Verdict

RUN = b"r" * 32
FIVE = [Identity.from_phrase(name) for name in ("erin", "frank", "grace", "heidi", "ivan")]
JUDGES = FIVE[:3]
WINDOW = 2


class World:
    """A run with three validators, in which alice is evicted for her second submission; the first ones judge."""

    def __init__(
        self, alice: Identity, *, quorum: int = 1, validators: Sequence[Identity] = JUDGES, window: int = WINDOW
    ) -> None:
        keys = tuple(judge.peer_id.public_key for judge in validators)
        self.manifest = make_manifest(
            validators=keys,
            quorum=quorum,
            batch=BatchSpec(rollouts_per_step=4, max_staleness=9, total_steps=9),
            credits=CreditSpec(maturity_steps=window),
        )
        self.state = LedgerState(RUN, self.manifest)
        self.alice = alice
        self.judges = JUDGES[:quorum]
        self.good = self.accepted(alice)
        self.bad = make_submission(alice, RUN, index=1)
        self.state.apply(self.bad.data)
        self.verdict = self.reject(self.bad, hard=True)

    def accepted(self, who: Identity, step: int = 0) -> Signed[Submission]:
        submission = make_submission(who, RUN, step=step)
        self.state.apply(submission.data)
        for judge in self.judges:
            self.state.apply(make_verdict(submission, by=judge).data)
        return submission

    def reject(self, submission: Signed[Submission], *, hard: bool = False) -> Signed[Verdict]:
        for judge in self.judges:
            verdict = make_verdict(submission, by=judge, outcome="reject", hard=hard, reason="toploc: x")
            self.state.apply(verdict.data)
        return verdict

    def evict(self) -> World:
        self.state.apply(make_eviction(self.verdict))
        return self

    def appeal(self, **changes: Any) -> Signed[Appeal]:
        appeal = make_appeal(self.alice, self.verdict, **changes)
        self.state.apply(appeal.data)
        return appeal

    def answer(self, appeal: Signed[Appeal], *, by: Identity = JUDGES[2], **changes: Any) -> Signed[Verdict]:
        answer = make_answer(self.bad, appeal, by=by, **changes)
        self.state.apply(answer.data)
        return answer

    def train(self, steps: int) -> None:
        bob = Identity.from_phrase("bob")
        for _ in range(steps):
            step = len(self.state.trained)
            self.state.apply(make_batch(RUN, step, [self.accepted(bob, step)]))
            self.state.apply(make_trained(RUN, step))


@pytest.fixture
def world(alice: Identity) -> World:
    return World(alice)


def test_a_granted_appeal_restores_credits_and_standing(world: World) -> None:
    state, alice = world.evict().state, world.state.contributors[world.alice.peer_id]
    assert (alice.standing, alice.credits, alice.balance.forfeited) == ("evicted", 0, 40)
    appeal = world.appeal()
    assert state.open_appeals() == [appeal.id]
    assert state.owed() == []
    answer = world.answer(appeal)
    assert state.open_appeals() == []
    assert state.appeals[appeal.id].state == "granted"
    assert state.submissions[world.bad.id].state == "accepted"
    (duty,) = state.owed()
    assert (duty.kind, duty.contributor) == ("reinstatement", world.alice.peer_id)
    assert (duty.appeal, duty.verdict) == (appeal.id, answer.id)
    state.apply(make_reinstatement(answer, appeal).data)
    assert (alice.standing, alice.reason, alice.credits) == ("active", "", 80)
    assert (alice.balance.restored, alice.balance.forfeited, alice.rejected) == (80, 0, {})
    assert state.owed() == []
    state.apply(make_submission(world.alice, RUN, index=2).data)


def test_a_soft_rejection_is_taken_back_without_an_eviction(alice: Identity) -> None:
    world = World(alice)
    soft = make_submission(alice, RUN, index=2)
    world.state.apply(soft.data)
    world.verdict, world.bad = world.reject(soft), soft
    appeal = world.appeal()
    world.answer(appeal)
    assert world.state.contributors[alice.peer_id].credits == 80
    assert world.state.contributors[alice.peer_id].rejected == {"toploc": 1}


def test_work_accepted_on_appeal_is_not_trained(world: World) -> None:
    """Nobody has its file at hand any more."""
    world.answer(world.appeal())
    assert world.state.shelf.usable(0) == [world.good.id]
    assert refused(world.state, make_batch(RUN, 0, [world.bad])) == "unusable"


def test_a_taken_back_rejection_is_none_for_the_draw(world: World) -> None:
    """But for heads that named the ledger before, it still is: their draws stay as they were."""
    before = world.state.length
    appeal = world.appeal()
    world.answer(appeal)
    after = world.state.length
    assert world.state.record(world.alice.peer_id, before) == TrackRecord(accepted=1, rejected=1)
    assert world.state.record(world.alice.peer_id, after - 1) == TrackRecord(accepted=1, rejected=1)
    assert world.state.record(world.alice.peer_id, after) == TrackRecord(accepted=2, streak=2)


def test_a_frivolous_appeal_costs_a_wait(world: World) -> None:
    state = world.state
    appeal = world.appeal()
    world.answer(appeal, outcome="reject", hard=True, reason="toploc: y")
    assert state.appeals[appeal.id].state == "refused"
    assert state.submissions[world.bad.id].state == "rejected"
    next_one = make_submission(world.alice, RUN, index=2)
    state.apply(next_one.data)
    verdict = world.reject(next_one)
    assert refused(state, make_appeal(world.alice, verdict).data) == "too-soon"
    world.train(WINDOW)
    state.apply(make_appeal(world.alice, verdict).data)


def test_a_verdict_is_appealed_once(world: World) -> None:
    appeal = world.appeal()
    assert refused(world.state, make_appeal(world.alice, world.verdict, reason="again").data) == "duplicate-appeal"
    world.answer(appeal, outcome="reject", reason="toploc: y")
    assert refused(world.state, make_appeal(world.alice, world.verdict, reason="again").data) == "duplicate-appeal"


def test_one_appeal_at_a_time_is_open_for_a_submission(alice: Identity) -> None:
    world = World(alice, quorum=2)
    first, second = world.state.submissions[world.bad.id].rejections()
    world.state.apply(make_appeal(alice, first).data)
    assert refused(world.state, make_appeal(alice, second).data) == "duplicate-appeal"


def test_one_appeal_at_a_time_is_open_for_a_contributor(world: World) -> None:
    """A cheat files all its appeals at once, so that the wait after the first that is refused stops none of them."""
    other = make_submission(world.alice, RUN, index=2)
    world.state.apply(other.data)
    second = make_appeal(world.alice, world.reject(other))
    first = world.appeal()
    assert refused(world.state, second.data) == "appeal-open"
    world.answer(first, outcome="reject", reason="toploc: y")
    assert refused(world.state, second.data) == "too-soon"
    world.train(WINDOW)
    world.state.apply(second.data)


def test_others_appeal_meanwhile(world: World, bob: Identity) -> None:
    world.appeal()
    work = make_submission(bob, RUN)
    world.state.apply(work.data)
    world.state.apply(make_appeal(bob, world.reject(work)).data)
    assert len(world.state.open_appeals()) == 2


def test_an_appeal_that_nobody_can_answer_ends_and_is_filed_once_more(world: World) -> None:
    """Validators that are left never decide, and the contributor could never appeal again."""
    first = world.appeal()
    world.train(WINDOW - 1)
    for judge in JUDGES[1:]:
        assert world.state.open_appeals() == [first.id]
        world.answer(first, by=judge, outcome="undecided")
    assert (world.state.open_appeals(), world.state.appeals[first.id].state) == ([], "undecided")
    assert refused(world.state, make_answer(world.bad, first, by=JUDGES[2]).data) == "appeal"
    assert refused(world.state, first.data) == "duplicate-appeal"
    world.train(WINDOW)
    second = world.appeal(reason="again")
    for judge in JUDGES[1:]:
        world.answer(second, by=judge, outcome="undecided")
    assert refused(world.state, make_appeal(world.alice, world.verdict, reason="thrice").data) == "duplicate-appeal"


def test_who_could_not_tell_at_the_first_appeal_decides_at_the_second(world: World) -> None:
    world.evict()
    first = world.appeal()
    for judge in JUDGES[1:]:
        world.answer(first, by=judge, outcome="undecided")
    second = world.appeal(reason="again")
    world.answer(second, by=JUDGES[2])
    assert world.state.submissions[world.bad.id].state == "accepted"
    assert [duty.appeal for duty in world.state.owed()] == [second.id]


def test_the_second_appeal_comes_within_the_window_too(world: World) -> None:
    first = world.appeal()
    for judge in JUDGES[1:]:
        world.answer(first, by=judge, outcome="undecided")
    world.train(WINDOW + 1)
    assert refused(world.state, make_appeal(world.alice, world.verdict, reason="again").data) == "too-late"


def test_appeals_are_by_whom_they_concern(world: World, bob: Identity) -> None:
    assert refused(world.state, make_appeal(bob, world.verdict).data) == "not-yours"
    assert refused(world.state, make_appeal(world.alice, world.verdict, submission=b"?" * 32).data) == (
        "unknown-submission"
    )


def test_only_rejections_are_appealed(world: World) -> None:
    accept = next(iter(world.state.submissions[world.good.id].verdicts.values()))
    assert refused(world.state, make_appeal(world.alice, accept).data) == "not-rejected"
    mixed = make_appeal(world.alice, world.verdict, submission=world.good.id)
    assert refused(world.state, mixed.data) == "not-rejected"


def test_appeals_come_within_the_window(world: World) -> None:
    world.train(WINDOW)
    late = World(world.alice)
    late.train(WINDOW + 1)
    assert refused(late.state, make_appeal(world.alice, late.verdict).data) == "too-late"
    world.appeal()


def test_an_appeal_needs_somebody_to_answer_it(alice: Identity) -> None:
    world = World(alice, quorum=3)
    assert refused(world.state, make_appeal(alice, world.verdict).data) == "nobody-left"


def test_the_judge_does_not_answer_the_appeal(world: World) -> None:
    """A validator confirms itself."""
    appeal = world.appeal()
    again = make_answer(world.bad, appeal, by=JUDGES[0], outcome="reject", reason="toploc: x")
    assert refused(world.state, again.data) == "duplicate-verdict"


def test_only_validators_answer(world: World, bob: Identity) -> None:
    appeal = world.appeal()
    with pytest.raises(WrongAuthorError):
        world.state.apply(make_answer(world.bad, appeal, by=bob).data)


def test_an_answer_that_cannot_tell_leaves_it_open(world: World) -> None:
    appeal = world.appeal()
    world.answer(appeal, by=JUDGES[1], outcome="undecided")
    assert world.state.open_appeals() == [appeal.id]
    world.answer(appeal, by=JUDGES[2])
    assert world.state.open_appeals() == []


def test_answers_are_to_open_appeals_about_the_same_work(world: World) -> None:
    unasked = make_verdict(world.bad, by=JUDGES[1], appeal=b"?" * 32)
    assert refused(world.state, unasked.data) == "appeal"
    appeal = world.appeal()
    elsewhere = make_verdict(world.good, by=JUDGES[1], appeal=appeal.id)
    assert refused(world.state, elsewhere.data) == "appeal"
    world.answer(appeal)
    assert refused(world.state, make_answer(world.bad, appeal, by=JUDGES[1]).data) == "appeal"


def test_an_appeal_is_granted_with_the_costly_checks(world: World) -> None:
    """A validator grants a friend's appeal without a look at it, and names a draw that excuses it."""
    appeal = world.appeal()
    lazy = Draw(drawn=False, rate=0.25, why="not drawn", beacon=b"", receipt=b"")
    assert refused(world.state, make_answer(world.bad, appeal, by=JUDGES[2], draw=lazy).data) == "draw"


def test_a_verdict_that_answers_nothing_grants_nothing(world: World) -> None:
    world.evict()
    world.appeal()
    assert refused(world.state, make_verdict(world.bad, by=JUDGES[1]).data) == "settled"
    assert world.state.submissions[world.bad.id].state == "rejected"
    assert world.state.owed() == []


def test_reinstatements_are_the_trainers_and_need_their_ground(world: World, bob: Identity) -> None:
    world.evict()
    appeal = world.appeal()
    made_up = make_answer(world.bad, appeal, by=JUDGES[1])
    assert refused(world.state, make_reinstatement(made_up, appeal).data) == "no-ground"
    answer = world.answer(appeal)
    for wrong in ({"appeal": b"?" * 32}, {"verdict": world.verdict.id}):
        record = msgspec.structs.replace(make_reinstatement(answer, appeal).record, **wrong)
        assert refused(world.state, seal(record, OPERATOR)) == "no-ground"
    stranger = make_reinstatement(answer, appeal, contributor=bob.peer_id.public_key)
    assert refused(world.state, stranger.data) == "standing"
    with pytest.raises(WrongAuthorError):
        world.state.apply(make_reinstatement(answer, appeal, by=bob).data)
    world.state.apply(make_reinstatement(answer, appeal, by=OPERATOR).data)
    assert refused(world.state, make_reinstatement(answer, appeal, issued_at_ms=9).data) == "standing"


def test_a_refused_appeal_brings_nobody_back(world: World) -> None:
    world.evict()
    appeal = world.appeal()
    answer = world.answer(appeal, outcome="reject", hard=True, reason="toploc: y")
    assert refused(world.state, make_reinstatement(answer, appeal).data) == "no-ground"


def test_another_appeal_does_not_undo_the_eviction(world: World) -> None:
    """An evicted cheat appeals against an older, soft rejection that was wrong."""
    soft = make_submission(world.alice, RUN, index=2)
    world.state.apply(soft.data)
    rejection = world.reject(soft)
    world.evict()
    appeal = make_appeal(world.alice, rejection)
    world.state.apply(appeal.data)
    answer = make_answer(soft, appeal, by=JUDGES[2])
    world.state.apply(answer.data)
    assert world.state.contributors[world.alice.peer_id].balance.forfeited == 80
    assert world.state.owed() == []
    assert refused(world.state, make_reinstatement(answer, appeal).data) == "no-ground"


def test_the_reinstated_can_be_evicted_again_but_not_for_the_same(world: World) -> None:
    world.evict()
    appeal = world.appeal()
    answer = world.answer(appeal)
    world.state.apply(make_reinstatement(answer, appeal).data)
    assert refused(world.state, make_eviction(world.verdict)) == "no-ground"
    worse = make_submission(world.alice, RUN, index=2)
    world.state.apply(worse.data)
    verdict = world.reject(worse, hard=True)
    world.state.apply(make_eviction(verdict))
    alice = world.state.contributors[world.alice.peer_id]
    assert (alice.credits, alice.balance.forfeited, alice.balance.restored) == (0, 80, 80)


# Answers: as many must agree as for a verdict.


@pytest.fixture
def court(alice: Identity) -> World:
    """Two of five have alice evicted, and two must agree."""
    return World(alice, quorum=2, validators=FIVE).evict()


def test_one_liar_refuses_no_appeal(court: World) -> None:
    """A dishonest validator is the first to answer, and rejects."""
    state, appeal = court.state, court.appeal()
    court.answer(appeal, by=FIVE[2], outcome="reject", hard=True, reason="toploc: y")
    assert state.open_appeals() == [appeal.id]
    first = court.answer(appeal, by=FIVE[3])
    assert (state.open_appeals(), state.owed()) == ([appeal.id], [])
    assert refused(state, make_reinstatement(first, appeal).data) == "no-ground"
    last = court.answer(appeal, by=FIVE[4])
    assert (state.appeals[appeal.id].state, state.appeals[appeal.id].answer) == ("granted", last.id)
    assert [(duty.kind, duty.verdict) for duty in state.owed()] == [("reinstatement", last.id)]
    assert refused(state, make_reinstatement(first, appeal).data) == "no-ground"
    state.apply(make_reinstatement(last, appeal).data)
    alice = state.contributors[court.alice.peer_id]
    assert (alice.standing, alice.credits, alice.rejected, alice.next_appeal) == ("active", 80, {}, 0)


def test_one_liar_grants_no_appeal(court: World) -> None:
    """A dishonest validator grants the appeal of a friend who was rightly evicted."""
    state, appeal = court.state, court.appeal()
    lie = court.answer(appeal, by=FIVE[2])
    assert state.submissions[court.bad.id].state == "rejected"
    court.answer(appeal, by=FIVE[3], outcome="reject", reason="toploc: y")
    assert state.open_appeals() == [appeal.id]
    court.answer(appeal, by=FIVE[4], outcome="reject", reason="toploc: y")
    assert (state.appeals[appeal.id].state, state.owed()) == ("refused", [])
    assert refused(state, make_reinstatement(lie, appeal).data) == "no-ground"
    alice = state.contributors[court.alice.peer_id]
    assert (alice.standing, alice.credits, alice.next_appeal) == ("evicted", 0, WINDOW)
    assert not state.may_be_appealed(court.bad.id)


def test_one_validator_answers_once(court: World) -> None:
    """A liar votes twice, so as to be a quorum by itself."""
    appeal = court.appeal()
    court.answer(appeal, by=FIVE[2])
    for outcome in ("accept", "reject", "undecided"):
        again = make_answer(court.bad, appeal, by=FIVE[2], outcome=outcome, issued_at_ms=9)
        assert refused(court.state, again.data) == "duplicate-verdict"
    assert court.state.open_appeals() == [appeal.id]


@pytest.mark.parametrize(("outcome", "state"), [("accept", "granted"), ("reject", "refused")])
def test_where_one_is_left_it_decides_alone(alice: Identity, outcome: str, state: str) -> None:
    world = World(alice, quorum=2)
    appeal = world.appeal()
    assert world.state.appeal_tally(appeal.id).needed == 1
    world.answer(appeal, outcome=outcome)
    assert world.state.appeals[appeal.id].state == state


def test_answers_that_disagree_with_nobody_left_end_an_appeal_at_no_cost(alice: Identity) -> None:
    world = World(alice, quorum=2, validators=FIVE[:4])
    appeal = world.appeal()
    world.answer(appeal, by=FIVE[2], outcome="reject", reason="toploc: y")
    assert world.state.open_appeals() == [appeal.id]
    world.answer(appeal, by=FIVE[3])
    case = world.state.appeals[appeal.id]
    assert (case.state, case.answer, world.state.open_appeals()) == ("undecided", b"", [])
    assert world.state.submissions[world.bad.id].state == "rejected"
    assert world.state.contributors[alice.peer_id].next_appeal == 0
    assert not world.state.may_appeal_again(appeal.id)
    assert refused(world.state, make_appeal(alice, world.verdict, reason="again").data) == "nobody-left"


def test_who_could_not_tell_breaks_the_tie_at_the_second_appeal(court: World) -> None:
    """What was said in answer to the first one counts on."""
    first = court.appeal()
    court.answer(first, by=FIVE[2])
    court.answer(first, by=FIVE[3], outcome="reject", reason="toploc: y")
    court.answer(first, by=FIVE[4], outcome="undecided")
    assert court.state.appeals[first.id].state == "undecided"
    assert court.state.contributors[court.alice.peer_id].next_appeal == 0
    assert court.state.may_appeal_again(first.id)
    second = court.appeal(reason="again")
    court.answer(second, by=FIVE[4])
    assert court.state.appeals[second.id].state == "granted"
    assert [duty.appeal for duty in court.state.owed()] == [second.id]


def test_an_appeal_ends_when_those_left_are_too_few(alice: Identity) -> None:
    world = World(alice, quorum=2, validators=FIVE[:4])
    first = world.appeal()
    world.answer(first, by=FIVE[2], outcome="undecided")
    assert world.state.appeals[first.id].state == "undecided"
    second = world.appeal(reason="again")
    for judge in FIVE[2:4]:
        world.answer(second, by=judge)
    assert world.state.appeals[second.id].state == "granted"


def test_who_cannot_tell_makes_nobody_the_only_one_left(alice: Identity) -> None:
    """A liar says that it cannot tell, waits until the others have rejected, and is to grant the next appeal alone."""
    world = World(alice, quorum=2, validators=FIVE[:4])
    first, second = world.state.submissions[world.bad.id].rejections()
    appeal = world.appeal()
    world.answer(appeal, by=FIVE[2], outcome="reject", reason="toploc: y")
    world.answer(appeal, by=FIVE[3], outcome="undecided")
    assert world.state.appeals[appeal.id].state == "undecided"
    for verdict in (first, second):
        assert refused(world.state, make_appeal(alice, verdict, reason="again").data) == "nobody-left"


def test_a_refusal_is_for_every_verdict_about_the_work(alice: Identity) -> None:
    """Two judges rejected it, so that there are two verdicts to appeal against; the last two validators are friends."""
    court = World(alice, quorum=2, validators=[*FIVE, Identity.from_phrase("judy")])
    first, second = court.state.submissions[court.bad.id].rejections()
    court.verdict = first
    appeal = court.appeal()
    for judge in FIVE[2:4]:
        court.answer(appeal, by=judge, outcome="reject", reason="toploc: y")
    assert court.state.appeals[appeal.id].state == "refused"
    assert refused(court.state, make_appeal(court.alice, second).data) == "duplicate-appeal"
    assert not court.state.may_be_appealed(court.bad.id)


def test_an_appeal_that_is_not_decided_within_a_window_ends(court: World) -> None:
    """One of the three that are left accepts, one rejects, and the third is gone for good."""
    first = court.appeal()
    court.answer(first, by=FIVE[2])
    court.answer(first, by=FIVE[3], outcome="reject", reason="toploc: y")
    court.train(WINDOW - 1)
    assert court.state.open_appeals() == [first.id]
    court.train(1)
    assert (court.state.open_appeals(), court.state.appeals[first.id].state) == ([], "undecided")
    assert refused(court.state, make_answer(court.bad, first, by=FIVE[4]).data) == "appeal"
    assert court.state.may_appeal_again(first.id)
    second = court.appeal(reason="again")
    court.train(WINDOW)
    assert court.state.appeals[second.id].state == "undecided"
    assert not court.state.may_be_appealed(court.bad.id), "relays may drop the file"


@pytest.mark.parametrize("window", [0, 1])
def test_an_appeal_is_open_for_a_step_at_least(alice: Identity, window: int) -> None:
    world = World(alice, window=window)
    appeal = world.appeal()
    assert world.state.open_appeals() == [appeal.id]
    world.train(1)
    assert world.state.appeals[appeal.id].state == "undecided"


def test_time_to_appeal_does_not_run_out_by_another_appeal(alice: Identity) -> None:
    """One at a time: a validator that is silent about the first one would cost the contributor the second one."""
    court = World(alice, quorum=2, validators=FIVE)
    other = make_submission(court.alice, RUN, index=2)
    court.state.apply(other.data)
    verdict = court.reject(other)
    court.train(1)
    court.appeal()
    court.train(WINDOW)
    court.appeal(reason="again")
    court.train(WINDOW)
    assert court.state.open_appeals() == []
    assert court.state.may_be_appealed(other.id)
    court.train(WINDOW - 1)
    court.state.check_appeal(make_appeal(court.alice, verdict))
    court.train(1)
    assert not court.state.may_be_appealed(other.id)
    assert refused(court.state, make_appeal(court.alice, verdict).data) == "too-late"


def test_no_more_filings_by_naming_another_verdict(court: World) -> None:
    """Two judges rejected the work: four appeals about it, each of which nobody could tell."""
    for verdict in court.state.submissions[court.bad.id].rejections():
        appeal = make_appeal(court.alice, verdict)
        court.state.apply(appeal.data)
        for judge in FIVE[2:]:
            if court.state.appeals[appeal.id].state == "open":
                court.answer(appeal, by=judge, outcome="undecided")
    for verdict in court.state.submissions[court.bad.id].rejections():
        again = make_appeal(court.alice, verdict, reason="again")
        assert refused(court.state, again.data) == "duplicate-appeal"
    assert not court.state.may_be_appealed(court.bad.id)


# Quorum m of n.


def disputed(alice: Identity, outcomes: list[tuple[str, bool]], *, quorum: int = 2) -> tuple[LedgerState, Any]:
    world = World(alice, quorum=quorum)
    submission = make_submission(alice, RUN, index=2)
    world.state.apply(submission.data)
    verdicts = []
    for judge, (outcome, hard) in zip(JUDGES, outcomes, strict=False):
        verdict = make_verdict(submission, by=judge, outcome=outcome, hard=hard, reason="seed: x")
        world.state.apply(verdict.data)
        verdicts.append(verdict)
    return world.state, (submission, verdicts)


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        (["accept"], "pending"),
        (["reject"], "pending"),
        (["accept", "accept"], "accepted"),
        (["accept", "reject"], "disputed"),
        (["reject", "accept"], "disputed"),
        (["accept", "reject", "accept"], "accepted"),
        (["accept", "reject", "reject"], "rejected"),
        (["accept", "reject", "undecided"], "disputed"),
        (["undecided", "accept"], "undecided"),
        (["accept", "undecided"], "undecided"),
    ],
    ids=str,
)
def test_two_who_disagree_call_a_third(alice: Identity, outcomes: list[str], state: str) -> None:
    ledger, (submission, _) = disputed(alice, [(outcome, False) for outcome in outcomes])
    assert ledger.submissions[submission.id].state == state


def test_judges_remain_for_an_appeal(alice: Identity) -> None:
    """One of three validators rejects work that the others accept: those are not used up by being late."""
    world = World(alice).evict()
    for judge in JUDGES[1:]:
        assert refused(world.state, make_verdict(world.bad, by=judge).data) == "settled"
    world.answer(world.appeal(), by=JUDGES[1])
    assert [duty.kind for duty in world.state.owed()] == ["reinstatement"]


def test_who_could_not_tell_decides_once_later(alice: Identity) -> None:
    ledger, (work, _) = disputed(alice, [("undecided", False)])
    unsure = make_verdict(work, by=JUDGES[0], outcome="undecided", issued_at_ms=9)
    assert refused(ledger, unsure.data) == "duplicate-verdict"
    ledger.apply(make_verdict(work, by=JUDGES[0]).data)
    for outcome in ("accept", "reject", "undecided"):
        again = make_verdict(work, by=JUDGES[0], outcome=outcome, issued_at_ms=9)
        assert refused(ledger, again.data) == "duplicate-verdict"
    assert ledger.submissions[work.id].state == "undecided", "one of two has accepted it"
    ledger.apply(make_verdict(work, by=JUDGES[1]).data)
    assert ledger.submissions[work.id].state == "accepted"


def test_who_could_not_tell_may_answer_an_appeal(alice: Identity) -> None:
    outcomes = [("undecided", False), ("reject", True), ("reject", True)]
    ledger, (work, verdicts) = disputed(alice, outcomes)
    appeal = make_appeal(alice, verdicts[2])
    ledger.apply(appeal.data)
    ledger.apply(make_answer(work, appeal, by=JUDGES[0]).data)
    assert ledger.appeals[appeal.id].state == "granted"


def test_a_lone_validator_evicts_nobody(alice: Identity) -> None:
    """One of three validators rejects an honest contributor's work as a forgery, alone and among others."""
    for outcomes in ([("reject", True)], [("reject", True), ("reject", False)], [("accept", False), ("reject", True)]):
        ledger, (_, verdicts) = disputed(alice, outcomes)
        hard = next(one for one in verdicts if one.record.hard)
        assert refused(ledger, make_eviction(hard)) == "no-ground"


def test_a_quorum_of_hard_verdicts_evicts(alice: Identity) -> None:
    ledger, (_, verdicts) = disputed(alice, [("reject", True), ("accept", False), ("reject", True)])
    ledger.apply(make_eviction(verdicts[2]))
    assert alice.peer_id in ledger.evicted

"""The ledger's rules, one by one, and as any interleaving of entries."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from factories import (
    OPERATOR,
    VALIDATOR,
    make_answer,
    make_appeal,
    make_batch,
    make_draw_evidence,
    make_eviction,
    make_head,
    make_manifest,
    make_submission,
    make_trained,
    make_verdict,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.draw import TrackRecord, beacon_of, is_drawn
from protocol.envelope import Signed
from protocol.errors import LedgerError, ProtocolError, WrongAuthorError, WrongRunError
from protocol.identity import Identity
from protocol.ledger import LedgerState, next_tip, open_entry
from protocol.ledger_memory import Stale
from protocol.records import BatchSpec, Submission

RUN = b"r" * 32
ALICE = Identity.from_phrase("alice")


@pytest.fixture
def state() -> LedgerState:
    return LedgerState(RUN, make_manifest())


@pytest.fixture
def alice() -> Identity:
    return Identity.from_phrase("alice")


@pytest.fixture
def bob() -> Identity:
    return Identity.from_phrase("bob")


def accept(state: LedgerState, submission: Signed[Submission]) -> None:
    state.apply(submission.data)
    state.apply(make_verdict(submission).data)


def refused(state: LedgerState, entry: bytes) -> str:
    before = copy.deepcopy(vars(state))
    with pytest.raises(LedgerError) as caught:
        state.apply(entry)
    assert vars(state) == before, "a refused entry must change nothing"
    return caught.value.rule


def test_an_old_entry_never_comes_again(state: LedgerState, alice: Identity) -> None:
    """Steps after it was trained and is mature, somebody hands in the same entry: for its credits once more.

    An id covers author, step and index; nothing is looked up as long as the index is the next one.
    """
    old = make_submission(alice, RUN)
    accept(state, old)
    state.apply(make_batch(RUN, 0, [old]))
    state.apply(make_trained(RUN, 0))
    for step in (1, 2):
        accept(state, work := make_submission(alice, RUN, step=step, checkpoint_step=step))
        state.apply(make_batch(RUN, step, [work]))
        state.apply(make_trained(RUN, step))
    assert refused(state, old.data) == "duplicate"
    assert state.next_index(alice.peer_id, 0) == 1
    again = make_submission(alice, RUN, index=1, checkpoint_step=0, sha256=old.record.sha256)
    assert refused(state, again.data) == "duplicate-file"


def test_accepted_work_earns_its_tokens_and_can_be_trained_once(state: LedgerState, alice: Identity) -> None:
    submission = make_submission(alice, RUN)
    accept(state, submission)
    assert state.contributors[alice.peer_id].credits == 40
    assert state.shelf.usable(0) == [submission.id]
    state.apply(make_batch(RUN, 0, [submission]))
    assert state.shelf.usable(1) == []
    assert refused(state, make_batch(RUN, 1, [submission])) == "unusable"


def test_tip_chains_every_entry(state: LedgerState, alice: Identity) -> None:
    submission = make_submission(alice, RUN)
    accept(state, submission)
    expected = next_tip(next_tip(RUN, submission.id), make_verdict(submission).id)
    assert (state.length, state.tip) == (2, expected)


def test_indices_are_contiguous_per_node_and_step(state: LedgerState, alice: Identity, bob: Identity) -> None:
    """Grinding: a contributor skips an index whose prompts it does not like."""
    assert refused(state, make_submission(alice, RUN, index=1).data) == "not-contiguous"
    state.apply(make_submission(alice, RUN, index=0).data)
    state.apply(make_submission(bob, RUN, index=0).data)
    state.apply(make_submission(alice, RUN, index=1).data)
    state.apply(make_submission(alice, RUN, step=1, index=0).data)
    assert refused(state, make_submission(alice, RUN, step=1, index=0, sha256=b"x" * 32).data) == "not-contiguous"


def test_index_over_the_cap_is_refused(state: LedgerState, alice: Identity) -> None:
    for index in range(4):
        state.apply(make_submission(alice, RUN, index=index).data)
    assert refused(state, make_submission(alice, RUN, index=4).data) == "over-cap"


def test_who_signs_for_the_file_of_another_first_keeps_nobody_out(
    state: LedgerState, alice: Identity, bob: Identity
) -> None:
    """A thief signs a submission with the hash of alice's file, and a lying validator lets it enter before hers."""
    stolen, honest = (make_submission(who, RUN, sha256=b"1" * 32) for who in (bob, alice))
    state.apply(stolen.data)
    state.apply(make_verdict(stolen, outcome="undecided", reason="the engine failed").data)
    accept(state, honest)
    assert state.shelf.usable(0) == [honest.id]
    again = make_submission(alice, RUN, index=1, sha256=b"1" * 32)
    assert refused(state, again.data) == "duplicate-file"


def test_same_submission_twice_is_refused(state: LedgerState, alice: Identity) -> None:
    submission = make_submission(alice, RUN)
    state.apply(submission.data)
    assert refused(state, submission.data) == "duplicate"


def test_only_validators_judge(state: LedgerState, alice: Identity, bob: Identity) -> None:
    submission = make_submission(alice, RUN)
    state.apply(submission.data)
    with pytest.raises(WrongAuthorError):
        state.apply(make_verdict(submission, by=bob).data)


def test_quorum_counts_validators_not_verdicts(alice: Identity, bob: Identity) -> None:
    keys = (VALIDATOR.peer_id.public_key, bob.peer_id.public_key)
    state = LedgerState(RUN, make_manifest(validators=keys, quorum=2))
    submission = make_submission(alice, RUN)
    state.apply(submission.data)
    state.apply(make_verdict(submission).data)
    assert refused(state, make_verdict(submission, issued_at_ms=9).data) == "duplicate-verdict"
    assert state.submissions[submission.id].state == "pending"
    state.apply(make_verdict(submission, by=bob).data)
    assert state.submissions[submission.id].state == "accepted"


def test_hard_rejection_evicts_and_forfeits(state: LedgerState, alice: Identity) -> None:
    good, bad = make_submission(alice, RUN), make_submission(alice, RUN, index=1)
    accept(state, good)
    state.apply(bad.data)
    verdict = make_verdict(bad, outcome="reject", hard=True, reason="toploc: another model")
    state.apply(verdict.data)
    state.apply(make_eviction(verdict))
    contributor = state.contributors[alice.peer_id]
    assert (contributor.standing, contributor.credits, contributor.rejected) == ("evicted", 0, {"toploc": 1})
    assert state.shelf.usable(0) == []
    assert refused(state, make_submission(alice, RUN, index=2).data) == "evicted"
    assert refused(state, make_eviction(verdict)) == "standing"


def test_soft_rejection_and_could_not_tell_do_not_evict(state: LedgerState, alice: Identity) -> None:
    """Honest contributors come first: nobody is evicted for what a validator could not find out."""
    for index, outcome in enumerate(("reject", "undecided")):
        submission = make_submission(alice, RUN, index=index)
        state.apply(submission.data)
        verdict = make_verdict(submission, outcome=outcome, hard=False, reason="late: after the window")
        state.apply(verdict.data)
        assert refused(state, make_eviction(verdict)) == "no-ground"
    assert state.evicted == set()


def test_batch_takes_no_stale_policy_and_no_future_one(state: LedgerState, alice: Identity, bob: Identity) -> None:
    old = make_submission(alice, RUN)
    accept(state, old)
    ahead = make_submission(alice, RUN, index=1, checkpoint_step=1)
    accept(state, ahead)
    assert refused(state, make_batch(RUN, 0, [ahead])) == "unusable"
    state.apply(make_batch(RUN, 0, [old]))
    state.apply(make_batch(RUN, 1, [ahead]))
    late = make_submission(bob, RUN)
    accept(state, late)
    assert refused(state, make_batch(RUN, 2, [late])) == "unusable"
    assert state.shelf.stale(2) == Stale(1, late.record.rollouts)
    assert not state.shelf.usable(2)


def test_batches_and_training_go_in_order(state: LedgerState, alice: Identity) -> None:
    submission = make_submission(alice, RUN)
    accept(state, submission)
    assert refused(state, make_batch(RUN, 1, [submission])) == "step"
    assert refused(state, make_trained(RUN, 0)) == "step"
    state.apply(make_batch(RUN, 0, [submission]))
    state.apply(make_trained(RUN, 0))
    assert refused(state, make_trained(RUN, 0)) == "step"


def test_only_the_trainer_sequences(state: LedgerState, alice: Identity) -> None:
    submission = make_submission(alice, RUN)
    accept(state, submission)
    with pytest.raises(WrongAuthorError):
        state.apply(make_batch(RUN, 0, [submission], by=alice))


def test_entry_of_another_run_is_refused(state: LedgerState, alice: Identity) -> None:
    with pytest.raises(WrongRunError):
        state.apply(make_submission(alice, b"x" * 32).data)


@given(st.binary(max_size=400))
def test_any_bytes_give_an_entry_or_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        open_entry(data)


CAROL = Identity.from_phrase("carol")
DAVE = Identity.from_phrase("dave")


def _pool() -> list[bytes]:
    """Every kind of entry about two contributors, good and bad."""
    entries: list[bytes] = []
    submissions = [
        make_submission(who, RUN, index=index, checkpoint_step=0) for who in (CAROL, DAVE) for index in (0, 1)
    ]
    for number, submission in enumerate(submissions):
        outcome = "reject" if number == 3 else "accept"
        verdict = make_verdict(submission, outcome=outcome, hard=number == 3, reason="seed: x" if number == 3 else "")
        entries += [submission.data, verdict.data, make_eviction(verdict)]
    entries += [make_batch(RUN, step, submissions[step : step + 2]) for step in (0, 1)]
    return [*entries, make_trained(RUN, 0), make_trained(RUN, 1)]


POOL = _pool()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(range(len(POOL))), max_size=40))
def test_any_interleaving_gives_one_state_or_named_refusals(order: list[int]) -> None:
    """Whatever order entries come in: used once, credits of evicted are zero, and a replay gives the same state."""
    state, taken = LedgerState(RUN, make_manifest()), []
    for number in order:
        length = state.length
        with contextlib.suppress(LedgerError):
            state.apply(POOL[number])
        if state.length > length:
            taken.append(POOL[number])
    used = [key for batch in state.batches.values() for key in batch]
    assert len(used) == len(set(used))
    assert all(one.balance.maturing == 0 for one in state.contributors.values() if one.standing == "evicted")
    replay = LedgerState(RUN, make_manifest())
    for entry in taken:
        replay.apply(entry)
    assert (replay.tip, replay.contributors, replay.batches) == (state.tip, state.contributors, state.batches)
    assert OPERATOR.peer_id not in state.contributors


def test_record_is_that_of_a_beginning_of_the_ledger(state: LedgerState, alice: Identity, bob: Identity) -> None:
    outcomes = ["accept", "accept", "reject", "accept"]
    for index, outcome in enumerate(outcomes):
        submission = make_submission(alice, RUN, index=index)
        state.apply(submission.data)
        state.apply(make_verdict(submission, outcome=outcome, reason="toploc: x").data)
    records = [state.record(alice.peer_id, length) for length in range(9)]
    assert records[0] == records[1] == TrackRecord()
    assert records[2] == records[3] == TrackRecord(accepted=1, streak=1)
    assert records[4] == TrackRecord(accepted=2, streak=2)
    assert records[6] == records[7] == TrackRecord(accepted=2, rejected=1)
    assert records[8] == TrackRecord(accepted=3, rejected=1, streak=1)
    assert state.record(bob.peer_id, 8) == TrackRecord()
    with pytest.raises(LedgerError, match="not replayed"):
        state.record(alice.peer_id, 9)


def test_undecided_submissions_change_no_record(state: LedgerState, alice: Identity) -> None:
    submission = make_submission(alice, RUN)
    state.apply(submission.data)
    state.apply(make_verdict(submission, outcome="undecided").data)
    assert state.record(alice.peer_id, state.length) == TrackRecord()


def reach(state: LedgerState, step: int) -> None:
    """Commit the batches before a step."""
    for at in range(len(state.batches), step):
        work = make_submission(CAROL, RUN, step=at, checkpoint_step=at)
        accept(state, work)
        state.apply(make_batch(RUN, at, [work]))


def veteran(state: LedgerState, alice: Identity) -> None:
    reach(state, 2)
    for step in range(3):
        for index in range(4):
            accept(state, make_submission(alice, RUN, step=step, index=index))


@pytest.mark.parametrize("drawn", [False, True])
def test_ledger_takes_no_accept_without_the_costly_checks_that_were_due(
    state: LedgerState, alice: Identity, drawn: bool
) -> None:
    """A validator saves itself the work, or does its friend a favour."""
    veteran(state, alice)
    beacon = make_head(RUN, 2, ledger_length=state.length)
    tries = (make_submission(alice, RUN, step=3, sha256=bytes([n]) * 32) for n in range(99))
    submission = next(one for one in tries if is_drawn(beacon_of(beacon), one.id, rate=0.25) == drawn)
    state.apply(submission.data)
    verdict = make_verdict(submission, draw=make_draw_evidence(submission, beacon, rate=0.25))
    if drawn:
        assert refused(state, verdict.data) == "draw"
    else:
        state.apply(verdict.data)
        assert state.submissions[submission.id].state == "accepted"


def test_beacon_that_names_a_longer_ledger_excuses_nothing(state: LedgerState, alice: Identity) -> None:
    submission = make_submission(alice, RUN)
    state.apply(submission.data)
    beacon = make_head(RUN, 2, ledger_length=10**6)
    draw = make_draw_evidence(submission, beacon, rate=0.25)
    assert refused(state, make_verdict(submission, draw=draw).data) == "draw"


# Policies never go back.


def test_policies_of_a_contributor_never_go_back(state: LedgerState, alice: Identity, bob: Identity) -> None:
    """Grinding: a contributor computes an index with every policy that is still taken, and hands in the best."""
    reach(state, 4)
    state.apply(make_submission(alice, RUN, step=4, checkpoint_step=3).data)
    state.apply(make_submission(alice, RUN, step=4, index=1, checkpoint_step=4).data)
    assert refused(state, make_submission(alice, RUN, step=4, index=2, checkpoint_step=3).data) == "policy-back"
    assert refused(state, make_submission(alice, RUN, step=5, checkpoint_step=3).data) == "policy-back"
    state.apply(make_submission(alice, RUN, step=5, checkpoint_step=4).data)
    state.apply(make_submission(bob, RUN, step=5, checkpoint_step=3).data)
    assert state.evicted == set()


def test_order_of_policies_is_by_step_and_index_and_not_by_arrival(state: LedgerState, alice: Identity) -> None:
    """An honest node's earlier work may be judged after its later work."""
    reach(state, 4)
    state.apply(make_submission(alice, RUN, step=5, checkpoint_step=4).data)
    state.apply(make_submission(alice, RUN, step=5, index=1, checkpoint_step=5).data)
    assert refused(state, make_submission(alice, RUN, step=3, checkpoint_step=5).data) == "policy-back"
    state.apply(make_submission(alice, RUN, step=3, checkpoint_step=2).data)
    state.apply(make_submission(alice, RUN, step=4, checkpoint_step=3).data)
    assert refused(state, make_submission(alice, RUN, step=3, index=1, checkpoint_step=4).data) == "policy-back"
    state.apply(make_submission(alice, RUN, step=3, index=1, checkpoint_step=3).data)


@given(st.permutations([(step, index, step // 2) for step in range(4) for index in range(2)]))
def test_honest_work_is_taken_in_any_order_of_steps(work: list[tuple[int, int, int]]) -> None:
    state = LedgerState(RUN, make_manifest())
    reach(state, 3)
    before = len(state.submissions)
    for step, index, policy in sorted(work, key=lambda one: one[1]):  # of one step, the first index comes first
        state.apply(make_submission(ALICE, RUN, step=step, index=index, checkpoint_step=policy).data)
    assert len(state.submissions) == before + len(work)


# What a quorum that lies cannot have credited.


@pytest.mark.parametrize(
    "changes",
    [{"output_tokens": 4 * 256 + 1}, {"output_tokens": 10**12}, {"rollouts": 5}, {"rollouts": 1, "output_tokens": 257}],
    ids=str,
)
def test_a_submission_is_as_large_as_the_manifest_allows(
    state: LedgerState, alice: Identity, changes: dict[str, int]
) -> None:
    """Validators that share with a contributor accept more tokens than its rollouts can have."""
    assert refused(state, make_submission(alice, RUN, **changes).data) == "over-tokens"
    accept(state, make_submission(alice, RUN, output_tokens=4 * 256))


def test_no_work_for_steps_to_come(state: LedgerState, alice: Identity) -> None:
    """Validators that share with a contributor accept work of a thousand steps that nobody has opened."""
    for step in (2, 250):
        assert refused(state, make_submission(alice, RUN, step=step).data) == "future"
    accept(state, make_submission(alice, RUN, step=1))
    reach(state, 1)
    accept(state, make_submission(alice, RUN, step=2))


def test_work_that_relays_took_in_time_is_credited_however_late_it_is_settled(
    state: LedgerState, alice: Identity
) -> None:
    """Validators were slow, or a relay was out of reach: that is not the contributor's doing."""
    reach(state, 3)
    for step in range(3):
        state.apply(make_trained(RUN, step))
    accept(state, make_submission(alice, RUN))
    assert state.contributors[alice.peer_id].credits == 40


def test_no_batch_holds_work_of_another_policy_than_the_one_that_its_step_gave(
    state: LedgerState, alice: Identity
) -> None:
    """Validators that lie would have an honest trainer contradict itself."""
    reach(state, 1)
    state.apply(make_trained(RUN, 0))
    work = make_submission(alice, RUN, step=1, checkpoint_step=1, checkpoint=b"z" * 32)
    accept(state, work)
    assert state.shelf.usable(1) == []
    assert refused(state, make_batch(RUN, 1, [work])) == "unusable"


def test_a_hard_answer_to_an_appeal_is_no_ground(alice: Identity) -> None:
    """With a hard vote and a hard answer, the trainer would evict a contributor whom no quorum has caught."""
    judges = [Identity.from_phrase(name) for name in ("erin", "frank", "grace")]
    keys = tuple(one.peer_id.public_key for one in judges)
    state = LedgerState(RUN, make_manifest(validators=keys, quorum=2))
    work = make_submission(alice, RUN)
    hard = make_verdict(work, by=judges[0], outcome="reject", hard=True, reason="seed: x")
    soft = make_verdict(work, by=judges[1], outcome="reject", reason="reward: x")
    appeal = make_appeal(alice, soft)
    answer = make_answer(work, appeal, by=judges[2], outcome="reject", hard=True, reason="seed: x")
    for entry in (work.data, hard.data, soft.data, appeal.data, answer.data):
        state.apply(entry)
    for verdict in (hard, answer):
        assert refused(state, make_eviction(verdict)) == "no-ground"
    assert state.owed() == []


def filtered(**batch: Any) -> LedgerState:
    """A run that trains on groups with signal only; a submission has two groups of two."""
    spec = BatchSpec(rollouts_per_step=4, max_staleness=1, total_steps=3, signal_only=True, **batch)
    return LedgerState(RUN, make_manifest(batch=spec))


def test_a_batch_says_which_groups_it_leaves_out(alice: Identity) -> None:
    state = filtered()
    first, second = make_submission(alice, RUN), make_submission(alice, RUN, index=1)
    accept(state, first)
    accept(state, second)
    assert refused(state, make_batch(RUN, 0, [first, second])) == "short", "it does not say it"
    assert refused(state, make_batch(RUN, 0, [first], silent=b"\x01")) == "short", "2 of 4 rollouts are left"
    state.apply(make_batch(RUN, 0, [first, second], silent=b"\x05"))
    assert state.committed[0].silent == b"\x05"
    assert state.submissions[second.id].used_in == 0


def test_a_batch_cannot_claim_a_deadline_that_has_not_passed(alice: Identity) -> None:
    """A trainer that wants a step without waiting for the contributors it does not like."""
    state = filtered(deadline_s=10.0)
    submission = make_submission(alice, RUN)
    accept(state, submission)
    early = make_batch(RUN, 0, [submission], silent=b"\x01", ended="deadline", issued_at_ms=10_000)
    assert refused(state, early) == "short"
    state.apply(make_batch(RUN, 0, [submission], silent=b"\x01", ended="deadline", issued_at_ms=10_001))
    assert state.committed_at_ms(1) == 10_001


def test_grounds_against_the_evicted_ask_for_nothing_more() -> None:
    """A cheat is caught twice with what it had handed in before: one eviction is due, and is owed until it is there."""
    state, bob = LedgerState(RUN, make_manifest()), Identity.from_phrase("bob")
    works = [make_submission(bob, RUN, index=index) for index in (0, 1, 2)]
    verdicts = [make_verdict(one, outcome="reject", hard=True, reason="toploc: another model") for one in works]
    for entry in (*works, *verdicts[:2]):
        state.apply(entry.data)
    assert [(duty.kind, duty.verdict, duty.entry) for duty in state.owed()] == [("eviction", verdicts[0].id, 3)]
    state.apply(make_eviction(verdicts[0]))
    assert state.owed() == []
    state.apply(verdicts[2].data)
    assert state.owed() == []

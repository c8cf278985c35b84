"""The ledger's rules, one by one, and as any interleaving of entries."""

from __future__ import annotations

import contextlib
import copy

import pytest
from factories import (
    OPERATOR,
    VALIDATOR,
    make_batch,
    make_eviction,
    make_manifest,
    make_submission,
    make_trained,
    make_verdict,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.envelope import Signed
from protocol.errors import LedgerError, ProtocolError, WrongAuthorError, WrongRunError
from protocol.identity import Identity
from protocol.ledger import LedgerState, next_tip, open_entry
from protocol.records import Submission

RUN = b"r" * 32


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
    before = copy.deepcopy(state.__dict__ | {"_rules": None})
    with pytest.raises(LedgerError) as caught:
        state.apply(entry)
    after = state.__dict__ | {"_rules": None}
    assert after == before, "a refused entry must change nothing"
    return caught.value.rule


def test_accepted_work_earns_its_tokens_and_can_be_trained_once(state: LedgerState, alice: Identity) -> None:
    submission = make_submission(alice, RUN)
    accept(state, submission)
    assert state.contributors[alice.peer_id].credits == 40
    assert state.usable(0) == [submission.id]
    state.apply(make_batch(RUN, 0, [submission]))
    assert state.usable(1) == []
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


def test_file_of_another_cannot_be_submitted_again(state: LedgerState, alice: Identity, bob: Identity) -> None:
    """Copying: bob hands in alice's file under his own key."""
    state.apply(make_submission(alice, RUN, sha256=b"1" * 32).data)
    assert refused(state, make_submission(bob, RUN, sha256=b"1" * 32).data) == "duplicate-file"


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
    assert state.usable(0) == []
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


def test_batch_takes_no_stale_policy_and_no_future_one(state: LedgerState, alice: Identity) -> None:
    old = make_submission(alice, RUN)
    accept(state, old)
    ahead = make_submission(alice, RUN, index=1, checkpoint_step=1)
    accept(state, ahead)
    assert refused(state, make_batch(RUN, 0, [ahead])) == "unusable"
    state.apply(make_batch(RUN, 0, [old]))
    state.apply(make_batch(RUN, 1, [ahead]))
    late = make_submission(alice, RUN, index=2)
    accept(state, late)
    assert refused(state, make_batch(RUN, 2, [late])) == "unusable"
    assert state.stale(2) == 1


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
    assert all(one.credits == 0 for one in state.contributors.values() if one.standing == "evicted")
    replay = LedgerState(RUN, make_manifest())
    for entry in taken:
        replay.apply(entry)
    assert (replay.tip, replay.contributors, replay.batches) == (state.tip, state.contributors, state.batches)
    assert OPERATOR.peer_id not in state.contributors

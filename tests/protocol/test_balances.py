"""Credits: how they mature, what an eviction takes, what a reinstatement gives back."""

from __future__ import annotations

import pytest
from factories import make_batch, make_eviction, make_manifest, make_submission, make_trained, make_verdict
from hypothesis import given
from hypothesis import strategies as st

from protocol.balances import FOR_GOOD, Balance
from protocol.envelope import Signed
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import BatchSpec, CreditSpec, Submission

RUN = b"r" * 32
BATCH = BatchSpec(rollouts_per_step=4, max_staleness=9, total_steps=5)


def ledger(maturity_steps: int = 2) -> LedgerState:
    return LedgerState(RUN, make_manifest(batch=BATCH, credits=CreditSpec(maturity_steps=maturity_steps)))


def train(state: LedgerState, who: Identity, *, steps: int = 1) -> None:
    """So many steps, each on one new submission."""
    for _ in range(steps):
        step = len(state.trained)
        submission = accept(state, who, step)
        state.apply(make_batch(RUN, step, [submission]))
        state.apply(make_trained(RUN, step))


def accept(state: LedgerState, who: Identity, step: int, index: int = 0) -> Signed[Submission]:
    submission = make_submission(who, RUN, step=step, index=index)
    state.apply(submission.data)
    state.apply(make_verdict(submission).data)
    return submission


def evict(state: LedgerState, who: Identity) -> None:
    """For work of the next step, which a relay would have taken."""
    step = len(state.batches) + 1
    bad = make_submission(who, RUN, step=step, index=state.next_index(who.peer_id, step))
    state.apply(bad.data)
    verdict = make_verdict(bad, outcome="reject", hard=True, reason="seed: x")
    state.apply(verdict.data)
    state.apply(make_eviction(verdict))


def amounts(state: LedgerState, who: Identity) -> tuple[int, int, int]:
    one = state.contributors[who.peer_id].balance
    return one.mature, one.maturing, one.forfeited


def test_credits_mature_by_trained_steps(alice: Identity) -> None:
    state = ledger(2)
    accept(state, alice, 0, 0)
    assert amounts(state, alice) == (0, 40, 0)
    train(state, Identity.from_phrase("bob"))
    assert amounts(state, alice) == (0, 40, 0)
    accept(state, alice, 1)
    train(state, Identity.from_phrase("bob"))
    assert amounts(state, alice) == (40, 40, 0), "the first is two steps old, the second one"


def test_an_eviction_takes_what_is_not_mature_and_leaves_the_rest(alice: Identity) -> None:
    state = ledger(1)
    train(state, alice)
    accept(state, alice, 2)
    assert amounts(state, alice) == (40, 40, 0)
    evict(state, alice)
    assert amounts(state, alice) == (40, 0, 40)
    assert state.contributors[alice.peer_id].credits == 40


def test_without_a_window_credits_are_mature_at_once(alice: Identity) -> None:
    state = ledger(0)
    accept(state, alice, 0)
    evict(state, alice)
    assert amounts(state, alice) == (40, 0, 0)


def test_with_the_last_step_everything_is_mature(alice: Identity) -> None:
    """No step comes after it: else the last steps' work would mature never."""
    state = ledger(100)
    train(state, alice, steps=4)
    assert amounts(state, alice) == (0, 160, 0)
    train(state, alice)
    assert amounts(state, alice) == (200, 0, 0)
    accept(state, alice, 6)
    assert amounts(state, alice) == (240, 0, 0)


def test_nobody_gains_from_an_eviction(alice: Identity, bob: Identity) -> None:
    """A validator rejects others to enrich itself or its friends."""
    state = ledger()
    accept(state, alice, 0)
    accept(state, bob, 0)
    evict(state, alice)
    assert sum(one.credits for one in state.contributors.values()) == 40
    assert amounts(state, bob) == (0, 40, 0)


def test_work_accepted_after_the_eviction_waits_for_a_reinstatement(alice: Identity) -> None:
    state = ledger()
    late = make_submission(alice, RUN)
    state.apply(late.data)
    evict(state, alice)
    state.apply(make_verdict(late).data)
    assert amounts(state, alice) == (0, 0, 40)


@pytest.mark.parametrize(("tokens", "credited"), [(40, 8), (4, 0)])
def test_flops_are_two_for_each_parameter_and_token_in_millions(tokens: int, credited: int) -> None:
    assert CreditSpec(unit="flops", parameters=102_848, maturity_steps=1).of(tokens) == credited


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("earn"), st.integers(0, 99), st.integers(0, 9)),
            st.tuples(st.just("withhold"), st.integers(0, 99), st.integers(0, 9)),
            st.tuples(st.sampled_from(["forfeit", "restore", "advance"]), st.just(0), st.just(0)),
        )
    )
)
def test_balances_conserve_and_are_never_negative(story: list[tuple[str, int, int]]) -> None:
    balance, earned, trained = Balance(), 0, 0
    for what, amount, due in story:
        before = balance.mature
        if what in ("earn", "withhold"):
            earned += amount
            getattr(balance, what)(amount, due=trained + due)
        elif what == "advance":
            trained += 1
        else:
            getattr(balance, what)()
        balance.advance(trained)
        assert balance.mature >= before, "what is mature is never taken"
        assert balance.mature + balance.maturing + balance.forfeited == earned
        assert min(balance.mature, balance.maturing, balance.forfeited, balance.restored) >= 0
    balance.restore()
    balance.advance(FOR_GOOD)
    assert (balance.mature, balance.maturing, balance.forfeited) == (earned, 0, 0)

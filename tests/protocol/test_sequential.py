"""The test of one node's whole life: rarely wrong whatever honest numbers look like, quick with cheats."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.sequential import FRACTIONS, MOST_CAPITAL, Bets, is_unlikely, observe

BOUND = 0.01


def highest_capitals(values):
    """`observe` for float[nodes, rollouts] at once: the highest capital that each node ever reaches."""
    nodes, rollouts = values.shape
    stakes, highest = np.zeros((len(FRACTIONS), nodes)), np.zeros(nodes)
    fractions = np.array(FRACTIONS)[:, None]
    for n in range(1, rollouts + 1):
        factor = 1 - fractions + fractions * values[:, n - 1] / BOUND
        stakes = np.minimum((stakes + 1 / (n * (n + 1)) / len(FRACTIONS)) * factor, MOST_CAPITAL)
        highest = np.maximum(highest, stakes.sum(axis=0) + 1 / (n + 1))
    return highest


def honest(kind, shape, rng):
    """Numbers of honest nodes whose mean is exactly the bound: the worst that an honest node may have."""
    if kind == "steady":
        return np.full(shape, BOUND)
    if kind == "rare":
        return (rng.random(shape) < 0.001) * BOUND * 1000
    if kind == "exponential":
        return rng.exponential(BOUND, shape)
    scale = np.where(np.arange(shape[1]) // 50 % 2, 0.1, 1.0)  # "changing": calm and wild times
    return scale * rng.exponential(BOUND, shape)


@pytest.mark.parametrize("kind", ["steady", "rare", "exponential", "changing"])
def test_honest_nodes_are_suspected_no_more_often_than_stated(kind):
    """2000 nodes of 1000 rollouts on the bound itself; the guarantee is for every rate at once."""
    highest = highest_capitals(honest(kind, (2000, 1000), np.random.default_rng(1)))
    for rate in (0.1, 0.01):
        assert (highest >= 1 / rate).mean() <= rate + 3 * math.sqrt(rate / 2000)
    assert highest.max() < 1e6


def test_the_simulation_is_of_the_test_itself():
    values = np.random.default_rng(2).exponential(BOUND, (3, 50))
    for row, highest in zip(values, highest_capitals(values), strict=True):
        capitals = [observe(Bets(), row[:count], bound=BOUND).capital for count in range(1, 51)]
        assert max(capitals) == pytest.approx(highest)


@pytest.mark.parametrize("honest_before", [0, 1000, 100_000])
def test_a_node_that_turns_dishonest_is_found_within_some_submissions(honest_before):
    """A contributor builds up a good record first, then departs by twice the bound in every rollout."""
    rng = np.random.default_rng(3)
    bets = observe(Bets(), rng.exponential(BOUND / 2, honest_before), bound=BOUND)
    assert not is_unlikely(bets, 1e-6)
    bets = observe(bets, np.full(100, 2 * BOUND), bound=BOUND)
    assert is_unlikely(bets, 1e-6)


def test_rare_large_values_are_found():
    """A contributor cheats in one rollout of fifty."""
    values = np.zeros(2000)
    values[::50] = 500 * BOUND
    assert is_unlikely(observe(Bets(), values, bound=BOUND), 1e-6)


def test_a_node_that_mends_its_ways_is_believed_again():
    bets = observe(Bets(), [100 * BOUND] * 10_000, bound=BOUND)
    assert is_unlikely(bets, 1e-9)
    assert not is_unlikely(observe(bets, [0.0] * 2000, bound=BOUND), 1e-6)


def test_values_one_by_one_or_together_are_the_same():
    values = [0.0, 0.03, 0.01]
    one_by_one = Bets()
    for value in values:
        one_by_one = observe(one_by_one, [value], bound=BOUND)
    assert one_by_one == observe(Bets(), values, bound=BOUND)


def test_a_bound_of_nothing_is_no_verdict_on_rounding():
    assert not is_unlikely(observe(Bets(), [1e-7] * 10_000, bound=0.0), 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_values_that_are_no_measurement_are_refused(bad):
    with pytest.raises(ValueError, match="no bet"):
        observe(Bets(), [bad], bound=BOUND)


@settings(deadline=None)
@given(values=st.lists(st.floats(0, 1e300), max_size=50), bound=st.floats(0, 1))
def test_every_state_survives_being_stored(values, bound):
    bets = observe(Bets(), values, bound=bound)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(bets), type=Bets) == bets
    assert math.isfinite(bets.capital)

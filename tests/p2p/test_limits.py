"""Token buckets and the daily budget, on a clock of their own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.limits import DAY_S, DOWNLOAD_BURST_S, Buckets, DailyBudget, DownloadBudget, Rate


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_burst_is_taken_at_once_and_then_the_rate_holds(clock):
    buckets = Buckets(Rate(10, burst=30), clock=clock)
    for _ in range(30):
        assert buckets.wait_s("alice", 1) == 0
        buckets.charge("alice", 1)
    assert buckets.wait_s("alice", 1) == pytest.approx(0.1)
    assert buckets.wait_s("bob", 1) == 0
    clock.now += 1
    assert buckets.wait_s("alice", 10) == pytest.approx(0)
    assert buckets.wait_s("alice", 11) == pytest.approx(0.1)


def test_a_debt_is_paid_off_before_the_next_one(clock):
    """A client asks for one huge shard when its allowance is nearly used up."""
    buckets = Buckets(Rate(10, burst=30), clock=clock)
    buckets.charge("alice", 130)
    assert buckets.wait_s("alice") == pytest.approx(10)
    clock.now += 10
    assert buckets.wait_s("alice") == 0
    assert buckets.wait_s("alice", 1) > 0


def test_more_than_a_burst_can_be_asked_for_when_the_bucket_is_full(clock):
    buckets = Buckets(Rate(10, burst=30), clock=clock)
    buckets.charge("alice", 1)
    assert buckets.wait_s("alice", 1000) == pytest.approx(0.1)


def test_nothing_a_second_is_no_limit():
    buckets = Buckets(Rate(0, 0))
    buckets.charge("alice", 10**12)
    assert buckets.wait_s("alice", 10**12) == 0
    assert len(buckets) == 0


def test_a_flood_of_keys_does_not_fill_the_memory(clock):
    """Somebody makes a new identity for every request."""
    buckets = Buckets(Rate(10, burst=30), max_buckets=100, clock=clock)
    buckets.charge("alice", 100)
    for number in range(10_000):
        buckets.charge(number, 1)
        assert buckets.wait_s("alice") > 0  # whoever keeps asking is not forgotten
    assert len(buckets) == 100


@given(amounts=st.lists(st.floats(0, 100), max_size=50), steps=st.lists(st.floats(0, 5), max_size=50))
def test_no_more_than_burst_and_rate_are_ever_taken(amounts, steps):
    clock, taken = Clock(0.0), 0.0
    buckets = Buckets(Rate(10, burst=30), clock=clock)
    for amount, step in zip(amounts, steps, strict=False):
        if buckets.wait_s("alice", amount) == 0:
            buckets.charge("alice", amount)
            taken += amount
        clock.now += step
        assert taken <= 30 + 10 * clock.now + max(amounts) + 1e-6


def test_a_budget_ends_and_begins_again_at_midnight():
    clock = Clock(5 * DAY_S + 80_000.0)
    budget = DailyBudget(100, clock=clock)
    budget.spend(99)
    assert budget.wait_s() == 0
    budget.spend(5)
    assert budget.wait_s() == pytest.approx(6400)
    clock.now += 6401
    assert budget.wait_s() == 0
    assert budget.spent == (6, 0)


def test_a_budget_survives_a_restart_of_the_same_day():
    clock = Clock(5 * DAY_S)
    for day, left in ((5, False), (4, True)):
        budget = DailyBudget(100, clock=clock)
        budget.restore(day, 100)
        assert (budget.wait_s() == 0) is left


def test_no_budget_is_no_limit():
    budget = DailyBudget(0)
    budget.spend(10**15)
    assert budget.wait_s() == 0


def test_downloads_are_paced_by_what_came_before(clock):
    budget = DownloadBudget(bytes_per_s=1000, clock=clock)
    assert budget.take(int(1000 * DOWNLOAD_BURST_S)) == 0
    assert budget.take(2000) == pytest.approx(2)
    clock.now += 1.5
    assert budget.take(0) == pytest.approx(0.5)
    assert DownloadBudget().take(10**12) == 0


def test_downloads_of_a_day_end_and_begin_again():
    clock = Clock(5 * DAY_S + 80_000.0)
    budget = DownloadBudget(bytes_per_day=100, day_clock=clock)
    budget.restore(5, 60)
    assert budget.wait_s() == 0
    budget.take(60)
    assert budget.wait_s() == pytest.approx(6400)
    clock.now += 6401
    assert budget.wait_s() == 0
    assert budget.spent == (6, 0)

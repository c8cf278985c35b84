"""Balancer: proportion, probing, healing and pauses, on a clock that the test moves."""

import random

import pytest

from p2p.shardcast.balance import HEALING_S, LONGEST_PAUSE_S, MISDEED_PAUSE_S, Balancer
from protocol.identity import Identity

ALICE, BOB, CAROL = (Identity.from_phrase(name).peer_id for name in ("alice", "bob", "carol"))
RELAYS = [ALICE, BOB, CAROL]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def balancer(clock):
    return Balancer(clock=clock, randomness=random.Random(1))


def share(balancer, relay, *, draws=3000):
    return sum(balancer.choose(RELAYS) == relay for _ in range(draws)) / draws


def test_all_are_equal_before_anything_is_known(balancer):
    assert balancer.weights(RELAYS) == [1.0, 1.0, 1.0]
    assert share(balancer, BOB) == pytest.approx(1 / 3, abs=0.05)


def test_relays_are_drawn_in_proportion_to_throughput(balancer):
    for relay, rate in ((ALICE, 3_000_000), (BOB, 1_000_000), (CAROL, 1_000_000)):
        balancer.succeeded(relay, bytes_count=rate, seconds=1.0)
    assert share(balancer, ALICE) == pytest.approx(0.6, abs=0.05)


def test_an_unknown_relay_is_probed_as_if_it_were_the_best(balancer):
    balancer.succeeded(ALICE, bytes_count=5_000_000, seconds=1.0)
    balancer.succeeded(BOB, bytes_count=1_000_000, seconds=1.0)
    assert balancer.weights(RELAYS) == [5e6, 1e6, 5e6]


def test_a_slow_relay_keeps_a_small_share(balancer):
    balancer.succeeded(ALICE, bytes_count=10**9, seconds=1.0)
    balancer.succeeded(BOB, bytes_count=1, seconds=1.0)
    assert 0.005 < share(balancer, BOB) < 0.04


def test_failures_lower_success_not_throughput_and_heal_slowly(balancer, clock):
    for relay in RELAYS:
        balancer.succeeded(relay, bytes_count=1_000_000, seconds=1.0)
    for _ in range(20):
        balancer.failed(BOB)
    assert balancer.best_throughput() == 1e6
    _, at_once, _ = balancer.weights(RELAYS)
    clock.now += HEALING_S
    _, later, _ = balancer.weights(RELAYS)
    clock.now += 10 * HEALING_S
    _, at_last, _ = balancer.weights(RELAYS)
    assert at_once < 0.03e6 < 0.6e6 < later < 0.7e6 < 0.99e6 < at_last


def test_a_failing_relay_is_left_alone_for_a_moment_that_doubles(balancer, clock):
    pauses = []
    for _ in range(12):
        balancer.failed(BOB)
        pauses.append(balancer.paused_s(BOB))
        clock.now += LONGEST_PAUSE_S
    assert 0.1 <= pauses[0] <= 0.2
    assert LONGEST_PAUSE_S / 2 <= pauses[-1] <= LONGEST_PAUSE_S
    balancer.failed(BOB)
    assert BOB not in {balancer.choose(RELAYS) for _ in range(200)}
    assert balancer.choose([BOB]) is None


def test_one_success_ends_the_doubling(balancer, clock):
    for _ in range(8):
        balancer.failed(BOB)
    balancer.succeeded(BOB, bytes_count=1, seconds=1.0)
    balancer.failed(BOB)
    assert balancer.paused_s(BOB) <= 0.2


def test_wrong_bytes_cost_much_more(balancer, clock):
    balancer.misbehaved(BOB)
    assert balancer.paused_s(BOB) == MISDEED_PAUSE_S
    clock.now += MISDEED_PAUSE_S
    assert BOB in {balancer.choose(RELAYS) for _ in range(200)}


def test_relays_to_avoid_are_asked_only_when_there_is_no_other(balancer):
    assert {balancer.choose(RELAYS, avoid={ALICE, BOB}) for _ in range(20)} == {CAROL}
    assert balancer.choose([ALICE], avoid={ALICE}) == ALICE
    assert balancer.choose([]) is None


def test_weights_never_vanish(balancer):
    """All relays have failed for ever: drawing must not fail for want of a weight."""
    for relay in RELAYS:
        balancer.misbehaved(relay)
    assert all(weight > 0 for weight in balancer.weights(RELAYS))

"""Intervals over seeds are Student's, and verdicts follow from them alone."""

import math

import pytest

from bench.seeds import Estimate, all_of, any_of, difference, estimate, is_above, is_no_worse, paired_ratio, ratio


def test_an_estimate_is_the_mean_with_students_interval():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert found.text(digits=2) == "2.00 ± 2.48"


def test_a_difference_is_welchs():
    gap = difference([0.5, 0.7, 0.9], [0.2, 0.3, 0.4])  # variances 0.04 and 0.01, 2.94 degrees of freedom
    assert gap.mean == pytest.approx(0.4)
    assert gap.half == pytest.approx(4.303 * math.sqrt(0.05 / 3), rel=1e-3)


def test_one_seed_decides_nothing():
    alone = difference([0.9], [0.1])
    assert math.isinf(alone.half)
    assert is_above(alone.low, alone.high, 0.0) == is_no_worse(alone) == "undecided"
    assert paired_ratio([2.0], [1.0]).text() == "2×"


def test_ratios_are_geometric_and_pairs_cancel_what_both_have():
    assert ratio([2.0, 8.0], [1.0, 1.0]).mean == pytest.approx(4.0)
    paired = paired_ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert (paired.low, paired.mean, paired.high) == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        (Estimate(-0.01, 0.02), "reproduced"),
        (Estimate(0.05, 0.02), "reproduced"),
        (Estimate(-0.05, 0.02), "not reproduced"),
        (Estimate(-0.05, 0.3), "undecided"),
    ],
)
def test_no_worse_needs_an_interval_that_is_narrow_and_holds_nought_or_more(gap, verdict):
    assert is_no_worse(gap) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.1, 3.0, "reproduced"), (0.9, 3.0, "undecided"), (0.2, 0.9, "not reproduced")],
)
def test_above_a_line_is_all_of_the_interval(low, high, verdict):
    assert is_above(low, high, 1.0) == verdict


def test_parts_of_a_claim_are_joined():
    assert all_of(["reproduced", "undecided", "not reproduced"]) == "not reproduced"
    assert all_of(["reproduced", "undecided"]) == "undecided"
    assert any_of(["reproduced", "not reproduced"]) == "reproduced"
    assert any_of(["undecided", "not reproduced"]) == "undecided"

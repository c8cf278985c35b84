"""pass@k is unbiased, and its interval covers the truth as often as it says."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from trainer.evaluation import Answer, mean_interval, pass_at_k, summarise


def answers(*rewards):
    return [Answer(reward, tokens=3, stopped=True) for reward in rewards]


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_it_is_the_formula_of_the_paper(case):
    n, c, k = case
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


@pytest.mark.parametrize(("p", "n", "k"), [(0.3, 4, 1), (0.3, 4, 2), (0.1, 6, 4), (0.9, 3, 3)])
def test_its_expectation_is_the_chance_that_one_of_k_is_right(p, n, k):
    """Over all outcomes of n draws; the plain share of groups of k with a right answer would need many more."""
    outcomes = itertools.product((0, 1), repeat=n)
    mean = sum(math.prod(p if x else 1 - p for x in one) * pass_at_k(n, sum(one), k) for one in outcomes)
    assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_does_not_exist_is_refused(n, c, k):
    with pytest.raises(ConfigError, match="does not exist"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("prompts", "samples", "easy"), [(64, 4, 0.5), (64, 1, 0.9), (32, 8, 0.2), (100, 2, 0.03)])
def test_the_interval_covers_the_truth(prompts, samples, easy):
    """Prompts of very different difficulty: two thirds have half the mean's chance, the others twice."""
    source = random.Random(7)
    rates = (easy / 2, easy / 2, min(1.0, 2 * easy))
    truth = sum(rates) / 3
    hits = 0
    for _ in range(400):
        drawn = (source.choice(rates) for _ in range(prompts))
        values = [sum(source.random() < rate for _ in range(samples)) / samples for rate in drawn]
        low, high = mean_interval(values, samples=samples)
        hits += low <= truth <= high
    assert hits / 400 > 0.92


def test_a_perfect_score_keeps_a_width():
    low, high = mean_interval([1.0] * 20, samples=8)
    assert high == 1.0
    assert 0.8 < low < 0.9


def test_many_answers_to_few_prompts_do_not_pretend_to_be_many_prompts():
    low, high = mean_interval([0.0, 1.0] * 5, samples=1000)
    assert high - low > 0.5


def test_a_summary_counts_what_could_not_be_judged_as_wrong():
    found = summarise([answers(1.0, 0.0), answers(None, 0.5)], pass_at=(1, 2))
    assert [(one.k, one.value) for one in found.pass_at] == [(1, 0.25), (2, 0.5)]
    assert found.reward == 0.375
    assert found.unknown == 1
    assert (found.prompts, found.samples, found.tokens, found.truncated) == (2, 2, 3.0, 0.0)


@pytest.mark.parametrize("groups", [[], [[]], [answers(1.0), answers(1.0, 0.0)]])
def test_uneven_or_empty_groups_are_refused(groups):
    with pytest.raises(ConfigError, match="equally many"):
        summarise(groups, pass_at=(1,))

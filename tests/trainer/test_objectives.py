"""Policy objectives: each one's formula, what it cuts off, and gradients that stay finite whatever was recorded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.objectives import OBJECTIVES, Tokens
from trainer.recipe import LossSettings

log_ratios = st.floats(-40, 40)
advantages = st.floats(-3, 3)


def tokens(ratios, advantages, *, owner=None, old=-1.0):
    """Tokens whose probability changed by these factors."""
    log_ratios = torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)
    before = torch.full_like(log_ratios, old)
    return Tokens(
        (before + log_ratios).requires_grad_(True),
        before,
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(owner or [0] * len(ratios)),
    )


def run(name, case, **settings):
    outcome = OBJECTIVES[name](case, LossSettings(objective=name, **settings))
    outcome.loss.sum().backward()
    return outcome, case.logprobs.grad


@given(log_ratios, advantages)
def test_two_sided_clipping_bounds_every_token(log_ratio, advantage):
    """Attack: a token with a huge ratio and a negative advantage, whose loss one-sided clipping leaves unbounded."""
    case = tokens([math.exp(log_ratio)], [advantage])
    outcome, gradient = run("two_sided", case, delta=4.0)
    assert abs(outcome.loss.item()) <= 4.0 * abs(advantage) + 1e-9
    assert abs(gradient.item()) <= 4.0 * abs(advantage) + 1e-9


def test_one_sided_clipping_does_not():
    outcome, gradient = run("one_sided", tokens([300.0], [-1.0]))
    assert outcome.loss.item() == pytest.approx(300)
    assert gradient.item() == pytest.approx(300)


@given(st.floats(-3, math.log(3.9)), advantages)
def test_within_delta_both_are_the_same(log_ratio, advantage):
    cases = [tokens([math.exp(log_ratio)], [advantage]) for _ in range(2)]
    one, two = run("one_sided", cases[0]), run("two_sided", cases[1], delta=4.0)
    assert one[0].loss.item() == two[0].loss.item()
    assert one[1].item() == two[1].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [(1.5, 1.0, True), (0.5, 1.0, False), (0.5, -1.0, True), (1.5, -1.0, False), (9.0, -1.0, True), (1.1, 1.0, False)],
)
def test_a_cut_token_gives_no_gradient_and_every_other_one_does(ratio, advantage, cut):
    outcome, gradient = run("two_sided", tokens([ratio], [advantage]))
    assert outcome.clipped.item() == cut
    assert (gradient.item() == 0) == cut


def test_masking_looks_at_probabilities_and_at_the_advantages_sign():
    """From a probability of 0.4: to 0.7 is too far for A > 0 and fine for A < 0; to 0.5 is fine for both."""
    old = math.log(0.4)
    case = tokens([0.7 / 0.4, 0.7 / 0.4, 0.5 / 0.4, 0.1 / 0.4], [1.0, -1.0, 1.0, -1.0], old=old)
    outcome, gradient = run("masked", case, mask_difference=0.2, mask_drift_coefficient=0.0)
    assert outcome.clipped.tolist() == [True, False, False, True]
    assert outcome.loss.tolist() == pytest.approx([0.0, 0.7 / 0.4, -0.5 / 0.4, 0.0])
    assert gradient.tolist() == pytest.approx([0.0, 0.7 / 0.4, -0.5 / 0.4, 0.0])


def test_masking_holds_the_policy_near_the_one_that_sampled():
    outcome, gradient = run("masked", tokens([2.0, 0.5], [0.0, 0.0]), mask_drift_coefficient=0.1)
    assert outcome.loss.tolist() == pytest.approx([0.1 * math.log(2) ** 2] * 2)
    assert gradient[0] > 0 > gradient[1]


def test_a_sequence_has_one_ratio_the_geometric_mean():
    case = tokens([2.0, 0.5, 1.1, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0, -1.0], owner=[0, 0, 1, 1, 1])
    outcome, gradient = run("sequence", case, epsilon=0.2)
    assert outcome.ratio.tolist() == pytest.approx([1.0, 1.0, *[1.1 ** (1 / 3)] * 3])
    assert outcome.loss.tolist() == pytest.approx([-1.0, -1.0, *[1.1 ** (1 / 3)] * 3])
    assert gradient.tolist() == pytest.approx([-1.0, -1.0, *[1.1 ** (1 / 3)] * 3])


def test_a_sequence_is_cut_as_a_whole():
    outcome, gradient = run("sequence", tokens([3.0, 1.0, 1.0], [1.0] * 3, owner=[0, 0, 1]), epsilon=0.2)
    assert outcome.clipped.tolist() == [True, True, False]
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -1.0])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("old", [-1e4, -math.inf])
def test_an_impossible_old_token_gives_finite_gradients(name, old):
    """Attack: a recorded log-probability so low that exp() overflows and turns the gradient into NaN."""
    for advantage in (1.0, -1.0):
        now = torch.tensor([-0.1], requires_grad=True)
        case = Tokens(now, torch.tensor([old]), torch.tensor([advantage]), torch.tensor([0]))
        assert torch.isfinite(run(name, case)[1]).all()

"""The GRPO loss against a hand-written reference, and the promises its terms make."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from trainer.grpo import (
    LossInputs,
    LossSums,
    group_advantages,
    grpo_loss,
    importance_weights,
    kl_estimate,
    token_objective,
)
from trainer.recipe import LossSettings


def inputs(logprobs, old, advantages, mask, **extra):
    tensors = [torch.tensor(value, dtype=torch.float64) for value in (logprobs, old, advantages, mask)]
    entropy = extra.pop("entropy", torch.zeros_like(tensors[0]))
    return LossInputs(*tensors, entropy=entropy, **extra)


def reference_loss(logprobs, old, advantages, mask, *, level, epsilon=0.2, delta=4.0, kl=0.0, reference=None):
    """The formula, token by token, in plain Python."""
    rows = []
    for b, advantage in enumerate(advantages):
        row = []
        for t, kept in enumerate(mask[b]):
            if not kept:
                continue
            ratio = math.exp(logprobs[b][t] - old[b][t])
            gain = min(min(ratio, delta) * advantage, min(max(ratio, 1 - epsilon), 1 + epsilon) * advantage)
            loss = -gain
            if reference is not None:
                gap = reference[b][t] - logprobs[b][t]
                loss += kl * (math.exp(gap) - gap - 1)
            row.append(loss)
        rows.append(row)
    if level == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    return sum(sum(row) / len(row) for row in rows) / len(rows)


LOGPROBS = [[-0.1, -2.0, -0.5, -1.0], [-3.0, -0.2, -0.1, -5.0], [-1.0, -1.0, -1.0, -1.0]]
OLD = [[-0.3, -0.5, -0.5, -9.0], [-0.1, -2.5, -4.0, -5.0], [-1.3, -0.9, -3.0, -1.0]]
ADVANTAGES = [1.5, -0.7, 0.4]
MASK = [[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 0]]


@pytest.mark.parametrize(("level", "normaliser"), [("token", 7.0), ("sample", 3.0)])
def test_loss_equals_the_hand_written_reference(level, normaliser):
    settings = LossSettings(level=level)
    loss = grpo_loss(inputs(LOGPROBS, OLD, ADVANTAGES, MASK), settings, normaliser=normaliser)
    assert loss.item() == pytest.approx(reference_loss(LOGPROBS, OLD, ADVANTAGES, MASK, level=level), rel=1e-12)


def test_loss_with_kl_equals_the_hand_written_reference():
    reference = [[-0.2, -1.0, -0.6, 0.0], [0.0, -0.1, -0.3, -4.0], [0.0, 0.0, -2.0, 0.0]]
    settings = LossSettings(kl_coefficient=0.3)
    held = torch.tensor(reference, dtype=torch.float64)
    loss = grpo_loss(inputs(LOGPROBS, OLD, ADVANTAGES, MASK, reference_logprobs=held), settings, normaliser=7.0)
    expected = reference_loss(LOGPROBS, OLD, ADVANTAGES, MASK, level="token", kl=0.3, reference=reference)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_token_and_sample_level_weigh_long_rollouts_differently():
    """A rollout of four tokens against one of a single token: 4 : 1 by token, 1 : 1 by rollout."""
    case = inputs([[-1.0] * 4] * 2, [[-1.0] * 4] * 2, [1.0, -1.0], [[1, 1, 1, 1], [1, 0, 0, 0]])
    token = grpo_loss(case, LossSettings(level="token"), normaliser=5.0)
    sample = grpo_loss(case, LossSettings(level="sample"), normaliser=2.0)
    assert token.item() == pytest.approx(-3 / 5)
    assert sample.item() == pytest.approx(0.0)


def test_micro_batches_add_up_to_the_whole():
    whole = grpo_loss(inputs(LOGPROBS, OLD, ADVANTAGES, MASK), LossSettings(), normaliser=7.0)
    parts = [
        grpo_loss(inputs(LOGPROBS[at], OLD[at], ADVANTAGES[at], MASK[at]), LossSettings(), normaliser=7.0)
        for at in (slice(0, 1), slice(1, 3))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12)


@given(st.floats(-50, 0), st.floats(-50, 0), st.floats(-3, 3))
def test_two_sided_clipping_bounds_every_token(logprob, old, advantage):
    """Attack: a token with a huge ratio and a negative advantage, whose loss one-sided clipping leaves unbounded."""
    loss = token_objective(inputs([[logprob]], [[old]], [advantage], [[1]]), LossSettings(delta=4.0)).item()
    assert abs(loss) <= 4.0 * abs(advantage) + 1e-9


def test_a_bounded_token_gives_no_gradient():
    case = inputs([[-0.1, -0.1]], [[-9.0, -0.1]], [-1.0], [[1, 1]])
    case.logprobs.requires_grad_(True)
    grpo_loss(case, LossSettings(), normaliser=2.0).backward()
    assert case.logprobs.grad is not None
    assert case.logprobs.grad[0].tolist() == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize("old", [-1e4, -math.inf])
def test_an_impossible_old_token_gives_finite_gradients(old):
    """Attack: a recorded log-probability so low that exp() overflows and turns the gradient into NaN."""
    for advantage in (1.0, -1.0):
        case = inputs([[-0.1]], [[old]], [advantage], [[1]])
        case.logprobs.requires_grad_(True)
        grpo_loss(case, LossSettings(), normaliser=1.0).backward()
        assert case.logprobs.grad is not None
        assert torch.isfinite(case.logprobs.grad).all()


def test_the_kl_term_has_a_gradient():
    """Advantages of zero leave the KL term alone; its derivative is 1 − exp(reference − logprob)."""
    reference = torch.tensor([[-0.5, -2.0]], dtype=torch.float64)
    case = inputs([[-1.0, -1.0]], [[-1.0, -1.0]], [0.0], [[1, 1]], reference_logprobs=reference)
    case.logprobs.requires_grad_(True)
    grpo_loss(case, LossSettings(kl_coefficient=0.1), normaliser=2.0).backward()
    assert case.logprobs.grad is not None
    expected = [0.05 * (1 - math.exp(0.5)), 0.05 * (1 - math.exp(-1.0))]
    assert case.logprobs.grad[0].tolist() == pytest.approx(expected)


def test_the_kl_estimate_is_zero_only_where_both_agree():
    policy, reference = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -0.5, -3.0])
    estimate = kl_estimate(policy, reference)
    assert estimate[0] == 0
    assert (estimate[1:] > 0).all()


def test_the_entropy_term_rewards_entropy():
    entropy = torch.tensor([[2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    case = inputs([[-1.0, -1.0]], [[-1.0, -1.0]], [0.0], [[1, 1]], entropy=entropy)
    loss = grpo_loss(case, LossSettings(entropy_coefficient=0.5), normaliser=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(-0.75)
    assert entropy.grad is not None
    assert entropy.grad[0].tolist() == pytest.approx([-0.25, -0.25])


def test_importance_weights_are_capped_and_scale_the_objective():
    weights = importance_weights(torch.tensor([[0.0, -1.0]]), torch.tensor([[-5.0, 0.0]]), cap=2.0)
    assert weights[0].tolist() == pytest.approx([2.0, math.exp(-1)])
    case = inputs([[-1.0, -1.0]], [[-1.0, -1.0]], [1.0], [[1, 1]], importance=weights.double())
    assert token_objective(case, LossSettings())[0].tolist() == pytest.approx([-2.0, -math.exp(-1)])


def test_advantages_are_centred_and_normalised():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    normalised = group_advantages(rewards)
    assert normalised.mean(dim=1).tolist() == pytest.approx([0.0, 0.0])
    assert normalised.std(dim=1).tolist() == pytest.approx([1.0, 1.0], rel=1e-5)
    assert group_advantages(rewards, normalise=False)[1].tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


@given(st.floats(-1e6, 1e6), st.integers(2, 17), st.booleans())
def test_equal_rewards_give_no_advantage_at_all(reward, size, normalise):
    """Also where the mean of equal floats is not exactly the float, which normalising would blow up."""
    rewards = torch.full((1, size), reward, dtype=torch.float32)
    assert not group_advantages(rewards, normalise=normalise).any()


@pytest.mark.parametrize("shape", [(3, 1), (4,)])
def test_a_group_of_one_is_refused(shape):
    with pytest.raises(ConfigError, match="no groups of two"):
        group_advantages(torch.zeros(shape))


def test_sums_give_means_over_tokens_whatever_the_micro_batches():
    settings = LossSettings()
    whole, parts = LossSums(), LossSums()
    whole.add(inputs(LOGPROBS, OLD, ADVANTAGES, MASK), settings)
    for at in (slice(0, 1), slice(1, 3)):
        parts.add(inputs(LOGPROBS[at], OLD[at], ADVANTAGES[at], MASK[at]), settings)
    assert parts.means() == pytest.approx(whole.means())
    # Clipped: ratio 10 and 50 at A < 0 beyond delta, 7.4 at A > 0; the ratio of 0.22 at A > 0 still has its gradient.
    assert whole.means()["clip_ratio"] == pytest.approx(4 / 7)
    assert whole.means()["ratio_max"] == pytest.approx(math.exp(3.9))
    assert "kl" not in whole.means()

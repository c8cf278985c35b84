"""The GRPO loss against a hand-written reference, advantages, and the promises of the KL and entropy terms."""

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
    token_losses,
)
from trainer.recipe import LossSettings


def inputs(logprobs, old, advantages, **extra):
    """Answers as rows of their tokens' numbers, laid end to end."""
    owner = [number for number, row in enumerate(logprobs) for _ in row]
    flat = {name: [value for row in rows for value in row] for name, rows in {"new": logprobs, "old": old}.items()}
    extra = {
        name: torch.tensor([value for row in rows for value in row], dtype=torch.float64)
        for name, rows in ({"entropy": [[0.0] * len(row) for row in logprobs]} | extra).items()
    }
    return LossInputs(
        logprobs=torch.tensor(flat["new"], dtype=torch.float64),
        old_logprobs=torch.tensor(flat["old"], dtype=torch.float64),
        advantages=torch.tensor([advantages[number] for number in owner], dtype=torch.float64),
        owner=torch.tensor(owner),
        **extra,
    )


def loss_of(case, settings, *, normaliser):
    return grpo_loss(token_losses(case, settings), case.owner, settings, normaliser=normaliser)


def reference_loss(logprobs, old, advantages, *, level, epsilon=0.2, delta=4.0, kl=0.0, reference=None):
    """The formula, token by token, in plain Python."""
    rows = []
    for b, advantage in enumerate(advantages):
        row = []
        for t, logprob in enumerate(logprobs[b]):
            ratio = math.exp(logprob - old[b][t])
            gain = min(min(ratio, delta) * advantage, min(max(ratio, 1 - epsilon), 1 + epsilon) * advantage)
            loss = -gain
            if reference is not None:
                gap = reference[b][t] - logprob
                loss += kl * (math.exp(gap) - gap - 1)
            row.append(loss)
        rows.append(row)
    if level == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    return sum(sum(row) / len(row) for row in rows) / len(rows)


LOGPROBS = [[-0.1, -2.0, -0.5], [-0.2, -0.1, -5.0], [-1.0]]
OLD = [[-0.3, -0.5, -0.5], [-2.5, -4.0, -5.0], [-3.0]]
ADVANTAGES = [1.5, -0.7, 0.4]


@pytest.mark.parametrize(("level", "normaliser"), [("token", 7.0), ("sample", 3.0)])
def test_loss_equals_the_hand_written_reference(level, normaliser):
    loss = loss_of(inputs(LOGPROBS, OLD, ADVANTAGES), LossSettings(level=level), normaliser=normaliser)
    assert loss.item() == pytest.approx(reference_loss(LOGPROBS, OLD, ADVANTAGES, level=level), rel=1e-12)


def test_loss_with_kl_equals_the_hand_written_reference():
    reference = [[-0.2, -1.0, -0.6], [-0.1, -0.3, -4.0], [-2.0]]
    settings = LossSettings(kl_coefficient=0.3)
    loss = loss_of(inputs(LOGPROBS, OLD, ADVANTAGES, reference_logprobs=reference), settings, normaliser=7.0)
    expected = reference_loss(LOGPROBS, OLD, ADVANTAGES, level="token", kl=0.3, reference=reference)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_token_and_sample_level_weigh_long_rollouts_differently():
    """A rollout of four tokens against one of a single token: 4 : 1 by token, 1 : 1 by rollout."""
    case = inputs([[-1.0] * 4, [-1.0]], [[-1.0] * 4, [-1.0]], [1.0, -1.0])
    token = loss_of(case, LossSettings(level="token"), normaliser=5.0)
    sample = loss_of(case, LossSettings(level="sample"), normaliser=2.0)
    assert token.item() == pytest.approx(-3 / 5)
    assert sample.item() == pytest.approx(0.0)


@pytest.mark.parametrize("objective", ["two_sided", "one_sided", "masked", "sequence"])
@pytest.mark.parametrize(("level", "normaliser"), [("token", 7.0), ("sample", 3.0)])
def test_micro_batches_add_up_to_the_whole(objective, level, normaliser):
    settings = LossSettings(objective=objective, level=level)
    whole = loss_of(inputs(LOGPROBS, OLD, ADVANTAGES), settings, normaliser=normaliser)
    parts = [
        loss_of(inputs(LOGPROBS[at], OLD[at], ADVANTAGES[at]), settings, normaliser=normaliser)
        for at in (slice(0, 1), slice(1, 3))
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12)


def kl_gradient(logprobs, reference):
    """Of a loss that is nothing but its KL term: the advantages are zero."""
    case = inputs([logprobs], [logprobs], [0.0], reference_logprobs=[reference])
    case.logprobs.requires_grad_(True)
    loss_of(case, LossSettings(kl_coefficient=0.1), normaliser=2.0).backward()
    return case.logprobs.grad.tolist()


def test_the_kl_term_has_a_gradient():
    """Its derivative is 1 − exp(reference − logprob)."""
    expected = [0.05 * (1 - math.exp(0.5)), 0.05 * (1 - math.exp(-1.0))]
    assert kl_gradient([-1.0, -1.0], [-0.5, -2.0]) == pytest.approx(expected)


@given(st.floats(-10, 0), st.floats(-10, 0))
def test_the_kl_term_pulls_towards_the_reference(logprob, reference):
    """Descent makes a token likelier where the reference finds it likelier, and never leaves it where they differ."""
    (gradient,) = kl_gradient([logprob], [reference])
    if abs(reference - logprob) > 1e-6:
        assert gradient != 0
        assert (gradient < 0) == (reference > logprob)


def test_the_kl_estimate_is_zero_only_where_both_agree():
    policy, reference = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -0.5, -3.0])
    estimate = kl_estimate(policy, reference)
    assert estimate[0] == 0
    assert (estimate[1:] > 0).all()


def test_the_entropy_term_rewards_entropy():
    case = inputs([[-1.0, -1.0]], [[-1.0, -1.0]], [0.0], entropy=[[2.0, 1.0]])
    case.entropy.requires_grad_(True)
    loss = loss_of(case, LossSettings(entropy_coefficient=0.5), normaliser=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(-0.75)
    assert case.entropy.grad is not None
    assert case.entropy.grad.tolist() == pytest.approx([-0.25, -0.25])


def test_importance_weights_are_capped_and_scale_the_objective():
    weights = importance_weights(torch.tensor([0.0, -1.0]), torch.tensor([-5.0, 0.0]), cap=2.0).tolist()
    assert weights == pytest.approx([2.0, math.exp(-1)])
    case = inputs([[-1.0, -1.0]], [[-1.0, -1.0]], [1.0], importance=[weights])
    assert token_losses(case, LossSettings()).loss.tolist() == pytest.approx([-2.0, -math.exp(-1)])


def test_advantages_are_centred_and_normalised():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    normalised = group_advantages(rewards)
    assert normalised.mean(dim=1).tolist() == pytest.approx([0.0, 0.0])
    assert normalised.std(dim=1).tolist() == pytest.approx([1.0, 1.0], rel=1e-5)
    assert group_advantages(rewards, kind="centred")[1].tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_a_baseline_may_weigh_rewards_by_length():
    rewards = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    lengths = torch.tensor([[30, 10]])
    assert group_advantages(rewards, kind="length_weighted", lengths=lengths)[0].tolist() == [0.25, -0.75]
    with pytest.raises(ConfigError, match="lengths"):
        group_advantages(rewards, kind="length_weighted")


@given(st.floats(-1e6, 1e6), st.integers(2, 17), st.sampled_from(["normalised", "centred", "length_weighted"]))
def test_equal_rewards_give_no_advantage_at_all(reward, size, kind):
    """Also where the mean of equal floats is not exactly the float, which normalising would blow up."""
    rewards = torch.full((1, size), reward, dtype=torch.float32)
    assert not group_advantages(rewards, kind=kind, lengths=torch.arange(1, size + 1)[None]).any()


@pytest.mark.parametrize("shape", [(3, 1), (4,)])
def test_a_group_of_one_is_refused(shape):
    with pytest.raises(ConfigError, match="no groups of two"):
        group_advantages(torch.zeros(shape))


def test_sums_give_means_over_tokens_whatever_the_micro_batches():
    settings = LossSettings()

    def add(sums, *case):
        sums.add(inputs(*case), token_losses(inputs(*case), settings))

    whole, parts = LossSums(), LossSums()
    add(whole, LOGPROBS, OLD, ADVANTAGES)
    for at in (slice(0, 1), slice(1, 3)):
        add(parts, LOGPROBS[at], OLD[at], ADVANTAGES[at])
    assert parts.means(with_kl=False) == pytest.approx(whole.means(with_kl=False))
    # Clipped: ratio 10 and 50 at A < 0 beyond delta, 1.22 and 7.4 at A > 0; that of 0.22 at A > 0 has its gradient.
    assert whole.means(with_kl=False)["clip_ratio"] == pytest.approx(4 / 7)
    assert whole.means(with_kl=False)["ratio_max"] == pytest.approx(math.exp(3.9))
    assert "kl" not in whole.means(with_kl=False)

"""A training step: it learns, it repeats bit for bit, and what is not finite never reaches the weights."""

import math

import msgspec
import pytest
import torch

from protocol.errors import ConfigError, MalformedError
from trainer.optimiser import make_optimiser
from trainer.policy import load_policy, pack_batch
from trainer.recipe import ASSETS_DIR
from trainer.step import TrainStep

DEMO_POLICY = ASSETS_DIR / "sort-digits"


def snapshot(policy):
    return {name: parameter.detach().clone() for name, parameter in policy.parameters().items()}


def same(policy, before):
    return all(torch.equal(parameter, before[name]) for name, parameter in policy.parameters().items())


def with_loss(recipe, **changes):
    return msgspec.structs.replace(recipe, loss=msgspec.structs.replace(recipe.loss, **changes))


def with_optimiser(recipe, **changes):
    return msgspec.structs.replace(recipe, optimiser=msgspec.structs.replace(recipe.optimiser, **changes))


def fresh(recipe, **options):
    policy = load_policy(DEMO_POLICY)
    return TrainStep(policy, make_optimiser(policy, recipe.optimiser), recipe, **options)


def test_metrics_have_the_papers_names(policy, optimiser, recipe, make_rollouts):
    rows = make_rollouts(4, checkpoint_step=1) + make_rollouts(1, checkpoint_step=1, rewards=[1.0] * 4)
    metrics = TrainStep(policy, optimiser, recipe).run(3, rows)
    assert {"loss", "grad_norm", "clip_ratio", "entropy", "ratio_max", "drift"} < metrics.keys()
    assert metrics["reward"] == pytest.approx(0.6)
    assert metrics["staleness"] == 2
    assert metrics["tokens"] == sum(len(row["output_ids"]) for row in rows)
    assert metrics["groups_without_signal"] == 1
    assert metrics["updates"] == 2
    assert metrics["skipped_updates"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(len(name) <= 32 for name in metrics)


def test_rewarded_tokens_become_likelier(recipe, make_rollouts):
    rows = make_rollouts(4)
    step = fresh(recipe)
    step.run(0, rows)

    def logprob(policy, row):
        batch = pack_batch([row["prompt_ids"]], [row["output_ids"]])
        with torch.no_grad():
            return float((policy.score(batch, 1.0)[0] * batch.mask).sum())

    gains = [logprob(step.policy, row) - sum(row["logprobs"]) for row in rows]
    rewarded = [gain for gain, row in zip(gains, rows, strict=True) if row["reward"]]
    others = [gain for gain, row in zip(gains, rows, strict=True) if not row["reward"]]
    assert sum(rewarded) / len(rewarded) > sum(others) / len(others) + 0.05


def test_the_same_step_gives_the_same_bits(recipe, make_rollouts):
    rows = make_rollouts(6)
    first, second = fresh(recipe), fresh(recipe)
    assert first.run(5, [row | {"checkpoint_step": 5} for row in rows]) == second.run(
        5, [row | {"checkpoint_step": 5} for row in rows]
    )
    assert same(first.policy, snapshot(second.policy))


def test_micro_batches_change_nothing_but_rounding(recipe, make_rollouts):
    rows = make_rollouts(6)
    whole = fresh(with_optimiser(recipe, micro_batch_tokens=100_000, updates_per_step=1))
    pieces = fresh(with_optimiser(recipe, micro_batch_tokens=1, updates_per_step=1))
    expected, found = whole.run(0, rows), pieces.run(0, rows)
    for name in ("loss", "grad_norm", "entropy", "clip_ratio", "ratio_max"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_recorded_log_probabilities_are_the_default_and_recomputed_ones_start_at_ratio_one(recipe, make_rollouts):
    rows = [row | {"logprobs": [value - 0.5 for value in row["logprobs"]]} for row in make_rollouts(3)]
    one = with_optimiser(recipe, updates_per_step=1)
    assert fresh(one).run(0, rows)["ratio_max"] == pytest.approx(math.exp(0.5), rel=1e-3)
    assert fresh(with_loss(one, old_logprobs="trainer")).run(0, rows)["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_the_importance_cap_weighs_stale_tokens(recipe, make_rollouts):
    rows = [row | {"logprobs": [value - 0.5 for value in row["logprobs"]]} for row in make_rollouts(3)]
    one = with_loss(with_optimiser(recipe, updates_per_step=1), old_logprobs="trainer")
    plain = fresh(one).run(0, rows)
    capped = fresh(with_loss(one, importance_cap=1.2)).run(0, rows)
    assert capped["loss"] == pytest.approx(1.2 * plain["loss"], rel=1e-3)


def test_kl_needs_and_uses_the_reference(recipe, make_rollouts):
    with_kl = with_loss(recipe, kl_coefficient=10.0)
    with pytest.raises(ConfigError, match="reference policy"):
        fresh(with_kl)
    rows = make_rollouts(4)
    held, free = fresh(with_kl, reference=load_policy(DEMO_POLICY)), fresh(recipe, reference=load_policy(DEMO_POLICY))
    for step in range(4):
        late = [row | {"checkpoint_step": step} for row in rows]
        held_metrics, free_metrics = held.run(step, late), free.run(step, late)
    assert 0 < held_metrics["kl"] < free_metrics["kl"]


@pytest.mark.parametrize("drop", [True, False])
def test_a_batch_without_signal_changes_nothing(recipe, make_rollouts, drop):
    """Also after a step that left momentum in the optimiser."""
    step = fresh(with_loss(recipe, drop_groups_without_signal=drop))
    step.run(0, make_rollouts(2))
    before = snapshot(step.policy)
    metrics = step.run(0, make_rollouts(2, rewards=[0.0] * 4))
    assert same(step.policy, before)
    assert metrics["groups_without_signal"] == 2
    assert metrics["updates"] == 0


def test_a_refused_batch_leaves_the_policy_alone(recipe, make_rollouts):
    step = fresh(recipe)
    before = snapshot(step.policy)
    for rows in ([], make_rollouts(2)[:-1]):
        with pytest.raises(MalformedError):
            step.run(0, rows)
    assert same(step.policy, before)


def test_an_update_that_is_not_finite_is_skipped_and_counted(recipe, make_rollouts, monkeypatch):
    """The policy scores one minibatch as NaN; the other update of the step is taken."""
    step = fresh(recipe)
    score, calls = step.policy.score, []

    def score_once_as_nan(batch, temperature, **options):
        logprobs, entropy = score(batch, temperature, **options)
        calls.append(batch)
        return (logprobs * math.nan if len(calls) == 1 else logprobs), entropy

    monkeypatch.setattr(step.policy, "score", score_once_as_nan)
    metrics = step.run(0, make_rollouts(4))
    assert metrics["skipped_updates"] == 1
    assert metrics["updates"] == 1
    assert all(torch.isfinite(parameter).all() for parameter in step.policy.parameters().values())
    assert math.isfinite(metrics["loss"])


def test_if_no_update_is_finite_the_weights_stay(recipe, make_rollouts, monkeypatch):
    step = fresh(recipe)
    before = snapshot(step.policy)
    score = step.policy.score

    def score_as_nan(batch, temperature, **options):
        logprobs, entropy = score(batch, temperature, **options)
        return logprobs * math.nan, entropy

    monkeypatch.setattr(step.policy, "score", score_as_nan)
    assert step.run(0, make_rollouts(4))["skipped_updates"] == 2
    assert same(step.policy, before)


def test_gradients_are_clipped(recipe, make_rollouts):
    """With a tiny bound and plain momentum-free Adam the step is the same, so look at the gradients themselves."""
    step = fresh(with_optimiser(recipe, max_grad_norm=1e-3, updates_per_step=1))
    metrics = step.run(0, make_rollouts(4))
    squares = sum(float((p.grad**2).sum()) for p in step.policy.parameters().values() if p.grad is not None)
    assert metrics["grad_norm"] > 1e-3
    assert math.sqrt(squares) == pytest.approx(1e-3, rel=1e-3)


def test_the_learning_rate_warms_up(recipe, make_rollouts):
    slow = with_optimiser(recipe, warm_up_steps=4)
    step = fresh(slow)
    rates = [
        step.run(number, make_rollouts(1, checkpoint_step=number))["learning_rate"] / slow.optimiser.learning_rate
        for number in range(6)
    ]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])

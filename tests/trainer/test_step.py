"""A training step: it learns, it repeats bit for bit, and what is not finite never reaches the weights."""

import math

import msgspec
import pytest
import torch

from protocol.errors import ConfigError, MalformedError, TrainingError
from trainer.optimiser import make_optimiser
from trainer.packing import lay_out, pad
from trainer.policy import load_policy
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
    rows = [row | {"reward": row["reward"] - 0.1, "length_penalty": 0.1} for row in rows]
    metrics = TrainStep(policy, optimiser, recipe).run(3, rows)
    assert {"loss", "grad_norm", "clip_ratio", "entropy", "ratio_max", "drift", "padding"} < metrics.keys()
    assert metrics["task_reward"] == pytest.approx(0.6)
    assert metrics["length_penalty"] == pytest.approx(0.1)
    assert metrics["reward"] == pytest.approx(0.5)
    assert metrics["staleness"] == metrics["staleness_max"] == 2
    assert metrics["tokens"] == sum(len(row["output_ids"]) for row in rows)
    assert metrics["groups_without_signal"] == 1
    assert metrics["updates"] == 2
    assert metrics["skipped_updates"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(len(name) <= 32 for name in metrics)


LOSSES = [
    {"old_logprobs": "worker"},
    {"old_logprobs": "trainer"},
    {"old_logprobs": "trainer", "importance_cap": 2.0},
    {"objective": "one_sided"},
    {"objective": "masked"},
    {"objective": "sequence", "epsilon": 3e-3},
    {"level": "sample"},
    {"advantage": "length_weighted"},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: " ".join(map(str, loss.values())))
def test_rewarded_tokens_become_likelier(recipe, make_rollouts, loss):
    rows = make_rollouts(4)
    step = fresh(with_loss(recipe, **loss))
    step.run(0, rows)

    def logprob(policy, row):
        with torch.no_grad():
            return float(policy.score(pad([(row["prompt_ids"], row["output_ids"])], [0]), 1.0)[0].sum())

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


@pytest.mark.parametrize("level", ["token", "sample"])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_layouts_and_micro_batches_change_nothing_but_rounding(recipe, make_rollouts, layout, level):
    """The loss is normalised by what the optimiser step holds: no layout and no limit of memory moves it."""
    rows = make_rollouts(6)

    def metrics(layout, tokens):
        one = with_loss(with_optimiser(recipe, micro_batch_tokens=tokens, updates_per_step=1), level=level)
        step = fresh(msgspec.structs.replace(one, policy=msgspec.structs.replace(one.policy, layout=layout)))
        return step.run(0, rows)

    expected, found = metrics("padded", 100_000), metrics(layout, 50)
    assert found["micro_batches"] > expected["micro_batches"]
    assert (found["padding"] > 0) == (layout == "padded")
    for name in ("loss", "grad_norm", "entropy", "clip_ratio", "ratio_max"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_a_groups_prompt_is_computed_once(recipe, make_rollouts):
    """`auto` sees that four answers share a prompt; the prompts are about as long as the answers."""
    assert fresh(recipe).run(0, make_rollouts(6))["computed_share"] < 0.7
    packed = msgspec.structs.replace(recipe, policy=msgspec.structs.replace(recipe.policy, layout="packed"))
    assert 0.9 < fresh(packed).run(0, make_rollouts(6))["computed_share"] < 1  # last tokens are never computed


def test_optimiser_steps_take_whole_groups(recipe, make_rollouts, monkeypatch):
    held = []

    def remember(pairs, layout, **options):
        held.append([tuple(prompt) for prompt, _ in pairs])
        return lay_out(pairs, layout, **options)

    monkeypatch.setattr("trainer.step.lay_out", remember)
    fresh(recipe).run(0, make_rollouts(6))
    assert [len(prompts) for prompts in held] == [12, 12]
    assert all(prompts.count(prompt) == 4 for prompts in held for prompt in prompts)
    held.clear()
    fresh(with_optimiser(recipe, updates_per_step=8)).run(0, make_rollouts(2))
    assert [len(prompts) for prompts in held] == [1] * 8


def test_the_old_policy_is_not_scored_where_nothing_depends_on_it(recipe, make_rollouts, monkeypatch):
    """Recorded log-probabilities, or a single optimiser step, whose own pass says what they are."""
    calls = []

    def passes(loss, updates):
        step = fresh(with_loss(with_optimiser(recipe, updates_per_step=updates), **loss))
        score = step.policy.score
        monkeypatch.setattr(step.policy, "score", lambda *a, **k: calls.append(1) or score(*a, **k))
        calls.clear()
        metrics = step.run(0, make_rollouts(4))
        return len(calls), metrics["ratio_max"]

    assert passes({"old_logprobs": "worker"}, 2)[0] == 2
    assert passes({"old_logprobs": "trainer"}, 2)[0] == 4
    assert passes({"old_logprobs": "trainer"}, 1) == (1, 1.0)
    assert passes({"old_logprobs": "trainer", "importance_cap": 2.0}, 1)[0] == 2


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


@pytest.mark.parametrize("fault", ["empty", "half a group", "a group of one", "too long", "another model's tokens"])
def test_a_refused_batch_leaves_the_policy_alone(recipe, make_rollouts, fault):
    """Attack: batches that a careless collector let through. The policy and the optimiser are as before."""
    step, undisturbed = fresh(recipe), fresh(recipe)
    rows = make_rollouts(2)
    if fault == "empty":
        rows = []
    elif fault == "half a group":
        rows = rows[:-1]
    elif fault == "a group of one":
        rows = rows[:1]
    elif fault == "too long":
        rows[3] |= {"output_ids": [5] * 300, "logprobs": [-1.0] * 300}
    else:
        rows[3] |= {"output_ids": [64], "logprobs": [-1.0]}
    with pytest.raises(MalformedError):
        step.run(0, rows)
    for one in (step, undisturbed):
        one.run(0, make_rollouts(2))
    assert same(step.policy, snapshot(undisturbed.policy))


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


def spoil_gradients(step, *, times):
    """The next so many backward passes give an infinite gradient, with a loss that is fine."""
    left = [times]

    def spoil(gradient):
        left[0] -= 1
        return gradient * math.inf if left[0] >= 0 else gradient

    next(iter(step.policy.parameters().values())).register_hook(spoil)


def test_the_run_stops_when_too_many_updates_in_a_row_are_not_finite(recipe, make_rollouts):
    """Two optimiser steps a batch, three bad ones in a row: the second batch is where training ends, by name."""
    step = fresh(with_optimiser(recipe, max_skipped_in_a_row=3))
    before = snapshot(step.policy)
    spoil_gradients(step, times=3)
    assert step.run(0, make_rollouts(4))["skipped_updates"] == 2
    with pytest.raises(TrainingError, match="3 optimiser steps in a row") as caught:
        step.run(1, make_rollouts(4, checkpoint_step=1))
    assert "learning_rate" in caught.value.hint
    assert same(step.policy, before)


def test_a_good_update_ends_a_row_of_bad_ones(recipe, make_rollouts):
    step = fresh(with_optimiser(recipe, max_skipped_in_a_row=2))
    for number in range(3):
        spoil_gradients(step, times=1)
        rows = make_rollouts(4, checkpoint_step=number)
        assert step.run(number, rows)["skipped_updates"] == 1


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


def test_which_groups_share_an_optimiser_step_depends_on_the_step(recipe, make_rollouts, monkeypatch):
    """And on the recipe's seed; the same step always shares them out alike."""

    def shares(step, seed=0):
        held = []

        def remember(pairs, layout, **options):
            held.append(frozenset(tuple(prompt) for prompt, _ in pairs))
            return lay_out(pairs, layout, **options)

        monkeypatch.setattr("trainer.step.lay_out", remember)
        fresh(with_optimiser(recipe, seed=seed)).run(step, [row | {"checkpoint_step": step} for row in rows])
        return held

    rows = make_rollouts(6)
    assert shares(3) == shares(3)
    assert len({tuple(shares(step)) for step in range(4)}) > 1
    assert len({tuple(shares(0, seed=seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_is_not_finite_is_never_given_out(recipe, make_rollouts, dtype):
    """Gradients are fine and the step that they make is not: a learning rate beyond all numbers."""
    settings = msgspec.structs.replace(recipe.policy, dtype=dtype)
    policy = load_policy(DEMO_POLICY, settings=settings)
    wild = with_optimiser(recipe, learning_rate=3e38, weight_decay=1e38, updates_per_step=1)
    step = TrainStep(policy, make_optimiser(policy, wild.optimiser), wild)
    with pytest.raises(TrainingError, match=r"\d+ parameters of the policy .* not finite \(first model\.") as caught:
        step.run(7, make_rollouts(4, checkpoint_step=7))
    assert "policy export --data-dir DIR --step 7" in caught.value.hint
    assert "learning_rate" in caught.value.hint


def test_the_checkpoint_before_the_bad_updates_is_the_one_to_go_on_from(recipe, make_rollouts):
    step = fresh(with_optimiser(recipe, max_skipped_in_a_row=5))
    step.run(0, make_rollouts(4))
    spoil_gradients(step, times=5)
    for number in (1, 2):
        step.run(number, make_rollouts(4, checkpoint_step=number))
    with pytest.raises(TrainingError) as caught:
        step.run(3, make_rollouts(4, checkpoint_step=3))
    assert "checkpoint 1 is sound" in caught.value.hint

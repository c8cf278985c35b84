"""From handed-in rollouts to samples: whole groups, sane numbers, bounded staleness."""

import math

import pytest

from protocol.errors import MalformedError
from trainer.groups import assemble_batch


def assemble(rows, **changes):
    settings = {"step": 0, "group_size": 4, "max_staleness": 2, "vocab_size": 64}
    defaults = {"max_length": 256, "advantage": "normalised", "drop_without_signal": True}
    return assemble_batch(rows, **(settings | defaults | changes))


def test_a_batch_knows_its_rewards_tokens_and_staleness(make_rollouts):
    rows = make_rollouts(2, checkpoint_step=4) + make_rollouts(2, checkpoint_step=5)
    batch = assemble(rows, step=6)
    assert batch.rollouts == 16
    assert batch.mean_reward == 0.5
    assert batch.mean_staleness == 1.5
    assert batch.staleness_max == 2
    assert batch.tokens == sum(len(row["output_ids"]) for row in rows)
    assert batch.groups_without_signal == 0
    assert [sample.advantage > 0 for sample in batch.samples[:4]] == [False, True, False, True]


def test_groups_without_signal_are_dropped_and_counted(make_rollouts):
    rows = make_rollouts(3, rewards=[1.0] * 4) + make_rollouts(1)
    assert len(assemble(rows).samples) == 4
    kept = assemble(rows, drop_without_signal=False)
    assert len(kept.samples) == 16
    assert kept.groups_without_signal == 3
    assert all(sample.advantage == 0 for sample in kept.samples[:12])


def test_rollouts_without_a_reward_are_left_out_of_their_groups_and_counted(make_rollouts):
    """A time-out is no zero: the others of the group are compared among themselves."""
    rows = make_rollouts(3, rewards=[0.0, 1.0, 1.0, 1.0])
    for place in (0, 1, 4, 5, 6, 8):
        rows[place]["reward"] = math.nan
    batch = assemble(rows)
    assert batch.rollouts_without_reward == 6
    assert batch.mean_reward == 1.0
    assert batch.groups_without_signal == 3  # equal rewards, one reward, equal rewards
    rows[2]["reward"] = 0.0
    batch = assemble(rows)
    assert [round(sample.advantage, 3) for sample in batch.samples] == [-0.707, 0.707]
    assert [sample.rollout.member for sample in batch.samples] == [2, 3]


def test_an_empty_batch_is_named():
    with pytest.raises(MalformedError, match="no rollouts"):
        assemble([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_ids": []}, "no output"),
        ({"prompt_ids": []}, "empty prompt"),
        ({"prompt_ids": [64]}, "outside the vocabulary"),
        ({"output_ids": [-1]}, "tokens but|outside the vocabulary"),
        ({"logprobs": [-1.0] * 99}, "99 probabilities"),
        ({"reward": math.inf}, "the reward inf"),
        ({"length_penalty": math.nan}, "the penalty nan"),
        ({"member": 7}, "members 0 to 3"),
        ({"member": 1}, "members 0 to 3"),
        ({"prompt_index": 9}, "mixes prompts"),
        ({"prompt_ids": [1, 2]}, "mixes prompts"),
        ({"checkpoint_step": 1}, "mixes prompts or policies"),
        ({"submission": "b"}, "mixes prompts"),
        ({"reward": "high"}, "not well formed"),
        ({"output_ids": None}, "not well formed"),
    ],
)
def test_rollouts_that_would_spoil_the_loss_are_refused(make_rollouts, change, message):
    """Attack: rollouts that a careless validator let through."""
    rows = make_rollouts(2)
    rows[0] |= change
    with pytest.raises(MalformedError, match=message):
        assemble(rows, step=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_impossible_log_probabilities_are_refused(make_rollouts, value):
    """Attack: recorded log-probabilities that turn the ratio into anything the contributor likes."""
    rows = make_rollouts(1)
    rows[2]["logprobs"] = [value] * len(rows[2]["output_ids"])
    with pytest.raises(MalformedError, match="log-probability"):
        assemble(rows)


def test_a_rollout_longer_than_the_model_is_refused(make_rollouts):
    rows = make_rollouts(1)
    longest = max(len(row["prompt_ids"]) + len(row["output_ids"]) for row in rows)
    assemble(rows, max_length=longest)
    with pytest.raises(MalformedError, match=f"has {longest} tokens, and the model has positions for {longest - 1}"):
        assemble(rows, max_length=longest - 1)


def test_rewards_are_split_into_task_and_length(make_rollouts):
    rows = [row | {"reward": row["reward"] - 0.25, "length_penalty": 0.25} for row in make_rollouts(1)]
    batch = assemble(rows)
    assert batch.mean_reward == 0.25
    assert batch.mean_task_reward == 0.5


def test_half_a_group_is_refused(make_rollouts):
    with pytest.raises(MalformedError, match="whole groups of 4"):
        assemble(make_rollouts(2)[:-1])


@pytest.mark.parametrize("checkpoint_step", [0, 2, 6])
def test_rollouts_too_old_or_of_the_future_are_refused(make_rollouts, checkpoint_step):
    with pytest.raises(MalformedError, match="at most 2 steps of staleness"):
        assemble(make_rollouts(1, checkpoint_step=checkpoint_step), step=5)


def test_the_length_weighted_baseline_counts_what_the_policy_emitted(make_rollouts):
    """A tool's long reply is no part of an answer's length: with it, or without, the advantages are the same."""
    plain = [row | {"output_ids": [5] * 6, "logprobs": [-1.0] * 6} for row in make_rollouts(1)]
    played = dict(plain[1])
    played |= {"output_ids": [5] * 26, "logprobs": [-1.0] * 3 + [0.0] * 20 + [-1.0] * 3, "turns": [0, 3, 23, 26]}

    def advantages(rows):
        batch = assemble(rows, advantage="length_weighted")
        return {sample.rollout.member: sample.advantage for sample in batch.samples}

    assert advantages([plain[0], played, *plain[2:]]) == advantages(plain)

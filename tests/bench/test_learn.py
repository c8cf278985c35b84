"""The learning bench runs, repeats itself, and shows that the demo recipe learns from stale rollouts."""

import msgspec
import pytest
import torch

from bench.learn import bench, learn
from trainer.recipe import load_recipe


def short(steps, rollouts):
    demo = load_recipe("demo")
    return msgspec.structs.replace(
        demo, batch=msgspec.structs.replace(demo.batch, total_steps=steps, rollouts_per_step=rollouts)
    )


def test_a_curve_has_a_reward_for_each_step_and_is_the_same_again(tmp_path):
    torch.set_num_threads(1)
    first, second = (learn(short(3, 64), tmp_path / name, staleness=1, seed=0) for name in ("first", "second"))
    assert len(first.rewards) == 3
    assert first.rewards == second.rewards
    assert [row["staleness"] for row in first.metrics] == [0, 1, 1]


def test_the_quick_bench_gives_figures_for_each_staleness():
    figures = bench(quick=True).figures
    assert {f"staleness_{staleness}_reward_least" for staleness in range(3)} < figures.keys()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_from_rollouts_two_steps_old(tmp_path, seed):
    torch.set_num_threads(1)
    curve = learn(load_recipe("demo"), tmp_path, staleness=2, seed=seed)
    assert curve.rewards[0] < 0.45
    assert curve.last_tenth >= 0.8

"""Does the demo recipe learn from stale rollouts? Its reward over the last tenth of the steps, without a network."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench.harness import Result
from bench.in_process import InProcess
from trainer.recipe import Recipe, load_recipe

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Curve:
    """Mean reward of each step's rollouts, and what the steps cost."""

    staleness: int
    seed: int
    rewards: list[float]
    generate_s: float
    train_s: float
    metrics: list[dict[str, float]]

    @property
    def last_tenth(self) -> float:
        """Mean reward over the last tenth of the steps."""
        count = max(1, len(self.rewards) // 10)
        return sum(self.rewards[-count:]) / count


def learn(recipe: Recipe, directory: Path, *, staleness: int, seed: int) -> Curve:
    """Run a recipe's steps with every rollout `staleness` steps old (less at the beginning)."""
    run = InProcess(recipe, directory, seed=seed, staleness=staleness)
    metrics = [run.step() for _ in range(recipe.batch.total_steps)]
    return Curve(staleness, seed, [row["reward"] for row in metrics], run.generate_s, run.train_s, metrics)


def bench(*, quick: bool) -> Result:
    """Three seeds at each staleness that the recipe allows; `quick` takes one seed and few steps."""
    torch.set_num_threads(1)
    recipe = load_recipe("demo")
    seeds = SEEDS[:1] if quick else SEEDS
    if quick:
        recipe = msgspec.structs.replace(recipe, batch=msgspec.structs.replace(recipe.batch, total_steps=3))
    result = Result()
    for staleness in range(recipe.batch.max_staleness + 1):
        curves = []
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix="bench-learn-") as work:
                curves.append(learn(recipe, Path(work), staleness=staleness, seed=seed))
        _add_figures(result, f"staleness_{staleness}", curves)
        if not quick:
            result.at_least(f"staleness_{staleness}_reward_least", 0.8)
    return result


def _add_figures(result: Result, prefix: str, curves: Sequence[Curve]) -> None:
    ends = [curve.last_tenth for curve in curves]
    steps = sum(len(curve.rewards) for curve in curves)
    result.figures |= {
        f"{prefix}_reward_first": sum(curve.rewards[0] for curve in curves) / len(curves),
        f"{prefix}_reward_mean": sum(ends) / len(ends),
        f"{prefix}_reward_least": min(ends),
        f"{prefix}_grad_norm_max": max(row["grad_norm_max"] for curve in curves for row in curve.metrics),
        f"{prefix}_generate_cpu_s_per_step": sum(curve.generate_s for curve in curves) / steps,
        f"{prefix}_train_cpu_s_per_step": sum(curve.train_s for curve in curves) / steps,
    }

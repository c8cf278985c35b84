"""Does the length penalty fall? The think-sort recipe with its penalty and without, over three seeds.

The prompt's letter asks for 10, 14 or 18 tokens (INTELLECT-2, section 3.1.2). Without a penalty the letter is there
too, and nothing is lost by ignoring it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import msgspec
import torch

from bench.harness import Result
from bench.in_process import InProcess
from trainer.recipe import Recipe, load_recipe

SEEDS = (0, 1, 2)
FIRST_STEPS = 3
LAST_STEPS = 5
CONTROL_ALPHA = 1e-9
"""Too little to be learned from, and enough to measure by."""


@dataclass(frozen=True)
class Curves:
    """Each seed's metrics, step by step."""

    alpha: float
    runs: list[list[dict[str, float]]]
    cpu_s_per_step: float

    @cached_property
    def off_first(self) -> list[float]:
        """Tokens that answers miss their target by at the beginning, by seed; as the next ones."""
        return [_mean(run[:FIRST_STEPS], "length_penalty") / self.alpha for run in self.runs]

    @cached_property
    def off_last(self) -> list[float]:
        return [_mean(run[-LAST_STEPS:], "length_penalty") / self.alpha for run in self.runs]

    @cached_property
    def task_first(self) -> list[float]:
        return [_mean(run[:FIRST_STEPS], "task_reward") for run in self.runs]

    @cached_property
    def task_last(self) -> list[float]:
        return [_mean(run[-LAST_STEPS:], "task_reward") for run in self.runs]


def bench(*, quick: bool) -> Result:
    """Three seeds each; `quick` takes one seed and few steps."""
    result = Result()
    for name, curves in measure(SEEDS[:1] if quick else SEEDS, quick=quick).items():
        result.figures |= {
            f"{name}_tokens_off_first": fmean(curves.off_first),
            f"{name}_tokens_off_last": fmean(curves.off_last),
            f"{name}_tokens_off_last_most": max(curves.off_last),
            f"{name}_task_reward_first": fmean(curves.task_first),
            f"{name}_task_reward_last": fmean(curves.task_last),
            f"{name}_cpu_s_per_step": curves.cpu_s_per_step,
        }
    if not quick:
        result.at_most("penalty_tokens_off_last", 1.0)
        result.at_least("control_tokens_off_last", 2.0)
        result.at_least("penalty_task_reward_last", 0.6)
    return result


def measure(seeds: Sequence[int], *, quick: bool) -> dict[str, Curves]:
    """Curves with the `penalty` and with next to none, the `control`."""
    torch.set_num_threads(1)
    recipe = load_recipe("think-sort")
    if quick:
        recipe = msgspec.structs.replace(recipe, batch=msgspec.structs.replace(recipe.batch, total_steps=2))
    alpha = recipe.rollout.length.alpha if recipe.rollout.length else CONTROL_ALPHA
    return {
        name: _curves(_with_alpha(recipe, value), value, seeds)
        for name, value in (("penalty", alpha), ("control", CONTROL_ALPHA))
    }


def _with_alpha(recipe: Recipe, alpha: float) -> Recipe:
    length = recipe.rollout.length and msgspec.structs.replace(recipe.rollout.length, alpha=alpha)
    return msgspec.structs.replace(recipe, rollout=msgspec.structs.replace(recipe.rollout, length=length))


def _curves(recipe: Recipe, alpha: float, seeds: Sequence[int]) -> Curves:
    began = time.process_time()
    runs = [_curve(recipe, seed) for seed in seeds]
    return Curves(alpha, runs, (time.process_time() - began) / sum(map(len, runs)))


def _curve(recipe: Recipe, seed: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="bench-lengths-") as work:
        run = InProcess(recipe, Path(work), seed=seed)
        return [run.step() for _ in range(recipe.batch.total_steps)]


def _mean(steps: Sequence[dict[str, float]], name: str) -> float:
    return fmean(step[name] for step in steps)

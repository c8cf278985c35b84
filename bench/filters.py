"""Do the filters help? Tasks of which many are too hard: without a filter, offline, online and both, over three seeds.

The policy is the demo's; the tasks are rows of 2 to 13 digits, and it never saw more than 8. What is compared is the
share of right answers to other tasks, of 4 to 8 digits, by step, and how many rollouts were generated for it
(INTELLECT-2, sections 4.1 and 3.3).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import torch

from bench.harness import Result
from bench.in_process import InProcess, pass_at_1
from node.data_filter import Plan, filter_tasks
from trainer.recipe import PoolChoice, Recipe, load_recipe, recipe_path

SEEDS: Final = (0, 1, 2)
PARAMETERS: Final = {"min_digits": 2, "max_digits": 13}
STEPS: Final = 25
EVALUATE_AT: Final = (5, 15, 25)
KINDS: Final = {"none": (False, False), "offline": (True, False), "online": (False, True), "both": (True, True)}
"""Whether tasks come from a pool, and whether only groups with signal count."""


class Curve(msgspec.Struct):
    """One run."""

    passed: dict[int, float] = {}
    """Share of right answers after so many steps."""
    reward: list[float] = []
    """Mean reward of each step's rollouts, those of groups without signal among them."""
    rollouts: float = 0.0
    """Generated."""
    used: float = 0.0
    """Trained on."""


class Measured(msgspec.Struct):
    """All runs by kind, a seed each, and what the offline filter kept of how many tasks."""

    curves: dict[str, list[Curve]] = {}
    kept: int = 0
    tasks: int = 0


def bench(*, quick: bool) -> Result:
    """Four ways, three seeds each; `quick` takes one seed and few steps."""
    measured = measure(SEEDS[:1] if quick else SEEDS, quick=quick)
    result = Result(figures={"pool_tasks": float(measured.kept), "pool_of": float(measured.tasks)})
    for kind, curves in measured.curves.items():
        for at in curves[0].passed:
            result.figures[f"{kind}_pass_{at}"] = fmean(curve.passed[at] for curve in curves)
        result.figures[f"{kind}_rollouts"] = fmean(curve.rollouts for curve in curves)
    if not quick:
        gain = result.figures[f"both_pass_{STEPS}"] - result.figures[f"none_pass_{STEPS}"]
        result.figures["both_gain"] = gain
        result.at_least("both_gain", 0.03)
    return result


def measure(seeds: Sequence[int], *, quick: bool) -> Measured:
    """Run every kind with every seed."""
    torch.set_num_threads(1)
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="bench-filters-") as work:
        pool = _pool(Path(work), prompts=100 if quick else 1000, measured=measured)
        for kind, (offline, online) in KINDS.items():
            recipe = _recipe(2 if quick else STEPS, pool=pool if offline else None, online=online)
            measured.curves[kind] = [_curve(recipe, Path(work) / f"{kind}-{seed}", seed=seed) for seed in seeds]
    return measured


def _pool(directory: Path, *, prompts: int, measured: Measured) -> Path:
    """Tasks that the first policy solves once to four times in eight, as the command makes them."""
    recipe, out = directory / "filter.toml", directory / "pool.bin"
    recipe.write_text(_wide_recipe_text())
    found = filter_tasks(Plan(out=out, prompts=prompts, recipe=str(recipe)), lambda line: None)
    measured.kept, measured.tasks = found.kept, found.tasks
    return out


def _wide_recipe_text() -> str:
    """The demo's recipe with its longer rows, and room to answer them."""
    text = recipe_path("demo").read_text(encoding="utf-8")
    parameters = ", ".join(f"{name} = {value}" for name, value in PARAMETERS.items())
    text = text.replace("[environment]", f"[environment]\nparameters = {{ {parameters} }}", 1)
    return text.replace("max_new_tokens = 10", "max_new_tokens = 16", 1)


def _recipe(steps: int, *, pool: Path | None, online: bool) -> Recipe:
    base = load_recipe("demo")
    pools = () if pool is None else (PoolChoice(file=str(pool)),)
    environment = msgspec.structs.replace(base.environment, parameters=PARAMETERS, pools=pools)
    batch = msgspec.structs.replace(base.batch, rollouts_per_step=128, total_steps=steps, signal_only=online)
    rollout = msgspec.structs.replace(base.rollout, max_new_tokens=16)
    return msgspec.structs.replace(base, environment=environment, batch=batch, rollout=rollout)


def _curve(recipe: Recipe, directory: Path, *, seed: int) -> Curve:
    directory.mkdir()
    run, curve = InProcess(recipe, directory, seed=seed), Curve()
    for step in range(1, recipe.batch.total_steps + 1):
        metrics = run.step()
        curve.reward.append(metrics["reward"])
        curve.rollouts += metrics.get("rollouts_collected", metrics["rollouts"])
        curve.used += metrics["rollouts"]
        if step in EVALUATE_AT or step == recipe.batch.total_steps:
            curve.passed[step] = pass_at_1(run.policy_dir, "sort-digits", prompts=256, samples=2, max_new_tokens=10)
    return curve

"""Two-sided clipping: what the bound δ does to losses and gradients where rollouts are stale (section 3.4)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from bench.in_process import InProcess, pass_at_1
from bench.report import Grid, Section, Statement
from bench.seeds import difference, estimate, is_above, is_no_worse, named, ratio
from trainer.recipe import Recipe, load_recipe

Objective = Literal["one_sided", "two_sided"]

OBJECTIVES: Final[tuple[Objective, ...]] = ("one_sided", "two_sided")
STALENESS: Final = 8
STEPS: Final = 40
SETTING: Final = (
    f"The demo's recipe with 128 rollouts a step, all {STALENESS} steps old, float32, learning rate 4e-4, 4 optimiser "
    f"steps on each batch, {STEPS} steps, recorded log-probabilities, δ = 4. A run's largest optimiser-step loss, its "
    "largest gradient norm before clipping, and pass@1 of its last policy on 256 held-out prompts, 4 answers each."
)


@dataclass(frozen=True)
class Runs:
    """Of one objective, a figure a seed."""

    loss: list[float]
    gradient: list[float]
    passed: list[float]


def run(seeds: Sequence[int], *, quick: bool, report: Callable[[str], None]) -> Section:
    """Both objectives with every seed."""
    section = Section("clipping", f"{SETTING} {named(seeds)}")
    found: dict[str, Runs] = {}
    for objective in OBJECTIVES:
        runs = found[objective] = Runs([], [], [])
        for seed in seeds:
            _measure(runs, recipe(objective, quick=quick), seed)
            for name, values in vars(runs).items():
                section.figures[f"{objective}_{name}_seed_{seed}"] = values[-1]
        report(f"{objective}: largest gradient {max(runs.gradient):.1f}")
    section.grids.append(_grid(found))
    if not quick:
        section.statements = statements(found["one_sided"], found["two_sided"])
    return section


def recipe(objective: Objective, *, quick: bool) -> Recipe:
    """The demo's, with stale rollouts, large steps and an objective."""
    base, replace = load_recipe("demo"), msgspec.structs.replace
    steps = 2 if quick else STEPS
    return replace(
        base,
        batch=replace(base.batch, rollouts_per_step=128, total_steps=steps, max_staleness=STALENESS),
        optimiser=replace(base.optimiser, learning_rate=4e-4, updates_per_step=4),
        policy=replace(base.policy, dtype="float32"),
        loss=replace(base.loss, objective=objective),
    )


def _measure(runs: Runs, recipe: Recipe, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-clipping-") as work:
        run = InProcess(recipe, Path(work), seed=seed, staleness=STALENESS)
        metrics = [run.step() for _ in range(recipe.batch.total_steps)]
        runs.loss.append(max(row["loss_max"] for row in metrics))
        runs.gradient.append(max(row["grad_norm_max"] for row in metrics))
        runs.passed.append(pass_at_1(run.policy_dir, "sort-digits", prompts=256, samples=4, max_new_tokens=10))


def statements(one: Runs, two: Runs) -> list[Statement]:
    """What the runs say of δ."""
    gradient, loss = ratio(one.gradient, two.gradient), ratio(one.loss, two.loss)
    passed = difference(two.passed, one.passed)
    return [
        *(
            Statement(f"δ bounds the largest {name}", is_above(times.low, times.high, 1.0), f"{times.text()} without δ")
            for name, times in (("gradient", gradient), ("loss", loss))
        ),
        Statement("δ costs no reward", is_no_worse(passed), f"{passed.text(sign=True)} with δ"),
    ]


def _grid(found: Mapping[str, Runs]) -> Grid:
    def each(values: Sequence[float], digits: int) -> str:
        return " / ".join(f"{value:.{digits}f}" for value in values)

    rows = [
        (name.replace("_", "-"), each(runs.gradient, 1), each(runs.loss, 2), estimate(runs.passed).text())
        for name, runs in found.items()
    ]
    return Grid("largest of each run, seed by seed", ("clipping", "gradient norm", "loss", "pass@1"), rows)

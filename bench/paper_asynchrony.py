"""Asynchrony: what learning loses when rollouts are k steps old, by which log-probabilities are old (section 3.2).

The paper finds no loss up to four steps, with log-probabilities that the trainer recomputes and a small learning rate.
Both of these are varied here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.in_process import InProcess, pass_at_1
from bench.report import Grid, Section, Statement
from bench.seeds import Estimate, Verdict, all_of, any_of, difference, estimate, is_above, is_no_worse, named
from node.run_create import model_directory
from trainer.recipe import Recipe, load_recipe

LEVELS: Final = (0, 1, 2, 4, 8, 16)
CLOSE: Final = (1, 2, 4)
FAR: Final = (8, 16)
_MARKS: Final[dict[Verdict, str]] = {"reproduced": "✓", "not reproduced": "✗", "undecided": "?"}


@dataclass(frozen=True)
class Way:
    """Which log-probabilities are old, how large steps are, and how many."""

    key: str
    name: str
    learning_rate: float
    steps: int
    loss: dict[str, Any]


WAYS: Final = (
    Way("recorded", "recorded", 2e-4, 50, {"old_logprobs": "worker"}),
    Way("recomputed", "recomputed", 2e-4, 50, {"old_logprobs": "trainer"}),
    Way("capped", "recomputed, weight ≤ 2", 2e-4, 50, {"old_logprobs": "trainer", "importance_cap": 2.0}),
    Way("small_steps", "recomputed, small steps", 2.5e-5, 160, {"old_logprobs": "trainer"}),
)
SETTING: Final = (
    "The demo's recipe with 128 rollouts a step, float32, and 2 optimiser steps on each batch; learning rate 2e-4 and "
    "50 steps, with small steps 2.5e-5 and 160. Every rollout is k steps old (those of the first k steps are of the "
    "first policy). Figures are pass@1 of the last policy on 256 held-out prompts, 4 answers each."
)


def run(seeds: Sequence[int], *, quick: bool, report: Callable[[str], None]) -> Section:
    """Every way at every level with every seed."""
    first = _pass(model_directory(load_recipe("demo").model.source))
    section = Section("asynchrony", f"{SETTING} The first policy has {first:.3f}. {named(seeds)}")
    section.figures["first"] = first
    found: dict[str, dict[int, list[float]]] = {}
    for way in WAYS:
        levels = found[way.name] = {}
        for level in LEVELS[:2] if quick else LEVELS:
            levels[level] = [_final(recipe(way, level, quick=quick), level, seed) for seed in seeds]
            report(f"{way.name}, {level} steps: {estimate(levels[level]).text()}")
            for seed, value in zip(seeds, levels[level], strict=True):
                section.figures[f"{way.key}_{level}_seed_{seed}"] = value
        if not quick:
            section.statements += statements(way.name, levels, first=first)
    section.grids.append(_grid(found))
    return section


def recipe(way: Way, level: int, *, quick: bool) -> Recipe:
    """The demo's, in a way, with so much staleness allowed."""
    base, replace = load_recipe("demo"), msgspec.structs.replace
    steps = 2 if quick else way.steps
    return replace(
        base,
        batch=replace(base.batch, rollouts_per_step=128, total_steps=steps, max_staleness=level),
        optimiser=replace(base.optimiser, learning_rate=way.learning_rate, updates_per_step=2),
        policy=replace(base.policy, dtype="float32"),
        loss=replace(base.loss, **way.loss),
    )


def _final(recipe: Recipe, level: int, seed: int) -> float:
    with tempfile.TemporaryDirectory(prefix="bench-asynchrony-") as work:
        run = InProcess(recipe, Path(work), seed=seed, staleness=level)
        for _ in range(recipe.batch.total_steps):
            run.step()
        return _pass(run.policy_dir)


def _pass(policy_dir: Path) -> float:
    return pass_at_1(policy_dir, "sort-digits", prompts=256, samples=4, max_new_tokens=10)


def statements(way: str, levels: dict[int, list[float]], *, first: float) -> list[Statement]:
    """What a way's levels say of the two claims."""
    gaps = {level: difference(levels[level], levels[0]) for level in CLOSE}
    halves = {level: beyond_half(levels[level], levels[0], first=first) for level in FAR}
    alike = [is_no_worse(gap) for gap in gaps.values()]
    broken = [is_above(-half.high, -half.low, 0.0) for half in halves.values()]
    return [
        Statement(
            f"{way}: with 1, 2 and 4 steps as without, within the noise of the seeds", all_of(alike), _told(gaps, alike)
        ),
        Statement(
            f"{way}: at 8 or 16 steps it breaks: less than half is learned",
            any_of(broken),
            f"beyond half way {_told(halves, broken)}",
        ),
    ]


def _told(estimates: Mapping[int, Estimate], verdicts: Sequence[Verdict]) -> str:
    return "; ".join(
        f"{level}: {one.text(sign=True)} {_MARKS[verdict]}"
        for (level, one), verdict in zip(estimates.items(), verdicts, strict=True)
    )


def beyond_half(values: Sequence[float], base: Sequence[float], *, first: float) -> Estimate:
    """By how much policies are better than half way from the first one to what is learned without asynchrony."""
    return difference(values, [(first + value) / 2 for value in base])


def _grid(found: dict[str, dict[int, list[float]]]) -> Grid:
    levels = next(iter(found.values())).keys()
    rows = [(way, *(estimate(values).text() for values in by_level.values())) for way, by_level in found.items()]
    return Grid("pass@1 by steps of asynchrony", ("old log-probabilities", *map(str, levels)), rows)

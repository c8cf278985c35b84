"""The zoo of cheats against the very checks of a run: what catches each, how surely, after how many rollouts.

`--model smollm2` puts SmolLM2-135M in the place of the demo's policy, and tries those cheats that a model makes a
difference to; `--model smollm2-adds` tries those of weights in the recipe smollm2 as it is, whose answers have three
tokens. Both take some minutes. Figures: `…_submissions` is the share of contributors whose first lie is not
accepted, `…_rollouts` that of false rollouts that fail a check alone, and `…_tokens_needed` after how many tokens one
has failed with probability 0.999, at the least rate that the trials allow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import torch
import trio
from rich.table import Table

from bench.harness import Result
from bench.in_process import InProcess
from bench.zoo_trials import Finding, Plan, Zoo, figures
from node.run_create import model_directory
from protocol.errors import ConfigError
from protocol.records import Tolerance
from simnet.cheats import FILES, PROOFS, ROLES, ROWS
from trainer.recipe import Recipe, load_recipe
from trainer.smollm2 import smollm2_directory

GAPS: Final = ("ground-checkpoint",)
"""What gets through, in part or whole, though no model is involved; docs/threat-model.md says what it is worth."""
OF_THE_PROTOCOL: Final = tuple(name for name in PROOFS | ROWS | FILES | ROLES if name not in GAPS)
PER_ROLLOUT: Final = ("wrong-model", "other-prompt", "edited-prompt", "other-seed")
OF_THE_MODEL: Final = (
    *("wrong-model", "int8", "int4-g32", "int4-g64", "int8-as-bfloat16", "int4-as-bfloat16"),
    *("fine-tuned", "fine-tuned-slightly", "edited-prompt", "other-temperature", "other-seed", "draft-model"),
)
OF_THE_WEIGHTS: Final = OF_THE_MODEL[:8]
SMOLLM2_BFLOAT16: Final = Tolerance(
    max_exponent_mismatches=16,
    max_mantissa_mean=2.0,
    max_mantissa_median=2.0,
    max_rollout_mantissa_mean=1.75,
    max_margin=0.5,
    max_mean_margin=0.005,
    max_logprob_error=1.0,
    max_mean_logprob_error=0.1,
    max_logprob_shift=0.02,
    honest_margin=0.0025,
    honest_mantissa=1.3,
    honest_logprob_shift=0.01,
)


def bench(*, quick: bool, model: str = "demo") -> Result:
    """Every cheat against the demo's run, or those of the model against SmolLM2's."""
    if model not in SETTINGS:
        raise ConfigError(f"there is no zoo for the model {model[:40]!r}", hint=f"known: {', '.join(SETTINGS)}")
    with _one_thread(), tempfile.TemporaryDirectory(prefix="bench-zoo-") as work:
        recipe, policies, plan = SETTINGS[model](Path(work), quick)
        found, honest = trio.run(Zoo(recipe, policies, plan, directory=Path(work)).run)
    result = Result(figures(found) | _of_the_honest(honest, recipe))
    result.tables += [_table(found, f"zoo, {model}: {plan.seeds} contributors each"), _honest_table(honest, recipe)]
    _ask_all(result, found)
    if model != "demo":
        result.at_most("int4_g32_tokens_needed", 300)
        result.at_most("int4_g64_tokens_needed", 300)
        result.at_most("int8_tokens_needed", 1000)
    return result


def _demo(work: Path, quick: bool) -> tuple[Recipe, list[Path], Plan]:
    """The demo's run after its first training step."""
    recipe, first = load_recipe("demo"), model_directory("sort-digits")
    run = InProcess(recipe, work / "first-step", seed=0)
    run.step()
    plan = Plan(seeds=2, history=8, honest=2) if quick else Plan(seeds=20, history=64, honest=64)
    cap = msgspec.structs.replace(recipe.rollout, max_submissions_per_step=plan.history)
    return msgspec.structs.replace(recipe, rollout=cap), [first, run.policy_dir], plan


def _smollm2(_: Path, quick: bool) -> tuple[Recipe, list[Path], Plan]:
    """SmolLM2 on the demo's task: proofs of 128 values, answers of up to 64 tokens."""
    recipe = load_recipe("demo")
    rollout = msgspec.structs.replace(
        recipe.rollout, group_size=4, prompts_per_submission=1 if quick else 4, max_new_tokens=64
    )
    recipe = msgspec.structs.replace(
        recipe,
        rollout=rollout,
        toploc=msgspec.structs.replace(recipe.toploc, top_k=128),
        tolerance=recipe.tolerance | {"bfloat16": SMOLLM2_BFLOAT16},
    )
    return recipe, [smollm2_directory()], Plan(seeds=1, history=2 if quick else 6, honest=1, names=OF_THE_MODEL)


def _smollm2_adds(work: Path, quick: bool) -> tuple[Recipe, list[Path], Plan]:
    """The run of the recipe smollm2 after a training step: weights in bfloat16, as nearly all of it has them."""
    recipe = load_recipe("smollm2")
    run = InProcess(recipe, work / "first-step", seed=0)
    run.step()
    plan = Plan(seeds=1 if quick else 4, history=2 if quick else 4, honest=1 if quick else 3, names=OF_THE_WEIGHTS)
    return recipe, [run.policy_dir], plan


SETTINGS: Final = {"demo": _demo, "smollm2": _smollm2, "smollm2-adds": _smollm2_adds}
"""By the name for --model: the recipe, its run's policies, and how much of everything."""


def _of_the_honest(honest: Mapping[str, Finding], recipe: Recipe) -> dict[str, float]:
    trials = [trial for finding in honest.values() for trial in finding.first]
    return {
        "honest_rollouts": float(len(trials) * recipe.rollouts_per_submission),
        "honest_rejected": float(sum(not trial.accepted for trial in trials)),
    }


def _ask_all(result: Result, found: Mapping[str, Finding]) -> None:
    result.at_most("honest_rejected", 0)
    protocol = [found[name].per_submission for name in OF_THE_PROTOCOL if name in found]
    if protocol:
        result.figures["protocol_submissions_least"] = min(protocol)
        result.at_least("protocol_submissions_least", 1)
    for name in PER_ROLLOUT:
        if name not in found:
            continue
        result.at_least(f"{name.replace('-', '_')}_rollouts", 0.99)
    for name in ("int8", "int4-g32", "int4-g64", "stale-checkpoint"):
        if name in found:
            result.at_least(f"{name.replace('-', '_')}_submissions", 1)


def _table(found: Mapping[str, Finding], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("cheat", overflow="fold")  # names and reasons are broken on a narrow terminal, never cut
    table.add_column("caught by", overflow="fold")
    for column in ("first submission", "evicts", "one rollout", "rollouts needed", "tokens needed"):
        table.add_column(column, justify="right")
    for name, one in found.items():
        table.add_row(
            *(name, one.caught_by, _percent(one.per_submission), _percent(one.evicting), _percent(one.per_rollout)),
            *(_needed(one), _count(one.tokens_needed)),
        )
    return table


def _honest_table(honest: Mapping[str, Finding], recipe: Recipe) -> Table:
    table = Table(title="the honest beside them", title_justify="left")
    for column in ("engine", "rollouts", "submissions", "rejected"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, one in honest.items():
        rejected = sum(not trial.accepted for trial in one.first)
        rollouts = len(one.first) * recipe.rollouts_per_submission
        table.add_row(name, str(rollouts), str(len(one.first)), str(rejected))
    return table


def _needed(one: Finding) -> str:
    if one.rollouts_needed is None:
        return "its file" if one.per_submission == 1 else "never"
    return f"{one.rollouts_needed:.0f}" if one.per_rollout else f"{one.rollouts_needed:.0f}, by its history"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.4g}" if 0 < share < 0.01 else f"{100 * share:.3g} %"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

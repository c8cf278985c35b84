"""The update against TRL's GRPOTrainer: tokens a CPU-second on the same samples, and reward at equal samples.

Both train the demo's policy on one thread with the same hyper-parameters, in turn: on the very samples of a run of
ours, and each on samples of its own. TRL has an environment of its own, which bench/trl_peer.py makes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import msgspec
import torch

from bench.harness import Result
from bench.in_process import InProcess, pass_at_1
from bench.report import Grid, Section, Statement
from bench.seeds import difference, estimate, is_above, is_no_worse, named, paired_ratio
from bench.trl_peer import TrlPeer, find_python
from environments.registry import get_environment
from node.engines.assignment import prompt_ids
from node.engines.tokenizer import Tokenizer
from node.run_create import model_directory
from protocol.errors import ConfigError
from protocol.seeds import candidate_seed
from trainer.optimiser import make_optimiser
from trainer.policy import load_policy
from trainer.recipe import Recipe, load_recipe
from trainer.step import TrainStep

SEEDS: Final = 3
SAMPLES: Final = 256
UPDATES: Final = 4
ROUNDS: Final = 22
WARM_UP: Final = 2
"""Rounds that are not counted."""
STEPS: Final = 30
_OPTIMISER: Final = ("learning_rate", "betas", "weight_decay", "warm_up_steps", "max_grad_norm")
SETTING: Final = (
    f"The demo's policy and task in float32; {SAMPLES} samples a step (32 prompts, 8 answers each) and {UPDATES} "
    "optimiser steps on them; AdamW at learning rate 4e-4 with 5 steps of warm-up, ε = 0.2, δ = 4, token-level "
    "loss, no KL. Forward, backward and optimiser are counted, and of ours all else between rollouts and new "
    "weights; of TRL not generation, tokenizing, rewards, advantages and old log-probabilities."
)


@dataclass
class Found:
    """Of each seed a figure, ours and TRL's."""

    speed: list[tuple[float, float]] = field(default_factory=list)
    """Tokens of prompts and answers a CPU-second in the update: the median round."""
    times: list[float] = field(default_factory=list)
    """How many times TRL's speed ours is, side by side: the median round."""
    gradient: list[tuple[float, float]] = field(default_factory=list)
    """Mean gradient norm of the first round's updates: from equal weights and samples they are alike."""
    passed: list[tuple[float, float]] = field(default_factory=list)
    """pass@1 of the last policy on held-out prompts, each having sampled for itself."""
    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    """A whole step, with generation."""


def bench(*, quick: bool, seeds: int | None = None, trl_python: Path | None = None) -> Result:
    """Three seeds unless told otherwise; `quick` takes one seed and few steps. Raises ConfigError without TRL."""
    torch.set_num_threads(1)
    chosen, found = range(1 if quick else seeds or SEEDS), Found()
    python = find_python(trl_python)
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as work, TrlPeer(python, Path(work)) as peer:
        for seed in chosen:
            _race(peer, Path(work) / f"race-{seed}", seed, found, rounds=3 if quick else ROUNDS)
            _learn(peer, Path(work) / f"learn-{seed}", seed, found, steps=2 if quick else STEPS)
            sys.stderr.write(f"trainer: seed {seed}: {found.times[-1]:.2f} times TRL\n")
        return _result(found, chosen, versions=peer.versions, judged=not quick)


def recipe(steps: int) -> Recipe:
    """The demo's, as TRL can do it too."""
    base, replace = load_recipe("demo"), msgspec.structs.replace
    return replace(
        base,
        batch=replace(base.batch, rollouts_per_step=SAMPLES, total_steps=steps, max_staleness=0),
        optimiser=replace(base.optimiser, learning_rate=4e-4, updates_per_step=UPDATES, warm_up_steps=5),
        policy=replace(base.policy, dtype="float32"),
    )


def _job(kind: str, recipe: Recipe, model: Path, out: Path, *, seed: int) -> dict[str, Any]:
    settings = {
        "samples": SAMPLES,
        "group_size": recipe.rollout.group_size,
        "max_new_tokens": recipe.rollout.max_new_tokens,
        "temperature": recipe.rollout.temperature,
        "epsilon": recipe.loss.epsilon,
        "delta": recipe.loss.delta,
        "updates": recipe.optimiser.updates_per_step,
        **{name: getattr(recipe.optimiser, name) for name in _OPTIMISER},
    }
    return {
        "job": kind,
        "settings": settings,
        "model": str(model),
        "out": str(out),
        "seed": seed,
        "steps": recipe.batch.total_steps,
    }


def _race(peer: TrlPeer, directory: Path, seed: int, found: Found, *, rounds: int) -> None:
    """Both train on the samples of a run of ours, round by round in turn."""
    plan = recipe(rounds)
    batches = _batches(InProcess(plan, directory, seed=seed), rounds)
    policy = load_policy(directory / "policy-0", settings=plan.policy)
    step = TrainStep(policy, make_optimiser(policy, plan.optimiser), plan)
    ours, trl, gradients = list[float](), list[float](), list[float]()
    peer.send(_job("updates", plan, directory / "policy-0", directory / "trl", seed=seed))
    for number, batch in enumerate(batches):
        trl.append(sum(peer.receive()["steps"]))
        began = time.process_time()
        gradients.append(step.run(number, batch)["grad_norm"])
        ours.append(time.process_time() - began)
        peer.send(_for_trl(batch))
    last = peer.receive()
    trl = [*trl[1:], sum(last["steps"])]  # each answer is of the round before
    tokens = [sum(len(row["prompt_ids"]) + len(row["output_ids"]) for row in batch) for batch in batches]
    measured = list(zip(tokens, ours, trl, strict=True))[WARM_UP:]
    found.speed.append((median(count / one for count, one, _ in measured), median(c / two for c, _, two in measured)))
    found.times.append(median(two / one for _, one, two in measured))
    found.gradient.append((gradients[0], fmean(last["gradients"][:UPDATES])))


def _batches(run: InProcess, rounds: int) -> list[list[dict[str, Any]]]:
    batches = []
    for _ in range(rounds):
        batch = run.collect()
        run.train(batch)
        batches.append(batch.rows)
    return batches


def _for_trl(batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "prompt_ids": [row["prompt_ids"] for row in batch],
        "completion_ids": [row["output_ids"] for row in batch],
        "logprobs": [row["logprobs"] for row in batch],
        "given_rewards": [row["reward"] for row in batch],
    }


def _learn(peer: TrlPeer, directory: Path, seed: int, found: Found, *, steps: int) -> None:
    """Each samples for itself, as many samples, and is judged on the same held-out prompts."""
    plan, first = recipe(steps), model_directory(load_recipe("demo").model.source)
    run = InProcess(plan, directory, seed=seed)
    for _ in range(steps):
        run.step()
    rows, ids = _tasks(first, seed, count=steps * SAMPLES // plan.rollout.group_size)
    peer.send(_job("learn", plan, first, directory / "trl", seed=seed) | {"rows": rows})
    told = peer.receive()
    if told["encoded"] != ids:
        raise ConfigError("TRL reads the prompts as other tokens than we do, so nothing can be compared")
    found.passed.append((_pass(run.policy_dir), _pass(directory / "trl")))
    found.cpu_s.append(((run.generate_s + run.train_s) / steps, told["cpu_s"] / steps))


def _tasks(model: Path, seed: int, *, count: int) -> tuple[list[dict[str, str]], list[list[int]]]:
    """Prompts with their answers, and the tokens of the first eight."""
    environment, tokenizer = get_environment("sort-digits"), Tokenizer(model)
    tasks = [environment.task(candidate_seed(b"bench trainer %d" % seed, number)) for number in range(count)]
    rows = [{"prompt": task.text, "answer": task.data["answer"]} for task in tasks]
    return rows, [prompt_ids(task, tokenizer) for task in tasks[:8]]


def _pass(policy_dir: Path) -> float:
    return pass_at_1(policy_dir, "sort-digits", prompts=256, samples=4, max_new_tokens=10)


def _result(found: Found, seeds: Sequence[int], *, versions: dict[str, str], judged: bool) -> Result:
    against = ", ".join(f"{name} {version}" for name, version in versions.items())
    section = Section("trainer", f"{SETTING} Against {against}; ours with torch {torch.__version__}. {named(seeds)}")
    section.figures |= {f"times_seed_{seed}": times for seed, times in zip(seeds, found.times, strict=True)}
    for name in ("speed", "gradient", "passed", "cpu_s"):
        pairs = getattr(found, name)
        for side, values in zip(("ours", "trl"), zip(*pairs, strict=True), strict=True):
            section.figures |= {f"{side}_{name}_seed_{seed}": value for seed, value in zip(seeds, values, strict=True)}
    section.grids.append(_grid(found))
    times, gap = paired_ratio(found.times, [1.0] * len(seeds)), difference(*_sides(found.passed))
    result = Result(figures=dict(section.figures), sections=[section])
    result.figures |= {"update_times_trl": times.mean, "reward_over_trl_at_most": gap.high}
    if judged:
        faster = is_above(times.low, times.high, 2.0)
        section.statements = [
            Statement("more than twice TRL's tokens a CPU-second in the update", faster, times.text()),
            Statement("no less reward from as many samples", is_no_worse(gap), gap.text(sign=True)),
        ]
        result.at_least("update_times_trl", 2.0)
        result.at_least("reward_over_trl_at_most", 0.0)
    return result


def _sides(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [ours for ours, _ in pairs], [trl for _, trl in pairs]


def _grid(found: Found) -> Grid:
    rows = [
        (
            side,
            f"{fmean(pair[at] for pair in found.speed):,.0f}",
            f"{fmean(pair[at] for pair in found.gradient):.2f}",
            f"{fmean(pair[at] for pair in found.cpu_s):.3f}",
            estimate([pair[at] for pair in found.passed]).text(),
        )
        for at, side in enumerate(("ours", "TRL"))
    ]
    columns = ("", "update, tokens a CPU-second", "gradient norm, first round", "whole step, CPU-seconds", "pass@1")
    return Grid(f"the update on the same samples, and {STEPS} steps each on its own", columns, rows)

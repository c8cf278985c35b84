"""Does the demo recipe learn from stale rollouts? Its reward over the last tenth of the steps, without a network.

Uses the built-in engine, the trainer's compute code in this process, and the seeds that nodes use; the number of a
seed stands for the run id.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.harness import Result
from environments.base import Environment
from environments.registry import get_environment
from node.engines.base import GenerationRequest, SamplingParams
from node.engines.tokenizer import Tokenizer
from node.engines.torch_engine import TorchEngine
from node.run_create import model_directory, model_spec
from node.trainer.compute import TrainerCompute
from protocol.seeds import prompt_seed, rollout_seed, submission_seed
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


class Contributor:
    """Generates whole submissions as an inference node does, proofs aside."""

    def __init__(self, recipe: Recipe, model_dir: Path, *, run_id: bytes) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._environment: Environment = get_environment(recipe.environment.name)
        self._tokenizer = Tokenizer(model_dir)
        self._engine = TorchEngine(max_batch=256)
        self._stop_ids = model_spec(model_dir).stop_ids

    def rollouts(self, policy_dir: Path, *, step: int, checkpoint_step: int) -> list[dict[str, Any]]:
        """A step's batch from the policy in `policy_dir`."""
        self._engine.load(policy_dir)
        submissions = self._recipe.batch.rollouts_per_step // self._recipe.rollouts_per_submission
        jobs = [job for index in range(submissions) for job in self._jobs(step, index)]
        sampling = SamplingParams(
            temperature=self._recipe.rollout.temperature,
            max_new_tokens=self._recipe.rollout.max_new_tokens,
            stop_ids=self._stop_ids,
            top_k_proof=0,
        )
        generations = self._engine.generate([request for request, _, _ in jobs], sampling)
        rows = []
        for (request, task, place), made in zip(jobs, generations, strict=True):
            answer = self._tokenizer.decode(made.output_ids, stop_ids=self._stop_ids)
            rows.append(
                {
                    **place,
                    "prompt_ids": list(request.prompt_ids),
                    "output_ids": made.output_ids,
                    "logprobs": made.logprobs,
                    "reward": self._environment.reward(task, answer).value,
                    "checkpoint_step": checkpoint_step,
                }
            )
        return rows

    def _jobs(self, step: int, index: int) -> Iterator[tuple[GenerationRequest, Any, dict[str, Any]]]:
        key = bytes(32)
        seed = submission_seed(self._run_id, step, checkpoint=key, contributor_key=key, index=index)
        for prompt in range(self._recipe.rollout.prompts_per_submission):
            task = self._environment.task(prompt_seed(seed, prompt))
            ids = self._tokenizer.encode(task.text)
            for member in range(self._recipe.rollout.group_size):
                place = {"prompt_index": prompt, "member": member, "submission": str(index)}
                yield GenerationRequest(ids, rollout_seed(seed, prompt, member)), task, place


def learn(recipe: Recipe, state_dir: Path, *, staleness: int, seed: int) -> Curve:
    """Run a recipe's steps with every rollout `staleness` steps old (less at the beginning)."""
    model_dir = model_directory(recipe.model.source)
    contributor = Contributor(recipe, model_dir, run_id=hashlib.sha256(f"bench {seed}".encode()).digest())
    compute = TrainerCompute(recipe, state_dir=state_dir, policy_dir=model_dir)
    policies = {0: Path(compute.open()["policy_dir"])}
    metrics: list[dict[str, float]] = []
    generate_s = train_s = 0.0
    for step in range(recipe.batch.total_steps):
        began = time.process_time()
        checkpoint_step = max(0, step - staleness)
        rollouts = contributor.rollouts(policies[checkpoint_step], step=step, checkpoint_step=checkpoint_step)
        generated = time.process_time()
        result = compute.train(step, rollouts)
        policies[result["step"]] = Path(result["policy_dir"])
        metrics.append(result["metrics"])
        generate_s += generated - began
        train_s += time.process_time() - generated
    return Curve(staleness, seed, [row["reward"] for row in metrics], generate_s, train_s, metrics)


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

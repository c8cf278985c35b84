"""A run without a network, for benchmarks of the recipe: one contributor and one trainer, with the code that nodes use.

Prompts, noise, rewards, batches and training are those of the run that a recipe describes; proofs, signatures and
verdicts are left out. The number of a seed stands for the run id.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from environments.registry import get_environment
from node.engines.assignment import derive_work, sampling_params
from node.engines.base import SamplingParams
from node.engines.tokenizer import Tokenizer
from node.engines.torch_engine import TorchEngine
from node.evaluation import evaluate, held_out_work
from node.inference.compute import RolloutWorker
from node.run_create import manifest_from_recipe, model_directory, model_spec
from node.run_pools import lay_out_pools
from node.trainer.compute import TrainerCompute
from node.trainer.gather import Gathered, batch_metrics, gather, silent_groups_of
from protocol.batches import is_trained
from protocol.identity import PeerId
from protocol.seeds import evaluation_seed, submission_seed
from trainer.recipe import Recipe

_NOBODY = PeerId(bytes(32))
_MAX_BATCH = 256


@dataclass(frozen=True)
class Collected:
    """A step's batch."""

    gathered: Gathered
    rows: list[dict[str, Any]]
    """Of all submissions, as a trainer reads them."""


class InProcess:
    """A run of a recipe; each `step` collects a batch and trains on it.

    Rollouts are of the policy `staleness` steps before, of the first one where there is none; the recipe must allow it.
    """

    def __init__(self, recipe: Recipe, directory: Path, *, seed: int, staleness: int = 0) -> None:
        recipe = msgspec.structs.replace(recipe, keep_checkpoints=max(recipe.keep_checkpoints, staleness + 2))
        model_dir = model_directory(recipe.model.source)
        self.manifest = manifest_from_recipe(
            recipe,
            model_dir,
            trainer=_NOBODY,
            validators=[_NOBODY],
            name=recipe.name,
            issued_at_ms=0,
            recipe_digest=bytes(32),
        )
        first = directory / "policy-0"
        shutil.copytree(model_dir, first)
        lay_out_pools(recipe, self.manifest.environment, first)
        self.generate_s = self.train_s = 0.0
        """CPU time so far."""
        self._run_id = hashlib.sha256(f"bench {seed}".encode()).digest()
        self._worker = RolloutWorker(TorchEngine(max_batch=_MAX_BATCH))
        self._sampling = dataclasses.replace(sampling_params(self.manifest), top_k_proof=0)
        self._compute = TrainerCompute(recipe, state_dir=directory / "training", policy_dir=first)
        self._policies = [Path(self._compute.open()["policy_dir"])]
        self._staleness = staleness
        self._step = 0

    @property
    def policy_dir(self) -> Path:
        """The newest policy."""
        return self._policies[-1]

    def step(self) -> dict[str, float]:
        """Collect, train; the metrics of a step as a trainer's node has them."""
        return self.train(self.collect())

    def train(self, batch: Collected) -> dict[str, float]:
        """Train on a step's batch; the metrics as above."""
        began, size = time.process_time(), self.manifest.rollout.group_size
        gathered = batch.gathered
        silent = gathered.silent or (False,) * (len(batch.rows) // size)
        useful = [row for at, row in enumerate(batch.rows) if not silent[at // size]]
        skip = not is_trained(self.manifest, gathered.tally)
        trained = self._compute.train(self._step, [] if skip else useful, skip=skip)
        self._policies.append(Path(trained["policy_dir"]))
        self._step = trained["step"]
        metrics: dict[str, float] = trained["metrics"]
        self.train_s += time.process_time() - began
        return metrics | batch_metrics(self.manifest, batch.rows, silent, skipped=skip)

    def collect(self) -> Collected:
        """Generate submissions until the step's batch is whole, or was tried often enough."""
        began = time.process_time()
        at = max(0, self._step - self._staleness)
        checkpoint = at.to_bytes(32, "big")
        self._worker.load(str(self._policies[at]), checkpoint)
        files: dict[bytes, list[dict[str, Any]]] = {}
        while True:
            key = len(files).to_bytes(32, "big")
            files[key] = self._submission(len(files), checkpoint_step=at)
            silent = {key: silent_groups_of(self.manifest, rows) for key, rows in files.items()}
            gathered = gather(self.manifest, list(files), silent, waited_s=0.0)
            if gathered.ended is not None:
                self.generate_s += time.process_time() - began
                return Collected(gathered, [row for key in gathered.submissions for row in files[key]])

    def _submission(self, index: int, *, checkpoint_step: int) -> list[dict[str, Any]]:
        policy, checkpoint = self._policies[checkpoint_step], checkpoint_step.to_bytes(32, "big")
        seed = submission_seed(self._run_id, self._step, checkpoint=checkpoint, contributor_key=bytes(32), index=index)
        work = derive_work(self.manifest, Tokenizer(policy), seed=seed, step=self._step)
        made = self._worker.rollouts(work, self._worker.answers(work, self._sampling))
        return [
            msgspec.structs.asdict(rollout)
            | {
                "length_penalty": work.length_penalty(rollout.prompt_index, len(rollout.output_ids)),
                "checkpoint_step": checkpoint_step,
                "submission": str(index),
            }
            for rollout in made
        ]


def pass_at_1(policy_dir: Path, environment: str, *, prompts: int, samples: int, max_new_tokens: int) -> float:
    """Share of right answers to held-out tasks, always the same, of an environment as it is without parameters."""
    engine, tokenizer = TorchEngine(max_batch=_MAX_BATCH), Tokenizer(policy_dir)
    engine.load(policy_dir)
    work = held_out_work(
        get_environment(environment), tokenizer, seed=evaluation_seed(b"bench"), prompts=prompts, samples=samples
    )
    model = model_spec(policy_dir)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, stop_ids=model.stop_ids, top_k_proof=0)
    found = evaluate(engine, tokenizer, work, sampling, max_model_len=model.max_model_len, pass_at=(1,))
    return found.pass_at[0].value

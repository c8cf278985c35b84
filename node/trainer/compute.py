"""The trainer's compute process: holds the policy, trains a step when told to, writes the checkpoint, then answers.

`python -m node.trainer.compute STATE_DIR RECIPE [--policy DIR] …`. The initial policy lies beside the
recipe as `policy-0`, where `run create` put it. Never sees the network.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node.compute.serve import serve
from protocol.errors import ModelError
from trainer.checkpoint import Checkpoints, Saved
from trainer.policy import Policy, load_policy
from trainer.recipe import Recipe, load_recipe, recipe_path
from trainer.step import TrainStep

logger = logging.getLogger(__name__)


@dataclass
class _Loaded:
    """A checkpoint in memory, ready to train the step of its number."""

    saved: Saved
    train_step: TrainStep


class TrainerCompute:
    """Answers the trainer's calls; each is safe to repeat after a crash on either side."""

    def __init__(self, recipe: Recipe, *, state_dir: Path, policy_dir: Path, device: str = "cpu") -> None:
        self._recipe = recipe
        self._policy_dir = policy_dir
        self._device = device
        self._checkpoints = Checkpoints(state_dir, keep=recipe.keep_checkpoints)
        self._loaded: _Loaded | None = None

    def open(self) -> dict[str, Any]:
        """The newest checkpoint: `step` and `policy_dir`. Makes step 0 at the first start. Raises ModelError."""
        saved = self._checkpoints.start(self._policy_dir)
        self._load(saved)
        return {"step": saved.step, "policy_dir": str(saved.policy_dir)}

    def train(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Train a step from checkpoint `step`; checkpoint `step + 1` is durable when this returns.

        A step that was trained before is not trained again: its checkpoint and metrics are given once more.
        Raises MalformedError for rollouts that cannot be trained on and ModelError without checkpoint `step`.
        """
        done = self._checkpoints.find(step + 1)
        if done is None:
            loaded = self._at(step)
            self._loaded = None  # whatever fails from here on, the next call begins from the disk
            metrics = loaded.train_step.run(step, rollouts)
            done = self._save(step + 1, loaded, metrics)
            self._loaded = _Loaded(done, loaded.train_step)
        metrics = done.report["metrics"]
        return {
            "step": done.step,
            "policy_dir": str(done.policy_dir),
            "metrics": metrics,
            "mean_reward": metrics["reward"],
        }

    def _save(self, step: int, loaded: _Loaded, metrics: dict[str, float]) -> Saved:
        work = loaded.train_step
        return self._checkpoints.save(
            step, work.policy, work.optimiser, report={"metrics": metrics}, previous=loaded.saved
        )

    def _at(self, step: int) -> _Loaded:
        if self._loaded is not None and self._loaded.saved.step == step:
            return self._loaded
        saved = self._checkpoints.find(step)
        if saved is None:
            newest = self._checkpoints.newest()
            held = f"the newest is {newest.step}" if newest else "there is none"
            raise ModelError(f"checkpoint {step} is not here, so step {step} cannot be trained; {held}")
        return self._load(saved)

    def _load(self, saved: Saved) -> _Loaded:
        policy, optimiser = self._checkpoints.restore(saved, self._recipe.optimiser, device=self._device)
        train_step = TrainStep(policy, optimiser, self._recipe, reference=self._reference())
        self._loaded = _Loaded(saved, train_step)
        return self._loaded

    def _reference(self) -> Policy | None:
        if not self._recipe.loss.kl_coefficient:
            return None
        return load_policy(self._policy_dir, device=self._device)


def main() -> None:
    """Entry point of the process that the trainer's node starts."""
    parser = argparse.ArgumentParser(prog="python -m node.trainer.compute")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("--policy", type=Path, help="initial policy; beside the recipe, policy-0, unless given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="more are faster on large models only")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    torch.set_num_threads(arguments.threads)
    _repeat_exactly(arguments.device)
    compute = TrainerCompute(
        load_recipe(arguments.recipe),
        state_dir=arguments.state_dir,
        policy_dir=arguments.policy or recipe_path(arguments.recipe).parent / "policy-0",
        device=arguments.device,
    )
    serve({"open": compute.open, "train": compute.train})


def _repeat_exactly(device: str) -> None:
    """Choose kernels whose sums have a fixed order; on a CPU with a fixed number of threads they all have."""
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


if __name__ == "__main__":
    main()

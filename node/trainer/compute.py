"""The trainer's compute process: holds the policy, trains a step when told to, writes the checkpoint, then answers.

`python -m node.trainer.compute STATE_DIR RECIPE [--policy DIR] …`. The initial policy lies beside the
recipe as `policy-0`, where `run create` put it. With `policy.processes` in the recipe it is as many processes, which
torchrun starts (node.trainer.team). Never sees the network.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from node.compute.serve import serve
from node.trainer.team import Team, become_torchrun, follow, join_torchrun, started_by_torchrun
from protocol.errors import ModelError
from trainer.checkpoint import Checkpoints, Saved, gather_for_save
from trainer.parallel import ALONE, World, join_world, own_device
from trainer.policy import Policy, load_policy
from trainer.recipe import Recipe, load_recipe, recipe_path
from trainer.state_dir import checked_elsewhere
from trainer.step import TrainStep

logger = logging.getLogger(__name__)

SKIPPED: Final[Mapping[str, float]] = {"reward": 0.0, "rollouts": 0.0, "tokens": 0.0, "updates": 0.0}
"""Metrics of a step that trains nothing; the node knows the reward of what was left out."""


@dataclass
class _Loaded:
    """A checkpoint in memory, ready to train the step of its number."""

    saved: Saved
    train_step: TrainStep


class TrainerCompute:
    """Answers the trainer's calls; each is safe to repeat after a crash on either side."""

    def __init__(
        self, recipe: Recipe, *, state_dir: Path, policy_dir: Path, device: str = "cpu", world: World = ALONE
    ) -> None:
        self._recipe = recipe
        self._team = Team(world)
        self._policy_dir = policy_dir
        self._device = device
        self._checkpoints = Checkpoints(state_dir, keep=recipe.keep_checkpoints, keep_every=recipe.keep_every)
        self._loaded: _Loaded | None = None

    def open(self) -> dict[str, Any]:
        """The newest checkpoint: `step` and `policy_dir`. Makes step 0 at the first start. Raises ModelError."""
        saved = self._checkpoints.start(self._policy_dir)
        self._load(saved)
        return {"step": saved.step, "policy_dir": str(saved.policy_dir)}

    def train(self, step: int, rollouts: Sequence[Mapping[str, Any]], skip: bool = False) -> dict[str, Any]:
        """Train a step from checkpoint `step`; checkpoint `step + 1` is durable when this returns.

        `skip`: the step's batch has too little to learn from, and its policy is that of the step before.
        A step that was trained before is not trained again: its checkpoint and metrics are given once more.
        Raises MalformedError for rollouts that cannot be trained on and ModelError without checkpoint `step`.
        """
        done = self._checkpoints.find(step + 1)
        if done is None:
            loaded = self._at(step)
            self._loaded = None  # whatever fails from here on, the next call begins from the disk
            metrics = dict(SKIPPED) if skip else self._run(loaded, step, rollouts)
            done = self._save(step + 1, loaded, metrics)
            self._loaded = _Loaded(done, loaded.train_step)
        metrics = done.report["metrics"]
        return {
            "step": done.step,
            "policy_dir": str(done.policy_dir),
            "metrics": metrics,
            "mean_reward": metrics["reward"],
        }

    @property
    def is_first(self) -> bool:
        """Whether this process speaks to the node."""
        return self._team.world.rank == 0

    def follow(self) -> NoReturn:
        """Take part in what the trainer's first process is told to do."""
        follow(self._team.world, {"load": self._load_with_others, "run": self._run_with_others, "save": self._gather})

    def _load_with_others(self, step: int) -> None:
        saved = checked_elsewhere(self._checkpoints.state_dir, step)
        if saved is None:
            raise ModelError(f"checkpoint {step} is not where this process looks: all of them need the same disk")
        self._load(saved)

    def _run_with_others(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        if self._loaded is not None:
            self._loaded.train_step.run(step, rollouts)

    def _gather(self) -> None:
        if self._loaded is not None:
            gather_for_save(self._loaded.train_step.policy, self._loaded.train_step.optimiser)

    def _run(self, loaded: _Loaded, step: int, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        self._team.tell("run", step=step, rollouts=rollouts)
        return loaded.train_step.run(step, rollouts)

    def _save(self, step: int, loaded: _Loaded, metrics: dict[str, float]) -> Saved:
        work = loaded.train_step
        self._team.tell("save")
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
        world, self._loaded = self._team.world, None  # two policies may not fit
        if self.is_first:
            self._team.tell("load", step=saved.step)
        policy, optimiser = self._checkpoints.restore(
            saved,
            self._recipe.optimiser,
            policy_settings=self._recipe.policy,
            device=self._device,
            world=world,
        )
        train_step = TrainStep(policy, optimiser, self._recipe, reference=self._reference())
        self._loaded = _Loaded(saved, train_step)
        return self._loaded

    def _reference(self) -> Policy | None:
        if not self._recipe.loss.kl_coefficient:
            return None
        return load_policy(self._policy_dir, device=self._device, settings=self._recipe.policy, world=self._team.world)


def main() -> None:
    """Entry point of the process that the trainer's node starts."""
    parser = argparse.ArgumentParser(prog="python -m node.trainer.compute")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("--policy", type=Path, help="initial policy; beside the recipe, policy-0, unless given")
    parser.add_argument("--device", default=os.environ.get("INTELLECT_DEVICE", "cpu"))
    parser.add_argument("--threads", type=int, default=1, help="more are faster on large models only")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    recipe = load_recipe(arguments.recipe)
    if started_by_torchrun():
        join_torchrun()
    elif recipe.policy.processes > 1:
        become_torchrun(recipe.policy.processes, "node.trainer.compute", sys.argv[1:])
    torch.set_num_threads(arguments.threads)
    _repeat_exactly(arguments.device)
    compute = TrainerCompute(
        recipe,
        state_dir=arguments.state_dir,
        policy_dir=arguments.policy or recipe_path(arguments.recipe).parent / "policy-0",
        device=own_device(arguments.device),
        world=join_world(),
    )
    if compute.is_first:
        serve({"open": compute.open, "train": compute.train})
    else:
        compute.follow()


def _repeat_exactly(device: str) -> None:
    """Choose kernels whose sums have a fixed order; on a CPU with a fixed number of threads they all have."""
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


if __name__ == "__main__":
    main()

"""The trainer's durable state: one directory a training step (trainer.state_dir), written whole or not at all.

A directory is written under another name, synced to the disk, then renamed. The step is all there is of the scheduler,
whose rate follows from it, and of the position in the data, which is the ledger's batch of that number. Leaves out
publication (p2p.shardcast).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from protocol.errors import DataDirError, ModelError
from trainer.optimiser import MasterAdamW, make_optimiser, optimiser_tensors, restore_optimiser, write_optimiser
from trainer.parallel import ALONE, World
from trainer.policy import WEIGHTS_FILE, Policy, load_policy, write_weights
from trainer.recipe import OptimiserSettings, PolicySettings
from trainer.state_dir import POLICY, STATE_FILE, file_sha256, find_saved, saved_steps, step_path, steps_to_drop
from trainer.state_dir import Saved as Saved

logger = logging.getLogger(__name__)

OPTIMISER_FILE: Final = "optimiser.safetensors"
RANDOM_FILE: Final = "random.safetensors"
_UNFINISHED: Final = "unfinished-"
_IDENTITY_FILES: Final = ("config.json", "tokenizer.json")
"""Equal in every checkpoint of a run."""


class Checkpoints:
    """The checkpoints of one trainer: the newest `keep` of them, and for good those of every `keep_every`-th step."""

    def __init__(self, state_dir: Path, *, keep: int, keep_every: int = 0) -> None:
        self.state_dir = state_dir
        self.keep = keep
        self.keep_every = keep_every

    def start(self, policy_dir: Path) -> Saved:
        """The newest checkpoint, or step 0 made from an initial policy. Removes what a crash left unfinished.

        Raises ModelError where the checkpoint is of another model than the initial policy; DataDirError as `save` does.
        """
        self.state_dir.mkdir(parents=True, exist_ok=True)
        for leftover in self.state_dir.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        newest = self.newest()
        if newest is None:
            return self._save_initial(policy_dir)
        _require_same_model(newest, policy_dir)
        return newest

    def newest(self) -> Saved | None:
        """The newest sound checkpoint; damaged ones are passed over with a warning."""
        return find_saved(self.state_dir)

    def find(self, step: int) -> Saved | None:
        """The sound checkpoint of a step."""
        return find_saved(self.state_dir, step)

    def save(
        self, step: int, policy: Policy, optimiser: MasterAdamW, *, report: dict[str, Any], previous: Saved
    ) -> Saved:
        """Write a step's checkpoint durably, then drop the oldest. Files beside the weights come from `previous`.

        None is dropped after a step that had all its optimiser steps skipped: the oldest may be what the run can go on
        from. Of several processes the first one calls this, and the others `gather_for_save`. Raises DataDirError where
        the disk refuses it: nothing half-written stays, and older checkpoints do.
        """
        weights, moments = policy.tensors(), optimiser_tensors(optimiser)
        with self._writing(step) as work:
            _copy_files(previous.policy_dir, work / POLICY, weights=False)
            write_weights(weights, work / POLICY / WEIGHTS_FILE)
            write_optimiser(moments, work / OPTIMISER_FILE)
            save_file(_random_state(), work / RANDOM_FILE)
            saved = self._finish(work, step, report)
        if not _all_skipped(report):
            self._drop_oldest()
        return saved

    def restore(
        self,
        saved: Saved,
        settings: OptimiserSettings,
        *,
        policy_settings: PolicySettings | None = None,
        device: str = "cpu",
        world: World = ALONE,
    ) -> tuple[Policy, MasterAdamW]:
        """Load a checkpoint's policy and optimiser exactly as they were, each process its share. Raises ModelError."""
        policy = load_policy(saved.policy_dir, device=device, settings=policy_settings, world=world)
        policy.prepare()
        optimiser = make_optimiser(policy, settings)
        moments = saved.path / OPTIMISER_FILE
        if moments.exists():
            restore_optimiser(optimiser, moments)
        elif saved.step:
            raise ModelError(f"the checkpoint {saved.path} has no {OPTIMISER_FILE}")
        if (saved.path / RANDOM_FILE).exists():
            _restore_random_state(load_file(saved.path / RANDOM_FILE))
        return policy, optimiser

    def _save_initial(self, policy_dir: Path) -> Saved:
        if not policy_dir.is_dir():
            raise ModelError(
                f"no checkpoint in {self.state_dir} and no initial policy in {policy_dir}",
                hint="make the run first: intellect-node run create --recipe demo --data-dir DIR --validator PEERID",
            )
        with self._writing(0) as work:
            _copy_files(policy_dir, work / POLICY, weights=True)
            return self._finish(work, 0, {})

    @contextmanager
    def _writing(self, step: int) -> Iterator[Path]:
        """A directory to write in, which is gone again when that fails."""
        work = self.state_dir / f"{_UNFINISHED}{step:08d}"
        try:
            shutil.rmtree(work, ignore_errors=True)
            (work / POLICY).mkdir(parents=True)
            yield work
        except (OSError, SafetensorError) as error:
            shutil.rmtree(work, ignore_errors=True)  # what it took is free again
            raise _unwritable(error, self.state_dir, step) from error

    def _finish(self, work: Path, step: int, report: dict[str, Any]) -> Saved:
        files = {str(path.relative_to(work)): file_sha256(path) for path in sorted(work.rglob("*")) if path.is_file()}
        state = json.dumps({"step": step, "report": report, "files": files}, indent=1, sort_keys=True)
        (work / STATE_FILE).write_text(state + "\n")
        _sync_tree(work)
        final = step_path(self.state_dir, step)
        if final.exists():
            shutil.rmtree(final)  # only a damaged one can be in the way: sound ones are found before training
        work.rename(final)
        _sync(self.state_dir)
        return Saved(step, final, report)

    def _drop_oldest(self) -> None:
        for step in steps_to_drop(saved_steps(self.state_dir), keep=self.keep, keep_every=self.keep_every):
            # Renamed first, so that a half-deleted checkpoint is never met under a checkpoint's name.
            doomed = self.state_dir / f"{_UNFINISHED}drop-{step:08d}"
            try:
                step_path(self.state_dir, step).rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:  # the next save or start tries again
                logger.warning("checkpoint not-dropped=%d error=%s", step, error)


def gather_for_save(policy: Policy, optimiser: MasterAdamW) -> None:
    """Take part in putting together what the first process writes, and keep nothing of it."""
    policy.tensors(keep=False)
    optimiser_tensors(optimiser, keep=False)


def _all_skipped(report: Mapping[str, Any]) -> bool:
    metrics = report.get("metrics", {})
    return bool(metrics.get("skipped_updates") and not metrics.get("updates"))


def _require_same_model(saved: Saved, policy_dir: Path) -> None:
    for name in _IDENTITY_FILES:
        ours, theirs = saved.policy_dir / name, policy_dir / name
        if theirs.exists() and (not ours.exists() or file_sha256(ours) != file_sha256(theirs)):
            raise ModelError(
                f"the checkpoint {saved.path} is of another model than the run: its {name} is not that of {policy_dir}",
                hint="give the data directory that the run was created in, or create a new run for the other model",
            )


def _random_state() -> dict[str, torch.Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), **{f"cuda:{index}": state for index, state in enumerate(cuda)}}


def _restore_random_state(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda:{index}"], index)


def _unwritable(error: OSError | SafetensorError, state_dir: Path, step: int) -> DataDirError:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
    cause = "no space is left" if full else str(error)[:200]
    return DataDirError(
        f"checkpoint {step} cannot be written to {state_dir}: {cause}; older checkpoints are whole",
        hint=f"free some space (df -h {state_dir}), or lower keep_checkpoints in the recipe, then start again",
    )


def _copy_files(source: Path, target: Path, *, weights: bool) -> None:
    for path in sorted(source.iterdir()):
        is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if path.is_file() and (weights or not is_weights):
            shutil.copyfile(path, target / path.name)


def _sync_tree(root: Path) -> None:
    for path in root.rglob("*"):
        _sync(path)
    _sync(root)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

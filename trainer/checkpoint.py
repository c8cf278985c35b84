"""The trainer's durable state: one directory a training step, written whole or not at all.

    STATE_DIR/step-00000012/policy/      config.json, tokenizer.json, model.safetensors …: what is published
    STATE_DIR/step-00000012/optimiser.safetensors
    STATE_DIR/step-00000012/state.json   step, report, SHA-256 of every file

A directory is written under another name, synced to the disk, then renamed. Nothing random is stored: each step draws
from the recipe's seed and its own number. Leaves out publication (p2p.shardcast).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from torch.optim import AdamW

from protocol.errors import ModelError
from trainer.optimiser import make_optimiser, restore_optimiser, save_optimiser
from trainer.policy import WEIGHTS_FILE, Policy, load_policy, save_weights
from trainer.recipe import OptimiserSettings

logger = logging.getLogger(__name__)

POLICY: Final = "policy"
OPTIMISER_FILE: Final = "optimiser.safetensors"
STATE_FILE: Final = "state.json"
_STEP_NAME: Final = re.compile(r"step-(\d{8,})")
_UNFINISHED: Final = "unfinished-"


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    report: dict[str, Any]
    files: dict[str, str]


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the disk whose files all have the hashes they were written with."""

    step: int
    path: Path
    report: dict[str, Any]
    """What the step that made it gave; empty for step 0."""

    @property
    def policy_dir(self) -> Path:
        return self.path / POLICY


class Checkpoints:
    """The checkpoints of one trainer, newest `keep` of them."""

    def __init__(self, state_dir: Path, *, keep: int) -> None:
        self.state_dir = state_dir
        self.keep = keep

    def start(self, policy_dir: Path) -> Saved:
        """The newest checkpoint, or step 0 made from an initial policy. Removes what a crash left unfinished."""
        self.state_dir.mkdir(parents=True, exist_ok=True)
        for leftover in self.state_dir.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        return self.newest() or self._save_initial(policy_dir)

    def newest(self) -> Saved | None:
        """The newest sound checkpoint; damaged ones are passed over with a warning."""
        found = (self._check(step) for step in sorted(self._steps(), reverse=True))
        return next((saved for saved in found if saved), None)

    def find(self, step: int) -> Saved | None:
        """The sound checkpoint of a step."""
        return self._check(step) if self._path(step).is_dir() else None

    def save(self, step: int, policy: Policy, optimiser: AdamW, *, report: dict[str, Any], previous: Saved) -> Saved:
        """Write a step's checkpoint durably, then drop the oldest. Files beside the weights come from `previous`."""
        work = self._begin(step)
        _copy_files(previous.policy_dir, work / POLICY, weights=False)
        save_weights(policy.model, work / POLICY / WEIGHTS_FILE)
        save_optimiser(policy, optimiser, work / OPTIMISER_FILE)
        saved = self._finish(work, step, report)
        self._drop_oldest()
        return saved

    def restore(self, saved: Saved, settings: OptimiserSettings, *, device: str = "cpu") -> tuple[Policy, AdamW]:
        """Load a checkpoint's policy and optimiser exactly as they were. Raises ModelError."""
        policy = load_policy(saved.policy_dir, device=device)
        optimiser = make_optimiser(policy, settings)
        moments = saved.path / OPTIMISER_FILE
        if moments.exists():
            restore_optimiser(policy, optimiser, moments)
        elif saved.step:
            raise ModelError(f"the checkpoint {saved.path} has no {OPTIMISER_FILE}")
        return policy, optimiser

    def _save_initial(self, policy_dir: Path) -> Saved:
        if not policy_dir.is_dir():
            raise ModelError(
                f"no checkpoint in {self.state_dir} and no initial policy in {policy_dir}",
                hint="make the run first: intellect-node run create --recipe demo --data-dir DIR --validator PEERID",
            )
        work = self._begin(0)
        _copy_files(policy_dir, work / POLICY, weights=True)
        return self._finish(work, 0, {})

    def _path(self, step: int) -> Path:
        return self.state_dir / f"step-{step:08d}"

    def _steps(self) -> Iterator[int]:
        for path in self.state_dir.iterdir():
            match = _STEP_NAME.fullmatch(path.name)
            if match:
                yield int(match[1])

    def _begin(self, step: int) -> Path:
        work = self.state_dir / f"{_UNFINISHED}{step:08d}"
        if work.exists():
            shutil.rmtree(work)
        (work / POLICY).mkdir(parents=True)
        return work

    def _finish(self, work: Path, step: int, report: dict[str, Any]) -> Saved:
        files = {str(path.relative_to(work)): _sha256(path) for path in sorted(work.rglob("*")) if path.is_file()}
        state = json.dumps({"step": step, "report": report, "files": files}, indent=1, sort_keys=True)
        (work / STATE_FILE).write_text(state + "\n")
        _sync_tree(work)
        final = self._path(step)
        if final.exists():
            shutil.rmtree(final)  # only a damaged one can be in the way: sound ones are found before training
        work.rename(final)
        _sync(self.state_dir)
        return Saved(step, final, report)

    def _check(self, step: int) -> Saved | None:
        path = self._path(step)
        try:
            state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=_State)
            damaged = [name for name, digest in state.files.items() if _sha256(path / name) != digest]
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("checkpoint passed-over=%s error=%s", path, error)
            return None
        if damaged or state.step != step:
            logger.warning("checkpoint passed-over=%s damaged=%s", path, ",".join(damaged))
            return None
        return Saved(step, path, state.report)

    def _drop_oldest(self) -> None:
        for step in sorted(self._steps(), reverse=True)[self.keep :]:
            # Renamed first, so that a half-deleted checkpoint is never met under a checkpoint's name.
            doomed = self.state_dir / f"{_UNFINISHED}drop-{step:08d}"
            self._path(step).rename(doomed)
            shutil.rmtree(doomed)


def _copy_files(source: Path, target: Path, *, weights: bool) -> None:
    for path in sorted(source.iterdir()):
        is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if path.is_file() and (weights or not is_weights):
            shutil.copyfile(path, target / path.name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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

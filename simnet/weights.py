"""Frees the disk of checkpoints that a finished simulation has no more use for.

The trainer's newest one stays, so that its policy can be exported; logs, ledgers and metrics are not touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from trainer.state_dir import saved_steps, step_path, steps_to_drop

_DOWNLOADED = ("checkpoints", "patches")


def drop_weights(data_dirs: Iterable[Path]) -> None:
    """Remove what nodes that have ended downloaded or made of policies, but for the newest that was trained."""
    for data_dir in data_dirs:
        for name in _DOWNLOADED:
            shutil.rmtree(data_dir / name, ignore_errors=True)
        shutil.rmtree(data_dir / "run" / "policy-0", ignore_errors=True)
        training = data_dir / "training"
        for step in steps_to_drop(saved_steps(training), keep=1, keep_every=0):
            shutil.rmtree(step_path(training, step), ignore_errors=True)

"""What a training step measures, by the paper's names, and the file it is kept in: JSON lines, one line a step.

A line is durable once `append` returns. A crash can tear the last line: it is cut off when the file is opened. Steps
rise, so none is there twice; the size of a file and the number of older ones are bounded. Never imports torch.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol.atomic import sync_directory
from protocol.errors import DataDirError

log = logging.getLogger(__name__)

METRICS: Final[Mapping[str, str]] = {
    "reward": "Mean reward that was trained on: task reward and length penalty together",
    "task_reward": "Mean reward of the environment",
    "length_penalty": "Mean penalty for missing the target length",
    "entropy": "Mean entropy of the policy's next-token distribution, in nats",
    "kl": "Mean divergence from the reference policy per token, in nats",
    "clip_ratio": "Share of tokens whose ratio the loss clips",
    "grad_norm": "Mean norm of the gradient before clipping",
    "loss_max": "Largest loss of an optimiser step, by size",
    "grad_norm_max": "Largest norm of the gradient before clipping",
    "loss": "Mean loss of the optimiser steps",
    "drift": "Mean divergence from the old log-probabilities per token, in nats",
    "ratio_max": "Largest ratio of a token's new to its old probability",
    "staleness": "Mean number of checkpoints between the rollouts' policy and the step",
    "staleness_max": "Most checkpoints between a rollout's policy and the step",
    "padding": "Share of the computed places that hold no token",
    "computed_share": "Computed places for each token of prompts and answers",
    "micro_batches": "Micro-batches that the step was computed in",
    "tokens": "Output tokens of the step's rollouts",
    "rollouts": "Rollouts of the step",
    "groups_without_signal": "Groups whose rewards are all equal",
    "rollouts_without_reward": "Rollouts left out because the environment could not tell",
    "rollouts_collected": "Rollouts that the step's batch took in, those of groups without signal among them",
    "skipped_step": "1 where a batch had too little signal to be trained on",
    "stale_rollouts": "Rollouts that became too old for any step since the one before",
    "learning_rate": "Learning rate of the step",
    "updates": "Optimiser steps taken",
    "skipped_updates": "Optimiser steps left out because loss or gradient was not finite",
    "train_seconds": "Seconds that the step took to train and write",
    "wait_seconds": "Seconds that the trainer waited for the step's batch",
}
"""Names and meanings; a line may hold others too."""
MAX_FILE_BYTES: Final = 16 << 20
KEPT_FILES: Final = 4
"""The one that grows, and older ones: `NAME.1` is the youngest of them."""
MAX_ROW_BYTES: Final = 1 << 20


class MetricsLog:
    """One growing file of rows that have a `step`, which rises. Raises DataDirError where it cannot be written."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES, keep: int = KEPT_FILES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._keep = keep
        try:
            self._repair()
        except OSError as error:
            raise _unwritable(path, error) from error
        rows = self.rows()
        self.last_step: int = rows[-1]["step"] if rows else -1
        """Of the newest row, −1 where there is none."""

    def append(self, row: Mapping[str, Any]) -> bool:
        """Add a row durably; False for a step that is there already. Raises DataDirError and adds nothing.

        Numbers that JSON has no word for (NaN, infinities) become null.
        """
        if row["step"] <= self.last_step:
            return False
        line = msgspec.json.encode(dict(row)) + b"\n"
        try:
            self._write(line)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.last_step = row["step"]
        return True

    def rows(self) -> list[dict[str, Any]]:
        """All rows that are kept, oldest first."""
        return [row for path in reversed(self._files()) if path.exists() for row in _rows(path.read_bytes())]

    def _files(self) -> list[Path]:
        """The growing file, then older and older ones."""
        return [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self._keep))]

    def _repair(self) -> None:
        """Cut off what a crash left after the last whole row, and see that the file can be written."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            data = self.path.read_bytes()
            whole = _whole_bytes(data)
            if whole < len(data):
                log.warning("metrics cut=%s bytes=%d", self.path, len(data) - whole)
                os.ftruncate(descriptor, whole)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(self.path.parent)

    def _write(self, line: bytes) -> None:
        if self.path.exists() and self.path.stat().st_size + len(line) > self._max_bytes:
            self._rotate()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, line)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, before)  # a full disk takes half a line
                raise
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        # From the oldest on: a crash in between leaves a gap in the numbers, never two files under one name.
        files = self._files()
        for younger, older in reversed(list(itertools.pairwise(files))):
            if younger.exists():
                younger.replace(older)
        if len(files) == 1:
            self.path.unlink(missing_ok=True)
        sync_directory(self.path.parent)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _rows(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        row = _row(line)
        if row is not None:
            yield row


def _row(line: bytes) -> dict[str, Any] | None:
    if len(line) > MAX_ROW_BYTES:
        return None
    try:
        row = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _whole_bytes(data: bytes) -> int:
    """Up to where a file ends with a whole row."""
    end = data.rfind(b"\n") + 1
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        if _row(data[start : end - 1]) is not None:
            return end
        end = start
    return 0


def _unwritable(path: Path, error: OSError) -> DataDirError:
    return DataDirError(
        f"the metrics file {path} cannot be written: {error.strerror or error}",
        hint=f"check free space and permissions (df -h {path.parent}; ls -l {path})",
    )

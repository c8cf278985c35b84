"""How a trainer's checkpoints lie on the disk, and how they are read and checked; trainer.checkpoint writes them.

    STATE_DIR/step-00000012/policy/      config.json, tokenizer.json, model.safetensors …: what is published
    STATE_DIR/step-00000012/optimiser.safetensors
    STATE_DIR/step-00000012/random.safetensors       states of torch's generators
    STATE_DIR/step-00000012/state.json   step, report, SHA-256 of every file

Never imports torch.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

logger = logging.getLogger(__name__)

POLICY: Final = "policy"
STATE_FILE: Final = "state.json"
_STEP_NAME: Final = re.compile(r"step-(\d{8,})")


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


def step_path(state_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return state_dir / f"step-{step:08d}"


def saved_steps(state_dir: Path) -> list[int]:
    """Steps that have a checkpoint, sound or not, rising; none where there is no directory."""
    return sorted(_steps(state_dir)) if state_dir.is_dir() else []


def find_saved(state_dir: Path, step: int | None = None) -> Saved | None:
    """The sound checkpoint of a step, or the newest sound one; damaged ones are passed over with a warning."""
    if step is not None:
        return check_saved(step_path(state_dir, step), step) if step_path(state_dir, step).is_dir() else None
    found = (check_saved(step_path(state_dir, each), each) for each in reversed(saved_steps(state_dir)))
    return next((saved for saved in found if saved), None)


def steps_to_drop(steps: Sequence[int], *, keep: int, keep_every: int) -> list[int]:
    """Which of some rising steps are neither among the newest `keep` nor a multiple of `keep_every` (0: none is)."""
    return [step for step in steps[:-keep] if not keep_every or step % keep_every]


def check_saved(path: Path, step: int) -> Saved | None:
    """A checkpoint if all its files have the hashes they were written with."""
    try:
        state = _read_state(path)
        damaged = [name for name, digest in state.files.items() if file_sha256(path / name) != digest]
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("checkpoint passed-over=%s error=%s", path, error)
        return None
    if damaged or state.step != step:
        logger.warning("checkpoint passed-over=%s damaged=%s", path, ",".join(damaged))
        return None
    return Saved(step, path, state.report)


def checked_elsewhere(state_dir: Path, step: int) -> Saved | None:
    """The checkpoint of a step whose files another process has just checked; None where it is not here."""
    path = step_path(state_dir, step)
    try:
        return Saved(step, path, _read_state(path).report)
    except (OSError, msgspec.MsgspecError):
        return None


def _read_state(path: Path) -> _State:
    return msgspec.json.decode((path / STATE_FILE).read_bytes(), type=_State)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _steps(state_dir: Path) -> Iterator[int]:
    for path in state_dir.iterdir():
        match = _STEP_NAME.fullmatch(path.name)
        if match:
            yield int(match[1])

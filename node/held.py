"""What a data directory holds of a run, without a network: the manifest, and policies on disk.

Reads only and takes no lock, so a node may run in the directory meanwhile. For commands that work offline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.run_show import load_run
from node.swarm import remembered_manifest
from p2p.shardcast.entries import MANIFEST as MANIFEST_FILE
from protocol.envelope import Signed, open_envelope
from protocol.errors import ConfigError, DataDirError, ProtocolError
from protocol.records import CheckpointManifest, Manifest
from protocol.run import RunAddress

SWARM_CACHE: Final = "swarm.cache"
CHECKPOINTS: Final = "checkpoints"


@dataclass(frozen=True)
class HeldPolicy:
    """A complete checkpoint; `id` is empty for the policy that an operator's run starts from."""

    step: int
    id: bytes
    path: Path


def held_run(data_dir: Path, run: str | None = None) -> Signed[Manifest]:
    """The run whose node used this directory. Raises DataDirError, or ConfigError when it is not `run`."""
    manifest = remembered_manifest(data_dir / SWARM_CACHE) or _own_run(data_dir)
    if manifest is None:
        raise DataDirError(
            f"{data_dir} knows no run yet",
            hint="start a node in it once so that it learns the run, or give --recipe (and --model) instead",
        )
    address = RunAddress(manifest.author, manifest.record.name)
    if run is not None and str(RunAddress.parse(run)) != str(address):
        raise ConfigError(f"{data_dir} belongs to the run {address}, not to {run}", hint="give its --data-dir")
    return manifest


def _own_run(data_dir: Path) -> Signed[Manifest] | None:
    return load_run(data_dir) if (data_dir / "run" / "manifest").exists() else None


def newest_policy(data_dir: Path, run_id: bytes) -> HeldPolicy:
    """The newest complete policy of a run on this disk. Raises DataDirError."""
    found = max(_policies(data_dir, run_id), key=lambda policy: policy.step, default=None)
    if found is not None:
        return found
    first = data_dir / "run" / "policy-0"
    if first.is_dir():
        return HeldPolicy(0, b"", first)
    raise DataDirError(
        f"{data_dir} holds no policy of the run",
        hint="let a node download one first (start it, wait for `checkpoint … held`), or give --model DIR",
    )


def held_policy(data_dir: Path, run_id: bytes, checkpoint: bytes) -> HeldPolicy | None:
    """One policy by its checkpoint's id; None when it is not here (any more)."""
    return next((policy for policy in _policies(data_dir, run_id) if policy.id == checkpoint), None)


def _policies(data_dir: Path, run_id: bytes) -> Iterator[HeldPolicy]:
    for path in sorted((data_dir / CHECKPOINTS).glob("step-*")):
        try:
            manifest = open_envelope((path / MANIFEST_FILE).read_bytes(), CheckpointManifest)
        except (OSError, ProtocolError):
            continue  # being removed just now, or damaged: its owner clears it away
        if manifest.record.run_id == run_id:
            yield HeldPolicy(manifest.record.step, manifest.id, path)

"""The run that a data directory holds, for people and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from protocol.envelope import Signed, open_envelope
from protocol.errors import DataDirError
from protocol.identity import PeerId
from protocol.records import Manifest
from protocol.run import RunAddress


def load_run(data_dir: Path) -> Signed[Manifest]:
    """The manifest that `run create` left. Raises DataDirError, or ProtocolError when it is damaged."""
    path = data_dir / "run" / "manifest"
    try:
        with path.open("rb") as file:
            data = file.read(2 * Manifest.MAX_BYTES)
    except FileNotFoundError as error:
        raise DataDirError(
            f"{data_dir} holds no run",
            hint=f"create one: intellect-node run create --recipe demo --data-dir {data_dir} --validator <peer id>",
        ) from error
    except OSError as error:
        raise DataDirError(f"{path} cannot be read: {error.strerror}", hint=f"ls -l {path}") from error
    return open_envelope(data, Manifest)


def known_run(data_dir: Path) -> Signed[Manifest]:
    """The run that was created in a directory, or that a node in it has joined. Raises as `load_run` does."""
    if not (data_dir / "run" / "manifest").exists() and (data_dir / "swarm.cache").exists():
        from node.swarm import remembered_manifest

        if (manifest := remembered_manifest(data_dir / "swarm.cache")) is not None:
            return manifest
    return load_run(data_dir)


def describe_run(manifest: Signed[Manifest]) -> dict[str, Any]:
    """Its address, id and every field of the manifest as plain values: keys as peer ids, digests in hex."""
    record = manifest.record
    fields: dict[str, Any] = _plain(msgspec.to_builtins(record, builtin_types=(bytes,)))
    return {
        "run": str(RunAddress(manifest.author, record.name)),
        "run_id": manifest.id.hex(),
        **fields,
        "trainer": str(PeerId(record.trainer)),
        "validators": [str(PeerId(key)) for key in record.validators],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value

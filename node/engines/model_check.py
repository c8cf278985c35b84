"""Whether a model directory is the model of a run, before any work is done with it.

A contributor that computed with another architecture or tokenizer would be rejected, and perhaps evicted, for nothing
that it meant to do. Weights are not looked at here: the checkpoint's signed hashes cover them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from node.engines.model_config import MAX_CONFIG_BYTES
from protocol.errors import ModelError
from protocol.records import ModelSpec

_FETCH_AGAIN = "remove the checkpoint from the data directory and let the node fetch it again"


def check_model(model_dir: Path, spec: ModelSpec, *, tokenizer_sha256: bytes) -> None:
    """Raise ModelError where config.json or tokenizer.json is not the one that the run's manifest names."""
    if tokenizer_sha256 != spec.tokenizer:
        raise ModelError(
            "the checkpoint's tokenizer.json is not the one that the run's manifest names", hint=_FETCH_AGAIN
        )
    path = model_dir / "config.json"
    try:
        with path.open("rb") as file:
            found = hashlib.sha256(file.read(MAX_CONFIG_BYTES)).digest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=_FETCH_AGAIN) from error
    if found != spec.architecture:
        raise ModelError(
            "the checkpoint's config.json is not the one that the run's manifest names: another architecture",
            hint=_FETCH_AGAIN,
        )

"""Whether a policy is the model of a run, before any work is done with it.

A contributor that computed with another architecture or tokenizer would be rejected, and perhaps evicted, for nothing
that it meant to do. Weights are not looked at here: the checkpoint's signed hashes cover them.
"""

from __future__ import annotations

from node.engines.tokenizer import Tokenizer
from protocol.errors import ModelError
from protocol.records import ModelSpec

_FETCH_AGAIN = "remove the checkpoint from the data directory and let the node fetch it again"


def check_model(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Raise ModelError where config.json or tokenizer.json is not the one that the run's manifest names.

    Both are known from when the policy was loaded: its directory may be gone by now.
    """
    if tokenizer.sha256 != spec.tokenizer:
        raise ModelError(
            "the checkpoint's tokenizer.json is not the one that the run's manifest names", hint=_FETCH_AGAIN
        )
    if not tokenizer.architecture:
        raise ModelError(f"{tokenizer.directory} had no config.json when it was loaded", hint=_FETCH_AGAIN)
    if tokenizer.architecture != spec.architecture:
        raise ModelError(
            "the checkpoint's config.json is not the one that the run's manifest names: another architecture",
            hint=_FETCH_AGAIN,
        )

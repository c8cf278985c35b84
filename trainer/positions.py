"""How many tokens a causal model takes, whatever its architecture calls that. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from protocol.errors import ModelError

FIELDS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""Of config.json: of most models, GPT-2, MPT, OPT's like, BLOOM and Falcon of old, GPT of old."""


def most_positions(config: Mapping[str, Any], *, origin: str) -> int:
    """Tokens of a prompt and its answer together, at most. Raises ModelError that begins with `origin`."""
    for field in FIELDS:
        value = config.get(field)
        if type(value) is int and value >= 1:
            return value
    raise ModelError(
        f"{origin} does not say how many tokens the model takes: it has none of {', '.join(FIELDS)}",
        hint='recurrent models and ALiBi have no such bound: add "max_position_embeddings": TOKENS to config.json',
    )

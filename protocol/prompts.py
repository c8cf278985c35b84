"""The digest by which a submission says which prompts it answered, as token ids.

A tokenizer, a chat template or an environment of another version shows in it before any rollout is looked at, and a
contributor cannot claim later to have answered others. Leaves out where prompts come from (environments).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from protocol.constants import SIGNATURE_DOMAIN
from protocol.errors import MalformedError

_DOMAIN: Final = f"{SIGNATURE_DOMAIN} prompts".encode()


def prompts_digest(prompts: Iterable[Sequence[int]]) -> bytes:
    """SHA-256 over the domain, then each prompt in order: its length and its ids, 4 bytes big-endian each.

    Raises MalformedError for an id outside 0 … 2^32 - 1.
    """
    digest = hashlib.sha256(_DOMAIN)
    for prompt in prompts:
        try:
            digest.update(struct.pack(f">{len(prompt) + 1}I", len(prompt), *prompt))
        except struct.error as error:
            raise MalformedError("a prompt's token id does not fit 32 bits") from error
    return digest.digest()

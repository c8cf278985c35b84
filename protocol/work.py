"""Proof of work: what makes a contributor's key cost something, so that an evicted one is not simply replaced.

A nonce is found by trying: scrypt over key, run and nonce (RFC 7914; 16 MiB and some tens of milliseconds of one core a
try, which special hardware shortens least) must begin with `bits` zero bits. Checking is one try. Bound to key and run,
so it can be neither sold to another key nor used again elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from protocol.constants import WORK_SCRYPT_BLOCK, WORK_SCRYPT_COST
from protocol.identity import PeerId

NONCE_BYTES: Final = 8
_SALT: Final = b"intellect-node/1 admission"


def work_hash(author: PeerId, run_id: bytes, nonce: bytes) -> bytes:
    """32 bytes; tens of milliseconds without the interpreter's lock."""
    return hashlib.scrypt(
        author.public_key + run_id + nonce,
        salt=_SALT,
        n=WORK_SCRYPT_COST,
        r=WORK_SCRYPT_BLOCK,
        p=1,
        maxmem=256 * WORK_SCRYPT_COST * WORK_SCRYPT_BLOCK,
        dklen=32,
    )


def work_holds(author: PeerId, run_id: bytes, nonce: bytes, *, bits: int) -> bool:
    """Whether a nonce proves so many bits of work. With 0 bits any does, at no cost."""
    return bits == 0 or zero_bits(work_hash(author, run_id, nonce)) >= bits


def find_work(
    author: PeerId, run_id: bytes, *, bits: int, first: int = 0, each: Callable[[int], object] = lambda tries: None
) -> bytes:
    """A nonce that proves so many bits: 2^bits tries on average, one after another, `first` of them done before.

    `each` is told the number of tries after every one, and may raise to stop.
    """
    tries = first
    while True:
        nonce = tries.to_bytes(NONCE_BYTES, "big")
        if work_holds(author, run_id, nonce, bits=bits):
            return nonce
        tries += 1
        each(tries)


def expected_tries(bits: int) -> int:
    """Tries that one proof takes on average; how many it took says nothing of how many are left."""
    return 1 << bits


def zero_bits(digest: bytes) -> int:
    """Leading zero bits."""
    return 8 * len(digest) - int.from_bytes(digest, "big").bit_length()

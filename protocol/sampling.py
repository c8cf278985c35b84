"""Seed-synchronised sampling: the noise that picks a token is a function of the rollout's seed; anyone can replay it.

Complements TOPLOC (protocol.toploc): it shows wrong temperatures, foreign seeds (cherry-picking), truncated sampling
and tokens of a cheaper model. This text is the specification; the tests hold golden vectors. All integers are
unsigned 32-bit and wrap.

**Keys.** Token t of a rollout has two keys: bytes 8t … 8t+7 of SHAKE-256(domain ‖ rollout seed) as two little-endian
integers k0, k1, with domain = `"intellect-node/<protocol version> sampling"`.

**Noise** of vocabulary id v under (k0, k1):

    mix(x):  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    u = mix(mix(v ^ k0) ^ k1)
    g = −ln(−ln((u + ½) / 2³²))                     in float64, then rounded to float32

so g is Gumbel distributed, between −3.14 and 22.88. Mathematical libraries differ in the last bit of a logarithm, and
engines in the last bits of a logit: hence a check measures margins and never demands equality.

**Choice.** At temperature T the next token is argmax over v of logits[v] + T·g[v], product and sum rounded to float32,
the lowest id on ties: a draw from softmax(logits / T). The log-probability recorded for it is its
log_softmax(logits / T).

**Margin** of an emitted token: by how much its noisy logit stays below the best one. 0 for the token of the rule.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.constants import SIGNATURE_DOMAIN
from protocol.errors import MalformedError

_DOMAIN: Final = f"{SIGNATURE_DOMAIN} sampling".encode()
_MULTIPLIERS: Final = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
_SHIFTS: Final = (np.uint32(16), np.uint32(15), np.uint32(16))
_TILE: Final = 16384  # values at a time, of one row or of several, so that the scratch arrays stay in a core's cache


def position_keys(rollout_seed: bytes, count: int) -> NDArray[np.uint32]:
    """Keys of a rollout's first `count` tokens, uint32[count, 2]; a longer request begins with the same rows."""
    stream = hashlib.shake_256(_DOMAIN + rollout_seed).digest(8 * count)
    return np.frombuffer(stream, "<u4").astype(np.uint32).reshape(count, 2)


def gumbel(keys: NDArray[np.uint32], vocab_size: int) -> NDArray[np.float32]:
    """Noise of every vocabulary id under one token's keys (uint32[2]); float32[vocab_size]."""
    row: NDArray[np.float32] = gumbel_rows(keys[None, :], vocab_size)[0]
    return row


def gumbel_rows(keys: NDArray[np.uint32], vocab_size: int) -> NDArray[np.float32]:
    """Noise for several tokens at once; keys uint32[B, 2], result float32[B, vocab_size]."""
    noise = np.empty((len(keys), vocab_size), np.float32)
    ids = _token_ids(vocab_size)
    rows = _rows_per_tile(vocab_size)
    tile = np.empty(min(rows, len(keys)) * min(vocab_size, _TILE), np.uint32)
    scratch, wide = np.empty_like(tile), np.empty(tile.size, np.float64)
    for row in range(0, len(keys), rows):
        for start in range(0, vocab_size, _TILE):
            out = noise[row : row + rows, start : start + _TILE]
            hashed = tile[: out.size].reshape(out.shape)
            _hash_ids(ids[start : start + _TILE], keys[row : row + rows], out=hashed, scratch=scratch[: out.size])
            _to_gumbel(hashed, wide[: out.size].reshape(out.shape), out=out)
    return noise


def margins(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], *, keys: NDArray[np.uint32], temperature: float
) -> NDArray[np.float32]:
    """By how much each emitted token lost against the best one, in logits; float32[N], 0 where it is the best.

    logits float32[N, V] are the checker's own, token_ids int[N] the emitted tokens, keys uint32[N, 2]. A margin that is
    not a number (logits that are none) comes back as infinity, so that no threshold lets it through. Raises
    MalformedError if a token is outside the vocabulary or the counts differ.
    """
    count, vocab_size = logits.shape
    if len(token_ids) != count or len(keys) != count:
        raise MalformedError(f"{len(token_ids)} tokens and {len(keys)} keys for {count} rows of logits")
    if count and not 0 <= int(np.min(token_ids)) <= int(np.max(token_ids)) < vocab_size:
        raise MalformedError(f"a token id lies outside the vocabulary of {vocab_size}")
    best, emitted = np.empty(count, np.float32), np.empty(count, np.float32)
    rows = _rows_per_tile(vocab_size)
    for start in range(0, count, rows):  # a rollout's whole table of noise would not fit the cache
        part = slice(start, start + rows)
        noisy = gumbel_rows(keys[part], vocab_size)
        noisy *= np.float32(temperature)
        noisy += logits[part]
        best[part], emitted[part] = noisy.max(axis=1), noisy[np.arange(len(noisy)), token_ids[part]]
    with np.errstate(invalid="ignore"):
        lost = best - emitted
    lost[np.isnan(lost)] = np.inf
    return lost


@lru_cache(maxsize=4)
def _token_ids(vocab_size: int) -> NDArray[np.uint32]:
    ids = np.arange(vocab_size, dtype=np.uint32)
    ids.flags.writeable = False
    return ids


def _rows_per_tile(vocab_size: int) -> int:
    return max(1, _TILE // max(1, vocab_size))


def _hash_ids(
    ids: NDArray[np.uint32], keys: NDArray[np.uint32], *, out: NDArray[np.uint32], scratch: NDArray[np.uint32]
) -> None:
    """Hashes of ids[n] under each of keys[B, 2], into out[B, n], which is contiguous."""
    flat = out.reshape(-1)
    np.bitwise_xor(ids, keys[:, :1], out=out)
    _mix(flat, scratch)
    np.bitwise_xor(out, keys[:, 1:], out=out)
    _mix(flat, scratch)


def _mix(x: NDArray[np.uint32], scratch: NDArray[np.uint32]) -> None:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        np.right_shift(x, shift, out=scratch)
        np.bitwise_xor(x, scratch, out=x)
        np.multiply(x, multiplier, out=x)
    np.right_shift(x, _SHIFTS[-1], out=scratch)
    np.bitwise_xor(x, scratch, out=x)


def _to_gumbel(hashed: NDArray[np.uint32], wide: NDArray[np.float64], *, out: NDArray[np.float32]) -> None:
    np.add(hashed, 0.5, out=wide)
    np.multiply(wide, 2.0**-32, out=wide)
    for _ in range(2):
        np.log(wide, out=wide)
        np.negative(wide, out=wide)
    out[:] = wide

"""TOPLOC: compact proofs that tokens came from the hidden states of one model (arXiv 2501.16007; INTELLECT-2's check).

A proof covers 32 decoded tokens: the largest activations of their final hidden states, as a polynomial over GF(65497).
The bytes are those of the public `toploc` package for the same index set. Leaves out thresholds (the manifest's) and
where hidden states come from (the engines). Pure numpy: no torch, no thread, no state.

**Build.** The bf16 bit patterns of rows P−1 … P+N−2 (the states that produced tokens 1 … N), 32 rows a chunk, the last
may be shorter. Of a chunk, flattened to index = row · H + dimension, the k = min(top_k, values) largest magnitudes, the
lowest index first among equals. modulus = the largest m ≤ 65497 for which all index mod m differ. The polynomial of
degree below k through the points (index mod m, pattern mod 65497). **Bytes**: m and the k coefficients, lowest degree
first, as big-endian 16-bit integers.

**Verify.** The checker takes the k largest of its own states and evaluates the polynomial at index mod m. An exponent
mismatch is a value whose sign or exponent differs; over the others, mantissas (7 bits) are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.constants import PROOF_CHUNK_TOKENS, PROOF_FIELD
from protocol.errors import ConfigError, MalformedError, ModelError

Patterns = NDArray[np.uint16]
Words = NDArray[np.uint32]

MIN_MODULUS: Final = 32769
"""Smallest modulus in the public format's rule; a proof with a smaller one is refused."""

NO_MATCH: Final = 2.0**64
"""Mantissa errors of a chunk in which no exponent matches, as the public format has it."""

_P: Final = np.uint32(PROOF_FIELD)
_BATCH_CHUNKS: Final = 64  # bounds the working memory whatever the length of a rollout
_QUIET_NAN: Final = np.uint16(0x7FC0)


@dataclass(frozen=True)
class ChunkResult:
    """How far a checker's states lie from one proof. `mantissa_median` is the upper median."""

    exponent_mismatches: int
    mantissa_mean: float
    mantissa_median: float


def bf16_patterns(values: NDArray[np.float32]) -> Patterns:
    """float32 values as bf16 bit patterns, rounded to nearest even; any NaN becomes 0x7FC0."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    patterns = (rounded >> np.uint32(16)).astype(np.uint16)
    patterns[np.isnan(values)] = _QUIET_NAN
    return patterns


def proof_count(tokens: int) -> int:
    """Proofs of a rollout of `tokens` output tokens."""
    return -(-tokens // PROOF_CHUNK_TOKENS)


def proof_bytes(points: int) -> int:
    """Length of a proof of `points` points."""
    return 2 + 2 * points


def build_proofs(patterns: Patterns, top_k: int) -> list[bytes]:
    """Proofs of one rollout from uint16[N, H], the patterns of the states that produced its N tokens.

    Raises ModelError for another shape or type, ConfigError when no modulus separates the points (a `top_k` in the
    thousands on a wide model).
    """
    proofs: list[bytes] = []
    for chunks in _chunk_batches(patterns):
        indices = _largest(chunks, top_k)
        proofs += _encode(indices, np.take_along_axis(chunks, indices, axis=1))
    return proofs


def encode_points(indices: Sequence[int], values: Sequence[int]) -> bytes:
    """The proof of one set of points: flat indices and bit patterns, both below 2^32 and 2^16."""
    return _encode(np.array([indices], np.int64), np.array([values], np.uint16))[0]


def verify_proofs(patterns: Patterns, proofs: Sequence[bytes], top_k: int) -> list[ChunkResult]:
    """Compare a checker's own states, uint16[N, H], with a rollout's proofs, a result per chunk.

    Raises MalformedError for proofs of another shape (`check_proof_shape`); any bytes are safe. O(top_k²) a chunk.
    """
    tokens, hidden_size = _shape(patterns)
    check_proof_shape(proofs, tokens=tokens, hidden_size=hidden_size, top_k=top_k)
    results: list[ChunkResult] = []
    for chunks in _chunk_batches(patterns):
        claims = _decode(proofs[len(results) : len(results) + len(chunks)])
        indices = _largest(chunks, top_k)
        own = np.take_along_axis(chunks, indices, axis=1)
        residues = _residues(indices, claims[0])
        claimed = _evaluate(claims[1:], residues)
        results += [_compare(a, b) for a, b in zip(own, claimed, strict=True)]
    return results


def check_proof_shape(proofs: Sequence[bytes], *, tokens: int, hidden_size: int, top_k: int) -> None:
    """Raise MalformedError unless there is a proof per chunk and each has the length and numbers that one can have."""
    if len(proofs) != proof_count(tokens):
        raise MalformedError(f"{len(proofs)} proofs for {tokens} tokens; {proof_count(tokens)} are due")
    for number, proof in enumerate(proofs):
        rows = min(PROOF_CHUNK_TOKENS, tokens - number * PROOF_CHUNK_TOKENS)
        _check_proof(proof, number, values=rows * hidden_size, top_k=top_k)


def _check_proof(proof: bytes, number: int, *, values: int, top_k: int) -> None:
    due = proof_bytes(_points(values, top_k))
    if len(proof) != due:
        raise MalformedError(f"proof {number} has {len(proof)} bytes; {due} are due")
    words = np.frombuffer(proof, ">u2")
    modulus = int(words[0])
    # Every set of indices below 65497 is already distinct modulo 65497, so only wider chunks have a choice.
    lowest = PROOF_FIELD if values <= PROOF_FIELD else MIN_MODULUS
    if not lowest <= modulus <= PROOF_FIELD:
        raise MalformedError(f"proof {number} has modulus {modulus}; {lowest} to {PROOF_FIELD} are possible")
    if int(words[1:].max()) >= PROOF_FIELD:
        raise MalformedError(f"proof {number} has a coefficient outside GF({PROOF_FIELD})")


def _points(values: int, top_k: int) -> int:
    if top_k < 1 or values < 1:
        raise ConfigError(f"a proof of the {top_k} largest of {values} values is none; both must be at least 1")
    return min(top_k, values)


def _shape(patterns: Patterns) -> tuple[int, int]:
    if patterns.ndim != 2 or patterns.dtype != np.uint16 or patterns.shape[1] == 0:
        raise ModelError(f"hidden states must be uint16[tokens, width], not {patterns.dtype}{list(patterns.shape)}")
    return patterns.shape[0], patterns.shape[1]


def _chunk_batches(patterns: Patterns) -> Iterator[Patterns]:
    """uint16[chunks, values], full chunks first, then the short last one."""
    tokens, _ = _shape(patterns)
    full = tokens - tokens % PROOF_CHUNK_TOKENS
    for start in range(0, full, _BATCH_CHUNKS * PROOF_CHUNK_TOKENS):
        rows = patterns[start : min(full, start + _BATCH_CHUNKS * PROOF_CHUNK_TOKENS)]
        yield rows.reshape(len(rows) // PROOF_CHUNK_TOKENS, -1)
    if full < tokens:
        yield patterns[full:].reshape(1, -1)


def _largest(chunks: Patterns, top_k: int) -> NDArray[np.int64]:
    """Flat indices, rising, of each chunk's k largest magnitudes; int64[chunks, k]."""
    magnitudes = chunks & np.uint16(0x7FFF)  # magnitudes of bf16 are ordered as their bit patterns
    points = _points(chunks.shape[1], top_k)
    return np.stack([_largest_of(row, points) for row in magnitudes])


def _largest_of(magnitudes: Patterns, k: int) -> NDArray[np.int64]:
    threshold = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    candidates = np.flatnonzero(magnitudes >= threshold)
    above = magnitudes[candidates] > threshold
    ties = np.flatnonzero(~above)[: k - int(above.sum())]
    above[ties] = True
    chosen: NDArray[np.int64] = candidates[above]
    return chosen


def _encode(indices: NDArray[np.int64], values: Patterns) -> list[bytes]:
    moduli = np.array([_modulus(row) for row in indices], np.uint32)
    coefficients = _interpolate(_residues(indices, moduli), values.T.astype(np.uint32) % _P)
    words = np.concatenate([moduli[None, :], coefficients]).T.astype(">u2")
    return [row.tobytes() for row in words]


def _decode(proofs: Sequence[bytes]) -> Words:
    """uint32[1 + k, chunks]: moduli, then coefficients."""
    return np.frombuffer(b"".join(proofs), ">u2").reshape(len(proofs), -1).T.astype(np.uint32)


def _modulus(indices: NDArray[np.int64]) -> int:
    for modulus in range(PROOF_FIELD, MIN_MODULUS - 1, -1):
        if int(indices.max()) < modulus or len(np.unique(indices % modulus)) == len(indices):
            return modulus
    raise ConfigError(
        f"no modulus separates the {len(indices)} largest activations of a chunk",
        hint="create the run with a smaller toploc.top_k (128 is usual)",
    )


def _residues(indices: NDArray[np.int64], moduli: Words) -> Words:
    """uint32[k, chunks]: where each chunk's polynomial has its points. Chunks lie along the last axis from here on."""
    return (indices.T % moduli.astype(np.int64)).astype(np.uint32)


@cache
def _inverses() -> Words:
    """Inverse in GF(65497) of every number below 2 · 65497, so that a difference needs no reduction; 0 at multiples."""
    power = _reduce(np.arange(2 * PROOF_FIELD, dtype=np.uint32))
    inverse = np.ones_like(power)
    exponent = PROOF_FIELD - 2  # Fermat: a^(p − 2) is the inverse of a
    while exponent:
        if exponent & 1:
            _reduce(np.multiply(inverse, power, out=inverse))
        _reduce(np.multiply(power, power, out=power))
        exponent >>= 1
    return inverse


def _reduce(words: Words) -> Words:
    """Modulo the field's prime, in place; numpy's floor division by a scalar is vectorised, its remainder is not."""
    quotients = words // _P
    quotients *= _P
    words -= quotients
    return words


def _interpolate(x: Words, y: Words) -> Words:
    """Coefficients of the polynomials of degree below k through (x, y); all uint32[k, chunks].

    Newton's divided differences, then Horner's scheme over the nodes. A product of two field elements plus one more
    stays below 2^32, so 32 bits are enough throughout.
    """
    inverses, k = _inverses(), len(x)
    c = y.copy()
    for order in range(1, k):
        rise = c[order:] + _P
        rise -= c[order - 1 : -1]
        np.minimum(rise, rise - _P, out=rise)  # below 2P; the difference wraps round when it is already below P
        rise *= inverses[x[order:] + _P - x[:-order]]
        c[order:] = _reduce(rise)
    negated = _reduce(_P - x)
    for node in range(k - 2, -1, -1):
        term = c[node + 1 :] * negated[node]
        term += c[node:-1]
        c[node:-1] = _reduce(term)
    return c


def _evaluate(coefficients: Words, x: Words) -> Patterns:
    """Values at x (uint32[k, chunks]) as the checker compares them; uint16[chunks, k]."""
    values = np.zeros_like(x)
    for row in coefficients[::-1]:
        values *= x
        values += row
        _reduce(values)
    return values.T.astype(np.uint16)


def _compare(own: Patterns, claimed: Patterns) -> ChunkResult:
    own = own % np.uint16(PROOF_FIELD)  # what a proof can carry: NaNs with the largest patterns wrap in both
    matches = (own ^ claimed) & np.uint16(0xFF80) == 0
    errors = np.sort(np.abs((own[matches] & 0x7F).astype(np.int32) - (claimed[matches] & 0x7F)))
    mismatches = len(own) - len(errors)
    if not len(errors):
        return ChunkResult(mismatches, NO_MATCH, NO_MATCH)
    return ChunkResult(mismatches, float(errors.mean()), float(errors[len(errors) // 2]))

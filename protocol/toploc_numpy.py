"""TOPLOC's arithmetic in numpy: for a machine without a C compiler, and what the compiled kernel is tested against.

`build`, `verify` and `encode` have the signatures and results of `protocol._toploc`, byte for byte. `protocol.toploc`
specifies what they compute, and says in words what is wrong with an input; nothing is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.constants import PROOF_FIELD

Patterns = NDArray[np.uint16]
Words = NDArray[np.uint32]

MIN_MODULUS: Final = 32769
"""Smallest modulus in the public format's rule; a proof with a smaller one is refused."""

NO_MATCH: Final = 2.0**64
"""Mantissa errors of a chunk in which no exponent matches, as the public format has it."""

_P: Final = np.uint32(PROOF_FIELD)
_BATCH_CHUNKS: Final = 64  # bounds the working memory whatever the number of chunks
_GROUP: Final = 64  # values with a common maximum


def build(patterns: Patterns, top_k: int, /) -> bytes:
    """Proofs, one after another, of uint16[chunks, values]. OverflowError: no modulus separates its points."""
    return b"".join(_encode(*_largest(part, top_k)) for part in _parts(patterns))


def verify(patterns: Patterns, proofs: bytes, top_k: int, /) -> list[tuple[int, float, float]]:
    """Exponent mismatches, mean and upper median of the mantissa errors of each chunk of uint16[chunks, values]."""
    claims = np.frombuffer(proofs, ">u2").reshape(len(patterns), -1).astype(np.uint32)
    results: list[tuple[int, float, float]] = []
    for part in _parts(patterns):
        claim = claims[len(results) : len(results) + len(part)].T
        indices, own = _largest(part, top_k)
        claimed = _evaluate(claim[1:], _residues(indices, claim[0]))
        results += [_compare(a, b) for a, b in zip(own, claimed, strict=True)]
    return results


def encode(indices: NDArray[np.uint32], values: Patterns, /) -> bytes:
    """The proof of one set of points: uint32[1, k] and uint16[1, k]. Raises OverflowError as `build` does."""
    return _encode(indices.astype(np.int64), values)


def _parts(patterns: Patterns) -> Iterator[Patterns]:
    for start in range(0, len(patterns), _BATCH_CHUNKS):
        yield patterns[start : start + _BATCH_CHUNKS]


def _largest(chunks: Patterns, k: int) -> tuple[NDArray[np.int64], Patterns]:
    """Flat indices, rising, and patterns of each chunk's k largest magnitudes; both [chunks, k]."""
    magnitudes = chunks & np.uint16(0x7FFF)  # magnitudes of bf16 are ordered as their bit patterns
    indices = np.stack([_largest_of(row, k) for row in magnitudes])
    return indices, np.take_along_axis(chunks, indices, axis=1)


def _largest_of(magnitudes: Patterns, k: int) -> NDArray[np.int64]:
    candidates = np.flatnonzero(magnitudes >= _lower_bound(magnitudes, k))
    values = magnitudes[candidates]
    threshold = _kth_largest(values, k)
    keep = values > threshold
    keep[np.flatnonzero(values == threshold)[: k - int(keep.sum())]] = True
    chosen: NDArray[np.int64] = candidates[keep]
    return chosen


def _lower_bound(magnitudes: Patterns, k: int) -> int:
    """At most the k-th largest: the k-th largest of the maxima of groups, or 0 where there are few groups."""
    groups = len(magnitudes) // _GROUP
    if groups < 2 * k:
        return 0
    return _kth_largest(magnitudes[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0), k)


def _kth_largest(values: Patterns, k: int) -> int:
    return int(np.partition(values, len(values) - k)[len(values) - k])


def _encode(indices: NDArray[np.int64], values: Patterns) -> bytes:
    moduli = np.array([_modulus(row) for row in indices], np.uint32)
    coefficients = _interpolate(_residues(indices, moduli), values.T.astype(np.uint32) % _P)
    proofs: bytes = np.concatenate([moduli[None, :], coefficients]).T.astype(">u2").tobytes()
    return proofs


def _modulus(indices: NDArray[np.int64]) -> int:
    for modulus in range(PROOF_FIELD, MIN_MODULUS - 1, -1):
        if int(indices.max()) < modulus or len(np.unique(indices % modulus)) == len(indices):
            return modulus
    raise OverflowError("no modulus separates the points of a chunk")


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


def _compare(own: Patterns, claimed: Patterns) -> tuple[int, float, float]:
    own = own % np.uint16(PROOF_FIELD)  # what a proof can carry: NaNs with the largest patterns wrap in both
    matches = (own ^ claimed) & np.uint16(0xFF80) == 0
    errors = np.sort(np.abs((own[matches] & 0x7F).astype(np.int32) - (claimed[matches] & 0x7F)))
    mismatches = len(own) - len(errors)
    if not len(errors):
        return mismatches, NO_MATCH, NO_MATCH
    return mismatches, float(errors.mean()), float(errors[len(errors) // 2])

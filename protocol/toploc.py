"""TOPLOC: compact proofs that tokens came from the hidden states of one model (arXiv 2501.16007; INTELLECT-2's check).

A proof covers 32 decoded tokens: the largest activations of their final hidden states, as a polynomial over GF(65497).
The bytes are those of the public `toploc` package for the same index set. Leaves out thresholds (the manifest's), where
hidden states come from (the engines), and the arithmetic: `protocol/_toploc.c`, or `protocol.toploc_numpy` where that
could not be compiled, with the same results. No torch, no thread, no state.

**Build.** The bf16 bit patterns of rows P−1 … P+N−2 (the states that produced tokens 1 … N), 32 rows a chunk, the last
may be shorter. Of a chunk, flattened to index = row · H + dimension, the k = min(top_k, values) largest magnitudes, the
lowest index first among equals. modulus = the largest m ≤ 65497 for which all index mod m differ. The polynomial of
degree below k through the points (index mod m, pattern mod 65497). **Bytes**: m and the k coefficients, lowest degree
first, as big-endian 16-bit integers.

**Verify.** The checker takes the k largest of its own states and evaluates the polynomial at index mod m. An exponent
mismatch is a value whose sign or exponent differs; over the others, mantissas (7 bits) are compared.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from protocol import toploc_numpy
from protocol.constants import PROOF_CHUNK_TOKENS, PROOF_FIELD
from protocol.errors import ConfigError, MalformedError, ModelError
from protocol.toploc_numpy import MIN_MODULUS as MIN_MODULUS
from protocol.toploc_numpy import NO_MATCH as NO_MATCH

Patterns = NDArray[np.uint16]

_NATIVE_INTERFACE: Final = 1
_QUIET_NAN: Final = np.uint16(0x7FC0)


class _Kernel(Protocol):
    """The arithmetic, over C-contiguous uint16[chunks, values]. OverflowError: no modulus separates the points."""

    def build(self, patterns: Patterns, top_k: int, /) -> bytes: ...

    def verify(self, patterns: Patterns, proofs: bytes, top_k: int, /) -> list[tuple[int, float, float]]: ...

    def encode(self, indices: NDArray[np.uint32], values: Patterns, /) -> bytes: ...


def _load_kernel() -> _Kernel:
    try:
        native = importlib.import_module("protocol._toploc")
    except ImportError:
        return toploc_numpy
    # An editable installation keeps its binary when the source moves on.
    return cast(_Kernel, native) if native.INTERFACE == _NATIVE_INTERFACE else toploc_numpy


_kernel = _load_kernel()


def backend() -> Literal["native", "numpy"]:
    """Which arithmetic this process uses: compiled with the installation, or numpy, which is many times slower."""
    return "numpy" if _kernel is toploc_numpy else "native"


class ChunkResult(NamedTuple):
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
    return [proof for chunks in _chunks(patterns) for proof in build_chunks(chunks, top_k)]


def build_chunks(chunks: Patterns, top_k: int) -> list[bytes]:
    """A proof per chunk of uint16[chunks, rows, H], which may be of several rollouts. Raises as `build_proofs` does."""
    points = _points(_chunk_values(chunks), top_k)
    if not len(chunks):
        return []
    try:
        joined = _kernel.build(_flat(chunks), points)
    except OverflowError as error:
        raise _inseparable(points) from error
    return [joined[start : start + proof_bytes(points)] for start in range(0, len(joined), proof_bytes(points))]


def encode_points(indices: Sequence[int], values: Sequence[int]) -> bytes:
    """The proof of one set of points: flat indices and bit patterns, both below 2^32 and 2^16."""
    _points(len(indices), len(indices))
    points = np.array([indices], np.uint32), np.array([values], np.uint16)
    try:
        return _kernel.encode(*points)
    except OverflowError as error:
        raise _inseparable(len(indices)) from error


def verify_proofs(patterns: Patterns, proofs: Sequence[bytes], top_k: int) -> list[ChunkResult]:
    """Compare a checker's own states, uint16[N, H], with a rollout's proofs, a result per chunk.

    Raises MalformedError for proofs of another shape (`check_proof_shape`); any bytes are safe. O(top_k²) a chunk.
    """
    tokens, hidden_size = _shape(patterns)
    check_proof_shape(proofs, tokens=tokens, hidden_size=hidden_size, top_k=top_k)
    results: list[ChunkResult] = []
    for chunks in _chunks(patterns):
        results += _measure(chunks, proofs[len(results) : len(results) + len(chunks)], top_k)
    return results


def verify_chunks(chunks: Patterns, proofs: Sequence[bytes], top_k: int) -> list[ChunkResult]:
    """The same for chunks of one length, uint16[chunks, rows, H], which may be of several rollouts."""
    values = _chunk_values(chunks)
    if len(proofs) != len(chunks):
        raise MalformedError(f"{len(proofs)} proofs for {len(chunks)} chunks")
    if not proofs:
        return []
    _check_proofs(proofs, 0, values=values, top_k=top_k)
    return _measure(chunks, proofs, top_k)


def _measure(chunks: Patterns, proofs: Sequence[bytes], top_k: int) -> list[ChunkResult]:
    flat = _flat(chunks)
    found = _kernel.verify(flat, b"".join(proofs), _points(flat.shape[1], top_k))
    return [ChunkResult._make(row) for row in found]


def check_proof_shape(proofs: Sequence[bytes], *, tokens: int, hidden_size: int, top_k: int) -> None:
    """Raise MalformedError unless there is a proof per chunk and each has the length and numbers that one can have."""
    if len(proofs) != proof_count(tokens):
        raise MalformedError(f"{len(proofs)} proofs for {tokens} tokens; {proof_count(tokens)} are due")
    full = tokens // PROOF_CHUNK_TOKENS
    for first, part, rows in (
        (0, proofs[:full], PROOF_CHUNK_TOKENS),
        (full, proofs[full:], tokens % PROOF_CHUNK_TOKENS),
    ):
        if part:
            _check_proofs(part, first, values=rows * hidden_size, top_k=top_k)


def _check_proofs(proofs: Sequence[bytes], first: int, *, values: int, top_k: int) -> None:
    """Proofs of chunks of one size; `first` is the number of the first one."""
    due = proof_bytes(_points(values, top_k))
    for number, proof in enumerate(proofs, first):
        if len(proof) != due:
            raise MalformedError(f"proof {number} has {len(proof)} bytes; {due} are due")
    # Every set of indices below 65497 is already distinct modulo 65497, so only wider chunks have a choice.
    lowest = PROOF_FIELD if values <= PROOF_FIELD else MIN_MODULUS
    words = struct.Struct(f">{due // 2}H")
    for number, proof in enumerate(proofs, first):
        modulus, *coefficients = words.unpack(proof)
        if not lowest <= modulus <= PROOF_FIELD:
            raise MalformedError(f"proof {number} has modulus {modulus}; {lowest} to {PROOF_FIELD} are possible")
        if max(coefficients) >= PROOF_FIELD:
            raise MalformedError(f"proof {number} has a coefficient outside GF({PROOF_FIELD})")


def _points(values: int, top_k: int) -> int:
    if top_k < 1 or values < 1:
        raise ConfigError(f"a proof of the {top_k} largest of {values} values is none; both must be at least 1")
    points = min(top_k, values)
    if points > PROOF_FIELD:
        raise _inseparable(points)
    return points


def _inseparable(points: int) -> ConfigError:
    return ConfigError(
        f"no modulus separates the {points} largest activations of a chunk",
        hint="create the run with a smaller toploc.top_k (128 is usual)",
    )


def _shape(patterns: Patterns) -> tuple[int, int]:
    if patterns.ndim != 2 or patterns.dtype != np.uint16 or patterns.shape[1] == 0:
        raise ModelError(f"hidden states must be uint16[tokens, width], not {patterns.dtype}{list(patterns.shape)}")
    return patterns.shape[0], patterns.shape[1]


def _chunk_values(chunks: Patterns) -> int:
    if chunks.ndim != 3 or chunks.dtype != np.uint16 or 0 in chunks.shape[1:]:
        raise ModelError(f"chunks must be uint16[chunks, rows, width], not {chunks.dtype}{list(chunks.shape)}")
    return int(chunks.shape[1]) * int(chunks.shape[2])


def _chunks(patterns: Patterns) -> Iterator[Patterns]:
    """uint16[chunks, rows, H]: full chunks, then the short last one."""
    tokens, hidden_size = _shape(patterns)
    full = tokens - tokens % PROOF_CHUNK_TOKENS
    if full:
        yield patterns[:full].reshape(-1, PROOF_CHUNK_TOKENS, hidden_size)
    if full < tokens:
        yield patterns[None, full:]


def _flat(chunks: Patterns) -> Patterns:
    """uint16[chunks, values], as kernels read it."""
    return np.require(chunks.reshape(len(chunks), -1), requirements=("C", "A"))

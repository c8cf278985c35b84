"""The compiled arithmetic against numpy's, and against what no caller should pass."""

import contextlib
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import toploc, toploc_numpy

P = 65497
VALUES = [1, 63, 64, 65, 1024, 8191, 8192, 20000, P, P + 70]


@pytest.fixture(scope="module")
def native():
    return pytest.importorskip("protocol._toploc", reason="the compiled kernel is not installed")


def patterns_of(kind, rng, shape):
    """What hidden states may be, and what they never are."""
    if kind == "any bits":
        return rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    if kind == "states":
        scales = rng.lognormal(0, 1.5, shape[1])
        return toploc.bf16_patterns((rng.normal(size=shape) * scales).astype(np.float32))
    if kind == "ties":
        return rng.choice(np.array([0x3F80, 0xBF80, 0x3F81, 0], np.uint16), shape)
    return np.full(shape, {"zeros": 0, "largest": 0xFFFF, "infinities": 0x7F80}[kind], np.uint16)


KINDS = st.sampled_from(["any bits", "states", "ties", "zeros", "largest", "infinities"])
TOP_K = st.sampled_from([1, 2, 15, 16, 17, 127, 128, 200, 300])


@settings(max_examples=150, deadline=None)
@given(KINDS, st.integers(0, 2**32 - 1), st.integers(1, 3), st.sampled_from(VALUES), TOP_K)
def test_proofs_are_byte_identical(native, kind, seed, chunks, values, top_k):
    patterns = patterns_of(kind, np.random.default_rng(seed), (chunks, values))
    k = min(top_k, values)
    proofs = native.build(patterns, k)
    assert proofs == toploc_numpy.build(patterns, k)
    assert native.verify(patterns, proofs, k) == [(0, 0.0, 0.0)] * chunks


@settings(max_examples=150, deadline=None)
@given(KINDS, st.integers(0, 2**32 - 1), st.sampled_from(VALUES), TOP_K, st.integers(0x8001, P), st.booleans())
def test_results_are_identical_whatever_the_claim(native, kind, seed, values, top_k, modulus, near):
    rng = np.random.default_rng(seed)
    patterns, k = patterns_of(kind, rng, (2, values)), min(top_k, values)
    words = rng.integers(0, P, (2, 1 + k)).astype(">u2")
    if near:  # a claim that most values are close to
        words[:, 1:] = 0
        words[:, 1] = patterns[0, 0] % P
    words[:, 0] = modulus
    assert native.verify(patterns, words.tobytes(), k) == toploc_numpy.verify(patterns, words.tobytes(), k)


@pytest.mark.parametrize("width", [2048, 2300, 5120])
def test_wide_chunks_whose_modulus_falls_are_identical(native, width):
    rng = np.random.default_rng(width)
    patterns = rng.integers(0, 0x3F00, (6, 32 * width), dtype=np.uint16)
    for number, chunk in enumerate(patterns[:5]):
        for step in range(number + 1):  # rules out 65497, 65496 and so on
            chunk[[7 * step + 3, 6 * step + 3 + P]] = rng.integers(0x4000, 0x5000, 2)
    proofs = native.build(patterns, 16)
    assert proofs == toploc_numpy.build(patterns, 16)
    moduli = np.frombuffer(proofs, ">u2").reshape(6, -1)[:, 0]
    assert (moduli[:5] == P - 1 - np.arange(5)).all()
    assert native.verify(patterns, proofs, 16) == [(0, 0.0, 0.0)] * 6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 0xFFFF)), min_size=1, max_size=150))
def test_any_points_are_encoded_alike_equal_ones_included(native, points):
    indices = np.array([[index for index, _ in points]], np.uint32)
    values = np.array([[value for _, value in points]], np.uint16)

    def outcome(kernel):
        try:
            return kernel.encode(indices, values)
        except OverflowError as error:
            return str(error)

    if len(np.unique(indices)) == indices.size or indices.max() >= P:
        assert outcome(native) == outcome(toploc_numpy)
    else:
        assert len(native.encode(indices, values)) == 2 + 2 * len(points)


def test_blocks_full_of_candidates_take_the_slow_way_to_the_same_bytes(native):
    """Large values in few blocks, which the shortcut has no room for."""
    patterns = np.zeros((1, 64 * 64), np.uint16)
    patterns[0, : 32 * 64] = np.random.default_rng(0).integers(0x4000, 0x4010, 32 * 64)
    for k in (4, 20, 32):
        assert native.build(patterns, k) == toploc_numpy.build(patterns, k)


SOUND = np.arange(1, 81, dtype=np.uint16).reshape(2, 40)
ODD = np.frombuffer(bytes(161), np.uint8)[1:].view(np.uint16).reshape(2, 40)


@pytest.mark.parametrize(
    ("patterns", "top_k"),
    [
        (SOUND[0], 4),
        (SOUND[:, ::2], 4),
        (SOUND.T, 4),
        (SOUND.astype(np.float32), 4),
        (SOUND.astype(np.uint8), 4),
        (SOUND[:0], 4),
        (SOUND[:, :0], 4),
        (SOUND.reshape(2, 20, 2), 4),
        (ODD, 4),
        (SOUND, 0),
        (SOUND, -1),
        (SOUND, 41),
        (SOUND, 2**40),
        (SOUND, 2**70),
        (np.zeros((1, 70000), np.uint16), P + 1),
        (None, 4),
        ("text", 4),
        (b"bytes", 4),
        (SOUND, "four"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_read(native, patterns, top_k):
    """Whoever calls it wrongly gets an exception, not a dead process."""
    with pytest.raises((ValueError, TypeError, OverflowError, BufferError)):
        native.build(patterns, top_k)
    with pytest.raises((ValueError, TypeError, OverflowError, BufferError)):
        native.verify(patterns, bytes(20), top_k)


def proof_of(modulus, *coefficients):
    return np.array([modulus, *coefficients], ">u2").tobytes()


@pytest.mark.parametrize(
    "proofs",
    [
        b"",
        bytes(1),
        bytes(9),
        bytes(11),
        bytes(20),
        bytes(30),
        proof_of(P, 1, 2, 3, 4),
        proof_of(P, 1, 2, 3, 4) + proof_of(0, 1, 2, 3, 4),
        proof_of(P, 1, 2, 3, 4) + proof_of(0x8000, 1, 2, 3, 4),
        proof_of(P, 1, 2, 3, 4) + proof_of(P + 1, 1, 2, 3, 4),
        proof_of(P, 1, 2, 3, P) + proof_of(P, 1, 2, 3, 4),
        proof_of(P, 1, 2, 3, 4) + proof_of(P, 0xFFFF, 2, 3, 4),
        "text",
        None,
    ],
)
def test_the_kernel_refuses_hostile_proofs_even_unchecked(native, proofs):
    """A caller forgets `check_proof_shape`: modulus 0, too few bytes, numbers outside the field."""
    with pytest.raises((ValueError, TypeError)):
        native.verify(SOUND, proofs, 4)


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=24))
def test_any_bytes_are_refused_or_measured(native, proofs):
    try:
        results = native.verify(SOUND[:1], proofs, 4)
    except ValueError:
        return
    assert results == toploc_numpy.verify(SOUND[:1], proofs, 4)


def test_an_array_that_changes_meanwhile_does_no_harm(native):
    """Another thread writes to the hidden states while the kernel, which holds no lock, reads them."""
    patterns = np.random.default_rng(1).integers(0, 1 << 16, (40, 32 * 256), dtype=np.uint16)
    stop = threading.Event()

    def scribble():
        rng = np.random.default_rng(2)
        while not stop.is_set():
            patterns[:] = rng.integers(0, 1 << 16, patterns.shape, dtype=np.uint16)
            patterns[:] = 0

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for top_k in (16, 100) * 40:
            with contextlib.suppress(ValueError):  # "the hidden states changed"
                assert len(native.build(patterns, top_k)) == 40 * (2 + 2 * top_k)
    finally:
        stop.set()
        writer.join()


def test_without_a_binary_or_with_a_stale_one_numpy_does_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "protocol._toploc", None)
    assert toploc._load_kernel() is toploc_numpy
    monkeypatch.setitem(sys.modules, "protocol._toploc", SimpleNamespace(INTERFACE=0))
    assert toploc._load_kernel() is toploc_numpy

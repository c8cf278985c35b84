import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import toploc, toploc_numpy
from protocol.errors import ConfigError, MalformedError, ModelError
from protocol.toploc import (
    MIN_MODULUS,
    NO_MATCH,
    ChunkResult,
    bf16_patterns,
    build_chunks,
    build_proofs,
    check_proof_shape,
    encode_points,
    proof_bytes,
    proof_count,
    verify_chunks,
    verify_proofs,
)

P = 65497
PERFECT = ChunkResult(0, 0.0, 0.0)
WIDTH = 64


@pytest.fixture(scope="module", params=["native", "numpy"], autouse=True)
def kernel(request):
    """Every test runs on both arithmetics."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(toploc, "_kernel", toploc_numpy)
        elif toploc.backend() == "numpy":
            pytest.skip("the compiled kernel is not installed")
        yield
        assert toploc.backend() == request.param


def reference_proof(indices, values):
    """The public format by another route: Lagrange's formula in Python integers."""
    modulus = next(m for m in range(P, 0, -1) if len({i % m for i in indices}) == len(indices))
    x, y, k = [i % modulus for i in indices], [v % P for v in values], len(indices)
    coefficients = [0] * k
    for j in range(k):
        basis, divisor = [1], 1
        for other in x[:j] + x[j + 1 :]:
            basis = [(low - other * high) % P for low, high in zip([0, *basis], [*basis, 0], strict=True)]
            divisor = divisor * (x[j] - other) % P
        scale = y[j] * pow(divisor, -1, P) % P
        coefficients = [(c + scale * b) % P for c, b in zip(coefficients, basis, strict=True)]
    return b"".join(word.to_bytes(2, "big") for word in [modulus, *coefficients])


def reference_indices(patterns, k):
    """Largest magnitudes, lowest index first among equals."""
    flat = patterns.ravel().tolist()
    return sorted(range(len(flat)), key=lambda i: (-(flat[i] & 0x7FFF), i))[:k]


def peaked(seed, *, tokens=64, width=WIDTH, sharpness=1.5):
    """Hidden states with a few strong dimensions and strong tokens, as trained models have; one seed per rollout."""
    scales = np.random.default_rng(99).lognormal(0, sharpness, width)
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(tokens, width)) * scales * rng.lognormal(0, 0.5, (tokens, 1))
    return states.astype(np.float32)


def accepted(results):
    """The thresholds that the paper publishes, for each chunk."""
    return all(r.exponent_mismatches <= 38 and r.mantissa_mean <= 10 and r.mantissa_median <= 8 for r in results)


@pytest.mark.parametrize(
    ("indices", "values", "golden"),
    [
        ([1, 2, 3], [4, 5, 6], "ffd9 0003 0001 0000"),
        ([0, 65497, 130994], [1, 2, 3], "ffd8 0001 0001 0000"),
        ([7, 65504, 12], [0x4080, 0xC0A0, 0xFFFF], "ffd8 a186 113d f62f"),
        ([163839, 5, 98765, 42], [0x4123, 0xC1F0, 0x3F80, 0x7F80], "ffd9 7146 a1e7 7458 b9d0"),
    ],
    ids=["line", "modulus falls", "values wrap", "four points"],
)
def test_golden_bytes_of_the_public_format(indices, values, golden):
    assert encode_points(indices, values).hex(" ", 2) == golden
    assert encode_points(indices[::-1], values[::-1]).hex(" ", 2) == golden


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_encoding_equals_an_independent_implementation(data):
    indices = data.draw(st.lists(st.integers(0, 300_000), min_size=1, max_size=20, unique=True))
    values = data.draw(st.lists(st.integers(0, 0xFFFF), min_size=len(indices), max_size=len(indices)))
    assert encode_points(indices, values) == reference_proof(indices, values)


@pytest.mark.parametrize("span", [65497, 163840])
def test_proofs_of_128_points_equal_an_independent_implementation(span):
    rng = random.Random(span)
    for _ in range(3):
        indices, values = rng.sample(range(span), 128), [rng.randrange(1 << 16) for _ in range(128)]
        assert encode_points(indices, values) == reference_proof(indices, values)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 70])
def test_build_follows_the_specification(tokens):
    patterns = bf16_patterns(peaked(1, tokens=tokens, width=16))
    proofs = build_proofs(patterns, 24)
    assert len(proofs) == proof_count(tokens) == (tokens + 31) // 32
    for number, proof in enumerate(proofs):
        chunk = patterns[32 * number : 32 * number + 32]
        indices = reference_indices(chunk, 24)
        assert proof == reference_proof(indices, chunk.ravel()[indices].tolist())


def test_ties_take_the_lowest_index():
    """bf16 has so few values that equal magnitudes at the last rank are the rule; both signs tie."""
    patterns = np.full((4, 8), 0x3F80, np.uint16)
    patterns[0, 1] = 0xBF80
    patterns[3, 7] = 0x4000
    assert build_proofs(patterns, 5) == [encode_points([0, 1, 2, 3, 31], [0x3F80, 0xBF80, 0x3F80, 0x3F80, 0x4000])]


def test_a_short_chunk_has_as_many_points_as_values():
    patterns = bf16_patterns(peaked(1, tokens=1, width=10))
    (proof,) = build_proofs(patterns, 128)
    assert len(proof) == proof_bytes(10) == 22
    assert verify_proofs(patterns, [proof], 128) == [PERFECT]


def test_no_tokens_have_no_proofs():
    empty = np.zeros((0, WIDTH), np.uint16)
    assert build_proofs(empty, 128) == []
    assert verify_proofs(empty, [], 128) == []


def test_many_chunks_equal_one_at_a_time():
    patterns = bf16_patterns(peaked(3, tokens=70 * 32 + 5, width=8))
    single = [build_proofs(patterns[start : start + 32], 16)[0] for start in range(0, len(patterns), 32)]
    assert build_proofs(patterns, 16) == single
    assert set(verify_proofs(patterns, single, 16)) == {PERFECT}


def test_chunks_of_several_rollouts_are_proved_in_one_call():
    patterns = bf16_patterns(peaked(4, tokens=5 * 11, width=8)).reshape(5, 11, 8)
    assert build_chunks(patterns, 16) == [build_proofs(chunk, 16)[0] for chunk in patterns]
    assert build_chunks(patterns[::2, :3], 16) == [build_proofs(chunk[:3], 16)[0] for chunk in patterns[::2]]
    assert build_chunks(patterns[:0], 16) == []


def test_chunks_of_several_rollouts_are_verified_in_one_call():
    chunks = bf16_patterns(peaked(4, tokens=5 * 11, width=8)).reshape(5, 11, 8)
    proofs = build_chunks(chunks, 16)
    assert verify_chunks(chunks, proofs, 16) == [PERFECT] * 5
    swapped = [proofs[1], proofs[0], *proofs[2:]]
    one_by_one = [verify_proofs(chunk, [proof], 16)[0] for chunk, proof in zip(chunks, swapped, strict=True)]
    assert verify_chunks(chunks, swapped, 16) == one_by_one != [PERFECT] * 5
    assert verify_chunks(chunks[:0], [], 16) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda proofs: proofs[:-1], "4 proofs for 5 chunks"),
        (lambda proofs: [*proofs[:4], b""], "proof 4 has 0 bytes"),
        (lambda proofs: [*proofs[:4], bytes(34)], "proof 4 has modulus 0"),
        (lambda proofs: [*proofs[:4], proofs[4][:-2] + b"\xff\xff"], "proof 4 has a coefficient outside"),
    ],
)
def test_hostile_proofs_of_chunks_are_refused_with_a_reason(change, reason):
    chunks = bf16_patterns(peaked(4, tokens=5 * 11, width=8)).reshape(5, 11, 8)
    with pytest.raises(MalformedError, match=reason):
        verify_chunks(chunks, change(build_chunks(chunks, 16)), 16)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.sampled_from([1, 3, 40]), st.integers(1, 130))
def test_honest_proofs_have_no_mismatch(seed, tokens, width, top_k):
    """Whatever the bits: infinities, NaNs and zeros included."""
    patterns = np.random.default_rng(seed).integers(0, 1 << 16, (tokens, width), dtype=np.uint16)
    assert set(verify_proofs(patterns, build_proofs(patterns, top_k), top_k)) == {PERFECT}


@pytest.mark.parametrize("width", [2048, 5120])
def test_wide_models_whose_modulus_falls_verify(width):
    """Two indices that agree modulo 65497: the public Python verifier reports honest proofs as forged here."""
    patterns = np.random.default_rng(width).integers(0, 0x3F00, (64, width), dtype=np.uint16)
    patterns[:32].ravel()[[5, 5 + P]] = 0x4000, 0x4100
    patterns[32:].ravel()[[7, 8 + P]] = 0x4000, 0x4100
    proofs = build_proofs(patterns, 2)
    assert [int.from_bytes(proof[:2], "big") for proof in proofs] == [P - 1, P]
    assert verify_proofs(patterns, proofs, 2) == [PERFECT] * 2


def test_no_modulus_is_an_error_that_names_the_setting():
    every_difference = [*range(256), *range(MIN_MODULUS, P + 256, 256)]
    with pytest.raises(ConfigError, match="no modulus") as caught:
        encode_points(every_difference, [1] * len(every_difference))
    assert "top_k" in caught.value.hint


def test_more_points_than_the_field_has_are_an_error_before_any_work():
    with pytest.raises(ConfigError, match="no modulus"):
        build_proofs(np.zeros((32, 2048), np.uint16), P + 1)


def test_small_drift_is_measured_and_accepted():
    states = peaked(5, tokens=96)
    drift = np.random.default_rng(6).normal(1, 0.004, states.shape).astype(np.float32)
    results = verify_proofs(bf16_patterns(states * drift), build_proofs(bf16_patterns(states), 128), 128)
    assert accepted(results)
    assert all(0 < result.mantissa_mean < 3 for result in results)


def test_results_are_the_documented_statistics():
    own = np.array([[0x4000, 0x4011, 0x4022, 0x4033, 0x4044]], np.uint16)
    claimed = np.array([0x4001, 0x4010, 0x402C, 0xC033, 0x4744], np.uint16)  # off by 1, 1, 10; sign; exponent
    proof = encode_points(list(range(5)), claimed.tolist())
    assert verify_proofs(own, [proof], 128) == [ChunkResult(2, 4.0, 1.0)]
    two = encode_points([0, 1], [0x4001, 0x4015])
    assert verify_proofs(own[:, :2], [two], 128) == [ChunkResult(0, 2.5, 4.0)]


def test_a_flipped_sign_is_seen():
    """Negating every hidden state keeps magnitudes and exponents; the public verifier accepts it."""
    patterns = bf16_patterns(peaked(7))
    results = verify_proofs(patterns ^ np.uint16(0x8000), build_proofs(patterns, 128), 128)
    assert results == [ChunkResult(128, NO_MATCH, NO_MATCH)] * 2


def forged(kind, top_k=128):
    words = np.zeros((2, top_k + 1), ">u2")
    words[:, 0] = P
    if kind == "constant":
        words[:, 1] = int(np.median(bf16_patterns(np.sort(np.abs(peaked(8).ravel()))[-256:])))
    if kind == "random":
        words[:, 1:] = np.random.default_rng(0).integers(0, P, (2, top_k))
    return [row.tobytes() for row in words]


@pytest.mark.parametrize("kind", ["zeros", "constant", "random"])
def test_forged_proofs_do_not_pass(kind):
    """A contributor hands in proofs without having run the model."""
    patterns = bf16_patterns(peaked(8))
    assert accepted(verify_proofs(patterns, build_proofs(patterns, 128), 128))
    for result in verify_proofs(patterns, forged(kind), 128):
        assert not accepted([result])


def test_another_rollouts_proofs_do_not_pass():
    """A contributor replays the proofs of an honest rollout of the same model."""
    for result in verify_proofs(bf16_patterns(peaked(9)), build_proofs(bf16_patterns(peaked(10)), 128), 128):
        assert not accepted([result])


def test_swapped_chunks_do_not_pass():
    """The proofs of a rollout in another order."""
    patterns = bf16_patterns(peaked(11))
    assert not accepted(verify_proofs(patterns, build_proofs(patterns, 128)[::-1], 128))


HONEST = build_proofs(bf16_patterns(peaked(12, tokens=40)), 128)


def with_modulus(modulus):
    return [modulus.to_bytes(2, "big") + HONEST[0][2:], HONEST[1]]


@pytest.mark.parametrize(
    ("proofs", "reason"),
    [
        ([], "0 proofs for 40 tokens"),
        (HONEST[:1], "1 proofs for 40 tokens; 2 are due"),
        ([*HONEST, HONEST[0]], "3 proofs"),
        ([b"", HONEST[1]], "proof 0 has 0 bytes; 258 are due"),
        ([HONEST[0][:2], HONEST[1]], "2 bytes"),
        ([HONEST[0], HONEST[1][:-2]], "proof 1 has 256 bytes"),
        ([HONEST[0], HONEST[1][:-1]], "257 bytes"),
        ([HONEST[0] + b"\0", HONEST[1]], "259 bytes"),
        ([HONEST[0] + bytes(256), HONEST[1]], "514 bytes"),
        ([bytes(258), HONEST[1]], "modulus 0"),
        (with_modulus(0), "modulus 0"),
        (with_modulus(1), "modulus 1"),
        (with_modulus(MIN_MODULUS), "modulus 32769"),
        (with_modulus(P - 1), "modulus 65496"),
        (with_modulus(P + 1), "modulus 65498"),
        (with_modulus(65535), "modulus 65535"),
        ([HONEST[0][:-2] + b"\xff\xd9", HONEST[1]], "coefficient outside"),
        ([HONEST[0], HONEST[1][:2] + b"\xff\xff" + HONEST[1][4:]], "proof 1 has a coefficient outside"),
    ],
)
def test_hostile_proofs_are_refused_with_a_reason(proofs, reason):
    """Each of these kills or fools the public verifier, or is a proof that no builder gives."""
    patterns = bf16_patterns(peaked(12, tokens=40))
    with pytest.raises(MalformedError, match=reason):
        verify_proofs(patterns, proofs, 128)


def test_a_wide_chunk_may_have_a_smaller_modulus_within_bounds():
    proof = (P - 9).to_bytes(2, "big") + bytes(256)
    check_proof_shape([proof], tokens=32, hidden_size=2048, top_k=128)
    for modulus in (128, MIN_MODULUS - 1):
        with pytest.raises(MalformedError, match="modulus"):
            check_proof_shape([modulus.to_bytes(2, "big") + bytes(256)], tokens=32, hidden_size=2048, top_k=128)


SMALL = bf16_patterns(peaked(13, tokens=40, width=4))


@settings(max_examples=2000, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_are_refused_or_measured(proofs):
    try:
        results = verify_proofs(SMALL, proofs, 8)
    except MalformedError:
        return
    assert len(results) == 2


@settings(max_examples=1000, deadline=None)
@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_any_coefficients_are_refused_or_measured(first, second):
    """Bytes of the right length behind a valid modulus reach the arithmetic."""
    try:
        results = verify_proofs(SMALL, [b"\xff\xd9" + first, b"\xff\xd9" + second], 8)
    except MalformedError:
        return
    assert all(0 <= result.exponent_mismatches <= 8 for result in results)


def test_a_hundred_thousand_random_proofs_are_refused_or_measured():
    """A flood of garbage: half of any length, half of the right length behind a valid modulus. None passes."""
    source, measured = random.Random(7), 0
    for number in range(100_000):
        garbage = source.randbytes(18 if number % 2 else source.randrange(64))
        proof = b"\xff\xd9" + garbage[2:] if number % 2 else garbage
        try:
            (result,) = verify_proofs(SMALL[:32], [proof], 8)
        except MalformedError:
            continue
        measured += 1
        assert result.exponent_mismatches > 2
    assert measured > 40_000


def test_bf16_rounds_to_nearest_even():
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00000001, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    rounded = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x0000, 0x8000, 0x7F80, 0x7F80, 0xFF80]
    assert bf16_patterns(np.array(bits, np.uint32).view(np.float32)).tolist() == rounded


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_bf16_keeps_nan(bits):
    """Rounding carries a NaN's mantissa into an infinity or a zero unless it is treated apart."""
    assert bf16_patterns(np.array([[bits]], np.uint32).view(np.float32)).tolist() == [[0x7FC0]]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_bf16_is_the_nearest_value(values):
    exact = np.array(values, np.float32)
    back = (bf16_patterns(exact).astype(np.uint32) << np.uint32(16)).view(np.float32)
    finite = np.isfinite(back)
    assert (np.abs(back[finite] - exact[finite]) <= np.abs(exact[finite]) / 256 + 2.0**-134).all()


@pytest.mark.parametrize("bad", [np.zeros((4, 4), np.float32), np.zeros(4, np.uint16), np.zeros((4, 0), np.uint16)])
def test_states_of_another_shape_or_type_are_the_engines_fault(bad):
    with pytest.raises(ModelError, match="hidden states"):
        build_proofs(bad, 128)


@pytest.mark.parametrize("shape", [(4, 4), (1, 0, 4), (1, 4, 0)])
def test_chunks_of_another_shape_are_the_engines_fault(shape):
    with pytest.raises(ModelError, match="chunks must be"):
        build_chunks(np.zeros(shape, np.uint16), 128)


def test_top_k_of_zero_is_a_wrong_setting():
    with pytest.raises(ConfigError, match="at least 1"):
        build_proofs(np.zeros((1, 4), np.uint16), 0)

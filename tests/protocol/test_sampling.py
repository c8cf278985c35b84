import math

import numpy as np
import pytest

from protocol.errors import MalformedError
from protocol.sampling import gumbel, gumbel_rows, margins, position_keys

ALICE, BOB = bytes(range(32)), bytes(32)
VOCABULARY = 49152


def documented_gumbel(k0, k1, token):
    """The documented function, written again in Python integers."""

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    u = mix(mix(token ^ k0) ^ k1)
    return -math.log(-math.log((u + 0.5) / 2**32))


def uniforms(noise):
    return np.exp(-np.exp(-noise.astype(np.float64)))


def standard_score(a, b):
    """Correlation of two samples, in standard deviations of what independent ones would have."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * math.sqrt(a.size))


def test_golden_keys():
    assert position_keys(ALICE, 2).tolist() == [[1435807726, 1108621407], [2929414386, 3685935961]]


def test_golden_noise():
    noise = gumbel(position_keys(ALICE, 1)[0], 50000)
    expected = {0: 2.2531785964, 1: 2.5536935329, 31: 1.6527051925, 16384: -0.410075426, 49999: 1.9791102409}
    for token, value in expected.items():
        assert noise[token] == pytest.approx(value, abs=0, rel=1e-6)


def test_noise_is_the_documented_function():
    keys = position_keys(BOB, 3)
    rows = gumbel_rows(keys, 20000)
    for row, (k0, k1) in zip(rows, keys.tolist(), strict=True):
        for token in (0, 1, 2, 16383, 16384, 19999):
            assert row[token] == pytest.approx(documented_gumbel(k0, k1, token), rel=1e-6)


def test_keys_are_prefix_stable_and_belong_to_their_seed():
    assert np.array_equal(position_keys(ALICE, 100)[:7], position_keys(ALICE, 7))
    assert position_keys(ALICE, 0).shape == (0, 2)
    assert len(np.unique(np.concatenate([position_keys(ALICE, 500), position_keys(BOB, 500)]))) == 2000


def test_a_row_depends_on_its_own_keys_alone():
    keys = position_keys(ALICE, 5)
    assert np.array_equal(gumbel_rows(keys, 999)[3], gumbel(keys[3], 999))
    assert np.array_equal(gumbel(keys[3], 40000)[:999], gumbel(keys[3], 999))
    assert gumbel(keys[0], 17).dtype == np.float32


@pytest.mark.parametrize("vocab_size", [1, 58, 8191, 8192, 16384, 16385])
def test_rows_computed_together_are_those_computed_alone(vocab_size):
    """Small vocabularies share a tile of the computation; neither noise nor margins may show where it ends."""
    keys = position_keys(BOB, 3 * 16384 // vocab_size + 2 if vocab_size > 57 else 20)
    alone = [gumbel(row, vocab_size) for row in keys]
    assert np.array_equal(gumbel_rows(keys, vocab_size), alone)
    logits, tokens = np.zeros((len(keys), vocab_size), np.float32), np.zeros(len(keys), np.int64)
    assert margins(logits, tokens, keys=keys, temperature=1.0).tolist() == [row.max() - row[0] for row in alone]


def test_noise_is_gumbel_distributed():
    noise = gumbel_rows(position_keys(ALICE, 24), VOCABULARY).astype(np.float64)
    assert noise.mean() == pytest.approx(0.5772156649, abs=5 * math.sqrt(math.pi**2 / 6 / noise.size))
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.01)
    assert noise.min() > -3.14
    assert noise.max() < 22.89
    assert np.isfinite(noise).all()


def test_extreme_hashes_give_finite_noise():
    """u = 0 and u = 2^32 − 1 are the ends of the range: neither may become an infinity."""
    assert -math.log(-math.log(0.5 / 2**32)) > -3.14
    assert -math.log(-math.log((2**32 - 0.5) / 2**32)) < 22.88
    assert gumbel(np.zeros(2, np.uint32), 1)[0] == pytest.approx(documented_gumbel(0, 0, 0), rel=1e-6)


@pytest.mark.parametrize("bins", [16, 256, 1000])
def test_uniforms_fill_their_bins_evenly(bins):
    u = uniforms(gumbel_rows(position_keys(BOB, 20), VOCABULARY))
    counts = np.bincount((u.ravel() * bins).astype(np.int64), minlength=bins)
    expected = u.size / bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - (bins - 1)) < 5 * math.sqrt(2 * bins)


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated():
    alice = uniforms(gumbel_rows(position_keys(ALICE, 16), VOCABULARY))
    bob = uniforms(gumbel_rows(position_keys(BOB, 16), VOCABULARY))
    pairs = [(alice[:, lag:], alice[:, :-lag]) for lag in (1, 2, 256)]
    pairs += [(alice[1:], alice[:-1]), (alice, bob), (alice[:, 1:], bob[:, :-1])]
    assert max(abs(standard_score(a, b)) for a, b in pairs) < 4.5


@pytest.mark.parametrize("changed", [0, 1])
def test_keys_that_differ_in_one_bit_give_independent_noise(changed):
    one = np.array([5, 9], np.uint32)
    other = one.copy()
    other[changed] ^= np.uint32(1)
    assert abs(standard_score(uniforms(gumbel(one, VOCABULARY)), uniforms(gumbel(other, VOCABULARY)))) < 4.5


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_argmax_draws_from_the_softmax(temperature):
    logits, draws = np.array([2.0, 1.0, 0.5, 0.0, -1.0, 1.9, -3.0, 0.2], np.float32), 40000
    noisy = logits + np.float32(temperature) * gumbel_rows(position_keys(ALICE, draws), len(logits))
    counts = np.bincount(noisy.argmax(axis=1), minlength=len(logits))
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = draws * weights / weights.sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 7 + 5 * math.sqrt(14)


def sampled(logits, keys, temperature):
    return (logits + np.float32(temperature) * gumbel_rows(keys, logits.shape[1])).argmax(axis=1)


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(0, 3, (200, 64)).astype(np.float32)


def test_margins_of_the_rule_s_own_tokens_are_zero(logits):
    keys = position_keys(ALICE, len(logits))
    assert not margins(logits, sampled(logits, keys, 0.8), keys=keys, temperature=0.8).any()


@pytest.mark.parametrize(
    ("keys", "temperature"), [(position_keys(BOB, 200), 1.0), (position_keys(ALICE, 200), 0.5)], ids=["seed", "heat"]
)
def test_margins_show_another_seed_or_temperature(logits, keys, temperature):
    """A contributor draws with a seed or a temperature of its own liking."""
    tokens = sampled(logits, keys, temperature)
    lost = margins(logits, tokens, keys=position_keys(ALICE, len(logits)), temperature=1.0)
    assert (lost >= 0).all()
    assert lost.mean() > 0.05


def test_margins_show_greedy_decoding(logits):
    """A contributor hands in the likeliest tokens in place of drawn ones."""
    lost = margins(logits, logits.argmax(axis=1), keys=position_keys(ALICE, len(logits)), temperature=1.0)
    assert lost.mean() > 0.1


def test_margin_is_in_logits():
    logits, keys = np.zeros((1, 4), np.float32), position_keys(ALICE, 1)
    noise = gumbel(keys[0], 4)
    lost = margins(logits, np.array([2]), keys=keys, temperature=2.0)
    assert lost[0] == pytest.approx(2.0 * float(noise.max() - noise[2]), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_margin_that_is_not_a_number_passes_no_threshold(bad):
    logits = np.full((1, 4), bad, np.float32)
    assert margins(logits, np.array([0]), keys=position_keys(ALICE, 1), temperature=1.0)[0] == math.inf


@pytest.mark.parametrize("token", [-1, 4, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(token):
    """A negative id would index from the end, a large one would crash the validator."""
    with pytest.raises(MalformedError, match="vocabulary"):
        margins(np.zeros((1, 4), np.float32), np.array([token]), keys=position_keys(ALICE, 1), temperature=1.0)


def test_counts_must_agree():
    with pytest.raises(MalformedError, match="2 tokens"):
        margins(np.zeros((1, 4), np.float32), np.array([0, 1]), keys=position_keys(ALICE, 1), temperature=1.0)
    assert (
        margins(np.zeros((0, 4), np.float32), np.array([], int), keys=position_keys(ALICE, 0), temperature=1).size == 0
    )

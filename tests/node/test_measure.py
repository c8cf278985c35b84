"""Measurements are the same whatever is measured together, in tiles of any size."""

import numpy as np
import pytest
from submission_kit import POLICY, hand_in, make_manifest, make_worker

from node.engines.torch_engine import TorchEngine
from node.validator import measure
from node.validator.measure import Measurer
from protocol.sampling import margins, position_keys
from protocol.toploc import verify_proofs


@pytest.fixture(scope="module")
def alice(tmp_path_factory):
    """Answers in bfloat16, so that there is something to measure; the longest have three chunks."""
    manifest = make_manifest(max_new_tokens=80, temperature=3.0)
    worker = make_worker(dtype="bfloat16")
    rollouts = hand_in(worker, manifest, tmp_path_factory.mktemp("alice") / "0.parquet").rollouts
    return rollouts


@pytest.fixture(scope="module")
def prefills(alice):
    engine = TorchEngine()
    engine.load(POLICY)
    return sorted(engine.prefill([(r.prompt_ids, r.output_ids) for r in alice]), key=lambda prefill: prefill.index)


def noise_seed(prompt_index, member):
    return bytes([prompt_index, member]) * 16


def measured(rollouts, prefills):
    measurer = Measurer(rollouts, noise_seed, temperature=3.0, top_k=16, vocab_size=64)
    for prefill in prefills:
        measurer.add(prefill)
    return measurer.results()


def test_numbers_are_those_of_each_rollout_alone(alice, prefills):
    for rollout, prefill, numbers in zip(alice, prefills, measured(alice, prefills), strict=True):
        count = len(rollout.output_ids)
        keys = position_keys(noise_seed(rollout.prompt_index, rollout.member), count)
        alone = margins(prefill.logits(0, count), np.array(rollout.output_ids), keys=keys, temperature=3.0)
        assert np.array_equal(numbers.margins, alone)
        assert [chunk.result for chunk in numbers.chunks] == verify_proofs(prefill.patterns, rollout.proofs, 16)
        assert [chunk.rows for chunk in numbers.chunks] == [min(32, count - s) for s in range(0, count, 32)]
        mean = measure.token_numbers([numbers]).mean_margin
        assert mean == pytest.approx(np.minimum(alone, 0.5).mean())


@pytest.mark.parametrize("tile", [1, 64, 700, 1 << 20])
def test_tiles_change_nothing(alice, prefills, monkeypatch, tile):
    whole = measured(alice, prefills)
    monkeypatch.setattr(measure, "_TILE_LOGITS", tile)
    monkeypatch.setattr(measure, "_TILE_VALUES", tile)
    for one, other in zip(whole, measured(alice, prefills), strict=True):
        assert other.margins == pytest.approx(one.margins, abs=1e-5)
        assert other.logprob_errors == pytest.approx(one.logprob_errors, abs=1e-5)
        assert one.chunks == other.chunks


def test_a_wild_chunk_counts_only_so_much_in_a_mean():
    chunks = [measure.MeasuredChunk(32, 16, measure.ChunkResult(16, 2.0**64, 2.0**64))]
    rollout = measure.MeasuredRollout(32, np.full(32, 40, np.float32), np.full(32, -40.0), chunks)
    calm = measure.MeasuredRollout(2, np.zeros(2, np.float32), np.array([0.25, -0.5]), chunks)
    found = measure.token_numbers([rollout, calm])
    assert rollout.mantissa_mean == 16.0
    assert (found.mean_margin.tolist(), found.largest_margin.tolist()) == ([0.5, 0.0], [40.0, 0.0])
    assert (found.mean_logprob_error.tolist(), found.logprob_shift.tolist()) == ([0.5, 0.375], [-0.5, -0.125])
    assert found.largest_logprob_error.tolist() == [40.0, 0.5]
    assert found.mean(found.mean_logprob_error) == pytest.approx((32 * 0.5 + 2 * 0.375) / 34)


def test_evidence_counts_answers_to_one_prompt_once(alice, prefills):
    """Answers to one prompt may be equal: betting on each would take one accident for many."""
    numbers = measured(alice, prefills)
    found = measure.evidence(numbers)
    assert len(found) == 4
    first = [each for each in numbers if each.rollout.prompt_index == 0]
    assert found[0][1] == pytest.approx(sum(each.mantissa_mean for each in first) / len(first))
    shifts = [each.logprob_errors.mean() for each in first]
    assert found[0][2] == pytest.approx(abs(sum(shifts)) / len(first))
    assert measure.evidence([]) == []

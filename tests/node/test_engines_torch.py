"""The built-in engine: answers depend on policy, prompt and seed alone, and a prefill sees the rows that made them."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, EOS, VOCAB, build_model, write_model

from node.engines.base import GenerationRequest, SamplingParams
from node.engines.registry import engine_from_environment
from node.engines.torch_engine import TorchEngine
from protocol.errors import ModelError
from protocol.sampling import gumbel_rows, margins, position_keys
from protocol.toploc import bf16_patterns, proof_count, verify_proofs

ROOT = str(Path(__file__).parents[2])
SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=40, stop_ids=(EOS,), top_k_proof=16)


@pytest.fixture(scope="module")
def model():
    return build_model("qwen2-grouped")


@pytest.fixture(scope="module")
def model_dir(model, tmp_path_factory):
    return write_model(model, tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model_dir):
    return make_engine(model_dir)


def make_engine(model_dir, **settings):
    engine = TorchEngine(**settings)
    engine.load(model_dir)
    return engine


def make_requests(count, *, seed=0):
    """Prompts of many lengths, each asked twice with other noise."""
    source = random.Random(seed)
    prompts = [[source.randrange(3, VOCAB) for _ in range(source.randint(1, 30))] for _ in range(count // 2)]
    return [GenerationRequest(prompts[i // 2], source.randbytes(32)) for i in range(count)]


def sample_slowly(model, request, sampling):
    """Section by section what an answer is, by transformers and without a cache."""
    tokens, logprobs = list(request.prompt_ids), []
    keys = position_keys(request.seed, sampling.max_new_tokens)
    for position in range(sampling.max_new_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].float()
        noise = gumbel_rows(keys[position : position + 1], len(logits))[0]
        token = int(np.argmax(logits.numpy() + np.float32(sampling.temperature) * noise))
        logprobs.append(float(torch.log_softmax(logits / sampling.temperature, -1)[token]))
        tokens.append(token)
        if token in sampling.stop_ids:
            break
    return tokens[len(request.prompt_ids) :], logprobs


def test_answers_are_those_of_the_rule(model, engine):
    requests = make_requests(8)
    for request, answer in zip(requests, engine.generate(requests, SAMPLING), strict=True):
        output_ids, logprobs = sample_slowly(model, request, SAMPLING)
        assert answer.output_ids == output_ids
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert answer.finish_reason == ("stop" if output_ids[-1] == EOS else "length")


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_in_a_batch_change_nothing(model_dir, seed):
    requests = make_requests(16, seed=seed)
    alone, together, split = (
        make_engine(model_dir, max_batch=size).generate(requests, SAMPLING) for size in (1, 16, 5)
    )
    assert [a.output_ids for a in alone] == [a.output_ids for a in together] == [a.output_ids for a in split]
    assert {a.finish_reason for a in alone} == {"stop", "length"}


def test_seeds_decide(engine):
    request = make_requests(2)[0]
    first, again, other = engine.generate([request, request, replace(request, seed=bytes(32))], SAMPLING)
    assert first.output_ids == again.output_ids != other.output_ids
    assert first.proofs == again.proofs


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_prefill_sees_the_rows_that_made_the_tokens(name, tmp_path):
    engine = make_engine(write_model(build_model(name), tmp_path), max_batch=6)
    requests = make_requests(10)
    answers = engine.generate(requests, SAMPLING)
    seen = set()
    for prefill in engine.prefill([(r.prompt_ids, a.output_ids) for r, a in zip(requests, answers, strict=True)]):
        seen.add(prefill.index)
        request, answer = requests[prefill.index], answers[prefill.index]
        count = len(answer.output_ids)
        logits = prefill.logits(0, count)
        assert prefill.patterns.shape == (count, engine.info.hidden_size)
        lost = margins(logits, np.array(answer.output_ids), keys=position_keys(request.seed, count), temperature=0.8)
        assert lost.max() < 1e-4
        logprobs = torch.log_softmax(torch.from_numpy(logits) / 0.8, -1)[range(count), answer.output_ids]
        assert answer.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
        assert len(answer.proofs) == proof_count(count)
        for chunk in verify_proofs(prefill.patterns, answer.proofs, 16):
            assert chunk.exponent_mismatches <= 1
            assert chunk.mantissa_mean <= 0.125
    assert seen == set(range(10))


def test_logits_come_in_pieces(engine):
    (prefill,) = engine.prefill([([3, 4], [5, 6, 7])])
    np.testing.assert_array_equal(prefill.logits(0, 3)[1:], prefill.logits(1, 3))


def test_patterns_are_the_protocol_s(model, engine):
    with torch.inference_mode():
        hidden = model.model(torch.tensor([[3, 4, 5, 6]])).last_hidden_state[0, 1:4].numpy()
    (prefill,) = engine.prefill([([3, 4], [5, 6, 7])])
    assert (np.abs(prefill.patterns.astype(int) - bf16_patterns(hidden).astype(int)) <= 1).all()
    assert (prefill.patterns == bf16_patterns(hidden)).mean() > 0.99


def test_threads_change_no_token(model_dir, engine):
    requests = make_requests(6)
    one = engine.generate(requests, SAMPLING)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = engine.generate(requests, SAMPLING)
    finally:
        torch.set_num_threads(before)
    assert [a.output_ids for a in one] == [a.output_ids for a in two]


def test_bfloat16_generates_and_proves(model_dir):
    engine = make_engine(model_dir, dtype="bfloat16")
    assert engine.info.dtype == "bfloat16"
    requests = make_requests(4)
    answers = engine.generate(requests, SAMPLING)
    for prefill in engine.prefill([(r.prompt_ids, a.output_ids) for r, a in zip(requests, answers, strict=True)]):
        results = verify_proofs(prefill.patterns, answers[prefill.index].proofs, 16)
        assert all(result.exponent_mismatches <= 8 for result in results)


def test_answers_without_proofs(engine):
    requests = make_requests(4)
    plain = engine.generate(requests, replace(SAMPLING, top_k_proof=0))
    proved = engine.generate(requests, SAMPLING)
    assert [a.output_ids for a in plain] == [a.output_ids for a in proved]
    assert all(a.proofs == [] for a in plain)


def test_progress_counts_tokens(model_dir):
    seen = []
    answers = make_engine(model_dir, max_batch=3).generate(make_requests(8), SAMPLING, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == sum(len(answer.output_ids) for answer in answers)


def test_nothing_asked_nothing_answered(engine):
    assert engine.generate([], SAMPLING) == []
    assert list(engine.prefill([])) == []


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], "needs a prompt token"),
        ([3, VOCAB], "outside the policy's vocabulary"),
        ([-1], "outside the policy's vocabulary"),
        ([3] * 217, "exceed the policy's 256 positions"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(engine, prompt_ids, message):
    with pytest.raises(ModelError, match=message):
        engine.generate([GenerationRequest(prompt_ids, bytes(32))], SAMPLING)


@pytest.mark.parametrize(
    ("output_ids", "message"),
    [([], "an output token"), ([VOCAB], "vocabulary"), ([3] * 255, "exceed")],
)
def test_outputs_that_do_not_fit_are_refused(engine, output_ids, message):
    with pytest.raises(ModelError, match=message):
        list(engine.prefill([([3, 4], output_ids)]))


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": float("nan")}, {"max_new_tokens": 0}])
def test_sampling_that_makes_no_sense_is_refused(engine, changes):
    with pytest.raises(ModelError, match="cannot be drawn"):
        engine.generate(make_requests(2), replace(SAMPLING, **changes))


def test_a_broken_policy_is_named(model, tmp_path):
    model_dir = write_model(model, tmp_path)
    weights = load_file(model_dir / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model_dir / "model.safetensors")
    with pytest.raises(ModelError, match="not finite"):
        make_engine(model_dir).generate(make_requests(2), SAMPLING)


def test_a_failed_load_keeps_the_policy(engine, tmp_path):
    requests = make_requests(2)
    before = engine.generate(requests, SAMPLING)
    with pytest.raises(ModelError):
        engine.load(tmp_path)
    assert engine.generate(requests, SAMPLING) == before


def test_loading_replaces_the_policy(engine, tmp_path):
    requests = make_requests(4)
    before = engine.generate(requests, SAMPLING)
    engine.load(write_model(build_model("qwen2-grouped", seed=7), tmp_path))
    assert engine.generate(requests, SAMPLING) != before


def test_an_engine_without_a_policy_says_so():
    with pytest.raises(ModelError, match="holds no policy"):
        TorchEngine().generate(make_requests(2), SAMPLING)


def test_settings_are_checked():
    with pytest.raises(ModelError, match="no dtype 'int4'"):
        TorchEngine(dtype="int4")
    with pytest.raises(ModelError, match="batch of 0"):
        TorchEngine(max_batch=0)
    with pytest.raises(ModelError, match="cannot use the device 'abacus'"):
        TorchEngine(device="abacus")


def test_a_compute_process_is_told_its_engine(monkeypatch, model_dir):
    monkeypatch.setenv("INTELLECT_DTYPE", "bfloat16")
    monkeypatch.setenv("INTELLECT_THREADS", "1")
    engine = engine_from_environment()
    engine.load(model_dir)
    assert engine.info.dtype == "bfloat16"
    assert torch.get_num_threads() == 1


def test_compute_processes_start_without_transformers():
    """Importing transformers takes seconds and a third of a gigabyte, in every process of a node."""
    program = "import sys, node.inference.compute, node.validator.compute; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=os.environ | {"PYTHONPATH": ROOT})

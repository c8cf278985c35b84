"""Which engines the contract is tested on, and what their tests share.

An engine that is not installed here is left out, and a test says so. Starting one may cost half a minute, so each is
made once; tests leave it as they found it.
"""

import importlib.util
import random

import numpy as np
import pytest
import torch
from tiny_models import EOS, VOCAB

from node.engines.base import GenerationRequest, SamplingParams
from node.engines.registry import engine_factory
from protocol.sampling import margins, position_keys
from protocol.toploc import proof_count, verify_proofs

TOP_K = 16
SAMPLING = SamplingParams(temperature=0.8, max_new_tokens=40, stop_ids=(EOS,), top_k_proof=TOP_K)
MARGIN = 1e-3
"""By how much a token of one float32 engine may lose in another, in logits."""


_HAS_VLLM = all(map(importlib.util.find_spec, ("vllm", "node.engines.vllm_engine")))
ENGINES = ["torch", "transformers", *(["vllm"] if _HAS_VLLM else [])]
LEFT_OUT = "" if _HAS_VLLM else "the contract was not tested on vllm, which is not installed here"


def make_engine(name, model_dir, **options):
    engine = engine_factory(name)(**options)
    engine.load(model_dir)
    return engine


def make_requests(count, *, seed=0, group=2):
    """Prompts of many lengths, each asked for `group` times with other noise."""
    source = random.Random(seed)
    prompts = [[source.randrange(3, VOCAB) for _ in range(source.randint(1, 30))] for _ in range(-(-count // group))]
    return [GenerationRequest(prompts[i // group], source.randbytes(32)) for i in range(count)]


def check(checker, requests, answers, sampling=SAMPLING):
    """Hold answers against an engine's own pass over them, as a validator does."""
    seen = set()
    for prefill in checker.prefill([(r.prompt_ids, a.output_ids) for r, a in zip(requests, answers, strict=True)]):
        seen.add(prefill.index)
        request, answer = requests[prefill.index], answers[prefill.index]
        count = len(answer.output_ids)
        logits = prefill.logits(0, count)
        assert prefill.patterns.shape == (count, checker.info.hidden_size)
        assert logits.shape == (count, checker.info.vocab_size)
        keys = position_keys(request.seed, count)
        lost = margins(logits, np.array(answer.output_ids), keys=keys, temperature=sampling.temperature)
        assert lost.max() < MARGIN
        scaled = torch.from_numpy(logits) / sampling.temperature
        logprobs = torch.log_softmax(scaled, -1)[range(count), answer.output_ids]
        assert answer.logprobs == pytest.approx(logprobs.tolist(), abs=MARGIN)
        assert len(answer.proofs) == proof_count(count)
        for chunk in verify_proofs(prefill.patterns, answer.proofs, sampling.top_k_proof):
            assert chunk.exponent_mismatches <= 1
            assert chunk.mantissa_mean <= 0.125
    assert seen == set(range(len(requests)))


def same_up_to_margins(checker, requests, ours, theirs):
    """Tokens are equal, or they part where both were about equally good."""
    for request, one, other in zip(requests, ours, theirs, strict=True):
        pairs = zip(one.output_ids, other.output_ids, strict=False)
        parted = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if parted is None:
            assert one.output_ids == other.output_ids
            continue
        for answer in (one, other):
            head = answer.output_ids[: parted + 1]
            (prefill,) = checker.prefill([(request.prompt_ids, head)])
            keys = position_keys(request.seed, len(head))
            lost = margins(prefill.logits(0, len(head)), np.array(head), keys=keys, temperature=SAMPLING.temperature)
            assert lost[parted] < MARGIN

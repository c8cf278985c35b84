"""Answers computed behind shared prompts equal those computed whole, whatever the lengths."""

import pytest
import torch
from tiny_models import build_model, write_model

from node.engines import prompts
from node.engines.prompts import answer_states
from node.engines.torch_engine import TorchEngine


@pytest.fixture(scope="module", params=["qwen2-grouped", "llama3-rope", "qwen3"])
def decoder(request, tmp_path_factory):
    engine = TorchEngine()
    engine.load(write_model(build_model(request.param), tmp_path_factory.mktemp(request.param)))
    return engine._loaded._decoder


def group(prompt_length, answer_lengths, *, start=3):
    prompt = [(start + 7 * i) % 60 + 3 for i in range(prompt_length)]
    return [(prompt, [(start + length + 5 * i) % 60 + 3 for i in range(length)]) for length in answer_lengths]


@pytest.mark.parametrize(
    "sequences",
    [
        group(40, [5, 9, 1, 9]),
        group(40, [1, 1, 1]),
        [*group(30, [4, 8]), *group(12, [8, 8, 3], start=9), *group(1, [6, 6], start=20)],
    ],
    ids=["one-group", "single-tokens", "several-groups"],
)
def test_sharing_prompts_changes_nothing(decoder, sequences, monkeypatch):
    shared = answer_states(decoder, sequences)
    monkeypatch.setattr(prompts, "_WORTHWHILE", 0.0)
    whole = answer_states(decoder, sequences)
    for row, (_, answer) in enumerate(sequences):
        assert torch.allclose(shared[row, : len(answer)], whole[row, : len(answer)], atol=1e-4)


def test_prompts_are_shared_where_it_saves_work_and_the_mask_is_small(decoder, monkeypatch):
    calls = []
    monkeypatch.setattr(prompts, "_behind_shared_prompts", lambda *args: calls.append(1))
    answer_states(decoder, group(40, [5, 5]))
    assert calls == [1]
    answer_states(decoder, [*group(5, [40]), *group(6, [40])])  # nothing is shared
    monkeypatch.setattr(prompts, "_MOST_MASK", 10)
    answer_states(decoder, group(40, [5, 5]))
    assert calls == [1]

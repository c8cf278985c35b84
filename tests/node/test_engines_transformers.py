"""Architectures that the built-in decoder does not have run in transformers' own model: same rows, same proofs."""

import json

import pytest
import torch
from engine_contract import SAMPLING, check, make_requests
from tiny_models import VOCAB, build_model, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from node.engines.torch_engine import TorchEngine, transformers_engine
from protocol.errors import ModelError

COMMON = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
GEMMA2 = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "final_logit_softcapping": 3.0,
}
"""Windows of attention, and logits that are more than the head's product."""
OTHERS = {"gpt2": GPT2, "gemma2": GEMMA2}


def write_other(name, path, *, seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **COMMON | OTHERS[name])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0).add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_generate_and_check(name, tmp_path):
    engine = TorchEngine(max_batch=5)
    engine.load(write_other(name, tmp_path / "model"))
    assert engine.info.name == "transformers"
    assert (engine.info.vocab_size, engine.info.hidden_size, engine.info.max_model_len) == (VOCAB, 64, 256)
    requests = make_requests(8)
    answers = engine.generate(requests, SAMPLING)
    check(engine, requests, answers)
    engine.max_batch = 8
    assert [a.output_ids for a in engine.generate(requests, SAMPLING)] == [a.output_ids for a in answers]


def test_the_built_in_decoder_is_preferred(tmp_path):
    model_dir = write_model(build_model("qwen2"), tmp_path)
    engine, other = TorchEngine(), transformers_engine()
    engine.load(model_dir)
    other.load(model_dir)
    assert (engine.info.name, other.info.name) == ("torch", "transformers")


def test_an_update_to_another_architecture_is_refused(tmp_path):
    engine = TorchEngine()
    engine.load(write_other("gpt2", tmp_path / "one"))
    with pytest.raises(ModelError, match="another architecture"):
        engine.update(write_other("gemma2", tmp_path / "two"))
    assert engine.info.hidden_size == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "wants to run code"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "no-such-model"}, "transformers cannot load"),
        ({"n_layer": 3}, "lacks 12 tensors, the first is transformer.h.2"),
        ({"n_embd": 32}, "transformers cannot load|lacks"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path, changes, message):
    path = write_other("gpt2", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        TorchEngine().load(path)

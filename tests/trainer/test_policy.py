"""Policies on disk and in memory: what a model says is what is scored, equal weights give equal bytes."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError
from trainer.packing import pad
from trainer.policy import Policy, build_policy, load_policy, save_weights
from trainer.recipe import ASSETS_DIR

DEMO_POLICY = ASSETS_DIR / "sort-digits"
PAIRS = [([1, 9, 9], [4, 5, 2]), ([1, 5, 6, 7, 8, 9, 10, 11], [7, 2]), ([1, 4], [8, 9, 10, 11, 12, 13, 14, 2])]


def tiny_model(tmp_path):
    target = tmp_path / "model"
    shutil.copytree(DEMO_POLICY, target)
    return target


def test_log_probabilities_are_those_of_the_plain_model(policy):
    prompt, output = PAIRS[1]
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + output])).logits[0]
        expected = (logits / 0.5).log_softmax(-1)
        logprobs, entropy = policy.score(pad([(prompt, output)], [0]), 0.5)
    rows = range(len(prompt) - 1, len(prompt) + len(output) - 1)
    torch.testing.assert_close(logprobs, torch.stack([expected[r, t] for r, t in zip(rows, output, strict=True)]))
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1)[list(rows)])


def test_entropy_has_a_gradient_only_where_it_is_asked_for(policy):
    batch = pad(PAIRS, range(3))
    assert policy.score(batch, 1.0)[1].requires_grad
    assert not policy.score(batch, 1.0, with_entropy=False)[1].requires_grad


def test_equal_weights_give_equal_bytes_and_come_back_exactly(policy, tmp_path):
    target = tiny_model(tmp_path)
    digests = set()
    for name in ("first.safetensors", "second.safetensors"):
        save_weights(policy.model, tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1
    shutil.copyfile(tmp_path / "first.safetensors", target / "model.safetensors")
    again = load_policy(target).parameters()
    assert all(torch.equal(parameter, again[name]) for name, parameter in policy.parameters().items())


def test_a_tied_weight_is_written_once(policy, tmp_path):
    save_weights(policy.model, tmp_path / "model.safetensors")
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ModelError, match="there is no model directory"):
        load_policy(tmp_path / "nowhere")


@pytest.mark.parametrize("damage", ["no config", "no weights", "truncated", "garbage config", "pickle only"])
def test_an_unusable_directory_is_a_model_error(tmp_path, damage):
    target = tiny_model(tmp_path)
    weights = target / "model.safetensors"
    if damage == "no config":
        (target / "config.json").unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "garbage config":
        (target / "config.json").write_text("{")
    else:
        weights.rename(target / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(target)


def test_missing_weights_are_not_replaced_by_random_ones(tmp_path):
    """Attack: a policy without one of its tensors, which transformers would fill with noise."""
    target = tiny_model(tmp_path)
    tensors = load_file(target / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights model\.norm\.weight"):
        load_policy(target)


def test_code_from_a_model_directory_is_never_run(tmp_path):
    """Attack: a model whose config points at its own Python code."""
    target = tiny_model(tmp_path)
    (target / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((target / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (target / "config.json").write_text(json.dumps(config | {"auto_map": auto_map, "model_type": "evil"}))
    with pytest.raises(ModelError):
        load_policy(target)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "gpt2", "n_positions": 96}, 96),
        ({"model_type": "mpt", "max_seq_len": 80, "d_model": 32, "n_heads": 2, "n_layers": 1}, 80),
        ({"model_type": "bloom", "seq_length": 64, "n_head": 2, "n_layer": 1}, 64),
        ({"model_type": "mamba", "state_size": 4, "hidden_size": 32, "num_hidden_layers": 1}, None),
        ({"model_type": "mamba", "state_size": 4, "hidden_size": 32, "num_hidden_layers": 1, "n_ctx": 48}, 48),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_how_many_tokens_a_model_takes_is_read_whatever_it_is_called(config, positions):
    width = {"hidden_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 2} if config["model_type"] == "gpt2" else {}
    policy = Policy(build_policy({"vocab_size": 64} | width | config))
    if positions is None:
        with pytest.raises(ModelError, match="does not say how many tokens the model takes"):
            _ = policy.max_length
    else:
        assert policy.max_length == positions

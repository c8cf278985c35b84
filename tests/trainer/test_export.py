"""An exported policy is what transformers loads: the same weights, the same tokens, whole or not at all."""

import errno
import json
import os
import shutil

import pytest
import torch

from protocol.errors import ConfigError, DataDirError, ModelError
from trainer.checkpoint import Checkpoints
from trainer.export import export_policy, policy_directory
from trainer.recipe import ASSETS_DIR
from trainer.step import TrainStep

DEMO_POLICY = ASSETS_DIR / "sort-digits"


@pytest.fixture
def data_dir(tmp_path, recipe, make_rollouts):
    """A trainer's data directory with checkpoints 0 and 1."""
    checkpoints = Checkpoints(tmp_path / "data" / "training", keep=3)
    saved = checkpoints.start(DEMO_POLICY)
    policy, optimiser = checkpoints.restore(saved, recipe.optimiser)
    TrainStep(policy, optimiser, recipe).run(0, make_rollouts(2))
    checkpoints.save(1, policy, optimiser, report={}, previous=saved)
    return tmp_path / "data"


def test_transformers_loads_what_was_exported(data_dir, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = policy_directory(data_dir)
    out = export_policy(source, tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(out, use_safetensors=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    held = AutoModelForCausalLM.from_pretrained(source)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), held.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 64
    assert tokenizer("s51=")["input_ids"][0] == 1
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<bos>", 2)
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2
    assert {path.suffix for path in out.iterdir()} == {".json", ".safetensors"}


def test_another_number_format(data_dir, tmp_path):
    from safetensors.torch import load_file

    out = export_policy(policy_directory(data_dir), tmp_path / "out", dtype="bfloat16")
    kept = load_file(policy_directory(data_dir) / "model.safetensors")
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], kept[name].bfloat16()) for name in kept)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_where_a_policy_is_found(data_dir):
    newest = data_dir / "training" / "step-00000001" / "policy"
    assert policy_directory(data_dir) == newest
    assert policy_directory(data_dir / "training") == newest
    assert policy_directory(data_dir, step=0) == data_dir / "training" / "step-00000000" / "policy"
    assert policy_directory(newest.parent) == newest
    assert policy_directory(newest) == newest
    assert policy_directory(DEMO_POLICY) == DEMO_POLICY


def test_a_damaged_checkpoint_is_not_exported(data_dir):
    weights = data_dir / "training" / "step-00000001" / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert policy_directory(data_dir).parent.name == "step-00000000"
    with pytest.raises(ModelError, match="neither a model nor a usable checkpoint of step 1"):
        policy_directory(data_dir, step=1)
    with pytest.raises(ModelError, match="step 1"):
        policy_directory(data_dir / "training" / "step-00000001")


@pytest.mark.parametrize("step", [None, 7])
def test_nothing_to_export_is_named(tmp_path, step):
    with pytest.raises(ModelError, match="neither a model nor a usable checkpoint"):
        policy_directory(tmp_path, step=step)


def test_a_step_of_a_mere_model_is_named():
    with pytest.raises(ConfigError, match="has no steps"):
        policy_directory(DEMO_POLICY, step=3)


def test_what_exists_is_not_overwritten(tmp_path):
    with pytest.raises(ConfigError, match="exists already"):
        export_policy(DEMO_POLICY, tmp_path)


def test_other_formats_of_weights_are_no_model(tmp_path):
    model = shutil.copytree(DEMO_POLICY, tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"config\.json and \*\.safetensors"):
        export_policy(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataDirError, match=r"cannot be written to .* No space left"):
        export_policy(DEMO_POLICY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

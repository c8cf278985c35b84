"""Memory and sizes against values worked out by hand, and against what torch really allocates."""

import tomllib
from dataclasses import astuple

import msgspec
import pytest
import torch

from protocol.errors import ModelError
from trainer.budget import PIECE_LOGITS, checkpoints_kept, gpu_budget, model_shape, run_budget
from trainer.head import PIECE_ELEMENTS
from trainer.policy import build_policy
from trainer.recipe import RECIPES_DIR, load_recipe
from trainer.state_dir import steps_to_drop

TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}


def shape(**fields):
    return model_shape(TINY | {"model_type": "qwen2"} | fields, origin="test")


def shipped(name):
    return model_shape(tomllib.loads((RECIPES_DIR / "shapes" / f"{name}.toml").read_text()), origin=name)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "llama", "tie_word_embeddings": False},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "head_dim": 16},
        {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    ],
)
def test_parameters_are_those_of_the_model_itself(fields):
    model = build_policy(TINY | fields)
    assert shape(**fields).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "parameters"), [("qwen--qwq-32b", 32_763_876_352), ("smollm2-135m", 134_515_008)])
def test_shipped_shapes_have_the_published_number_of_parameters(name, parameters):
    assert shipped(name).parameters == parameters


def test_activations_are_what_torch_keeps_for_the_gradient():
    """bfloat16, as on a GPU; the difference of two depths, so that embeddings and head fall out."""
    fields = {"hidden_size": 64, "intermediate_size": 256, "tie_word_embeddings": True}
    tokens, kept = 64, {}
    for layers in (2, 4):
        model = build_policy(TINY | fields | {"model_type": "qwen2", "num_hidden_layers": layers}).bfloat16()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        seen, alive = {}, []

        def keep(tensor, weights=weights, seen=seen, alive=alive):
            storage = tensor.untyped_storage()
            alive.append(tensor)
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        kept[layers] = sum(seen.values())
    measured = (kept[4] - kept[2]) / 2 / tokens / 2
    assert shape(**fields).layer_activations == pytest.approx(measured, rel=0.05)


def test_target_short_by_hand():
    """32 763 876 352 parameters over 8 GPUs are 4 095 484 544 each, and so on."""
    recipe, model = load_recipe("target-short"), shipped("qwen--qwq-32b")
    gpu = gpu_budget(recipe, model)
    assert gpu.weights == gpu.masters == gpu.reference == gpu.gradients == 4 * 4_095_484_544
    assert gpu.moments == 8 * 4_095_484_544
    # Two layers and what is outside of layers, three times (values, gradients, reference), 2 bytes each.
    layer = 2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 27648 + (5120 + 2 * 1024) + 2 * 5120
    outside = 2 * 152064 * 5120 + 5120
    assert 64 * layer + outside == 32_763_876_352
    assert gpu.gathered == 2 * 3 * (2 * layer + outside)
    # What enters each of 64 layers, and the inside of one: 32 768 tokens, 2 bytes a value.
    assert gpu.activations == 2 * 32768 * (64 * 5120 + 8 * 5120 + 2 * (5120 + 1024) + 4 * 27648)
    # A piece of 2^26 logits, where 32 768 tokens have 4 982 833 152.
    assert gpu.logits == 67_108_864 * (2 + 4 * 4)
    assert gpu.total == sum(astuple(gpu))


def test_what_a_run_of_target_short_needs():
    budget = run_budget(load_recipe("target-short"), shipped("qwen--qwq-32b"))
    assert budget.policy_bytes == 65_527_752_704
    assert budget.checkpoint_bytes == 32_763_876_352 * (2 + 4 + 8)
    assert (budget.rollouts_per_step, budget.prompts_per_step, budget.updates_per_step) == (4096, 256, 8)
    assert budget.tokens_per_step == 4096 * 5000
    assert budget.expected_tokens_per_step == 4096 * 2500
    assert budget.gpu_loading_bytes == 12 * 4_095_484_544, "weights, masters and the reference"
    assert budget.host_loading_bytes == 4 * 152064 * 5120, "one tensor in parts"
    assert budget.host_bytes == budget.checkpoint_bytes
    assert budget.disk_bytes == budget.checkpoints_kept * budget.checkpoint_bytes


@pytest.mark.parametrize(
    ("steps", "keep", "every", "kept"),
    [(200, 5, 25, 13), (200, 5, 0, 5), (3, 5, 0, 4), (10, 1, 10, 2), (10, 1, 3, 5), (0, 5, 2, 1)],
)
def test_checkpoints_kept(steps, keep, every, kept):
    """Written one after another, as the trainer does."""
    held = []
    for step in range(steps + 1):
        held.append(step)
        held = [each for each in held if each not in steps_to_drop(held, keep=keep, keep_every=every)]
    assert len(held) == kept == checkpoints_kept(steps, keep=keep, keep_every=every)


def test_settings_move_memory_as_they_should():
    recipe, model = load_recipe("target-short"), shipped("qwen--qwq-32b")

    def total(**policy):
        changed = msgspec.structs.replace(recipe, policy=msgspec.structs.replace(recipe.policy, **policy))
        return gpu_budget(changed, model)

    assert total(processes=16).weights * 2 == total(processes=8).weights
    assert total(processes=1).gathered == 0
    assert total(activation_checkpointing=False).activations > 10 * total().activations
    assert total(dtype="float32", compute="float32").masters == 0


def test_logits_are_counted_as_the_trainer_makes_them():
    assert PIECE_LOGITS == PIECE_ELEMENTS
    small = gpu_budget(load_recipe("demo"), shape(vocab_size=64))
    assert small.logits == load_recipe("demo").optimiser.micro_batch_tokens * 64 * (4 + 4 * 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "memory is known of llama"),
        ({"hidden_size": "wide"}, "no shape"),
        ({"hidden_size": 0}, "no shape"),
        ({"vocab_size": 2**40}, "no shape"),
    ],
)
def test_a_shape_that_is_none_is_named(fields, message):
    with pytest.raises(ModelError, match=message):
        shape(**fields)

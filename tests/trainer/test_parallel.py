"""Two processes with gloo learn what one does: same losses, same weights, whatever they had to share out."""

import json
import os
import traceback

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from trainer.optimiser import make_optimiser, optimiser_tensors, restore_optimiser, write_optimiser
from trainer.parallel import World
from trainer.policy import load_policy
from trainer.recipe import ASSETS_DIR
from trainer.step import TrainStep

DEMO_POLICY = ASSETS_DIR / "sort-digits"


def train(recipe, batches, world, tmp_path):
    """Two steps; between them the optimiser's state goes to the disk and comes back."""
    policies = [load_policy(DEMO_POLICY, settings=recipe.policy) for _ in range(2)]
    for policy in policies:
        policy.prepare(world)
        if recipe.policy.activation_checkpointing:
            policy.piece_elements = 5 * policy.vocab_size  # the output layer in pieces, too
    policy, reference = policies
    step = TrainStep(policy, make_optimiser(policy, recipe.optimiser), recipe, reference=reference, world=world)
    metrics = [step.run(0, batches[0])]
    path = tmp_path / f"moments-{world.size}-{world.rank}"
    write_optimiser(optimiser_tensors(step.optimiser), path)
    restored = make_optimiser(policy, recipe.optimiser)
    restore_optimiser(restored, path)
    step = TrainStep(policy, restored, recipe, reference=reference, world=world)
    metrics.append(step.run(1, batches[1]))
    return metrics, policy.tensors()


def train_in_a_child(recipe, batches, rank, tmp_path):
    """Process id of a child that writes what it learned."""
    child = os.fork()
    if child:
        return child
    try:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        metrics, tensors = train(recipe, batches, World(rank, 2), tmp_path)
        save_file(tensors, tmp_path / f"weights-{rank}")
        (tmp_path / f"metrics-{rank}").write_text(json.dumps(metrics))
        dist.destroy_process_group()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


CASES = {
    "plain": {"policy": {"dtype": "float32"}},
    "everything": {
        "policy": {"dtype": "bfloat16", "activation_checkpointing": True, "layout": "packed"},
        "loss": {"kl_coefficient": 0.1, "level": "sample", "old_logprobs": "trainer", "entropy_coefficient": 0.01},
        "optimiser": {"micro_batch_tokens": 40},
    },
    "one of them idle": {
        "groups": 1,
        "policy": {"dtype": "float32", "layout": "padded"},
        "optimiser": {"updates_per_step": 1},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_does(recipe, make_rollouts, tmp_path, case):
    changes = dict(CASES[case])
    batches = [make_rollouts(changes.pop("groups", 5), seed=seed, checkpoint_step=seed) for seed in range(2)]
    for section, values in changes.items():
        changed = msgspec.structs.replace(getattr(recipe, section), **values)
        recipe = msgspec.structs.replace(recipe, **{section: changed})
    children = [train_in_a_child(recipe, batches, rank, tmp_path) for rank in range(2)]
    expected, weights = train(recipe, batches, World(), tmp_path)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    first, second = (json.loads((tmp_path / f"metrics-{rank}").read_text()) for rank in range(2))
    assert first == second
    # Adam's first steps follow the signs of gradients near zero, where the order of a sum decides.
    tolerance = 1e-3 if recipe.policy.dtype == "float32" else 2e-2
    for one, other in zip(expected, first, strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_ratio", "drift", "ratio_max", "reward", "updates"):
            assert other[name] == pytest.approx(one[name], rel=tolerance, abs=1e-5), name
    found = [load_file(tmp_path / f"weights-{rank}") for rank in range(2)]
    for name, tensor in weights.items():
        assert torch.equal(found[0][name], found[1][name])
        assert found[0][name].dtype == tensor.dtype
        largest = float((found[0][name].float() - tensor.float()).abs().max())
        assert largest < (4e-5 if tensor.dtype == torch.float32 else 2e-2), name

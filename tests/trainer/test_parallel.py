"""Two processes with gloo learn what one does: same losses, same weights, whatever they had to share out."""

import json
import os
import shutil
import traceback

import msgspec
import pytest
import torch
import torch.distributed as dist
from processes_kit import in_two_processes
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError
from trainer.optimiser import make_optimiser, optimiser_tensors, restore_optimiser, write_optimiser
from trainer.parallel import World, own_part, reshard
from trainer.policy import load_policy
from trainer.recipe import ASSETS_DIR
from trainer.step import TrainStep

DEMO_POLICY = ASSETS_DIR / "sort-digits"


def train(recipe, batches, world, tmp_path):
    """Two steps; between them the optimiser's state goes to the disk and comes back."""
    policies = [load_policy(DEMO_POLICY, settings=recipe.policy, world=world) for _ in range(2)]
    for policy in policies:
        policy.prepare()
        if recipe.policy.activation_checkpointing:
            policy.piece_elements = 5 * policy.vocab_size  # the output layer in pieces, too
    policy, reference = policies
    step = TrainStep(policy, make_optimiser(policy, recipe.optimiser), recipe, reference=reference)
    metrics = [step.run(0, batches[0])]
    path = tmp_path / f"moments-{world.size}-{world.rank}"
    write_optimiser(optimiser_tensors(step.optimiser), path)
    restored = make_optimiser(policy, recipe.optimiser)
    restore_optimiser(restored, path)
    step = TrainStep(policy, restored, recipe, reference=reference)
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


def held_bytes(tensors):
    return sum(own_part(tensor).nbytes for tensor in tensors)


def test_each_process_holds_its_share_and_together_they_are_the_policy(recipe, make_rollouts, tmp_path, monkeypatch):
    """Nobody loads the model whole. Weights, gradients, masters and moments are 20 bytes a parameter over both, and a
    reference 4 more. What is put together again, in the first process alone, is what one process has, to the bit.
    """
    rows = make_rollouts(4)
    alone = load_policy(DEMO_POLICY, settings=recipe.policy)
    expected, count = alone.tensors(), sum(held.numel() for held in alone.parameters().values())

    def work(world):
        monkeypatch.setattr("trainer.policy._load_whole", lambda path: pytest.fail("loaded whole"))
        policy, reference = (load_policy(DEMO_POLICY, settings=recipe.policy, world=world) for _ in range(2))
        first = policy.tensors(keep=world.rank == 0)
        step = TrainStep(policy, make_optimiser(policy, recipe.optimiser), recipe, reference=reference)
        step.run(0, rows)
        reshard(reference.model)  # what its last pass has put together is kept for the next
        optimiser = step.optimiser
        parameters = list(policy.parameters().values())
        state = [value for held in optimiser.state.values() for name, value in held.items() if name != "step"]
        sizes = [parameters, [held.grad for held in parameters], optimiser.masters.values(), state]
        sizes.append(reference.parameters().values())
        path = tmp_path / "moments"
        if world.rank == 0:
            write_optimiser(before := optimiser_tensors(optimiser), path)
        else:
            optimiser_tensors(optimiser, keep=False)
        dist.barrier()
        restored = make_optimiser(policy, recipe.optimiser)
        restore_optimiser(restored, path)
        after = optimiser_tensors(restored, keep=world.rank == 0)
        return {
            "same": all(torch.equal(first[name], value) for name, value in expected.items()) if first else None,
            "kept": len(first) + len(after),
            "restored": all(torch.equal(after[name], before[name]) for name in before) if after else None,
            "bytes": [held_bytes(tensors) for tensors in sizes],
        }

    one, other = in_two_processes(work, tmp_path)
    assert (one["same"], one["restored"]) == (True, True)
    assert (other["same"], other["restored"], other["kept"]) == (None, None, 0)
    both = [mine + theirs for mine, theirs in zip(one["bytes"], other["bytes"], strict=True)]
    assert both == [4 * count, 4 * count, 4 * count, 8 * count, 4 * count]
    assert max(one["bytes"][0], other["bytes"][0]) < 0.6 * 4 * count


def test_tensors_that_are_stored_under_other_names_are_read_whole_in_turn(tmp_path):
    """As transformers once named them, without the name of the part that they are in."""
    model_dir = shutil.copytree(DEMO_POLICY, tmp_path / "older")
    tensors = load_file(model_dir / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, model_dir / "model.safetensors", metadata={"format": "pt"})
    expected = load_policy(DEMO_POLICY).tensors()

    def work(world):
        found = load_policy(model_dir, world=world).tensors()
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

    assert in_two_processes(work, tmp_path) == [True, True]


def test_a_model_without_some_of_its_weights_is_refused_in_every_process(tmp_path):
    model_dir = shutil.copytree(DEMO_POLICY, tmp_path / "lacking")
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})

    def work(world):
        with pytest.raises(ModelError) as caught:
            load_policy(model_dir, world=world)
        return caught.value.message

    one, other = in_two_processes(work, tmp_path)
    assert "lacks the weights model.norm.weight" in one
    assert "could not load" in other


def test_weights_in_several_files_are_read_by_their_index(tmp_path, monkeypatch):
    model_dir = shutil.copytree(DEMO_POLICY, tmp_path / "shards")
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    files = {name: f"model-0000{place % 2}.safetensors" for place, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(part, model_dir / file, metadata={"format": "pt"})
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    expected = load_policy(DEMO_POLICY).tensors()

    def work(world):
        monkeypatch.setattr("trainer.policy._load_whole", lambda path: pytest.fail("loaded whole"))
        found = load_policy(model_dir, world=world).tensors()
        return all(torch.equal(found[name], value) for name, value in expected.items())

    assert in_two_processes(work, tmp_path) == [True, True]

"""The optimiser: float32 masters of a bfloat16 policy; state on disk that is exact, or refused."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError
from trainer.optimiser import make_optimiser, optimiser_tensors, restore_optimiser, write_optimiser
from trainer.policy import load_policy
from trainer.recipe import ASSETS_DIR, PolicySettings
from trainer.step import TrainStep


@pytest.fixture
def trained(policy, optimiser, recipe, make_rollouts):
    TrainStep(policy, optimiser, recipe).run(0, make_rollouts(4))
    return policy, optimiser


def test_state_comes_back_exactly(trained, recipe, tmp_path):
    policy, optimiser = trained
    write_optimiser(optimiser_tensors(optimiser), tmp_path / "moments")
    other = load_policy(ASSETS_DIR / "sort-digits")
    restored = make_optimiser(other, recipe.optimiser)
    restore_optimiser(restored, tmp_path / "moments")
    for name, parameter in policy.parameters().items():
        expected, found = optimiser.state[parameter], restored.state[other.parameters()[name]]
        assert expected.keys() == found.keys()
        for moment, value in expected.items():
            assert torch.equal(value, found[moment])
            assert value.dtype == found[moment].dtype


@pytest.mark.parametrize("damage", ["missing moment", "other shape", "other model", "truncated", "absent"])
def test_state_that_does_not_fit_is_refused(trained, recipe, tmp_path, damage):
    policy, optimiser = trained
    path = tmp_path / "moments"
    write_optimiser(optimiser_tensors(optimiser), path)
    tensors = load_file(path)
    if damage == "missing moment":
        del tensors["model.norm.weight:step"]
    elif damage == "other shape":
        tensors["model.norm.weight:exp_avg"] = torch.zeros(3)
    elif damage == "other model":
        tensors["model.layers.9.weight:exp_avg"] = torch.zeros(3)
    save_file(tensors, path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "absent":
        path.unlink()
    with pytest.raises(ModelError, match="optimiser's state"):
        restore_optimiser(make_optimiser(policy, recipe.optimiser), path)


COARSE = PolicySettings(dtype="bfloat16")


def coarse_policy():
    return load_policy(ASSETS_DIR / "sort-digits", settings=COARSE)


def coarse_step(recipe, **settings):
    policy = coarse_policy()
    recipe = msgspec.structs.replace(
        recipe, policy=COARSE, optimiser=msgspec.structs.replace(recipe.optimiser, **settings)
    )
    return TrainStep(policy, make_optimiser(policy, recipe.optimiser), recipe)


def is_bfloat16(tensor):
    return torch.equal(tensor, tensor.to(torch.bfloat16).float())


def test_a_bfloat16_policy_is_its_masters_rounded(recipe, make_rollouts):
    step = coarse_step(recipe)
    step.run(0, make_rollouts(4))
    published = step.policy.tensors()
    for name, parameter in step.policy.parameters().items():
        master = step.optimiser.masters[name]
        assert published[name].dtype == torch.bfloat16
        assert torch.equal(published[name], master.to(torch.bfloat16))
        assert torch.equal(published[name].float(), parameter)
    assert not all(is_bfloat16(master) for master in step.optimiser.masters.values())


def test_steps_too_small_for_bfloat16_add_up_in_the_masters(recipe, make_rollouts):
    """At this rate no single step reaches the next bfloat16 value of most weights; eight of them do for many."""
    step = coarse_step(recipe, learning_rate=2e-5, updates_per_step=1)
    step.run(0, make_rollouts(4))
    after_one = {name: tensor.clone() for name, tensor in step.policy.tensors().items()}
    for number in range(1, 9):
        step.run(number, make_rollouts(4, checkpoint_step=number))
    moved = sum(int((tensor != after_one[name]).sum()) for name, tensor in step.policy.tensors().items())
    assert moved > 0.05 * sum(tensor.numel() for tensor in after_one.values())


def test_masters_come_back_exactly(recipe, make_rollouts, tmp_path):
    step = coarse_step(recipe)
    step.run(0, make_rollouts(4))
    write_optimiser(optimiser_tensors(step.optimiser), tmp_path / "moments")
    restored = make_optimiser(coarse_policy(), recipe.optimiser)
    restore_optimiser(restored, tmp_path / "moments")
    assert all(torch.equal(master, restored.masters[name]) for name, master in step.optimiser.masters.items())


@pytest.mark.parametrize("written_as", ["float32", "bfloat16"])
def test_state_of_another_number_format_is_refused(recipe, make_rollouts, tmp_path, written_as):
    coarse = coarse_step(recipe)
    fine_policy = load_policy(ASSETS_DIR / "sort-digits")
    fine = TrainStep(fine_policy, make_optimiser(fine_policy, recipe.optimiser), recipe)
    writer, reader = (coarse, fine) if written_as == "bfloat16" else (fine, coarse)
    writer.run(0, make_rollouts(2))
    write_optimiser(optimiser_tensors(writer.optimiser), tmp_path / "moments")
    with pytest.raises(ModelError, match=r"another policy\.dtype"):
        restore_optimiser(reader.optimiser, tmp_path / "moments")

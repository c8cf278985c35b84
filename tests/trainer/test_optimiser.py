"""The optimiser's state on disk: exact, and refused where it does not fit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError
from trainer.optimiser import make_optimiser, restore_optimiser, save_optimiser
from trainer.policy import load_policy
from trainer.recipe import ASSETS_DIR
from trainer.step import TrainStep


@pytest.fixture
def trained(policy, optimiser, recipe, make_rollouts):
    TrainStep(policy, optimiser, recipe).run(0, make_rollouts(4))
    return policy, optimiser


def test_state_comes_back_exactly(trained, recipe, tmp_path):
    policy, optimiser = trained
    save_optimiser(policy, optimiser, tmp_path / "moments")
    other = load_policy(ASSETS_DIR / "sort-digits")
    restored = make_optimiser(other, recipe.optimiser)
    restore_optimiser(other, restored, tmp_path / "moments")
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
    save_optimiser(policy, optimiser, path)
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
        restore_optimiser(policy, make_optimiser(policy, recipe.optimiser), path)

"""A simulated run's recipe is written as it was read, tables in lists and all."""

import tomllib

import pytest

from protocol.errors import ConfigError
from simnet.recipe_file import to_toml, write_recipe
from simnet.scenario import RunPlan, load_scenario
from simnet.scenario_checks import check_possible
from trainer.recipe import load_recipe, recipe_path


def test_tables_in_lists_survive():
    table = {"name": "x", "environment": {"pools": [{"file": 'a "b"', "from_step": 0}, {"file": "c", "from_step": 9}]}}
    assert tomllib.loads("\n".join(to_toml(table))) == table


def mine(tmp_path, **replaced):
    """A recipe file of one's own: the demo's, with other lines."""
    text = recipe_path("demo").read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def written(scenario, tmp_path):
    write_recipe(scenario.run, tmp_path / "recipe.toml", seed=3)
    recipe = load_recipe(tmp_path / "recipe.toml")
    check_possible(scenario, recipe, seed=3)
    return recipe


def test_a_bare_recipe_is_run_by_a_small_fleet_as_it_is(tmp_path):
    scenario = load_scenario(mine(tmp_path))
    assert [plan.name for plan in scenario.nodes()] == [
        *("trainer-0", "relay-0", "relay-1", "validator-0", "inference-0", "inference-1")
    ]
    assert (scenario.name, scenario.run.name) == ("mine", "demo")
    assert "1 trainer, 2 relays, 1 validator, 2 inference nodes" in scenario.title
    recipe = written(scenario, tmp_path)
    assert (recipe.batch, recipe.optimiser.seed) == (load_recipe("demo").batch, 3)
    assert scenario.expect.steps_at_least == recipe.batch.total_steps == 50
    short = load_scenario(mine(tmp_path), short=True)
    assert short.expect.steps_at_least == written(short, tmp_path).batch.total_steps == 5


def test_a_bare_recipe_has_as_many_validators_as_must_agree_and_lets_the_fleet_in(tmp_path):
    invited = '[admission]\nkind = "invite"\n'
    path = mine(tmp_path, **{"quorum = 1": "quorum = 3", "[admission]\n": invited})
    scenario = load_scenario(path)
    assert sum(plan.role == "validator" for plan in scenario.nodes()) == 3
    assert written(scenario, tmp_path).admission.kind == "open"


def test_a_bare_recipe_with_a_mistake_is_told_what_is_wrong_with_the_recipe(tmp_path):
    with pytest.raises(ConfigError, match="quorm"):
        load_scenario(mine(tmp_path, **{"quorum = 1": "quorm = 1"}))


@pytest.mark.parametrize("seed", [-5, 2**60])
def test_a_seed_that_is_none_is_called_by_its_name(tmp_path, seed):
    with pytest.raises(ConfigError, match="--seed is"):
        write_recipe(RunPlan(), tmp_path / "recipe.toml", seed=seed)

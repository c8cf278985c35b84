"""`run create --dry-run` resolves recipes without weights, network or a data directory."""

import json
import socket

import pytest

from node.run_plan import plan_lines, plan_run, source_shape
from protocol.errors import ConfigError, EnvironmentUnknown, ModelError
from trainer.recipe import RECIPES_DIR, load_recipe, recipe_names


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a dry run of a shipped recipe needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_resolves_without_a_network(name, no_network):
    plan = plan_run(name)
    assert plan["parameters"] > 1000
    assert plan["gpu_bytes"]["total"] == sum(size for part, size in plan["gpu_bytes"].items() if part != "total")
    assert json.loads(json.dumps(plan)) == plan
    assert all(len(line) < 400 for line in plan_lines(plan))


@pytest.mark.parametrize(
    ("name", "targets"), [("target-short", [1000, 2000, 3000, 4000]), ("target-long", [2000, 4000, 6000, 8000, 10000])]
)
def test_the_papers_two_runs(name, targets):
    """INTELLECT-2, sections 3.1.2, 3.3, 3.4 and 4.1."""
    recipe, plan = load_recipe(name), plan_run(name)
    assert plan["model"] == "Qwen/QwQ-32B"
    assert plan["rollouts_per_step"] == 512 * plan["updates_per_step"] == 4096
    learning = plan["learning"]
    assert learning["learning_rate"] == 3e-7
    assert (learning["epsilon"], learning["delta"], learning["alpha"]) == (0.2, 4.0, 3e-4)
    assert learning["length_targets"] == targets
    assert (learning["asynchrony"], learning["micro_batch_tokens"]) == (2, 32768)
    assert recipe.batch.signal_only
    assert recipe.policy.processes > 1
    text = "\n".join(plan_lines(plan))
    assert "32,763,876,352 parameters" in text
    assert "65.5 GB" in text
    assert "458.7 GB" in text
    assert "loading       49.1 GB on each GPU, 3.1 GB of the machine's memory" in text
    assert "host memory   458.7 GB" in text
    assert "fits a GPU of the size of B200" in text
    assert "warning       batch.total_steps is a guess" in text
    assert f"calibrate --recipe {name} --dtype bfloat16" in text


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ('name = "sort-digits"', 'name = "nothing"', EnvironmentUnknown, "nothing"),
        ('source = "sort-digits"', 'source = "no such model"', ModelError, "no such model"),
        ("max_new_tokens = 10", "max_new_tokens = 256", ConfigError, "leaves no room for a prompt"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path, old, new, error, message):
    text = (RECIPES_DIR / "demo.toml").read_text()
    at = text.index("[environment]") if "name" in old else 0
    path = tmp_path / "mine.toml"
    path.write_text(text[:at] + text[at:].replace(old, new, 1))
    with pytest.raises(error, match=message):
        plan_run(str(path))


def test_a_shape_comes_from_a_directory(tmp_path):
    (tmp_path / "config.json").write_text((RECIPES_DIR.parent / "assets" / "sort-digits" / "config.json").read_text())
    assert source_shape(str(tmp_path)).parameters == source_shape("sort-digits").parameters == 102_848

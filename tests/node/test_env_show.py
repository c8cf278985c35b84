"""`intellect-node env …`: what is installed, and what one is."""

import json

import pytest
from typer.testing import CliRunner

from cli import app
from node.env_show import parse_parameters
from protocol.errors import ConfigError, EnvironmentUnknown


def run(*arguments):
    result = CliRunner().invoke(app, ["env", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_list_names_everything_with_its_package():
    found = {one["name"]: one for one in json.loads(run("list", "--json"))}
    assert found["sort-digits"]["package"].startswith("intellect-node ")
    assert found["maths"]["about"].startswith("Mathematics with an answer that can be checked")
    assert "countdown" in run("list")


def test_show_tells_parameters_and_bounds():
    found = json.loads(run("show", "chain-sums", "--json"))
    assert found["parameters"][0] == {"name": "min_terms", "type": "int", "default": 2, "bounds": "≥ 2, ≤ 64"}
    assert found["takes_data"] is False
    assert json.loads(run("show", "maths", "--json"))["takes_data"] is True
    assert "parameter  max_digits = 2  int (≥ 1, ≤ 12)" in run("show", "chain-sums")


def test_try_draws_the_same_task_for_the_same_seed():
    first = json.loads(run("try", "countdown", "--seed", "3", "--json"))
    assert first == json.loads(run("try", "countdown", "--seed", "3", "--json"))
    assert first != json.loads(run("try", "countdown", "--seed", "4", "--json"))
    assert first["reward"] is None


def test_try_judges_an_answer():
    shown = run("try", "chain-sums", "--parameter", "max_terms=2", "--parameter", "plain=true", "--answer", "x")
    assert "[reward] 0: the last line is no whole number" in shown
    data = json.loads(run("try", "addition", "--json"))["task"]["data"]
    assert "[reward] 1: right" in run("try", "addition", "--answer", str(data["answer"]))


def test_try_takes_a_data_file(tmp_path):
    source = tmp_path / "data.jsonl"
    source.write_text('{"problem": "2+2?", "answer": "4"}\n')
    shown = run("try", "maths", "--data", str(source), "--answer", "\\boxed{4}")
    assert "2+2?" in shown
    assert "[reward] 1: right" in shown


def test_unknown_names_and_parameters_are_named():
    with pytest.raises(EnvironmentUnknown, match="no environment is called 'nothing'"):
        run("show", "nothing")
    with pytest.raises(ConfigError, match="no parameter 'size'"):
        run("try", "countdown", "--parameter", "size=3")
    with pytest.raises(ConfigError, match="'size' is no parameter"):
        parse_parameters(["size"])
    assert parse_parameters(["a=3", "b=x=y", 'c="3"']) == {"a": 3, "b": "x=y", "c": "3"}

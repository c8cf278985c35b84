"""The short form of every shipped scenario, with real nodes: it comes to its end, and what it expects holds."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from simnet import run_scenario
from simnet.network import check_network
from simnet.scenario import load_scenario, scenario_names

ELSEWHERE = {"demo-real": "test_demo_real.py", "zoo": "test_zoo_swarm.py"}
"""They have tests of their own: one needs a model's weights, the other looks at every cheat."""


def complaints(code: int, report: dict[str, Any]) -> list[str]:
    """Everything for which a simulation did not pass, in the words of its report."""
    found = [report["problem"]] if report["problem"] else []
    unmet = [one for one in report["expectations"] if not one["met"]]
    found += [f"not met: {one['name']} {one['goal']} (found {one['value']})" for one in unmet]
    found += [f"{one['name']}: {one['finding']}" for one in report["oracles"] if one["outcome"] == "failed"]
    found += report["unexpected_exits"]
    return found or ([f"it ended with code {code}, outcome {report['outcome']}"] if code else [])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(scenario_names()) - ELSEWHERE.keys()))
def test_short_form_holds_what_it_expects(name: str, tmp_path: Path) -> None:
    scenario = load_scenario(name, short=True)
    if any(node.engine == "vllm" for node in scenario.nodes()) and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    try:
        check_network(scenario)
    except ConfigError as error:
        pytest.skip(error.message)
    code = run_scenario(name, tmp_path / "out", short=True, live=False)
    found = complaints(code, json.loads((tmp_path / "out" / "report.json").read_text()))
    if found:
        pytest.fail("\n".join([f"{name} did not pass; its report lies in {tmp_path / 'out'}", *found]), pytrace=False)


def test_every_scenario_is_tested_somewhere() -> None:
    assert ELSEWHERE.keys() <= set(scenario_names())
    for name, file in ELSEWHERE.items():
        assert f'run_scenario("{name}"' in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_what_did_not_hold_is_told_in_the_reports_words() -> None:
    report = {
        "problem": "",
        "outcome": "finished",
        "expectations": [
            {"name": "steps_at_least", "goal": "≥ 14", "value": "14", "met": True},
            {"name": "cheats_evicted", "goal": "= yes", "value": "no", "met": False},
        ],
        "oracles": [
            {"name": "steps advance", "outcome": "passed", "finding": "14 steps."},
            {"name": "no honest node punished", "outcome": "failed", "finding": "Punished though honest: inference-0."},
        ],
        "unexpected_exits": [],
    }
    assert complaints(1, report) == [
        "not met: cheats_evicted = yes (found no)",
        "no honest node punished: Punished though honest: inference-0.",
    ]
    sound = report | {"expectations": [], "oracles": []}
    assert complaints(0, sound) == []
    assert complaints(1, sound) == ["it ended with code 1, outcome finished"]

"""The short form of every shipped scenario, with real nodes: it comes to its end, and what it expects holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simnet import run_scenario
from simnet.scenario import scenario_names

ELSEWHERE = {"demo-real", "engines", "zoo"}
"""They have tests of their own: they need a model or vLLM, or look at every cheat."""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(scenario_names()) - ELSEWHERE))
def test_short_form_holds_what_it_expects(name: str, tmp_path: Path) -> None:
    code = run_scenario(name, tmp_path / "out", short=True, live=False)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    unmet = [one for one in report["expectations"] if not one["met"]]
    failed = [one for one in report.get("oracles", []) if one["outcome"] == "failed"]
    assert (code, unmet, failed, report["problem"]) == (0, [], [], "")

"""Processes that outlive their node are found, whoever ended it, and fail the simulation."""

import json
import os
from pathlib import Path

import pytest
from simnet_world import FakeCommands, wait_for

from simnet import fleet, gatherer, run_scenario, runner
from simnet.fleet import Fleet
from simnet.gather import NodeRecord, Recording
from simnet.gatherer import Gatherer
from simnet.scenario import Scenario, parse_scenario

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(runner, "ROUND_S", 0.1)
    monkeypatch.setattr(runner, "FINISH_GRACE_S", 0.5)
    monkeypatch.setattr(fleet, "TERM_AFTER_S", 1.0)
    monkeypatch.setattr(fleet, "END_TIMEOUT_S", 1.5)
    monkeypatch.setattr(gatherer, "SAMPLE_S", 0.0)


def plan(small) -> Scenario:
    return parse_scenario(small, name="small")


def judgement(report: dict) -> str:
    (found,) = [one["outcome"] for one in report["oracles"] if one["name"] == "no process left behind"]
    return found


def test_a_child_that_a_node_leaves_at_the_end_fails_the_simulation(tmp_path: Path):
    path = tmp_path / "small.toml"
    path.write_text(
        '[run]\nrecipe = "demo"\n'
        + "".join(f'[[fleet]]\nrole = "{role}"\n' for role in ("trainer", "relay", "validator", "inference"))
    )
    commands = FakeCommands(trainer_0={"total_steps": 8}, inference_0={"orphans": True})
    code = run_scenario(path, tmp_path / "out", live=False, commands=commands)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert judgement(report) == "failed"
    assert (code, report["passed"]) == (1, False)


def test_a_child_that_a_node_leaves_meanwhile_is_found_too(small, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gatherer, "LEFT_AFTER_S", 0.0)
    scenario = plan(small)
    commands = FakeCommands(inference_0={"orphans": True, "total_steps": 1})
    with Fleet(scenario, tmp_path, commands=commands) as nodes:
        recording = Recording(
            scenario, "", 0, 0, [NodeRecord(one.name, one.role, "", one.cheat) for one in scenario.nodes()]
        )
        watcher = Gatherer(nodes, recording)
        nodes.start("inference-0")

        def left() -> list[str]:
            watcher.poll()
            nodes.reap()
            return recording.left_behind

        found = wait_for(left)
        watcher.close()
        child = (tmp_path / "nodes" / "inference-0" / "data" / "child.pid").read_text()
    assert found == [f"inference-0: pid {child}"]
    (node,) = [one for one in recording.nodes if one.name == "inference-0"]
    assert {one.network for one in node.processes} == {True, False}

"""Cheats among real nodes: eight kinds at once beside two honest contributors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from simnet import run_scenario


@pytest.mark.long
def test_every_cheat_is_evicted_and_no_honest_node_pays(tmp_path: Path) -> None:
    """Attack: most contributors lie, each about something else."""
    assert run_scenario("zoo", tmp_path / "out", short=True, live=False) == 0
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes())
    nodes = {node["name"]: node for node in report["nodes"]}
    cheats = [node for node in nodes.values() if node["cheat"]]
    assert len(cheats) == 8
    assert {node["standing"] for node in cheats} == {"evicted"}
    assert {node["accepted"] for node in cheats} == {0}
    assert min(nodes[f"inference-{number}"]["accepted"] for number in range(2)) > 0


REFUSED = """
title = "Cheats of the protocol that are refused, not evicted"

[run]
recipe = "demo"

[run.overrides]
batch = { total_steps = 6, rollouts_per_step = 64 }

[[fleet]]
role = "trainer"

[[fleet]]
role = "relay"
count = 2

[[fleet]]
role = "validator"

[[fleet]]
role = "inference"

[[fleet]]
role = "inference"
cheat = "ground-index"

[[fleet]]
role = "inference"
cheat = "two-nodes-one-key"

[until]
finished = true
timeout_s = 300

[expect]
steps_at_least = 6
honest_rejected = 0
"""


@pytest.mark.long
def test_what_is_only_refused_earns_nothing_more(tmp_path: Path) -> None:
    """Attack: a contributor leaves indices out to choose its prompts; another hands every submission in twice."""
    scenario = tmp_path / "refused.toml"
    scenario.write_text(REFUSED)
    assert run_scenario(scenario, tmp_path / "out", live=False) == 0
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes())
    nodes = {node["name"]: node for node in report["nodes"]}
    assert nodes["ground-index-0"]["accepted"] == 0
    assert nodes["two-nodes-one-key-0"]["rejected"] == {}
    assert nodes["two-nodes-one-key-0"]["accepted"] <= 6 * 16

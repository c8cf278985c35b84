"""The fault plan is a pure function of scenario and seed."""

import subprocess
import sys

import pytest

from simnet.memory import WATCH_MB, fitted, needed_memory_mb
from simnet.scenario import parse_scenario
from simnet.timeline import describe, plan_faults


@pytest.fixture
def drawn(small):
    small["fleet"][3]["count"] = 3
    small["until"] = {"timeout_s": 100}
    small["random"] = [
        {"nodes": "inference-*", "actions": ["kill", "stop", "partition"], "count": 12, "from_s": 5, "to_s": 50},
        {"nodes": "relay-0", "actions": ["clock", "disk-slow", "restart"], "count": 6, "from_step": 2, "to_step": 9},
    ]
    return small


def lines(table, seed):
    return list(describe(plan_faults(parse_scenario(table, name="x"), seed)))


def test_the_same_seed_gives_the_same_plan_and_another_one_another(drawn):
    assert lines(drawn, 7) == lines(drawn, 7)
    assert lines(drawn, 7) != lines(drawn, 8)


def test_the_plan_does_not_depend_on_the_process(drawn):
    """Attack of chance: hashes of texts differ from one process to the next."""
    code = (
        "from simnet.scenario import parse_scenario\n"
        "from simnet.timeline import describe, plan_faults\n"
        f"print('\\n'.join(describe(plan_faults(parse_scenario({drawn!r}, name='x'), 7))))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == lines(drawn, 7)


def test_drawn_faults_lie_within_their_bounds_and_are_undone(drawn):
    plan = plan_faults(parse_scenario(drawn, name="x"), 3)
    assert len(plan) == 18
    timed = [fault for fault in plan if fault.node != "relay-0"]
    assert all(5 <= fault.at_s <= 50 and 5 <= fault.for_s <= 20 for fault in timed)
    stepped = [fault for fault in plan if fault.node == "relay-0"]
    assert all(2 <= fault.at_step <= 9 for fault in stepped)
    assert all(-60 <= fault.seconds <= 60 for fault in stepped if fault.action == "clock")
    assert {fault.node for fault in timed} <= {"inference-0", "inference-1", "inference-2"}


def test_faults_of_a_node_are_in_their_order(drawn):
    plan = plan_faults(parse_scenario(drawn, name="x"), 5)
    for node in {fault.node for fault in plan}:
        moments = [fault.at_s if fault.at_step is None else fault.at_step for fault in plan if fault.node == node]
        assert moments == sorted(moments)


def test_what_is_drawn_strikes_in_its_order_beside_what_the_file_has(drawn):
    drawn["fault"] = [{"node": "inference-1", "action": "kill", "at_s": 30, "for_s": 1}]
    plan = [fault for fault in plan_faults(parse_scenario(drawn, name="x"), 5) if fault.node == "inference-1"]
    moments = [fault.at_s for fault in plan]
    assert moments == sorted(moments)
    assert moments[0] < 30 < moments[-1]


def test_faults_of_both_clocks_keep_the_order_of_the_file_and_are_told_so(small):
    small["fault"] = [
        {"node": "inference-0", "action": "kill", "at_step": 20},
        {"node": "inference-0", "action": "join", "at_s": 5},
        {"node": "inference-0", "action": "stop", "at_step": 21, "for_s": 1},
    ]
    assert lines(small, 0) == [
        "step 20: inference-0 kill",
        "5 s or later: inference-0 join",
        "step 21 or later: inference-0 stop for 1.0 s",
    ]


def test_two_draws_of_one_seed_and_two_scenarios_with_the_same_draw_have_nothing_in_common(small):
    small["until"] = {"timeout_s": 100}
    draw = {"nodes": "inference-0", "actions": ["stop"], "count": 4, "from_s": 5, "to_s": 50}
    small["random"] = [draw, {**draw, "nodes": "validator-0"}]
    first, other = (plan_faults(parse_scenario(small, name=name), 7) for name in ("x", "y"))
    of = {node: {fault.at_s for fault in first if fault.node == node} for node in ("inference-0", "validator-0")}
    assert not of["inference-0"] & of["validator-0"]
    assert not {fault.at_s for fault in first} & {fault.at_s for fault in other}


def test_another_draw_does_not_move_the_first_one(drawn):
    before = [line for line in lines(drawn, 1) if "inference" in line]
    drawn["random"].append({"nodes": "validator-0", "actions": ["stop"], "count": 3, "from_s": 1, "to_s": 2})
    assert [line for line in lines(drawn, 1) if "inference" in line] == before


def test_nodes_that_match_a_pattern_are_parted_from_the_rest_together(small):
    small["fleet"][3]["count"] = 2
    small["fault"] = [{"node": "inference-*", "action": "partition", "at_step": 3, "for_s": 10}]
    plan = plan_faults(parse_scenario(small, name="x"), 0)
    assert [(fault.node, fault.side) for fault in plan] == [
        ("inference-0", "inference-*"),
        ("inference-1", "inference-*"),
    ]


def test_staggered_joins_and_leaves_are_faults(small):
    small["until"] = {"timeout_s": 100}
    small["fleet"][3].update(count=3, join_at_s=10, join_every_s=5, leave_at_s=60, leave_every_s=1)
    scenario = parse_scenario(small, name="x")
    assert [plan.absent for plan in scenario.nodes() if plan.name.startswith("inference")] == [True] * 3
    assert list(describe(plan_faults(scenario, 0))) == [
        "10 s: inference-0 join",
        "60 s: inference-0 leave",
        "15 s: inference-1 join",
        "61 s: inference-1 leave",
        "20 s: inference-2 join",
        "62 s: inference-2 leave",
    ]


def test_what_is_drawn_is_the_same_on_a_machine_that_holds_fewer_nodes(small):
    small["until"] = {"timeout_s": 100}
    small["fleet"].append({"role": "watch", "count": 9, "fill": True})
    small["random"] = [{"nodes": "watch-*", "actions": ["kill"], "count": 30, "from_s": 5, "to_s": 20}]
    large = parse_scenario(small, name="x")
    little = fitted(large, needed_memory_mb(large) - 5 * WATCH_MB)
    assert len(little.matching("watch-*")) == 4
    here = [fault for fault in plan_faults(large, 7) if fault.node in little.matching("watch-*")]
    assert sorted(plan_faults(little, 7), key=repr) == sorted(here, key=repr)
    assert 0 < len(here) < 30

import io
import math
import os
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from bench import swarm
from bench.harness import PIPED_WIDTH
from bench.swarm import Point, Rates, constants_of, rates_by_role, result_of
from bench.swarm_fleet import Shape, Use, interface, scenario_of
from bench.swarm_model import NEAR_RELAYS, Constants, fit, need, spread
from protocol.errors import ConfigError, NodeError
from simnet import netns

CONSTANTS = Constants(
    contributor_bytes_per_s=4000.0,
    relay_cpu_share=0.005,
    hand_in_bytes=10_000.0,
    trainer_bytes_per_relay_s=2000.0,
    contributor_messages_per_s=3.0,
    hand_in_messages=3.5,
    relay_messages_per_s=0.4,
)


def a_use(**changes):
    use = Use(
        at_s=100.0,
        bytes_in=0,
        bytes_out=0,
        packets=0,
        cpu_s=0.0,
        compute_cpu_s=0.0,
        requests=Counter(),
        dht_messages=0,
        policy_bytes=0,
        private_mb=90.0,
        step=3,
    )
    return replace(use, **changes)


def a_point(
    contributors,
    each,
    *,
    node_bytes=9000.0,
    policy=5000.0,
    relay_cpu=30.0,
    trainer_bytes=20_000.0,
    steps=0.125,
    yardstick=5.0,
    node_cpu=10.0,
):
    idle = Rates(
        bytes_in=node_bytes,
        bytes_out=0.0,
        requests=2.0,
        asked={"GET head": 1.5, "GET checkpoints": 0.5},
        dht_messages=0.1,
        cpu_ms=node_cpu,
        policy_bytes=policy,
        hand_ins=each * steps,
        private_mb=90.0,
        steps=steps,
    )
    roles = {
        "node": idle,
        "validator": idle,
        "relay": replace(idle, cpu_ms=relay_cpu),
        "trainer": replace(idle, bytes_in=trainer_bytes),
    }
    return Point(Shape(contributors, each, 8.0), roles, 60.0, yardstick)


def test_a_straight_line_is_found_and_a_single_size_has_no_slope():
    assert fit([(5, 17.0), (10, 27.0), (40, 87.0)]) == pytest.approx((7.0, 2.0))
    assert fit([(5, 17.0), (5, 19.0)]) == (18.0, 0.0)


def test_growth_is_of_the_largest_over_the_smallest_and_unknown_from_nothing():
    assert spread([10.0, 11.5, 9.2]) == pytest.approx(0.25)
    assert math.isinf(spread([0.0, 1.0]))


def test_rates_are_means_over_each_roles_nodes():
    before = {"node-0": a_use(), "node-1": a_use(), "trainer-0": a_use()}
    after = {
        "node-0": a_use(at_s=110.0, bytes_in=1000, requests=Counter({"GET head": 10, "POST submissions": 2}), step=5),
        "node-1": a_use(at_s=120.0, bytes_in=4000, requests=Counter({"GET head": 10}), cpu_s=0.2, step=7),
        "trainer-0": a_use(at_s=110.0, bytes_out=50),
    }
    rates = rates_by_role(before, after)
    assert rates["node"].bytes_in == pytest.approx(150.0)
    assert rates["node"].asked == pytest.approx({"GET head": 0.75, "POST submissions": 0.1})
    assert (rates["node"].hand_ins, rates["node"].cpu_ms, rates["node"].steps) == pytest.approx((0.1, 5.0, 0.2))
    assert rates["trainer"].bytes == pytest.approx(5.0)


def test_a_swarm_whose_contributors_cost_more_the_more_there_are_misses_its_goals():
    same = result_of([a_point(5, 1), a_point(40, 1)], [a_point(5, 8), a_point(40, 1)])
    assert same.met
    worse = result_of([a_point(5, 1), a_point(40, 1, node_bytes=12_000.0)], [a_point(5, 8), a_point(40, 1)])
    assert [goal.name for goal in worse.goals if not goal.met] == ["contributor_bytes_growth"]
    slower = result_of([a_point(5, 1), a_point(40, 1)], [a_point(5, 8), a_point(40, 1, trainer_bytes=30_000.0)])
    assert [goal.name for goal in slower.goals if not goal.met] == ["trainer_bytes_growth"]


def test_longer_steps_of_a_busy_machine_are_no_growth():
    busy = a_point(40, 1, node_bytes=4000.0 + 2500.0, policy=2500.0, steps=0.0625)
    result = result_of([a_point(5, 1), busy], [a_point(5, 8), a_point(40, 1)])
    assert result.figures["contributor_bytes_growth"] == pytest.approx(0.0)


def test_cpu_time_is_held_against_what_the_same_work_took_on_the_machine_as_busy_as_it_was():
    shared = [a_point(5, 8), a_point(40, 1)]
    busy = result_of([a_point(5, 1), a_point(40, 1, node_cpu=14.0, yardstick=7.0)], shared)
    assert busy.figures["contributor_cpu_growth"] == pytest.approx(0.0)
    costlier = result_of([a_point(5, 1), a_point(40, 1, node_cpu=14.0)], shared)
    assert [goal.name for goal in costlier.goals if not goal.met] == ["contributor_cpu_growth"]
    assert swarm.watch(0.01) > 0


def test_constants_are_slopes_and_intercepts():
    growing = [a_point(5, 1, node_bytes=9100.0, relay_cpu=25.0), a_point(20, 1, node_bytes=9100.0, relay_cpu=62.5)]
    shared = [a_point(5, 8, node_bytes=9800.0)]
    found = constants_of(growing, shared)
    assert found.hand_in_bytes == pytest.approx(800.0)
    assert found.contributor_bytes_per_s == pytest.approx(4000.0)
    assert found.relay_cpu_share == pytest.approx(0.005)


def test_messages_are_fitted_beside_those_for_policies():
    """A contributor says 1.6 a second, and 2 more for each submission; a relay 0.1 for each contributor."""

    def point(count, each, relay):
        found = a_point(count, each)
        hand_ins = found.node.hand_ins
        node = replace(found.node, requests=2.0 + 2 * hand_ins)  # half a request is for policies, a tenth the DHT's
        return replace(found, roles={**found.roles, "node": node, "relay": replace(node, requests=relay)})

    found = constants_of([point(5, 1, 1.25), point(20, 1, 2.0)], [point(5, 8, 9.0)])
    assert found.contributor_messages_per_s == pytest.approx(1.6)
    assert found.hand_in_messages == pytest.approx(2.0)
    assert found.relay_messages_per_s == pytest.approx(0.1)


def test_one_row_of_the_paper_table_as_worked_by_hand():
    """7B, so patches of 15.2 GB / 133 = 114.29 MB, to 1,000 contributors.

    Hand-ins of a step: 4,096 · 6,000 · 16.1 B = 395.67 MB, and 128 times 10 kB: 396.95 MB. Relays send 1,000 times a
    patch and a hundredth of a policy, 266.29 GB; 4.8 GB go into waiting; hand-ins pass relays three times, 1.19 GB: in
    all 272.28 GB. Polls need 1,000 · 6 / 768 = 7.8 relays, the most of all bounds.
    """
    row = need(CONSTANTS, 1000, "7B")
    assert (row.relays, row.bound_by) == (8, "its polls")
    assert row.relay_mbit == pytest.approx(226.897, rel=1e-4)  # 272.28 GB / 8 in 1,200 s
    assert row.relay_cpu_share == pytest.approx(0.66272, rel=1e-4)  # (6,000 s + 266.29 · 1.36 s) / 8 / 1,200 s
    assert row.relay_messages_per_s == pytest.approx(425.047, rel=1e-4)  # (3,000 + 128 · 3.5 / 1,200 + 400) / 8
    assert row.contributor_mb_per_step == pytest.approx(119.483, rel=1e-4)  # 114.29 + 4.8 + 396.95 / 1,000
    assert row.contributor_messages_per_step == pytest.approx(3600.448, rel=1e-6)  # 3 · 1,200 + 128 · 3.5 / 1,000
    assert row.trainer_mbit == pytest.approx(3.91721, rel=1e-4)  # 1.5 · 114.29 + 396.95 + 8 · 2.4 MB = 587.58 MB
    assert row.trainer_share_of_relays == pytest.approx(0.032676, rel=1e-4)


def test_a_quick_run_claims_nothing():
    points = [a_point(1, 1), a_point(2, 1)], [a_point(1, 2), a_point(2, 1)]
    result = result_of(*points, quick=True)
    assert result.goals == []
    assert [table.title for table in result.tables] == [
        "one submission a step each: a second, of each node",
        "2 submissions a step, shared: a second, of each node",
    ]
    assert not any(name.startswith(("model_", "7B_")) for name in result.figures)


def test_headings_are_whole_where_nobody_looks_at_a_terminal():
    result = result_of([a_point(5, 1), a_point(40, 1)], [a_point(5, 8), a_point(40, 1)])
    shown = Console(file=io.StringIO(), width=PIPED_WIDTH)
    for table in result.tables:
        shown.print(table)
    text = shown.file.getvalue()
    assert "…" not in text
    for heading in ("contributors", "DHT messages", "messages a contributor, step", "Mbit/s of the trainer"):
        assert heading in text


def test_more_contributors_need_more_relays_and_hardly_more_of_the_trainer():
    few, many = need(CONSTANTS, 100, "32B"), need(CONSTANTS, 10_000, "32B")
    assert (few.relays, few.bound_by) == (NEAR_RELAYS, "three at least")
    assert many.relays > 20 * few.relays
    assert many.trainer_mbit * (1 - many.trainer_share_of_relays) == pytest.approx(
        few.trainer_mbit * (1 - few.trainer_share_of_relays)
    )
    assert need(CONSTANTS, 10_000, "7B").relays < many.relays


def test_what_binds_is_named():
    assert need(CONSTANTS, 10_000, "32B").bound_by == "spreading a policy"
    assert need(replace(CONSTANTS, relay_cpu_share=1.0), 10_000, "7B").bound_by == "its processor"


@pytest.mark.parametrize("only", ["0", "-3", "many"])
def test_a_number_of_contributors_that_is_none_is_refused(only):
    with pytest.raises(ConfigError, match="contributors"):
        swarm.bench(quick=True, only=only)


def test_each_contributor_does_its_share_of_a_step():
    scenario = scenario_of(Shape(5, 8, 8.0))
    assert scenario.run.overrides["batch"]["rollouts_per_step"] == 5 * 8 * 8
    assert sum(plan.role == "inference" for plan in scenario.nodes()) == 5


def test_an_interface_is_read_where_the_process_lies():
    assert len(interface(os.getpid(), "lo")) == 4
    with pytest.raises(NodeError, match="no network device"):
        interface(os.getpid(), "nowhere")


@pytest.mark.long
@pytest.mark.skipif(bool(netns.why_not()), reason="bytes are counted at network namespaces")
def test_the_quick_bench_counts_what_real_nodes_take():
    result = swarm.bench(quick=True)
    for role in swarm.ROLES:
        assert result.figures[f"growing_2_{role}_bytes_in"] > 0
        assert result.figures[f"growing_2_{role}_cpu_ms"] > 0
    assert result.figures["growing_2_node_POST_submissions"] > 0
    assert result.goals == []

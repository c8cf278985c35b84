import io
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench import swarm
from bench.harness import PIPED_WIDTH, show
from bench.report import write_sections
from bench.swarm import result_of
from bench.swarm_fleet import Shape, Use, interface, scenario_of
from bench.swarm_growth import along_line, beyond_line, constants_of
from bench.swarm_model import CARRIED, NEAR_RELAYS, Constants, fit, need, spread
from bench.swarm_rates import ROLES, Point, Rates, rates_by_role
from bench.swarm_yardstick import yardstick
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
    node_cpu=10.0,
    relay_bytes=9000.0,
    relay_cpu=30.0,
    trainer_bytes=20_000.0,
    trainer_requests=8.0,
    trainer_cpu=40.0,
    steps=0.125,
    yardstick_ms=1.4,
    polls=1.5,
    for_policies=0.5,
):
    """Of its 2.1 messages a second a contributor says half a one because of policies, and 0.1 are the DHT's."""
    idle = Rates(
        bytes_in=node_bytes,
        bytes_out=0.0,
        requests=polls + for_policies,
        asked={"GET head": polls, "GET checkpoints": for_policies},
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
        "relay": replace(idle, bytes_in=relay_bytes, cpu_ms=relay_cpu),
        "trainer": replace(idle, bytes_in=trainer_bytes, requests=trainer_requests, cpu_ms=trainer_cpu),
    }
    return Point(Shape(contributors, each, 8.0), roles, 60.0, yardstick_ms)


def swarms(*counts, **of_the_largest):
    """Swarms whose relays' costs lie on straight lines, but for what is said of the last one."""
    *smaller, last = counts or (5, 10, 20, 40)
    points = [a_point(count, 1, **relay_costs(count)) for count in smaller]
    return [*points, a_point(last, 1, **{**relay_costs(last), **of_the_largest})]


def relay_costs(count):
    return {"relay_bytes": 5000.0 + 5000 * count, "relay_cpu": 10.0 + 2 * count}


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


GOALS = (
    *("contributor_bytes_growth", "contributor_messages_growth"),
    *("contributor_cpu_ms_growth", "contributor_cpu_growth"),
    *("relay_bytes_beyond_line", "relay_cpu_beyond_line"),
    *("relays_bytes_of_contributors", "relays_cpu_of_contributors"),
    *("trainer_bytes_growth", "trainer_requests_growth", "trainer_cpu_growth"),
)


def missed(growing=(), **of_the_larger_of_shared):
    result = result_of(growing or swarms(), [a_point(5, 8), a_point(40, 1, **of_the_larger_of_shared)])
    assert [goal.name for goal in result.goals] == list(GOALS)
    return [goal.name for goal in result.goals if not goal.met]


def test_a_swarm_whose_contributors_cost_more_the_more_there_are_misses_its_goals():
    assert missed() == []
    assert missed(swarms(node_bytes=12_000.0)) == ["contributor_bytes_growth"]
    assert missed(swarms(polls=2.0)) == ["contributor_messages_growth"]
    assert missed(swarms(node_cpu=11.8)) == ["contributor_cpu_ms_growth", "contributor_cpu_growth"]
    assert missed(swarms(node_cpu=8.2)) == ["contributor_cpu_ms_growth", "contributor_cpu_growth"]
    assert missed(trainer_bytes=24_000.0) == ["trainer_bytes_growth"]
    assert missed(trainer_requests=9.3) == ["trainer_requests_growth"]
    assert missed(trainer_cpu=47.0) == ["trainer_cpu_growth"]


BUSY = {  # steps of sixteen seconds, and each message 1.4 times as dear
    "steps": 0.0625,
    "yardstick_ms": 1.4 * 1.4,
    "node_bytes": 4000.0 + 2500.0,
    "policy": 2500.0,
    "for_policies": 0.25,
    "node_cpu": 1.4 * 10.0 * 1.85 / 2.1,
    "relay_bytes": 205_000.0 * 6500 / 9000,
    "relay_cpu": 1.4 * 90.0 * 1.85 / 2.1,
}


def test_longer_steps_and_dearer_messages_of_a_busy_machine_are_no_growth():
    slow = {"trainer_bytes": 10_000.0, "trainer_requests": 4.0, "trainer_cpu": 1.4 * 20.0}
    result = result_of(swarms(**BUSY), [a_point(5, 8), a_point(40, 1, **{**BUSY, **slow})])
    as_counted = "contributor_cpu_ms_growth"
    assert [goal.name for goal in result.goals if not goal.met] == [as_counted]
    growths = [result.figures[name] for name in GOALS if name.startswith(("contributor", "trainer"))]
    assert growths == pytest.approx([0.0, 0.0, result.figures[as_counted], 0.0, 0.0, 0.0, 0.0])


def test_as_much_a_second_in_steps_twice_as_long_is_growth():
    """What a step costs has doubled; by the second it looks as ever."""
    assert missed(steps=0.0625) == ["trainer_bytes_growth", "trainer_requests_growth", "trainer_cpu_growth"]
    assert missed(swarms(steps=0.0625, policy=2500.0))[:3] == list(GOALS[:3])


def test_a_trainers_cpu_time_is_held_against_what_requests_take_meanwhile():
    assert missed(trainer_cpu=60.0, yardstick_ms=2.1) == []
    assert missed(trainer_cpu=40.0, yardstick_ms=1.0) == ["trainer_cpu_growth"]


def test_relays_that_cost_more_for_each_contributor_the_more_there_are_miss_their_goals():
    """With n contributors n²: at 40 each costs more than at 10, whatever a relay takes alone."""
    squares = [a_point(n, 1, **{**relay_costs(n), "relay_cpu": 10.0 + n * n / 10}) for n in (5, 10, 20, 40)]
    assert missed(squares) == ["relay_cpu_beyond_line"]
    squares = [a_point(n, 1, **{**relay_costs(n), "relay_bytes": 5000.0 + 200 * n * n}) for n in (5, 10, 20, 40)]
    assert missed(squares) == ["relay_bytes_beyond_line"]


def test_relays_that_cost_far_more_than_their_contributors_miss_their_goals():
    dear = [a_point(n, 1, **{**relay_costs(n), "relay_cpu": 1000 * (10.0 + 2 * n)}) for n in (5, 10, 20, 40)]
    assert missed(dear) == ["relays_cpu_of_contributors"]
    heavy = [a_point(n, 1, **{**relay_costs(n), "relay_bytes": 2 * (5000.0 + 5000 * n)}) for n in (5, 10, 20, 40)]
    assert missed(heavy) == ["relays_bytes_of_contributors"]


def test_a_line_through_smaller_swarms_knows_what_is_beyond_it_and_two_swarms_tell_nothing():
    assert beyond_line([(40, 92.0), (5, 10.0), (10, 20.0)]) == pytest.approx(0.15)
    assert math.isinf(beyond_line([(5, 10.0), (40, 80.0)]))
    assert missed(swarms(5, 40)) == ["relay_bytes_beyond_line", "relay_cpu_beyond_line"]


def test_growth_along_a_line_is_of_its_ends_and_one_swarm_that_strays_is_little_of_it():
    assert along_line([(40, 13.0), (5, 10.0), (10, 11.0), (20, 12.0)]) == pytest.approx(0.3)
    assert along_line([(5, 13.0), (10, 12.0), (20, 11.0), (40, 10.0)]) == pytest.approx(0.3)
    assert along_line([(5, 10.0), (10, 11.8), (20, 10.0), (40, 10.0)]) < 0.06
    assert math.isinf(along_line([(5, 10.0), (10, 11.0), (20, 10.0), (40, math.inf)]))
    few, _, *more = swarms()
    assert missed([few, a_point(10, 1, node_cpu=11.8, **relay_costs(10)), *more]) == ["contributor_cpu_ms_growth"]
    assert missed([few, a_point(10, 1, node_bytes=11_000.0, **relay_costs(10)), *more])[0] == "contributor_bytes_growth"


def test_without_a_step_nothing_can_be_told_and_nothing_is_met():
    assert missed(steps=0.0) == ["trainer_bytes_growth", "trainer_requests_growth", "trainer_cpu_growth"]
    assert missed(swarms(steps=0.0)) == list(GOALS[:8])


def test_the_yardstick_is_what_a_request_takes_another_process(tmp_path):
    with yardstick(tmp_path / "yardstick") as request_ms:
        assert 0.02 < request_ms() < 60
        with pytest.raises(NodeError, match="has ended"):
            request_ms()


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
    assert row.relay_cpu_share == pytest.approx(0.640533, rel=1e-4)  # (6,000 s + 266.29 · 0.56 s) / 8 / 1,200 s
    assert row.relay_messages_per_s == pytest.approx(425.047, rel=1e-4)  # (3,000 + 128 · 3.5 / 1,200 + 400) / 8
    assert row.contributor_mb_per_step == pytest.approx(271.483, rel=1e-4)  # 114.29 + 152 + 4.8 + 396.95 / 1,000
    assert row.contributor_messages_per_step == pytest.approx(3600.448, rel=1e-6)  # 3 · 1,200 + 128 · 3.5 / 1,000
    assert row.trainer_mbit == pytest.approx(3.91721, rel=1e-4)  # 1.5 · 114.29 + 396.95 + 8 · 2.4 MB = 587.58 MB
    assert row.trainer_share_of_relays == pytest.approx(0.032676, rel=1e-4)


@pytest.mark.parametrize("policy", ["7B", "32B"])
def test_relays_move_what_contributors_move_and_hand_ins_twice_more(policy):
    row = need(CONSTANTS, 1000, policy)
    of_relays_mb = row.relays * row.relay_mbit / 8 * 1200
    hand_ins_mb = (4096 * 6000 * 16.1 + 128 * 10_000) / 1e6
    assert of_relays_mb == pytest.approx(1000 * row.contributor_mb_per_step + (CARRIED - 1) * hand_ins_mb)


def shown(result):
    told = Console(file=io.StringIO(), width=PIPED_WIDTH)
    show("swarm", result, told)
    return told.file.getvalue()


def test_a_quick_run_claims_nothing():
    result = result_of([a_point(1, 1), a_point(2, 1)], [a_point(1, 2), a_point(2, 1)], quick=True)
    assert result.goals == []
    assert [row[0] for grid in result.sections[0].grids for row in grid.rows] == ["1", "2", "1, 2 submissions each"]
    assert not any(name.startswith(("model_", "7B_")) for name in result.figures)


def test_everything_on_the_page_is_told_and_headings_are_whole_where_nobody_looks_at_a_terminal():
    result = result_of(swarms(relay_cpu=900.0), [a_point(5, 8), swarms()[-1]])
    text = shown(result)
    assert "…" not in text
    for heading in ("contributors", "messages a contributor and step", "Mbit/s of the trainer", "a request's CPU, ms"):
        assert heading in text
    rows = {row[0]: row[1:] for grid in result.sections[0].grids for row in grid.rows}
    assert rows["a contributor's kB"] == ("72.0", "72.0", "72.0", "72.0", "0.0 %", "≤ 15.0 % ✓")
    assert rows["a relay's CPU, in requests, beyond a line"][-2:] == ("900.0 %", "≤ 15.0 % ✗")
    assert rows["all relays' CPU over contributors', in the last"][-2:] == ("4.50", "≤ 1.00 ✗")
    assert {"5, 8 submissions each", "7B, 1,000", "32B, 10,000"} <= rows.keys()


def test_the_page_has_a_place_for_what_is_written(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text((Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    result = result_of(swarms(), [a_point(5, 8), swarms()[-1]])
    write_sections(page, result.sections, bench="swarm", options="", date="2026-01-02")
    assert "| a contributor's kB | 72.0 |" in page.read_text(encoding="utf-8")


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
    for role in ROLES:
        assert result.figures[f"growing_2_{role}_bytes_in"] > 0
        assert result.figures[f"growing_2_{role}_cpu_ms"] > 0
    assert result.figures["growing_2_node_POST_submissions"] > 0
    assert result.figures["growing_2_yardstick_ms"] > 0
    assert result.goals == []

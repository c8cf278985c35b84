"""Faults that cannot happen, come too late, or leave nobody to do what is expected; with the seed that is to be run."""

import msgspec
import pytest

from protocol.errors import ConfigError
from simnet import run_scenario
from simnet.recipe_file import to_toml
from simnet.runner import plan_scenario
from simnet.scenario import parse_scenario
from simnet.scenario_checks import check_possible
from trainer.recipe import load_recipe


def fault(node, action="kill", **fields):
    return {"node": node, "action": action, **fields}


def draw(**fields):
    usual = {"nodes": "inference-0", "actions": ["stop"], "count": 1, "from_s": 0.0, "to_s": 28.0, "for_s": (1.0, 2.0)}
    return usual | fields


def possible(table, *, seed=0, **recipe):
    scenario = parse_scenario(table, name="x")
    check_possible(scenario, msgspec.structs.replace(load_recipe("demo"), **recipe), seed=seed)


@pytest.fixture
def windowed(small):
    """A node that is gone for a third of the time, in which a seed may draw that it stops."""
    small["fault"] = [fault("inference-0", at_s=10.0), fault("inference-0", "join", at_s=20.0)]
    small["random"] = [draw()]
    return small


def what_is_wrong(table, seed):
    try:
        possible(table, seed=seed)
    except ConfigError as error:
        return error.message
    return ""


def seeds(table):
    """The first seed whose plan can be run, and the first whose cannot."""
    found = {seed: what_is_wrong(table, seed) for seed in range(40)}
    bad = next(seed for seed, wrong in found.items() if wrong)
    assert f"with --seed {bad}: inference-0 cannot stop, it is gone by then" in found[bad]
    return next(seed for seed, wrong in found.items() if not wrong), bad


def test_the_plan_that_is_told_or_run_is_checked_with_its_own_seed(windowed, tmp_path):
    good, bad = seeds(windowed)
    path = tmp_path / "x.toml"
    path.write_text("\n".join(to_toml(windowed)))
    assert [line for line in plan_scenario(path, seed=good) if "inference-0 stop" in line]
    with pytest.raises(ConfigError, match=f"with --seed {bad}: inference-0 cannot stop"):
        plan_scenario(path, seed=bad)
    with pytest.raises(ConfigError, match=f"with --seed {bad}: inference-0 cannot stop"):
        run_scenario(path, tmp_path / "out", seed=bad, live=False)
    assert not (tmp_path / "out" / "nodes").exists()


def test_a_scenario_is_not_refused_for_a_seed_that_nobody_asked_for(windowed):
    assert what_is_wrong(windowed, seeds(windowed)[1])
    for number in range(12):  # what a seed draws depends on the name
        parse_scenario(windowed, name=f"x{number}")


def test_more_than_one_node_has_time_for_is_refused(small):
    small["random"] = [draw(count=1000)]
    with pytest.raises(ConfigError, match=r"with --seed 0: inference-0 is to stop, .* until 3[0-9.]+ s or longer"):
        possible(small)


def test_a_stopped_node_that_is_killed_and_joins_again_runs(small):
    stopped = [fault("validator-0", "stop", at_step=5), fault("validator-0", at_step=8, for_s=10.0)]
    small["fault"] = [*stopped, fault("validator-0", "stop", at_step=20, for_s=1.0)]
    possible(small)
    small["fault"] = [*stopped, fault("validator-0", "continue", at_step=20)]
    with pytest.raises(ConfigError, match="validator-0 cannot continue, it is running by then"):
        parse_scenario(small, name="x")


def test_a_draw_may_bring_back_what_else_is_gone_for_good(small):
    small["fault"] = [fault("relay-0", "stop", at_s=1.0)]
    small["random"] = [draw(nodes="relay-0", actions=["restart"], to_s=2.0)]
    found = {what_is_wrong(small, seed) for seed in range(20)}
    assert len(found) == 2
    assert "" in found


def late(table):
    table["fleet"][3]["join_at_s"] = 2.0


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(fault=[fault("inference-0", at_step=20, for_s=1)], random=[draw()]),
        lambda t: (late(t), t.update(random=[draw(from_s=None, to_s=None, from_step=2, to_step=9)])),
        lambda t: t.update(random=[draw(), draw(from_s=None, to_s=None, from_step=2, to_step=9)]),
    ],
)
def test_draws_by_one_clock_beside_faults_by_the_other_are_refused(small, change):
    change(small)
    with pytest.raises(ConfigError, match="which comes first nobody knows"):
        parse_scenario(small, name="x")


def test_draws_by_both_clocks_may_strike_different_nodes(small):
    steps = draw(nodes="validator-0", from_s=None, to_s=None, from_step=2, to_step=9)
    small["random"] = [draw(), steps]
    possible(small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(fault=[fault("relay-0", at_s=20.0, for_s=10.5)]), "lasts until 30.5 s or longer"),
        (lambda t: t.update(fault=[fault("relay-0", at_step=2, for_s=31.0)]), "lasts until 31 s or longer"),
        (
            lambda t: t.update(
                fault=[fault("inference-0", at_s=10.0, for_s=15.0), fault("inference-0", "stop", at_s=12.0, for_s=6.0)]
            ),
            "inference-0 is to stop, and with what comes before that lasts until 31 s or longer",
        ),
        (lambda t: t.update(random=[draw(for_s=(1.0, 3.0))]), "number 1, and for_s lasts until 31 s"),
        (lambda t: (late(t), t.update(fault=[fault("inference-0", "disk-full", at_s=1.0)])), "it is gone by then"),
        (
            lambda t: t.update(fault=[fault("inference-0", at_s=1.0), fault("inference-0", "disk-full", at_s=2.0)]),
            "cannot disk-full, it is gone by then",
        ),
    ],
)
def test_what_comes_too_late_or_to_nobody_is_refused(small, change, message):
    change(small)
    with pytest.raises(ConfigError, match=message):
        parse_scenario(small, name="x")


def test_what_ends_with_the_simulation_is_taken_and_so_is_room_for_a_node_that_was_killed_for_want_of_it(small):
    faults = [fault("inference-0", "disk-full", at_s=1.0), fault("inference-0", at_s=2.0)]
    faults += [fault("inference-0", "disk-free", at_s=3.0), fault("inference-0", "join", at_s=4.0)]
    small["fault"] = [*faults, fault("relay-0", at_s=20.0, for_s=10.0)]
    small["random"] = [draw(nodes="validator-0"), draw(nodes="relay-0", actions=["restart"], to_s=30.0)]
    possible(small)


def add(table, role, count=1, **fields):
    table["fleet"].append({"role": role, "count": count, "name": f"more-{role}", **fields})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(fault=[fault("trainer-0", at_s=1.0)]), "before any step there is no trainer"),
        (lambda t: t.update(fault=[fault("relay-*", "stop", at_s=1.0)]), "before any step there is no relay"),
        (lambda t: t.update(fault=[fault("validator-0", at_s=2.9)]), "before any step there is no validator"),
        (
            lambda t: t.update(until={"step": 1}, fault=[fault("validator-0", at_s=1.0)]),
            "step 1 is to be reached, but before any step",
        ),
        (lambda t: t["fleet"][0].update(leave_at_s=1.0), "there is no trainer any more"),
        (lambda t: t.update(fault=[fault("trainer-0", "partition", at_s=1.0)]), "before any step there is no relay"),
        (lambda t: t.update(until={"finished": False}, fault=[fault("trainer-0", at_step=5)]), "fails without it"),
        (lambda t: t.update(until={"step": 5}, fault=[fault("trainer-0", "leave", at_step=5)]), "fails without it"),
        (lambda t: t.update(fault=[fault("trainer-0", at_step=50)]), "from step 50 on .* fails without it"),
        (
            lambda t: (add(t, "relay"), t.update(fault=[fault("relay-0", at_s=1.0), fault("more-relay-0", at_step=9)])),
            r"from step 9 on there is no relay any more: 2 of 2 nodes \(relay-0, more-relay-0",
        ),
    ],
)
def test_a_role_that_is_gone_for_good_too_early_is_refused(small, change, message):
    change(small)
    with pytest.raises(ConfigError, match=message):
        possible(small)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(fault=[fault("trainer-0", at_s=29.0)]),
        lambda t: t.update(fault=[fault("trainer-0", at_s=1.0, for_s=1.0)]),
        lambda t: t.update(fault=[fault("relay-0", at_s=1.0), fault("relay-0", "join", at_s=2.0)]),
        lambda t: t.update(fault=[fault("*", "partition", at_s=1.0)]),
        lambda t: (add(t, "relay"), t.update(fault=[fault("relay-0", at_s=1.0), fault("more-relay-0", at_s=9.0)])),
        lambda t: t.update(until={"finished": False}, fault=[fault("validator-0", at_s=1.0)]),
        lambda t: t["fleet"][3].update(leave_at_s=20.0),
    ],
)
def test_what_depends_on_the_pace_of_the_run_is_left_to_it(small, change):
    change(small)
    possible(small)


def test_a_quorum_takes_as_many_validators_and_keeps_as_many(small):
    add(small, "validator")
    with pytest.raises(ConfigError, match="has 2 validators, and 3 must agree"):
        possible(small, quorum=3)
    small["fault"] = [fault("validator-0", at_step=5)]
    possible(small)
    with pytest.raises(ConfigError, match="from step 5 on there are fewer than 2 validators: validator-0 will"):
        possible(small, quorum=2)
    add(small, "validator")
    possible(small, quorum=2)


def test_a_plan_is_refused_where_run_create_would_refuse_its_quorum(small, tmp_path):
    small["run"]["overrides"] = {"quorum": 2}
    path = tmp_path / "x.toml"
    path.write_text("\n".join(to_toml(small)))
    with pytest.raises(ConfigError, match="has 1 validators, and 2 must agree"):
        plan_scenario(path)


@pytest.mark.parametrize("cheat", [None, "wrong-model"])
def test_a_run_that_is_to_finish_has_somebody_honest_to_train_on(small, cheat):
    small["fleet"] = small["fleet"][:3] + [one for one in small["fleet"][3:] if cheat and one.get("cheat") == cheat]
    with pytest.raises(ConfigError, match="no honest contributor to train on"):
        possible(small)
    small["until"] = {"finished": False, "timeout_s": 30}
    possible(small)

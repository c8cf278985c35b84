import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from simnet.scenario import load_scenario, parse_scenario, scenario_names


def fault(**fields):
    return {"node": "inference-0", **fields}


@pytest.mark.parametrize("name", scenario_names())
def test_every_shipped_scenario_is_sound(name):
    assert load_scenario(name).nodes()


def test_the_demo_has_the_fleet_that_it_promises():
    nodes = load_scenario("demo").nodes()
    assert [node.name for node in nodes] == [
        "trainer-0",
        "relay-0",
        "relay-1",
        "validator-0",
        "inference-0",
        "inference-1",
        "wrong-model-0",
        "slow-0",
    ]
    assert [(node.cheat, node.nice) for node in nodes[-2:]] == [("wrong-model", 0), (None, 10)]


def test_nodes_of_several_entries_are_numbered_through(small):
    small["fleet"].append({"role": "inference", "count": 2})
    names = [node.name for node in parse_scenario(small, name="x").nodes()]
    assert names[3:] == ["inference-0", "wrong-model-0", "inference-1", "inference-2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(fleets=[]), "did you mean 'fleet'"),
        (lambda t: t["run"].update(recip="demo"), "did you mean 'recipe'"),
        (lambda t: t["fleet"][0].update(rôle="trainer"), "unknown name"),
        (lambda t: t["fleet"][0].update(role="trainr"), "unknown role 'trainr'; did you mean 'trainer'"),
        (lambda t: t["fleet"][4].update(cheat="wrong-modle"), "did you mean 'wrong-model'"),
        (lambda t: t["fleet"][0].update(cheat="wrong-model"), "a cheat is an inference node"),
        (lambda t: t["fleet"].append({"role": "trainer"}), "2 trainers"),
        (lambda t: t["fleet"].pop(1), "no relay"),
        (lambda t: t["fleet"].pop(2), "no validator"),
        (lambda t: t["fleet"].append({"role": "inference", "count": 0}), "count"),
        (lambda t: t["fleet"].extend([{"role": "inference", "count": 60}] * 2), "at most 64"),
        (lambda t: t["fleet"][0].update(name="../../etc"), "name"),
        (lambda t: t.update(until={"timeout": 3}), "did you mean 'timeout_s'"),
        (lambda t: t.update(expect={"honest_rejects": 0}), "did you mean 'honest_rejected'"),
        (lambda t: t.update(expect={"honest_rejected": "none"}), "int"),
        (lambda t: t.update(fleet={"role": "trainer"}), "array"),
        (lambda t: t.update(fault=[fault(action="leave", at_step=1, node="inference-9")]), "unknown node"),
        (lambda t: t.update(fault=[fault(action="quit", at_step=1)]), "unknown action"),
        (lambda t: t.update(fault=[fault(action="leave")]), "exactly one of at_step and at_s"),
        (lambda t: t.update(fault=[fault(action="leave", at_step=1, at_s=2.0)]), "exactly one"),
        (lambda t: t.update(fault=[fault(action="continue", at_step=1)]), "it is running by then"),
        (lambda t: t.update(fault=[fault(action="leave", at_step=1)] * 2), "it is gone by then"),
        (
            lambda t: t.update(fault=[fault(action="leave", at_step=5), fault(action="join", at_step=2)]),
            "in the order in which they happen",
        ),
        (lambda t: t.update(fault=[fault(action="join", at_step=5, node="relay-0")]), "bootstrap"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_right_name(small, change, message):
    change(small)
    with pytest.raises(ConfigError, match=message):
        parse_scenario(small, name="x")


def test_a_node_whose_first_fault_is_a_join_is_absent_at_the_start(small):
    small["fault"] = [fault(action="join", at_step=3)]
    absent = [node.name for node in parse_scenario(small, name="x").nodes() if node.absent]
    assert absent == ["inference-0"]


def test_an_unknown_scenario_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        load_scenario("dmeo")


@pytest.mark.parametrize("content", [b"[run", b"\xff\xfe", b"a = " + b"[" * 5000, b"#" * 300_000])
def test_a_file_that_is_no_scenario_is_a_named_error(tmp_path: Path, content: bytes):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_scenario(path)


def test_a_missing_file_is_a_named_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")


def test_overrides_replace_values_and_leave_their_neighbours():
    scenario = load_scenario("demo", {"until": {"timeout_s": 9.0}, "expect": {"reward_at_least": None}})
    assert (scenario.until.timeout_s, scenario.until.finished) == (9.0, True)
    assert (scenario.expect.reward_at_least, scenario.expect.cheats_evicted) == (None, True)


@given(
    st.dictionaries(
        st.sampled_from(["run", "fleet", "fault", "until", "expect", "title", "x"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["role", "count", "node", "action", "name"]), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_any_table_gives_a_scenario_or_a_config_error(table):
    with pytest.raises(ConfigError):
        parse_scenario(table, name="x")


def test_the_demo_file_is_toml_that_other_tools_read():
    path = Path(__file__).parents[2] / "simnet" / "scenarios" / "demo.toml"
    assert tomllib.loads(path.read_text())["run"]["recipe"] == "demo"

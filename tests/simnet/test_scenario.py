import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from simnet.recipe_file import write_recipe
from simnet.scenario import load_scenario, parse_scenario, scenario_names
from simnet.scenario_checks import check_possible
from trainer.recipe import EvaluationSettings, load_recipe


def fault(**fields):
    return {"node": "inference-0", **fields}


def deep(levels):
    return {"a": deep(levels - 1)} if levels else {}


def gone(node, action="kill", **fields):
    return {"node": node, "action": action, **fields}


def draw(**fields):
    return {"nodes": "inference-*", "actions": ["kill"], "count": 3, "from_s": 1.0, "to_s": 9.0, **fields}


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
        (lambda t: t["fleet"][0].update(cheat="wrong-model"), "wrong-model is an inference node"),
        (lambda t: t["fleet"][4].update(cheat="framer"), "framer is a validator"),
        (lambda t: t.update(expect={"liars_overruled": True}), "has no validator that lies"),
        (lambda t: t["fleet"].append({"role": "trainer"}), "2 trainers"),
        (lambda t: t["fleet"].pop(1), "no relay"),
        (lambda t: t["fleet"].pop(2), "no validator"),
        (lambda t: t["fleet"].append({"role": "inference", "count": 0}), "count"),
        (lambda t: t["fleet"].extend([{"role": "inference", "count": 200}] * 2), "at most 240"),
        (lambda t: t["fleet"][0].update(name="../../etc"), "name"),
        (lambda t: t.update(until={"timeout": 3}), "did you mean 'timeout_s'"),
        (lambda t: t.update(expect={"honest_rejects": 0}), "did you mean 'honest_rejected'"),
        (lambda t: t.update(expect={"honest_rejected": "none"}), "int"),
        (lambda t: t.update(fleet={"role": "trainer"}), "array"),
        (lambda t: t.update(fault=[fault(action="leave", at_step=1, node="inference-9")]), "unknown node"),
        (lambda t: t.update(fault=[fault(action="quit", at_step=1)]), "unknown action"),
        (lambda t: t.update(fault=[fault(action="leave", at_step=10**400)]), r"fault\[0\].at_step"),
        (lambda t: t.update(expect={"honest_rejected": 2**53 + 1}), "expect.honest_rejected"),
        (lambda t: t["run"].update(overrides=deep(900)), "deeper than 32"),
        (lambda t: t["fleet"][3].update(settings=deep(900)), "deeper than 32"),
        (lambda t: t.update(fault=[fault(action="leave")]), "exactly one of at_step and at_s"),
        (lambda t: t.update(fault=[fault(action="leave", at_step=1, at_s=2.0)]), "exactly one"),
        (lambda t: t.update(fault=[fault(action="continue", at_step=1)]), "it is running by then"),
        (lambda t: t.update(fault=[fault(action="leave", at_step=1)] * 2), "it is gone by then"),
        (
            lambda t: t.update(fault=[fault(action="leave", at_step=5), fault(action="join", at_step=2)]),
            "in the order in which they happen",
        ),
        (lambda t: t.update(fault=[fault(action="join", at_step=5, node="relay-0")]), "bootstrap"),
        (lambda t: t["fleet"][1].update(join_at_s=5.0), "bootstrap"),
        (lambda t: t.update(fault=[fault(action="partition", at_step=1, node="inferense-*")]), "unknown node"),
        (lambda t: t.update(fault=[fault(action="heal", at_step=1)]), "cannot heal, it is whole by then"),
        (lambda t: t.update(fault=[fault(action="disk-free", at_step=1)]), "cannot disk-free, it is normal"),
        (lambda t: t.update(fault=[fault(action="join", at_step=1, for_s=3)]), "nothing to undo"),
        (lambda t: t.update(fault=[fault(action="clock", at_step=1)]), "`clock`, and nothing else, has `seconds`"),
        (lambda t: t.update(fault=[fault(action="kill", at_step=1, sync_ms=5)]), "`disk-slow`, and nothing else"),
        (lambda t: t.update(fault=[fault(action="kill", at_step=1, side="x")]), "unknown name 'side'"),
        (lambda t: t["fleet"][3].update(link="hmoe"), "unknown link 'hmoe'"),
        (lambda t: t.update(link={"home": {"dealy_ms": 3}}), "did you mean 'delay_ms'"),
        (lambda t: t.update(link={"home": {"nat": "symmetrical"}}), "did you mean 'symmetric'"),
        (lambda t: t.update(link={"home": {"loss": 0.9}}), "0.5"),
        (lambda t: (t.update(link={"n": {"nat": "symmetric"}}), t["fleet"][1].update(link="n")), "others dial a relay"),
        (lambda t: t["fleet"][3].update(settings={"download_byte_per_s": 1}), "did you mean 'download_bytes_per_s'"),
        (lambda t: t["fleet"][3].update(settings={"download_bytes_per_s": "many"}), "settings of inference.*int"),
        (lambda t: t["fleet"][3].update(settings={"data_dir": "/"}), "unknown name 'data_dir'"),
        (lambda t: t["fleet"].append({"role": "hostile"}), "a hostile peer, and no other node, has an attack"),
        (lambda t: t["fleet"].append({"role": "hostile", "attack": "eclips"}), "did you mean 'eclipse'"),
        (lambda t: t["fleet"][3].update(attack="flood"), "a hostile peer, and no other node, has an attack"),
        (lambda t: t["fleet"][1].update(fill=True), "cannot be left to the memory"),
        (lambda t: t.update(random=[draw(nodes="relays-*")]), r"no node is named 'relays-\*'"),
        (lambda t: t.update(random=[draw(actions=["continue"])]), "continue cannot be drawn"),
        (lambda t: t.update(random=[draw(from_step=1)]), "give from_step and to_step, or from_s and to_s"),
        (lambda t: t.update(random=[draw(from_s=9.0, to_s=3.0)]), "ends before it begins"),
        (lambda t: t.update(short={"fleets": []}), r"\[short\]: unknown name 'fleets'"),
        (lambda t: (t["fleet"].pop(), t.update(expect={"cheats_evicted": True})), "its fleet has no cheat"),
        (lambda t: (t["fleet"].pop(3), t.update(expect={"steps_at_least": 2})), "no honest contributor to train on"),
        (lambda t: t.update(until={"step": 3}, expect={"steps_at_least": 4}), "4 steps, but ends at step 3"),
        (lambda t: t.update(fault=[fault(action="kill", at_s=31.0)]), "is to kill at 31 s, but .* timeout_s is 30"),
        (lambda t: t["fleet"][3].update(join_at_s=40.0), "inference-0 is to join at 40 s"),
        (lambda t: t.update(random=[draw(from_s=3.0, to_s=40.0)]), "number 1 is to end at 40 s"),
        (lambda t: t.update(until={"step": 3}, fault=[fault(action="kill", at_step=4)]), "to kill at step 4"),
        (lambda t: t.update(expect={"reward_at_least": float("nan")}), "reward_at_least = nan is not a finite number"),
        (lambda t: t["run"].update(overrides={"batch": {"deadline_s": float("inf")}}), "deadline_s = inf is not"),
        (lambda t: t.update(short=3), r"\[short\] is '3' and not a table"),
        (lambda t: t.update(short={"until": {"timeout_s": -4}}), "the short form cannot be run: .*until.timeout_s"),
        (lambda t: t.update(short={"fault": [gone("relay-7", at_s=1.0)]}), "the short form .* unknown node 'relay-7'"),
        (lambda t: t.update(short={"unasked": ["honest_rejected"]}), "unknown expectation 'honest_rejected'"),
        (
            lambda t: t.update(expect={"honest_rejected": 0}, short={"unasked": ["honest_rejects"]}),
            "unknown expectation 'honest_rejects'; did you mean 'honest_rejected'",
        ),
        (lambda t: t.update(short={"unasked": "honest_rejected"}), "unasked is a list of names"),
        (lambda t: t.update(expect={"trainer_wait_fraction_at_most": 1.0}), "< 1.0"),
        (lambda t: t.update(expect={"steps_at_least": 0}), ">= 1"),
        (lambda t: t["fleet"][0].update(name="a\n"), "fleet.*name"),
        (lambda t: t["run"].update(name="x\n"), "run.name"),
        (lambda t: t.update(link={"home": {"up_mbit": 1e-9}}), ">= 0.01"),
        (lambda t: t.update(link={"home": {"up_mbit": 1}}), "no node has the link 'home'"),
        (lambda t: t["fleet"][1].update(disk_mb=64), "relay-0: disk_mb is 64, and a relay starts with 72 MB"),
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


@pytest.mark.parametrize("name", scenario_names())
def test_every_short_form_is_sound_and_no_larger(name):
    whole, short = load_scenario(name), load_scenario(name, short=True)
    assert len(short.nodes()) <= len(whole.nodes())
    assert short.until.timeout_s <= whole.until.timeout_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(expect={"steps_at_least": 60}), "steps_at_least is 60, but the run ends after 50 steps"),
        (lambda t: t.update(until={"step": 51}), "step is 51"),
        (lambda t: t.update(fault=[fault(action="kill", at_step=51)]), "number 1, at_step is 51"),
        (lambda t: t.update(random=[{**draw(), "from_s": None, "to_s": None, "from_step": 1, "to_step": 99}]), "is 99"),
        (lambda t: t.update(expect={"evaluation_rises": True}), "evaluates nothing"),
        (lambda t: t.update(expect={"reward_at_least": 7.0}), "rewards of sort-digits lie between 0 and 1"),
        (lambda t: t.update(expect={"reward_gain_at_least": 2.0}), "reward_gain_at_least = 2, but"),
        (lambda t: t.update(expect={"accepted_per_honest_at_least": 801}), "a contributor can have 800"),
        (lambda t: t.update(expect={"accepted_at_least": 1601}), "2 contributors can have 1600"),
        (lambda t: t.update(until={"step": 3}, expect={"accepted_per_honest_at_least": 65}), "can have 64"),
        (lambda t: t.update(fault=[gone("trainer-0", at_step=49)]), "from step 49 on there is no trainer"),
        (lambda t: t.update(fault=[gone("relay-*", at_step=5)]), "from step 5 on there is no relay"),
        (lambda t: t.update(fault=[gone("validator-0", "stop", at_step=5)]), "there is no validator any more"),
        (lambda t: t.update(fault=[gone("inference-0", "leave", at_step=5)]), "there is no inference any more"),
        (lambda t: t.update(fault=[gone("inference-0", "partition", at_step=5)]), "there is no inference any more"),
        (
            lambda t: t.update(
                until={"finished": False}, expect={"steps_at_least": 9}, fault=[gone("trainer-0", "stop", at_step=8)]
            ),
            "step 9 is to be reached",
        ),
    ],
)
def test_what_the_run_can_never_come_to_is_refused(small, change, message):
    change(small)
    recipe = load_recipe("demo")
    recipe = msgspec.structs.replace(recipe, evaluation=EvaluationSettings(every_steps=0))
    with pytest.raises(ConfigError, match=message):
        check_possible(parse_scenario(small, name="x"), recipe, seed=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(fault=[gone("trainer-0", at_step=5, for_s=3.0)]),
        lambda t: t.update(fault=[gone("trainer-0", at_step=5), gone("trainer-0", "join", at_step=6)]),
        lambda t: t.update(fault=[gone("relay-0", "clock", at_step=5, seconds=3.0)]),
        lambda t: t.update(until={"step": 5}, fault=[gone("trainer-0", "stop", at_step=5)]),
        lambda t: t.update(until={"finished": False}, fault=[gone("trainer-0", "stop", at_step=5)]),
        lambda t: (t["fleet"].append({"role": "relay"}), t.update(fault=[gone("relay-0", at_step=5)])),
        lambda t: t.update(expect={"reward_at_least": 1.0, "accepted_per_honest_at_least": 800}),
    ],
)
def test_what_the_run_may_come_to_is_taken(small, change):
    change(small)
    check_possible(parse_scenario(small, name="x"), load_recipe("demo"), seed=0)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", scenario_names())
def test_what_every_shipped_scenario_wants_can_be_had(name, short, tmp_path):
    scenario = load_scenario(name, short=short)
    write_recipe(scenario.run, tmp_path / "recipe.toml", seed=0)
    for seed in range(20):
        check_possible(scenario, load_recipe(tmp_path / "recipe.toml"), seed=seed)


def test_the_short_form_replaces_values_and_counts(small):
    small["fleet"][3].update(count=5, short_count=2)
    small["short"] = {"until": {"timeout_s": 9.0}}
    short, whole = (parse_scenario(small, name="x", short=flag) for flag in (True, False))
    assert (len(short.nodes()), short.until.timeout_s) == (6, 9.0)
    assert (len(whole.nodes()), whole.until.timeout_s) == (9, 30.0)


def test_what_the_whole_asks_may_be_left_unasked_in_the_short_form(small):
    small["expect"] = {"honest_rejected": 0, "trainer_wait_fraction_at_most": 0.1}
    small["short"] = {"unasked": ["trainer_wait_fraction_at_most"]}
    short, whole = (parse_scenario(small, name="x", short=flag).expect for flag in (True, False))
    assert (short.trainer_wait_fraction_at_most, short.honest_rejected) == (None, 0)
    assert whole.trainer_wait_fraction_at_most == 0.1


def test_a_link_may_be_one_of_the_short_form_alone(small):
    small["link"] = {"home": {"up_mbit": 1}}
    small["short"] = {"fleet": [dict(entry) for entry in small["fleet"]]}
    small["short"]["fleet"][3]["link"] = "home"
    assert parse_scenario(small, name="x").nodes()[3].link.up_mbit is None
    assert parse_scenario(small, name="x", short=True).nodes()[3].link.up_mbit == 1


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", scenario_names())
def test_a_shipped_scenario_that_is_to_finish_expects_all_steps(name, short, tmp_path):
    scenario = load_scenario(name, short=short)
    write_recipe(scenario.run, tmp_path / "recipe.toml", seed=0)
    total = load_recipe(tmp_path / "recipe.toml").batch.total_steps
    assert scenario.expect.steps_at_least == total or not scenario.until.finished
    assert scenario.expect.steps_at_least


def test_a_node_has_the_link_and_the_disk_that_its_scenario_says(small):
    small["link"] = {"home": {"down_mbit": 20, "up_mbit": 5, "delay_ms": 15}}
    small["fleet"][3]["link"] = "home"
    small["fault"] = [fault(action="disk-full", at_step=1, for_s=4.0), fault(action="clock", at_step=2, seconds=60)]
    plan = parse_scenario(small, name="x").nodes()[3]
    assert (plan.link.up_mbit, plan.link.delay_ms, plan.disk_mb, plan.meddled) == (5, 15, 128, True)


def test_an_unknown_scenario_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        load_scenario("dmeo")


@pytest.mark.parametrize(
    "content", [b"[run", b"\xff\xfe", b"a = " + b"[" * 5000, b"a = " + b"9" * 5000, b"#" * 300_000]
)
def test_a_file_that_is_no_scenario_is_a_named_error(tmp_path: Path, content: bytes):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_scenario(path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str):
    """Attack: a name that leads to a pipe, which nobody writes to, or to a device that never ends."""
    path = tmp_path / "odd.toml"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    code = f"from simnet.scenario import load_scenario\nload_scenario({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert "no file that can be read as a scenario" in done.stderr


def test_a_missing_file_is_a_named_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "directory.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "directory.toml")


def test_overrides_replace_values_and_leave_their_neighbours():
    scenario = load_scenario("demo", {"until": {"timeout_s": 9.0}, "expect": {"reward_at_least": None}})
    assert (scenario.until.timeout_s, scenario.until.finished) == (9.0, True)
    assert (scenario.expect.reward_at_least, scenario.expect.cheats_evicted) == (None, True)


@given(
    st.dictionaries(
        st.sampled_from(["run", "fleet", "fault", "random", "link", "short", "until", "expect", "title", "x"]),
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

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from simnet_world import FakeCommands, wait_for, without_ledgers

from protocol.errors import ConfigError, ModelError
from simnet import fleet, run_scenario, runner
from simnet.interrupts import shielded

SCENARIO = """
[run]
recipe = "demo"
overrides = { batch = { total_steps = 7 } }
[[fleet]]
role = "trainer"
[[fleet]]
role = "relay"
[[fleet]]
role = "validator"
[[fleet]]
role = "inference"
[[fleet]]
role = "inference"
cheat = "wrong-model"
[until]
timeout_s = 60
[expect]
cheats_evicted = true
honest_rejected = 0
"""

GOOD = {
    "total_steps": 8,
    "contributors": [
        {"name": "inference-0", "accepted": 5},
        {"name": "wrong-model-0", "accepted": 0, "rejected": {"toploc": 1}, "standing": "evicted"},
    ],
}
BAD = {**GOOD, "contributors": [{"name": "inference-0", "accepted": 5, "rejected": {"late": 2}}]}


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr("simnet.report.gather_evidence", without_ledgers)
    monkeypatch.setattr(runner, "ROUND_S", 0.1)
    monkeypatch.setattr(runner, "FINISH_GRACE_S", 0.5)
    monkeypatch.setattr(fleet, "TERM_AFTER_S", 2.0)
    monkeypatch.setattr(fleet, "END_TIMEOUT_S", 3.0)


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def run(scenario: Path, tmp_path: Path, *, overrides=None, **behaviour) -> tuple[int, dict]:
    code = run_scenario(scenario, tmp_path / "out", live=False, overrides=overrides, commands=FakeCommands(**behaviour))
    return code, json.loads((tmp_path / "out" / "report.json").read_text())


def test_met_expectations_end_with_0_and_the_reports_path_as_the_last_line(scenario, tmp_path, capfd):
    code, report = run(scenario, tmp_path, trainer_0=GOOD)
    assert code == 0
    assert report["outcome"] == "finished"
    assert report["steps"] == 8
    assert report["bytes_by_relay"]["relay-0"] == {"bytes_in": 2000, "bytes_out": 7000}
    assert [node["starts"] for node in report["nodes"]] == [1] * 5
    assert capfd.readouterr().out.splitlines()[-1] == str(tmp_path / "out" / "report.json")
    assert (tmp_path / "out" / "report.html").exists()


def test_the_first_and_last_evaluation_are_said_in_words(scenario, tmp_path, capfd):
    evaluations = [
        {"step": step, "pass_at": [{"k": 1, "value": value, "low": value - 0.05, "high": value + 0.05}]}
        for step, value in ((0, 0.25), (4, 0.5), (8, 0.9))
    ]
    run(scenario, tmp_path, trainer_0={**GOOD, "evaluations": evaluations})
    said = [line for line in capfd.readouterr().out.splitlines() if "pass@1" in line]
    assert said == [
        "pass@1 0.250 on held-out prompts after 0 steps (95 %: 0.200 to 0.300)",
        "pass@1 0.900 on held-out prompts after 8 steps (95 %: 0.850 to 0.950)",
    ]


def test_an_unmet_expectation_ends_with_1(scenario, tmp_path, capfd):
    code, report = run(scenario, tmp_path, trainer_0=BAD)
    assert code == 1
    assert [expectation["met"] for expectation in report["expectations"]] == [False, False]
    assert "NOT MET  honest_rejected ≤ 0 (found 2)" in capfd.readouterr().out


def test_a_run_whose_ledger_cannot_be_read_has_not_passed(scenario, tmp_path, monkeypatch):
    monkeypatch.undo()  # stand-ins leave none
    monkeypatch.setattr(runner, "FINISH_GRACE_S", 0.5)
    code, report = run(scenario, tmp_path, trainer_0=GOOD)
    assert all(expectation["met"] for expectation in report["expectations"])
    assert (code, report["passed"]) == (1, False)
    assert sum(one["outcome"] == "failed" for one in report["oracles"]) == 6


def test_faults_strike_while_it_runs(scenario, tmp_path):
    faults = [
        {"node": "inference-0", "action": "leave", "at_step": 3},
        {"node": "inference-0", "action": "join", "at_step": 6},
    ]
    changes = {
        "run": {"overrides": {"batch": {"total_steps": 40}}},
        "fault": faults,
        "until": {"step": 30},
        "expect": {"cheats_evicted": None},
    }
    code, report = run(scenario, tmp_path, overrides=changes)
    assert (code, report["outcome"]) == (0, "reached")
    assert [(fault["node"], fault["action"]) for fault in report["faults"]] == [
        ("inference-0", "leave"),
        ("inference-0", "join"),
    ]
    assert {node["name"]: node["starts"] for node in report["nodes"]}["inference-0"] == 2
    assert report["unexpected_exits"] == []


def test_what_the_run_never_comes_to_is_refused_before_anything_starts(scenario, tmp_path):
    with pytest.raises(ConfigError, match="but the run ends after 7 steps"):
        run(scenario, tmp_path, overrides={"until": {"step": 8}})
    assert not (tmp_path / "out" / "nodes").exists()


def test_the_plan_is_told_without_starting_anything():
    lines = runner.plan_scenario("soak", seed=3, short=True)  # with its recipe, but nothing is started
    assert "relay-0: relay" in lines
    assert [line for line in lines if "trainer-0 restart" in line]
    assert lines[:-1] == runner.plan_scenario("soak", seed=3, short=True)[:-1]
    assert lines[-1].startswith("about ")


def test_ctrl_c_does_not_come_between_what_a_plan_tries_and_taking_it_away(monkeypatch):
    seen = []

    def load(*_, **__):
        with shielded():
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("taken away")

    monkeypatch.setattr(runner, "_load", load)
    with pytest.raises(KeyboardInterrupt):
        runner.plan_scenario("demo")
    assert seen == ["taken away"]


def test_what_an_earlier_simulation_left_is_ended_before_memory_is_asked_for(scenario, tmp_path, monkeypatch, capfd):
    free = {"mb": 1}
    monkeypatch.setattr(runner, "available_memory_mb", lambda: free["mb"])
    monkeypatch.setattr(runner, "sweep", lambda: free.update(mb=10**6) or 7)
    run(scenario, tmp_path, trainer_0=GOOD)
    assert "killed 7 processes that an earlier simulation left behind" in capfd.readouterr().out


def test_an_output_directory_by_which_no_clock_could_be_moved_is_refused(scenario, tmp_path):
    clock = {"fault": [{"node": "inference-0", "action": "clock", "at_step": 1, "seconds": 5}]}
    with pytest.raises(ConfigError, match="has ':' in its path"):
        run(scenario, tmp_path / "12:30", overrides=clock)
    assert not (tmp_path / "12:30").exists()


def test_a_plan_is_refused_as_the_simulation_would_be(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SCENARIO.replace("total_steps", "total_stepz"))
    with pytest.raises(ConfigError, match="total_stepz"):
        runner.plan_scenario(path)


def test_a_trainer_may_crash_and_come_back(scenario, tmp_path):
    faults = [
        {"node": "trainer-0", "action": "kill", "at_s": 0.5},
        {"node": "trainer-0", "action": "join", "at_s": 1.0},
    ]
    code, report = run(scenario, tmp_path, overrides={"fault": faults}, trainer_0={**GOOD, "total_steps": 20})
    assert (code, report["outcome"]) == (0, "finished")


def test_a_trainer_that_ends_on_its_own_ends_the_simulation_with_its_last_words(scenario, tmp_path, capfd):
    code, report = run(scenario, tmp_path, trainer_0={"exit_code": 3})
    assert (code, report["outcome"]) == (1, "failed")
    assert "the disk is on fire" in report["problem"]
    assert "the disk is on fire" in capfd.readouterr().out


def test_a_trainer_that_ends_well_before_its_last_step_has_not_finished(scenario, tmp_path):
    code, report = run(scenario, tmp_path, trainer_0={**GOOD, "steps_trained": 3})
    assert (code, report["outcome"]) == (1, "failed")
    assert "ended with code 0 after 3 of 8 steps" in report["problem"]


def test_what_a_fault_did_is_recorded_and_what_it_could_not_do_is_noted(scenario, tmp_path):
    changes = {
        "run": {"overrides": {"batch": {"total_steps": 30}}},
        "fault": [
            {"node": "inference-0", "action": "clock", "at_step": 1, "seconds": -7.5},
            {"node": "validator-0", "action": "stop", "at_step": 10, "for_s": 0.2},
            {"node": "relay-0", "action": "kill", "at_s": 55.0, "for_s": 1.0},
        ],
    }
    behaviour = {"trainer_0": {**GOOD, "total_steps": 30}, "validator_0": {"crash_at": 2}}
    _, report = run(scenario, tmp_path, overrides=changes, **behaviour)
    marks = [(fault["node"], fault["action"], fault["seconds"]) for fault in report["faults"]]
    assert marks == [("inference-0", "clock", -7.5)]
    assert report["notes"] == [
        "validator-0 was not there to stop",
        "2 of 3 planned faults never struck: validator-0, relay-0",
    ]
    assert (report["faults_planned"], report["faults_struck"]) == (3, 1)


def test_a_first_relay_that_cannot_start_is_told_with_its_last_words(scenario, tmp_path):
    code, report = run(scenario, tmp_path, relay_0={"exit_code": 1})
    assert (code, report["outcome"]) == (1, "failed")
    assert "relay-0 ended as it started" in report["problem"]


def test_time_that_runs_out_is_a_failure_unless_only_the_time_counts(scenario, tmp_path):
    changes = {"until": {"timeout_s": 1.0}, "expect": {"cheats_evicted": None}}
    code, report = run(scenario, tmp_path / "a", overrides=changes)
    assert (code, report["outcome"]) == (1, "timeout")
    changes["until"]["finished"] = False
    code, report = run(scenario, tmp_path / "b", overrides=changes)
    assert (code, report["outcome"]) == (0, "reached")


def test_a_node_that_crashes_unasked_is_named(scenario, tmp_path):
    _, report = run(scenario, tmp_path, trainer_0={**GOOD, "total_steps": 15}, validator_0={"crash_at": 3})
    assert report["unexpected_exits"] == ["validator-0 ended with exit code 9"]


def test_a_run_that_waits_for_a_node_that_has_died_ends_with_its_last_words(scenario, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(runner, "STUCK_AFTER_S", 0.5)
    waiting = {**GOOD, "total_steps": 0}  # stays at step 0 and never says that it has finished
    code, report = run(
        scenario,
        tmp_path,
        trainer_0={**waiting, "stays": True},
        relay_0={"total_steps": 0, "stays": True},
        validator_0={"total_steps": 0, "stays": True},
        inference_0={"exit_code": 3},
        wrong_model_0={"total_steps": 0, "stays": True},
    )
    assert (code, report["outcome"]) == (1, "failed")
    assert report["wall_s"] < 30
    said = capfd.readouterr().out
    assert "inference-0 ended with code 3, no other inference is left" in said
    assert "the disk is on fire" in said


def test_a_node_that_died_beside_others_that_work_ends_nothing(scenario, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "STUCK_AFTER_S", 0.0)
    text = scenario.read_text().replace('role = "validator"', 'role = "validator"\ncount = 2')
    scenario.write_text(text)
    assert run(scenario, tmp_path, trainer_0=GOOD, validator_0={"exit_code": 3})[1]["outcome"] == "finished"


def test_the_recipe_is_written_with_the_overrides_and_the_seed(scenario, tmp_path):
    run_scenario(scenario, tmp_path / "out", seed=42, live=False, commands=FakeCommands(trainer_0=GOOD))
    recipe = (tmp_path / "out" / "recipe.toml").read_text()
    assert '"total_steps" = 7' in recipe
    assert '"seed" = 42' in recipe


def test_an_override_that_the_recipe_does_not_know_is_refused_before_anything_starts(scenario, tmp_path):
    changes = {"run": {"overrides": {"batch": {"total_step": 3}}}}
    with pytest.raises(ConfigError, match=r"unknown key 'batch\.total_step'"):
        run_scenario(scenario, tmp_path / "out", live=False, overrides=changes, commands=FakeCommands())
    assert not (tmp_path / "out" / "nodes").exists()


def test_an_earlier_simulation_is_never_overwritten(scenario, tmp_path):
    run(scenario, tmp_path, trainer_0=GOOD)
    with pytest.raises(ConfigError, match="holds an earlier simulation"):
        run(scenario, tmp_path, trainer_0=GOOD)


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from simnet_world import FakeCommands
from simnet import run_scenario
sys.exit(run_scenario({scenario!r}, {out!r}, live=False, commands=FakeCommands()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_every_process_and_leaves_a_report(scenario, tmp_path, number):
    out = tmp_path / "out"
    script = SCRIPT.format(here=str(Path(__file__).parent), scenario=str(scenario), out=str(out))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(list(out.glob("nodes/*/data/status.url"))) == 5)
        os.kill(process.pid, number)
        stdout, _ = process.communicate(timeout=30)
    assert process.returncode == runner.EXIT_INTERRUPTED
    assert stdout.splitlines()[-1] == str(out / "report.json")
    assert json.loads((out / "report.json").read_text())["outcome"] == "interrupted"
    children = [int(path.read_text()) for path in out.glob("nodes/*/data/child.pid")]
    assert len(children) == 5
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("keep", [True, False])
def test_checkpoints_stay_unless_the_scenario_says_otherwise(scenario, tmp_path, keep):
    class WithCheckpoints(FakeCommands):
        def create_run(self, trainer_dir, recipe, *, name, validators):
            (trainer_dir / "checkpoints").mkdir(parents=True)
            return super().create_run(trainer_dir, recipe, name=name, validators=validators)

    overrides = {"run": {"keep_weights": keep}}
    commands = WithCheckpoints(trainer_0=GOOD)
    assert run_scenario(scenario, tmp_path / "out", live=False, overrides=overrides, commands=commands) == 0
    assert (tmp_path / "out" / "nodes" / "trainer-0" / "data" / "checkpoints").exists() is keep


def test_a_model_that_is_not_to_be_had_is_told_before_any_node_starts(scenario, tmp_path):
    overrides = {"run": {"overrides": {"model": {"source": "nowhere"}}}}
    with pytest.raises(ModelError, match="there is no model 'nowhere'"):
        run(scenario, tmp_path, overrides=overrides)
    assert not (tmp_path / "out" / "nodes").exists()

"""reasoning-gym: only what was found to be the same everywhere and safe to score; the list fits the package."""

import hashlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import scorers_kit

from environments import reasoning_gym_boxed
from environments.base import Task
from environments.reasoning_gym import ReasoningGym, survey
from environments.reasoning_gym_boxed import FORMS
from environments.reasoning_gym_survey import BOXED, judge
from environments.reasoning_gym_worker import prepare
from environments.registry import get_environment
from protocol.errors import ConfigError, EnvironmentUnknown, SandboxError

SEEDS = [hashlib.sha256(bytes([number])).digest() for number in range(4)]


linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(scope="module")
def worker():
    """What draws items, in this process."""
    return prepare()


@pytest.fixture(scope="module")
def sums():
    environment = ReasoningGym(config=json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}))
    yield environment
    environment.close()


def test_the_list_is_of_the_installed_release_and_whole():
    assert survey().release == metadata.version("reasoning-gym")
    kinds = [{*survey().allowed}, {*survey().boxed}, {*survey().excluded}]
    assert sum(map(len, kinds)) == len(set.union(*kinds)) == 106
    assert survey().boxed.items() <= BOXED.items()


@pytest.fixture(scope="module")
def countdown():
    environment = ReasoningGym(task_name="countdown", tags=False)
    yield environment
    environment.close()


@linux
def test_a_scorer_that_evaluates_text_runs_in_a_box(countdown):
    """Attack: answers that are code, for the node, for the verdict, or for what the scorer knows."""
    task = countdown.task(SEEDS[0])
    right = task.data["answer"]
    refused = [
        "__import__('os').write(3, b'v1.0') or __import__('os')._exit(0)",
        "().__class__.__bases__[0].__subclasses__()",
        "entry",
        "S('1')",
        "x.free_symbols",
        "[1]",
        "1 .real",
        "1.5.real",
        "(" * 500,
        "",
    ]
    rewards = countdown.rewards([(task, text) for text in (right, f" {right} ", *refused)])
    assert [reward.value for reward in rewards] == [1.0, 1.0] + [0.0] * len(refused)
    assert not countdown.repeatable


@linux
@pytest.mark.long
@pytest.mark.parametrize("bomb", ["9**9**9**9**9**9**9", "(" * 300, "sqrt(" * 70 + "2" + ")" * 70])
def test_a_formula_that_takes_for_ever_is_ended_and_the_next_is_scored(countdown, bomb):
    """Attack: towers of powers for the parser."""
    task = countdown.task(SEEDS[0])
    assert countdown.reward(task, bomb).value in (0.0, None)
    assert countdown.reward(task, task.data["answer"]).value == 1.0


@linux
@pytest.mark.parametrize("task", [pytest.param(each, marks=pytest.mark.long) for each in survey().boxed])
def test_every_boxed_task_pays_its_own_answer_and_no_other(task):
    environment = ReasoningGym(task_name=task, tags=False)
    tasks = [environment.task(seed) for seed in SEEDS]
    right = [(each, each.data["answer"]) for each in tasks]
    wrong = [(each, text) for each in tasks for text in ("", "entry", "oracle_answer", "answer", "7", "[]")]
    rewards = environment.rewards([*right, *wrong])
    environment.close()
    assert [reward.value for reward in rewards] == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize(
    "task", [each if each == "countdown" else pytest.param(each, marks=pytest.mark.long) for each in survey().boxed]
)
def test_right_answers_have_the_form_that_is_evaluated(task, worker):
    for number in range(20):
        drawn = worker({"task": task, "config": {}, "seed": number})
        assert FORMS[survey().boxed[task]].fullmatch(drawn["answer"]), drawn["answer"]


def test_without_the_sandbox_a_task_that_needs_it_refuses(countdown, sums, monkeypatch):
    monkeypatch.setattr(reasoning_gym_boxed, "establish", Mock(side_effect=SandboxError("no box", hint="a kernel")))
    with pytest.raises(SandboxError, match="no box"):
        countdown.require_machine()
    sums.require_machine()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"task_name": "word_ladder"}, "another hash seed"),
        ({"task_name": "no_such"}, "has no such task"),
        ({"config": "[]"}, "JSON object"),
        ({"config": '{"seed": 1}'}, "without size and seed"),
        ({"config": "{"}, "parameters of the environment"),
    ],
)
def test_other_parameters_are_refused(parameters, message):
    with pytest.raises(ConfigError, match=message):
        get_environment("reasoning-gym", parameters=parameters)


def test_settings_reach_the_task_and_answers_are_scored_in_full_or_not_at_all(sums):
    task = sums.task(SEEDS[0])
    answer = task.data["answer"]
    assert len(task.data["answer"].lstrip("-")) <= 2
    texts = [f"<answer>{answer}</answer>", f"<answer>The answer is {answer}</answer>", answer, "<answer></answer>"]
    assert [reward.value for reward in sums.rewards([(task, text) for text in texts])] == [1.0, 0.0, 0.0, 0.0]


def test_settings_that_the_task_does_not_know_are_named(sums, monkeypatch):
    monkeypatch.setattr(sums, "_settings", {"colour": "red"})
    with pytest.raises(EnvironmentUnknown, match=r"does not draw the task chain_sum.*colour"):
        sums.task(SEEDS[0])


def test_a_worker_that_cannot_work_cannot_tell():
    environment = ReasoningGym()
    environment._pool.command = ("-P", "-c", "import no_such_module")
    assert environment.reward(Task([], {"seed": 1}), "<answer>1</answer>").value is None
    environment.close()


def test_the_survey_sees_a_scorer_that_runs_text():
    """Attack: scorers of a new release that hand text to eval, openly, by a helper, or so that no reading shows it."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, scorers_kit.__file__], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert json.loads(done.stdout) == {
        "Plain": "",
        "Open": "its scorer may run what a policy wrote: score_answer calls eval",
        "Helped": "its scorer may run what a policy wrote: helper calls parse_expr",
        "Hidden": "its scorer compiles what a policy wrote",
        "Literal": "",
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "task", ["n_queens", "polynomial_multiplication", "word_ladder", "chain_sum", "propositional_logic"]
)
def test_the_survey_finds_the_same_again(task):
    assert judge(task) == survey().excluded.get(task, "")


@pytest.mark.long
def test_every_allowed_task_can_be_drawn_and_answered():
    for task in survey().allowed:
        environment = ReasoningGym(task_name=task)
        drawn = environment.task(SEEDS[1])
        rewards = environment.rewards(
            [(drawn, f"<answer>{drawn.data['answer']}</answer>"), (drawn, "<answer>x</answer>")]
        )
        assert [reward.value for reward in rewards] == [1.0, 0.0], task
        environment.close()

"""reasoning-gym: only what was found to be the same everywhere and safe to score; the list fits the package."""

import hashlib
import json
from importlib import metadata

import pytest

from environments.base import Task
from environments.reasoning_gym import ReasoningGym, survey
from environments.reasoning_gym_survey import judge, runs_text
from environments.registry import get_environment
from protocol.errors import ConfigError, EnvironmentUnknown

SEEDS = [hashlib.sha256(bytes([number])).digest() for number in range(4)]


@pytest.fixture(scope="module")
def sums():
    environment = ReasoningGym(config=json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}))
    yield environment
    environment.close()


def test_the_list_is_of_the_installed_release_and_whole():
    assert survey().release == metadata.version("reasoning-gym")
    assert len(survey().allowed) + len(survey().excluded) == 106
    assert not set(survey().allowed) & survey().excluded.keys()


@pytest.mark.parametrize("task", ["countdown", "n_queens", "string_insertion", "polynomial_multiplication"])
def test_tasks_whose_scorer_runs_text_are_refused_with_the_reason(task):
    """Attack: an answer that is code; these scorers hand it to eval."""
    with pytest.raises(ConfigError, match="may not be used: its scorer may run what a policy wrote"):
        get_environment("reasoning-gym", parameters={"task_name": task})


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
    class Plain:
        def score_answer(self, answer, entry):
            return float(answer == entry)

    assert runs_text(Plain) == ""


@pytest.mark.long
@pytest.mark.parametrize("task", ["n_queens", "word_ladder", "chain_sum", "propositional_logic"])
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

"""Think-sort: any number of dots, a colon, the digits in order; a letter asks for a length."""

import pytest

from environments.base import Task, user_message
from environments.registry import get_environment
from environments.sort_digits import SortDigits
from environments.think_sort import ThinkSort
from protocol.errors import ConfigError

TASK = Task(user_message("s3120="), {"answer": "0123"})


def test_golden_tasks():
    texts = [ThinkSort().task(number.to_bytes(32, "big")).text for number in range(3)]
    assert texts == ["s3804=", "s2095=", "s55286="]


@pytest.mark.parametrize("completion", [":0123", ".:0123", "........:0123"])
def test_right_answers(completion):
    assert ThinkSort().reward(TASK, completion).value == 1.0


@pytest.mark.parametrize(
    "completion", ["", "0123", "...0123", "..:123", "..:0123.", ". .:0123", "::0123", "..:0123<eos>"]
)
def test_wrong_answers(completion):
    assert ThinkSort().reward(TASK, completion).value == 0.0


def test_a_target_is_a_letter_in_front():
    environment = get_environment("think-sort")
    assert environment.with_length_target(TASK, 14).text == "ns3120="
    assert environment.with_length_target(TASK, 14).data == TASK.data
    for target in (0, 27):
        with pytest.raises(ConfigError, match=f"no letter for {target} tokens"):
            environment.with_length_target(TASK, target)


def test_other_environments_ask_in_the_paper_s_words():
    task = Task([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}])
    asked = SortDigits().with_length_target(task, 2000)
    assert asked.prompt[0] == task.prompt[0]
    assert asked.prompt[1]["content"] == "What is 2 + 2? Think for 2000 tokens before giving a response."

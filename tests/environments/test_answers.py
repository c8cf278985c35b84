"""Finding and reading answers: no digit of another script, no evaluation, bounded time."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.addition import Addition
from environments.answers import NotAnExpressionError, evaluate, integer, last_line, tagged
from environments.base import Task
from environments.chain_sums import ChainSums
from environments.countdown import Countdown

SEEDS = [bytes([number]) * 32 for number in range(64)]


def test_the_last_line_that_is_not_blank():
    assert last_line("a\n b \n\n \t\n") == "b"
    assert last_line("a\r\nb\r\n") == "b"
    assert last_line("") == last_line("\n\n") == ""
    assert last_line("x" * 10_000 + "\n5") == "5"


@pytest.mark.parametrize("text", ["", "-", "+5", "5.0", "٣", "５", "²", "1_000", "0x5", "5 5", "1e3", "9" * 65])
def test_no_whole_number(text):
    """int() and isdigit() take several of these."""
    assert integer(text) is None


def test_the_last_tag_counts():
    assert tagged("<answer>1</answer> <answer> 2 </answer> 3", "answer") == "2"
    assert tagged("<answer>1", "answer") is None
    assert tagged("1</answer>", "answer") is None


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1+2*3", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("8/3/2", Fraction(4, 3), [8, 3, 2]),
        ("10-4-3", 3, [10, 4, 3]),
        ("-(2 - 5) * --2 ", 6, [2, 5, 2]),
    ],
)
def test_expressions_are_evaluated_exactly(text, value, numbers):
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "", "1+", "(1", "1)", "1 2", "1/0", "1/(2-2)", "2**9", "2^3", "a", "1.5", "１+1", "1÷1", "1e9",
        "__import__('os')",
        "(" * 100 + "1" + ")" * 100, "-" * 200 + "1", "1+" * 200 + "1", "9999999999",
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text):
    """Attack: code, towers and nesting in place of an answer."""
    with pytest.raises(NotAnExpressionError):
        evaluate(text)


@given(st.text(alphabet="0123456789+-*/() ", max_size=300))
def test_any_text_has_a_value_or_is_refused(text):
    try:
        value, _ = evaluate(text)
    except NotAnExpressionError:
        return
    assert isinstance(value, Fraction)


def test_countdown_can_always_be_solved():
    """All numbers from 1 to 2, all targets within 2: the sum of the numbers takes over where nothing is in range."""
    for seed in SEEDS:
        task = Countdown(largest_target=2, min_numbers=3).task(seed)
        assert task.data["target"] in range(1, 3) or task.data["target"] == sum(task.data["numbers"])


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("(3+4)*2", 1.0),
        ("2*(4+3)", 1.0),
        ("2*7", 0.0),
        ("7+7", 0.0),
        ("3+4+2+3", 0.0),
        ("14", 0.0),
        ("2*(4+3) = 14", 0.0),
    ],
)
def test_countdown_takes_given_numbers_once(answer, value):
    """Attack: the target itself, numbers that were not given, numbers used twice."""
    task = Task([], {"numbers": [2, 3, 4], "target": 14})
    assert Countdown().reward(task, f"I think\n{answer}").value == value


def test_chain_sums_have_the_terms_and_digits_asked_for():
    for seed in SEEDS:
        task = ChainSums(min_terms=3, max_terms=3, min_digits=2, max_digits=2, plain=True).task(seed)
        assert len(task.text) == 9
        assert task.plain
        assert evaluate(task.text[:-1])[0] == task.data["answer"]


def test_addition_shows_examples_of_its_size():
    assert Addition().task(SEEDS[0]).text.startswith("2+3=5\n4+4=8\n9+6=15\n")
    assert Addition(largest=30).task(SEEDS[0]).text.startswith("12+3=15\n")
    assert Addition().reward(Task([], {"answer": 15}), "15 \n and more").value == 1.0
    assert Addition().reward(Task([], {"answer": 15}), "\n15").value == 0.0

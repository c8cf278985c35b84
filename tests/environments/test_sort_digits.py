"""Sorting digits: tasks depend on the seed alone, rewards survive any text."""

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.base import Reward, environment_digest
from environments.sort_digits import SortDigits

SEEDS = [hashlib.sha256(bytes([number])).digest() for number in range(64)]
PRINT_TASKS = """
import hashlib
from environments.registry import get_environment
environment = get_environment("sort-digits")
print(environment.digest.hex())
for number in range(64):
    print(environment.task(hashlib.sha256(bytes([number])).digest()))
"""


def run_with_hash_seed(hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-c", PRINT_TASKS], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_tasks_are_the_same_in_every_process():
    first, second = run_with_hash_seed("1"), run_with_hash_seed("2")
    assert first == second
    assert repr(SortDigits().task(SEEDS[63])) in first


def test_a_prompt_asks_for_four_to_eight_digits():
    texts = [SortDigits().task(seed).text for seed in SEEDS]
    assert all(text.startswith("s") and text.endswith("=") and text[1:-1].isdigit() for text in texts)
    assert {len(text) - 2 for text in texts} == {4, 5, 6, 7, 8}
    assert len(set(texts)) == len(SEEDS)


def test_the_tasks_of_this_version_never_change():
    """Golden: other tasks for the same seed need a higher `version`."""
    environment = SortDigits()
    assert environment.task(bytes(32)).text == "s3804="
    assert environment.digest.hex() == "8c1712c5fd7603221fdab173e7f72c407bbddcee1ca13e5fe205f469c8452091"


def test_rewards_the_exact_answer_only():
    environment = SortDigits()
    task = environment.task(SEEDS[0])
    answer = "".join(sorted(task.text[1:-1]))
    assert environment.reward(task, answer) == Reward(1.0, "right")
    for wrong in (answer[::-1], answer + " ", answer[:-1], "\N{FULLWIDTH DIGIT ONE}" + answer[1:], "", "=" + answer):
        assert environment.reward(task, wrong).value == 0.0


@pytest.mark.parametrize("completion", ["", "\ud800", "\0" * 200_000, "\N{PILE OF POO}" * 50_000, "9" * 200_000])
def test_hostile_completions_are_wrong_and_nothing_else(completion):
    """Attack: a completion meant to crash or stall whoever judges it."""
    environment = SortDigits()
    assert environment.reward(environment.task(SEEDS[1]), completion).value == 0.0


@given(st.text())
def test_any_text_gets_a_reward(completion):
    environment = SortDigits()
    assert environment.reward(environment.task(SEEDS[2]), completion).value in (0.0, 1.0)


def test_digest_covers_name_version_and_parameters():
    digests = {
        SortDigits().digest,
        SortDigits(max_digits=9).digest,
        SortDigits(min_digits=3).digest,
        environment_digest("sort-digits", 2, {"min_digits": 4, "max_digits": 8}),
        environment_digest("other", 1, {"min_digits": 4, "max_digits": 8}),
    }
    assert len(digests) == 5
    assert SortDigits().digest == environment_digest("sort-digits", 1, {"max_digits": 8, "min_digits": 4})

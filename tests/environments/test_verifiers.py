"""Tasksets of the verifiers package, in an interpreter of their own: `make test-verifiers` makes it and names it."""

import os

import pytest

from environments.registry import get_environment, open_environment, specify
from environments.verifiers import PYTHON_VARIABLE
from protocol.errors import ConfigError, EnvironmentUnknown
from protocol.records import EnvironmentSpec

INTERPRETER = os.environ.get("VERIFIERS_PYTHON", "")
TASKSET = """
import verifiers.v1 as vf

class EchoTask(vf.Task):
    @vf.reward
    async def exact(self, trace) -> float:
        if trace.root_reply == "boom":
            raise ValueError("boom")
        return float(trace.root_reply == self.data.id)

class Echo(vf.Taskset):
    def load(self):
        for number in range(10):
            yield EchoTask(vf.TaskData(prompt=f"Say w{number}", id=f"w{number}"), self.config.task)

__all__ = ["Echo"]
"""


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "the environment verifiers needs the parameter taskset"),
        ({"taskset": "../x"}, "parameter taskset"),
        ({"taskset": "x", "config": "[]"}, "config is a JSON object"),
        ({"taskset": "x", "tasks": 0}, "parameter tasks"),
    ],
)
def test_parameters_are_checked(parameters, message):
    with pytest.raises(ConfigError, match=message):
        get_environment("verifiers", parameters=parameters)


def test_without_an_interpreter_that_has_it_the_variable_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(EnvironmentUnknown, match="cannot be started: No such file") as caught:
        specify(get_environment("verifiers", parameters={"taskset": "echo"}))
    assert PYTHON_VARIABLE in caught.value.hint


@pytest.mark.long
@pytest.mark.skipif(not INTERPRETER, reason="VERIFIERS_PYTHON is not set; make test-verifiers sets it")
def test_a_taskset_is_drawn_from_and_scored(tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, INTERPRETER)
    (tmp_path / "echo_words.py").write_text(TASKSET)
    environment = get_environment("verifiers", parameters={"taskset": "echo-words", "tasks": 5})
    environment._pool.path = str(tmp_path)
    task = environment.task(bytes(32))
    right = task.text.removeprefix("Say ")
    assert task.data["task"] < 5
    texts = [right, "", "boom", "x" * 300_000, "\ud800", "<|im_end|>"]
    rewards = environment.rewards([(task, text) for text in texts])
    assert [reward.value for reward in rewards] == [1.0, 0.0, None, 0.0, 0.0, 0.0]
    assert specify(environment).requires["verifiers"].startswith("0.4")
    environment.close()


@pytest.mark.long
@pytest.mark.skipif(not INTERPRETER, reason="VERIFIERS_PYTHON is not set; make test-verifiers sets it")
def test_a_taskset_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, INTERPRETER)
    spec = EnvironmentSpec(
        name="verifiers",
        digest=bytes(32),
        package="intellect-node",
        package_version="1",
        parameters={"taskset": "none"},
    )
    with pytest.raises(EnvironmentUnknown, match="taskset 'none' not found") as caught:
        open_environment(spec, tmp_path)
    assert PYTHON_VARIABLE in caught.value.hint

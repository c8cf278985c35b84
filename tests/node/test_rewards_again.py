"""Rewards that need not repeat themselves: claimed only if found twice, and only softly held against anyone."""

import itertools
import json
import math
import sys
from dataclasses import dataclass, field

import pytest
from submission_kit import POLICY

from environments.base import Environment, Reward, Task, user_message
from environments.code import CodeProblems
from node.engines import rewards
from node.engines.assignment import Assignment, Work
from node.engines.rewards import answer_rewards, claimed_rewards
from node.engines.tokenizer import Tokenizer
from node.validator.checks import REWARD_RUNS, check_rewards, decide
from protocol.draw import TrackRecord, check_rate
from protocol.records import CheckSpec
from protocol.rollouts import Rollout


@dataclass(eq=False)
class Scripted(Environment):
    """Gives each answer the rewards that it was told to, one after another, the last one for ever."""

    name = "scripted"
    repeatable = False
    _script: dict[str, list] = field(default_factory=dict)
    _asked: list[str] = field(default_factory=list)

    def task(self, seed):
        raise NotImplementedError

    def reward(self, task, completion):
        self._asked.append(completion)
        script = self._script[completion]
        value = script.pop(0) if len(script) > 1 else script[0]
        return Reward(value, "as told")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(POLICY)


@pytest.fixture
def case(tokenizer):
    """`case(claim=[own, own, …])`: a finding on answers of these claims, and the environment that was asked."""

    def checked(*claims_and_scripts, repeatable=False):
        environment, rollouts = Scripted(), []
        for number, (claim, script) in enumerate(claims_and_scripts):
            rollouts.append(rollout(number, claim))
            environment._script[rewards.answer_text(tokenizer, rollouts[-1])] = list(script)
        environment.repeatable = repeatable
        return check_rewards(rollouts, work_of(environment), tokenizer=tokenizer), environment

    return checked


def work_of(environment, task=None):
    return Work(bytes(32), environment, [Assignment(task or Task(user_message("?")), [3])], 8)


def rollout(number, claim):
    return Rollout(
        prompt_index=0,
        member=number,
        prompt_ids=[3],
        output_ids=[4 + number, 2],
        logprobs=[0.0, 0.0],
        reward=claim,
        finish_reason="stop",
        proofs=[b""],
    )


def told(finding):
    return finding.result.outcome, finding.hard


def test_a_disagreement_is_found_again_before_it_counts_and_is_never_hard(case):
    finding, environment = case((1.0, [0.0]), (1.0, [1.0]))
    assert told(finding) == ("fail", False)
    assert len(environment._asked) == 2 + REWARD_RUNS - 1
    assert decide([finding]).outcome == "reject"


@pytest.mark.parametrize("script", [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, None, 0.0]])
def test_own_runs_that_disagree_tell_nothing(case, script):
    """Attack on an honest contributor: an answer that is right now and wrong then makes it look like a liar."""
    finding, _ = case((1.0, script), (1.0, [1.0]))
    assert finding.result.outcome == "unknown"
    assert decide([finding]).outcome == "undecided"


def test_nothing_claimed_for_what_comes_out_now_so_and_now_otherwise_is_well(case):
    assert told(case((0.0, [1.0, 0.0, 1.0]), (1.0, [1.0]))[0])[0] == "pass"
    assert told(case((0.0, [1.0]), (1.0, [1.0]))[0]) == ("fail", False)


def test_where_rewards_repeat_themselves_a_difference_is_a_lie_at_once(case):
    finding, environment = case((1.0, [0.0]), repeatable=True)
    assert told(finding) == ("fail", True)
    assert len(environment._asked) == 1


def test_who_was_rejected_softly_is_checked_in_full_from_then_on():
    """Attack: a contributor that claims rewards and calls its answers unsteady."""
    checks = CheckSpec(newcomer_submissions=2, floor=0.25, duplicate_tokens=32)
    assert check_rate(TrackRecord(50, 0, 50), checks) < 1.0
    assert check_rate(TrackRecord(50, 1, 0), checks) == 1.0


def test_a_pass_is_claimed_only_if_it_comes_twice(tokenizer):
    environment = Scripted()
    answers = [(0, rollout(number, 0.0)) for number in range(4)]
    texts = [rewards.answer_text(tokenizer, answer) for _, answer in answers]
    environment._script = dict(zip(texts, ([1.0], [1.0, 0.0], [0.0, 1.0], [1.0, None]), strict=True))
    found = claimed_rewards(work_of(environment), tokenizer, answers)
    assert found[0] == 1.0
    assert found[2] == 0.0
    assert math.isnan(found[1])
    assert math.isnan(found[3])
    assert environment._asked == [*texts, texts[0], texts[1], texts[3]]


def test_a_submission_s_answers_have_an_allowance_together(tokenizer, monkeypatch):
    """Attack: many answers, each just within its own limits."""
    monkeypatch.setattr(rewards, "SUBMISSION_CPU_S", 2.0)

    class Costly(Scripted):
        def reward(self, task, completion):
            self.allowance.charge(1.0)
            return Reward(1.0, "dear")

    answers = [(0, rollout(number, 0.0)) for number in range(4)]
    environment = Costly()
    found = answer_rewards(work_of(environment), tokenizer, answers)
    assert found[:2] == [1.0, 1.0]
    assert all(map(math.isnan, found[2:]))
    assert environment.allowance is None


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_a_program_that_asks_for_the_time_makes_nobody_a_liar(tokenizer, monkeypatch):
    """Attack on an honest contributor: a solution that is right in every other millisecond."""
    environment = CodeProblems(python=f"{sys.version_info.major}.{sys.version_info.minor}", _boxes=2)
    test = {"input": "", "output": "3\n"}
    environment.use_data(json.dumps({"kind": "program", "id": "p", "question": "?", "tests": [test]}).encode())
    source = "import time\nprint(3 if time.time_ns() // 1000 % 2 else 4)"
    monkeypatch.setattr(rewards, "answer_text", lambda *_: f"```python\n{source}\n```")
    work = work_of(environment, environment.task(bytes(32)))
    for claim in itertools.islice(itertools.cycle((1.0, 0.0)), 6):
        finding = check_rewards([rollout(0, claim)], work, tokenizer=tokenizer)
        assert not (finding.result.outcome == "fail" and finding.hard)
    environment.close()

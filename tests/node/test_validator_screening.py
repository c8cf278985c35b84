"""The cheap checks alone: they need no engine, and say the same as the judge's."""

import subprocess
import sys

import msgspec
import pytest
from submission_kit import ALICE, POLICY, RUN_ID, hand_in, judge_rollouts, make_judge, make_manifest, make_worker

from node.validator.screening import Screen
from protocol.errors import ModelError


@pytest.fixture(scope="module")
def manifest():
    return make_manifest()


@pytest.fixture(scope="module")
def alice(manifest, tmp_path_factory):
    """What an honest contributor handed in."""
    return hand_in(make_worker(), manifest, tmp_path_factory.mktemp("alice") / "0.parquet")


@pytest.fixture(scope="module")
def judge():
    return make_judge()


def rows_of(rollouts):
    return [msgspec.to_builtins(rollout, builtin_types=(bytes,)) for rollout in rollouts]


def screen(manifest, handed_in, rows, *, rewards=True, policy_dir=POLICY, contributor=ALICE):
    return Screen().screen(
        policy_dir=str(policy_dir),
        submission=msgspec.msgpack.encode(handed_in.record),
        manifest=msgspec.msgpack.encode(manifest),
        run_id=RUN_ID,
        contributor=contributor,
        rollouts=rows,
        rewards=rewards,
    )


def names(screened):
    return [check["name"] for check in screened["checks"]]


def test_honest_rollouts_pass_and_no_name_promises_more_than_was_checked(manifest, alice):
    screened = screen(manifest, alice, rows_of(alice.rollouts))
    assert screened["outcome"] == "accept"
    assert names(screened) == ["dtype", "schema", "prompt", "termination", "proof-shape", "reward"]
    assert screened["mean_reward"] == pytest.approx(sum(r.reward for r in alice.rollouts) / len(alice.rollouts))
    assert screened["answers"] == []  # none is long enough to be compared


def test_rewards_are_left_to_the_judge_where_it_is_asked_anyway(manifest, alice):
    assert "reward" not in names(screen(manifest, alice, rows_of(alice.rollouts), rewards=False))


LIES = {
    "schema": {"output_ids": []},
    "prompt": {"prompt_ids": [1, 2, 3]},
    "termination": {"finish_reason": "length"},
    "toploc": {"proofs": [b"short"]},
    "reward": {"reward": 7.0},
}


@pytest.mark.parametrize("check", LIES)
def test_cheap_lies_are_named_as_the_judge_names_them(manifest, alice, judge, check):
    number = next(i for i, one in enumerate(alice.rollouts) if one.finish_reason == "stop")
    rollouts = list(alice.rollouts)
    rollouts[number] = msgspec.structs.replace(rollouts[number], **LIES[check])
    screened = screen(manifest, alice, rows_of(rollouts))
    assert (screened["outcome"], screened["hard"]) == ("reject", True)
    assert screened["reason"].startswith(f"{check}: ")
    if check != "schema":  # the judge's helper mends the counts that it is about
        judged = judge_rollouts(judge, manifest, alice, rollouts)
        assert (judged["outcome"], judged["hard"], judged["reason"]) == ("reject", True, screened["reason"])


@pytest.mark.parametrize("rows", [None, [], [{}], [7], "rollouts", [{"prompt_index": "x"}], {"a": 1}])
def test_any_rows_get_a_result(manifest, alice, rows):
    screened = screen(manifest, alice, rows)
    assert screened["outcome"] == "reject"
    assert screened["reason"].startswith("schema: ")


def test_submission_under_anothers_key_answers_other_prompts(manifest, alice):
    """A contributor hands in what somebody else generated."""
    screened = screen(manifest, alice, rows_of(alice.rollouts), contributor=b"b" * 32)
    assert screened["reason"].startswith("prompt: ")


def test_long_answers_are_sketched(manifest, alice):
    wary = msgspec.structs.replace(manifest, checks=msgspec.structs.replace(manifest.checks, duplicate_tokens=8))
    sketches = screen(wary, alice, rows_of(alice.rollouts))["answers"]
    long = [one for one in alice.rollouts if len(one.output_ids) >= 8]
    assert len(sketches) == len(long) > 0
    assert sketches[0]["nats"] == pytest.approx(-sum(long[0].logprobs), rel=1e-5)


def test_policy_that_cannot_be_read_is_this_nodes_fault(manifest, alice, tmp_path):
    with pytest.raises(ModelError):
        screen(manifest, alice, rows_of(alice.rollouts), policy_dir=tmp_path)


def test_screening_needs_no_torch():
    script = "import sys, node.validator.screening; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "False"

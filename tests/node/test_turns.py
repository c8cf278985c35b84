"""Answers of several turns: made by a contributor, judged by a validator, trained on; a reply is nobody's to change."""

import json
import math

import msgspec
import pytest
from submission_kit import POLICY, hand_in, judge_rollouts, make_judge, make_manifest, make_worker, numbers

from environments import registry
from environments.base import Task, user_message
from environments.calculator import Calculator
from node.engines import turns
from node.engines.assignment import Assignment, Work
from node.engines.rewards import answer_rewards
from node.engines.tokenizer import Tokenizer
from protocol.errors import MalformedError, ModelError
from protocol.rollouts import Rollout, emitted_spans, read_rollouts, split_turns, write_rollouts
from trainer.groups import assemble_batch

GROUP = 4


@pytest.fixture(scope="module")
def installed():
    """The kit's environment, as if it were built in."""
    before = registry.BUILT_IN
    registry.BUILT_IN = {**before, "row-after-row": "turns_kit:RowAfterRow"}
    yield registry.get_environment("row-after-row")
    registry.BUILT_IN = before


@pytest.fixture(scope="module")
def manifest(installed):
    return msgspec.structs.replace(make_manifest(), environment=registry.specify(installed))


@pytest.fixture(scope="module")
def alice(manifest, tmp_path_factory):
    return hand_in(make_worker(), manifest, tmp_path_factory.mktemp("alice") / "0.parquet")


@pytest.fixture(scope="module")
def judge(manifest):
    return make_judge()


@pytest.fixture
def long(alice):
    """Place and content of an answer of three turns."""
    return next((place, one) for place, one in enumerate(alice.rollouts) if len(one.turns) == 6)


@pytest.fixture
def judge_changed(judge, manifest, alice, long):
    """Judge Alice's work with the long answer changed: check and hardness of what it is rejected for."""

    def judged(**changes):
        rollouts = list(alice.rollouts)
        rollouts[long[0]] = msgspec.structs.replace(long[1], **changes)
        judgement = judge_rollouts(judge, manifest, alice, rollouts)
        return judgement["outcome"], judgement["reason"].partition(":")[0], judgement["hard"]

    return judged


def test_honest_turns_are_accepted(judge, manifest, alice):
    judgement = judge_rollouts(judge, manifest, alice)
    assert judgement["outcome"] == "accept", judgement["reason"]
    assert numbers(judgement, "turns")["replies"] > 8
    assert numbers(judgement, "sampling")["match"] == 1.0
    emitted = sum(
        stop - start for one in alice.rollouts for start, stop in emitted_spans(len(one.output_ids), one.turns)
    )
    assert numbers(judgement, "sampling")["tokens"] == emitted < judgement["output_tokens"]


def test_replies_are_those_of_the_environment(alice, long):
    tokenizer = Tokenizer(POLICY)
    _, rollout = long
    first, second, third = emitted_spans(len(rollout.output_ids), rollout.turns)
    reply = tokenizer.decode(rollout.output_ids[first[1] : second[0]])
    assert reply.startswith("s")
    assert reply.endswith("=")
    assert rollout.logprobs[first[1] : second[0]] == [0.0] * len(reply)
    assert all(rollout.output_ids[stop - 1] == 2 for _, stop in (first, second))
    assert third[1] == len(rollout.output_ids)
    assert {len(one.turns) for one in alice.rollouts} >= {0, 6}


def test_the_last_turn_is_judged(alice, installed):
    """The reward is the environment's for the last turn alone."""
    tokenizer = Tokenizer(POLICY)
    for one in alice.rollouts:
        start = one.turns[-2] if one.turns else 0
        stop_ids = (2,) if one.finish_reason == "stop" else ()
        said = tokenizer.decode(one.output_ids[start:], stop_ids=stop_ids)
        digits = sorted(tokenizer.decode(one.prompt_ids).removeprefix("<bos>").strip("s="))
        assert one.reward == float(said == "".join(digits))


def test_a_right_last_turn_is_paid_whatever_came_before_it(installed):
    tokenizer = Tokenizer(POLICY)
    task = installed.task(bytes(32))
    right = "".join(sorted(task.text.strip("s=")))
    first, reply, last = (
        tokenizer._tokenizer.encode(text, add_special_tokens=False).ids for text in ("00", "s21=", right)
    )
    output_ids = [*first, 2, *reply, *last, 2]
    rollout = Rollout(
        prompt_index=0,
        member=0,
        prompt_ids=[3],
        output_ids=output_ids,
        logprobs=[0.0] * len(output_ids),
        reward=0.0,
        finish_reason="stop",
        proofs=[b""],
        turns=[0, len(first) + 1, len(first) + 1 + len(reply), len(output_ids)],
    )
    work = Work(bytes(32), installed, [Assignment(task, [3])], 1)
    assert answer_rewards(work, tokenizer, [(0, rollout)]) == [1.0]


def test_another_reply_than_the_environment_s_is_rejected(judge_changed, long):
    """Attack: a contributor changes what the tool said, to make the task easy."""
    _, rollout = long
    changed = list(rollout.output_ids)
    changed[rollout.turns[1]] = 7
    assert judge_changed(output_ids=changed) == ("reject", "turns", True)


def test_a_shorter_reply_is_rejected(judge_changed, long):
    """Attack: part of a reply is passed off as what the policy emitted, to have it trained on."""
    _, rollout = long
    begin, end, start, *rest = rollout.turns
    assert judge_changed(turns=[begin, end, start - 1, *rest])[0] == "reject"
    assert judge_changed(turns=[begin, end + 1, start, *rest])[:2] == ("reject", "termination")
    assert judge_changed(turns=[])[:2] == ("reject", "schema")


def test_probabilities_of_replies_are_refused(judge_changed, long):
    """Attack: numbers hidden where nobody compares them."""
    _, rollout = long
    changed = list(rollout.logprobs)
    changed[rollout.turns[1]] = -0.5
    assert judge_changed(logprobs=changed) == ("reject", "turns", True)


def test_an_answer_that_ends_too_early_is_rejected(judge_changed, long):
    """Attack: a contributor stops where its answer is right, though the environment goes on."""
    _, rollout = long
    end = rollout.turns[3]
    proofs = -(-rollout.turns[1] // 32) + -(-(end - rollout.turns[2]) // 32)
    shorter = {
        "output_ids": rollout.output_ids[:end],
        "logprobs": rollout.logprobs[:end],
        "turns": rollout.turns[:4],
        "proofs": rollout.proofs[:proofs],
        "finish_reason": "stop",
    }
    assert judge_changed(**shorter) == ("reject", "turns", True)


def test_the_noise_of_another_turn_is_rejected(judge, manifest, tmp_path, monkeypatch):
    """Attack: a contributor draws a later turn with noise of its choice."""

    def request(work, game, turn):
        honest = turns.GenerationRequest(
            [*work.assignments[game.prompt_index].prompt_ids, *game.played.output_ids, *game.reply],
            work.noise_seed(game.prompt_index, game.member),
        )
        return honest

    monkeypatch.setattr(turns, "_request", request)
    mallory = hand_in(make_worker(), manifest, tmp_path / "0.parquet")
    judgement = judge_rollouts(judge, manifest, mallory)
    assert (judgement["outcome"], judgement["reason"].partition(":")[0]) == ("reject", "sampling")


def test_proofs_of_later_turns_are_checked(judge_changed, long):
    _, rollout = long
    assert judge_changed(proofs=rollout.proofs[:-1])[:2] == ("reject", "toploc")
    assert judge_changed(proofs=[rollout.proofs[0]] * len(rollout.proofs))[:2] == ("reject", "toploc")


def test_a_run_of_single_turns_takes_no_others(judge, alice):
    """Attack: turns in a run whose environment has none: a way to leave tokens out of the checks."""
    judgement = judge_rollouts(judge, make_manifest(), alice)
    assert (judgement["outcome"], judgement["reason"].partition(":")[0]) == ("reject", "schema")


def test_an_environment_that_fails_to_reply_is_undecided(judge, manifest, alice, installed, monkeypatch):
    def reply(self, task, transcript):
        raise RuntimeError("the tool is broken here")

    monkeypatch.setattr(type(installed), "reply", reply)
    judgement = judge_rollouts(judge, manifest, alice)
    assert (judgement["outcome"], judgement["hard"]) == ("undecided", False)


def test_a_reply_that_leaves_no_room_ends_the_answer(manifest, alice, tmp_path):
    short = msgspec.structs.replace(manifest, model=msgspec.structs.replace(manifest.model, max_model_len=36))
    made = hand_in(make_worker(), short, tmp_path / "0.parquet")
    assert max(len(one.prompt_ids) + len(one.output_ids) for one in made.rollouts) <= 36
    assert sum(len(one.turns) for one in made.rollouts) < sum(len(one.turns) for one in alice.rollouts)
    assert judge_rollouts(make_judge(), short, made)["outcome"] == "accept"


def test_nothing_is_learnt_from_replies(alice):
    rows = [msgspec.to_builtins(one, builtin_types=(bytes,)) | {"checkpoint_step": 0} for one in alice.rollouts]
    batch = assemble_batch(
        rows, step=0, group_size=GROUP, max_staleness=0, vocab_size=64, max_length=256, advantage="normalised",
        drop_without_signal=False,
    )  # fmt: skip
    learnt = [(sample.rollout.prompt_ids, sample.rollout.output_ids) for sample in batch.samples]
    due = [(turn.prompt_ids, turn.output_ids) for one in alice.rollouts for turn in split_turns(one, GROUP)]
    assert learnt == due
    assert batch.rollouts == 16 < len(learnt)
    assert batch.tokens == sum(len(output) for _, output in learnt)
    assert all(all(sample.rollout.logprobs) for sample in batch.samples)


@pytest.mark.parametrize(
    "bad",
    [[0], [0, 3], [1, 3, 5, 9], [0, 3, 3, 9], [0, 3, 5, 8], [0, 5, 3, 9], [0, 3, 5, 9, 9], [-1, 3, 5, 9], [0, 0, 5, 9],
     list(range(12))],
)  # fmt: skip
def test_turns_that_do_not_fit_are_refused(alice, tmp_path, bad):
    with pytest.raises(MalformedError, match="turns"):
        emitted_spans(9, bad)
    rollout = msgspec.structs.replace(
        alice.rollouts[0], output_ids=[4] * 8 + [2], logprobs=[-1.0] * 9, proofs=[], turns=bad
    )
    with pytest.raises(ModelError, match="turns"):
        write_rollouts(tmp_path / "x.parquet", [rollout])


def test_turns_survive_the_file(alice, tmp_path):
    write_rollouts(tmp_path / "x.parquet", alice.rollouts)
    assert read_rollouts(tmp_path / "x.parquet", max_rollouts=16, max_tokens=256) == alice.rollouts


def test_a_reply_goes_through_the_chat_template(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((POLICY / "tokenizer.json").read_bytes())
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}<assistant>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_reply("42", plain=False, ended_by=2)
    assert tokenizer.decode(ids) == tokenizer.decode(
        tokenizer._tokenizer.encode("<user>42<eos><assistant>", add_special_tokens=False).ids
    )
    assert tokenizer.decode(tokenizer.encode_reply("42", plain=True, ended_by=2)) == "42"


def test_a_template_that_forgets_turns_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((POLICY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[-1].content }}"}))
    with pytest.raises(ModelError, match="it has no turns"):
        Tokenizer(tmp_path).encode_reply("42", plain=False, ended_by=2)


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        ("Let me see: <calc>12*34</calc>", "408"),
        ("<calc>1/3</calc>\n", "1/3"),
        ("<calc>1</calc> and <calc>2+2</calc>", "4"),
        ("<calc>1/0</calc>", "error: a division by zero"),
        ("<calc>__import__('os')</calc>", "error: unexpected '_'"),
        ("<calc>9**9**9</calc>", "error: unexpected '*'"),
        ("<calc>" + "9*" * 100 + "9</calc>", "error: the value is too long"),
        ("<calc>" + "9" * 200_000 + "</calc>", "error: 200000 characters; 256 are allowed"),
        ("<calc>5</calc> so 5", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_calculator_answers_what_ends_with_an_expression(said, reply):
    """Attack, among them: code and towers for the calculator."""
    task = Task(user_message("x"), {"answer": 5})
    assert Calculator().reply(task, [{"role": "assistant", "content": said}]) == reply


def test_only_the_policy_s_own_last_line_is_right():
    environment = Calculator()
    task = environment.task(bytes(32))
    assert environment.reward(task, f"<calc>1</calc>\n{task.data['answer']}").value == 1.0
    assert environment.reward(task, "<calc>1</calc>").value == 0.0
    assert not math.isnan(environment.reward(task, "").value)

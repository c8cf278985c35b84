"""Submissions judged as a validator judges them: honest ones pass on every engine setting, each lie is named."""

import copy
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from submission_kit import (
    ALICE,
    BFLOAT16,
    BOB,
    CHECKPOINT,
    FLOAT32,
    POLICY,
    hand_in,
    judge_rollouts,
    judge_rows,
    make_judge,
    make_manifest,
    make_worker,
    numbers,
)
from tiny_models import build_model, write_model

from environments.base import Reward
from environments.sort_digits import SortDigits
from node.engines.torch_engine import TorchEngine
from node.inference.compute import RolloutWorker
from node.validator.checks import check_logprobs, check_sampling, check_toploc, looseness
from node.validator.compute import Judge
from node.validator.measure import MeasuredChunk, MeasuredRollout
from protocol.errors import MalformedError, ModelError
from protocol.toploc import ChunkResult, build_proofs


@pytest.fixture(scope="module")
def judge():
    return make_judge()


@pytest.fixture(scope="module")
def manifest():
    return make_manifest()


@pytest.fixture(scope="module")
def alice(manifest, tmp_path_factory):
    """What an honest contributor handed in."""
    return hand_in(make_worker(), manifest, tmp_path_factory.mktemp("alice") / "0.parquet")


@pytest.fixture
def change(judge, manifest, alice):
    """Judge Alice's submission with some of its rollouts changed: `change({number: {field: value}})`."""

    def judged(changes):
        rollouts = list(alice.rollouts)
        for number, fields in changes.items():
            rollouts[number] = msgspec.structs.replace(rollouts[number], **fields)
        return judge_rollouts(judge, manifest, alice, rollouts)

    return judged


def rejected(judgement, check, *, hard=True):
    assert judgement["outcome"] == "reject", judgement
    assert judgement["hard"] is hard
    assert judgement["reason"].startswith(f"{check}: "), judgement["reason"]
    return True


def stopped(alice):
    """Number of a rollout that ended with the stop token after three tokens at least."""
    return next(
        i for i, rollout in enumerate(alice.rollouts) if rollout.finish_reason == "stop" and len(rollout.output_ids) > 3
    )


# Honest contributors.


@pytest.mark.parametrize(
    ("max_batch", "threads", "submissions"), [(1, 1, 5), (8, 1, 10), (64, 1, 10), (8, 2, 1), (64, 2, 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_rollouts_are_accepted_whatever_the_engine_s_settings(
    manifest, tmp_path, dtype, max_batch, threads, submissions
):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        worker = make_worker(dtype=dtype, max_batch=max_batch)
        handed_in = [hand_in(worker, manifest, tmp_path / f"{i}.parquet", index=i) for i in range(submissions)]
    finally:
        torch.set_num_threads(before)
    judge = make_judge(max_batch=64 // max_batch)
    for submission in handed_in:
        judgement = judge_rollouts(judge, manifest, submission)
        assert judgement["outcome"] == "accept", judgement
        assert {check["outcome"] for check in judgement["checks"]} == {"pass"}


@pytest.mark.parametrize("name", ["qwen2", "llama3-rope", "qwen3"])
def test_long_honest_rollouts_of_every_architecture_are_accepted(name, tmp_path):
    policy = write_model(build_model(name), tmp_path / "policy")
    manifest = make_manifest(policy, max_new_tokens=80, temperature=0.7)
    handed_in = hand_in(make_worker(policy, max_batch=5), manifest, tmp_path / "0.parquet")
    assert max(len(rollout.proofs) for rollout in handed_in.rollouts) == 3
    judgement = judge_rollouts(make_judge(policy), manifest, handed_in)
    assert judgement["outcome"] == "accept", judgement


def test_a_verdict_carries_what_was_measured(judge, manifest, alice):
    judgement = judge_rollouts(judge, manifest, alice)
    names = [check["name"] for check in judgement["checks"]]
    assert names == ["dtype", "schema", "prompt", "termination", "toploc", "sampling", "logprob", "reward"]
    assert numbers(judgement, "toploc")["chunks"] == len(alice.rollouts)
    assert numbers(judgement, "sampling")["tokens"] == judgement["output_tokens"] == alice.record.output_tokens
    assert numbers(judgement, "sampling")["match"] > 0.99
    assert 0 < numbers(judgement, "logprob")["max_error"] < 1e-4
    assert judgement["mean_reward"] == pytest.approx(sum(r.reward for r in alice.rollouts) / len(alice.rollouts))
    assert judgement["engine"].startswith("torch ")
    assert judgement["dtype"] == "float32"


def test_equal_answers_to_one_prompt_are_no_fault(manifest, judge, tmp_path):
    cold = make_manifest(temperature=0.01)
    judgement = judge_rollouts(judge, cold, hand_in(make_worker(), cold, tmp_path / "0.parquet"))
    assert judgement["outcome"] == "accept", judgement
    assert numbers(judgement, "schema")["repeats"] > 0


# Cheats with another policy, another noise, another temperature.


def drifted(tmp_path, size):
    """The demo policy with every weight moved a little, as a training step does."""
    noise = torch.Generator().manual_seed(0)
    weights = load_file(POLICY / "model.safetensors")
    moved = {name: w + size * torch.randn(w.shape, generator=noise) for name, w in weights.items()}
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((POLICY / name).read_bytes())
    save_file(moved, tmp_path / "model.safetensors")
    return tmp_path


def test_another_policy_is_rejected(judge, manifest, tmp_path):
    """A contributor answers with a policy that is not the run's at all."""
    worker = make_worker()
    worker.engine.load(write_model(build_model("qwen2", seed=5), tmp_path / "other"))
    judgement = judge_rollouts(judge, manifest, hand_in(worker, manifest, tmp_path / "0.parquet"))
    assert rejected(judgement, "toploc")
    assert {check["name"] for check in judgement["checks"] if check["outcome"] == "fail"} >= {"toploc", "sampling"}


def test_a_stale_policy_is_rejected(judge, manifest, tmp_path):
    """A contributor names the newest checkpoint but keeps an older one, whose weights differ by a thousandth."""
    worker = make_worker(drifted(tmp_path, 1e-3))
    judgement = judge_rollouts(judge, manifest, hand_in(worker, manifest, tmp_path / "0.parquet"))
    assert rejected(judgement, "toploc", hard=False)


def test_a_slightly_stale_policy_shows_in_the_log_probabilities(judge, manifest, tmp_path):
    """A contributor keeps weights that differ by a hundred-thousandth: too little for any activation's mantissa."""
    worker = make_worker(drifted(tmp_path, 3e-5))
    judgement = judge_rollouts(judge, manifest, hand_in(worker, manifest, tmp_path / "0.parquet"))
    assert rejected(judgement, "logprob", hard=False)


def test_a_coarser_number_format_than_declared_is_rejected_softly(judge, manifest, tmp_path):
    """A contributor computes in bfloat16 and declares float32: a lie, or an engine that does not do as told."""
    honest = hand_in(make_worker(dtype="bfloat16"), manifest, tmp_path / "0.parquet")
    assert judge_rollouts(judge, manifest, honest)["outcome"] == "accept"
    record = msgspec.structs.replace(honest.record, dtype="float32")
    assert rejected(judge_rollouts(judge, manifest, replace(honest, record=record)), "toploc", hard=False)


@pytest.mark.parametrize("dtype", ["float16", "", "float32 "])
def test_a_number_format_without_limits_is_refused_by_name(judge, manifest, alice, dtype):
    record = msgspec.structs.replace(alice.record, dtype=dtype)
    judgement = judge_rollouts(judge, manifest, replace(alice, record=record))
    assert rejected(judgement, "dtype", hard=False)
    assert "bfloat16, float32" in judgement["reason"]
    assert len(judgement["checks"]) == 1


def test_prompts_other_than_signed_for_are_rejected_before_any_rollout_is_read(judge, manifest, alice):
    """A contributor's tokenizer or template gave other prompts; nothing of its file needs to be looked at."""
    record = msgspec.structs.replace(alice.record, prompts=b"x" * 32)
    judgement = judge_rollouts(judge, manifest, replace(alice, record=record), [])
    assert [check["name"] for check in judgement["checks"]] == ["dtype", "prompt"]


@pytest.mark.parametrize("tolerance", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("times", "allowance", "hard"), [(1.1, 0, False), (7.9, 0, False), (8.1, 1, True)])
def test_only_far_departures_are_hard(tolerance, times, allowance, hard):
    """Odd hardware is never evicted: the hard bound lies far beyond the soft one, for every measurement."""
    rollout = measured(
        mantissa_mean=times * tolerance.max_mantissa_mean + 8 * allowance + 127 / 16,
        margin=times * tolerance.max_margin + allowance,
        error=times * tolerance.max_logprob_error + allowance,
    )
    found = [check([rollout] * 2, tolerance) for check in (check_toploc, check_sampling, check_logprobs)]
    assert [(one.result.outcome, one.hard) for one in found] == [("fail", hard)] * 3


def test_half_of_a_proof_s_exponents_are_hard():
    for mismatches, hard in ((8, False), (9, True), (16, True)):
        found = check_toploc([measured(mismatches=mismatches)], FLOAT32)
        assert (found.result.outcome, found.hard) == ("fail", hard)


def test_short_chunks_have_looser_limits():
    """The mean of fewer values scatters more: by the root of the ratio, at most twice."""
    assert [looseness(count, 32) for count in (32, 64, 18, 8, 1)] == [1.0, 1.0, 4 / 3, 2.0, 2.0]
    limit = FLOAT32.max_mantissa_mean
    for rows, times, outcome in ((32, 1.0, "pass"), (32, 1.01, "fail"), (18, 1.33, "pass"), (18, 1.34, "fail")):
        rollouts = [measured(mantissa_mean=times * limit, rows=rows)] * 2
        assert check_toploc(rollouts, FLOAT32).result.outcome == outcome


def test_a_stray_value_is_no_failure_but_many_are(alice):
    """Honest sides may differ in one value at the edge of the top k, where a proof's polynomial means nothing."""
    clean, stray = measured(), measured(mantissa_mean=0.1 + 100 / 16)
    assert check_toploc([stray, *[clean] * 31], FLOAT32).result.outcome == "pass"
    found = check_toploc([stray, stray, *[clean] * 30], FLOAT32)
    assert (found.result.outcome, found.hard) == ("fail", False)
    assert check_toploc([*[stray] * 3, *[clean] * 600], FLOAT32).result.outcome == "pass"
    alike = [replace(stray, rollout=alice.rollouts[0])] * 5
    assert check_toploc([*alike, *[clean] * 27], FLOAT32).result.outcome == "pass"
    assert check_toploc([*[stray] * 4, *[clean] * 600], FLOAT32).result.outcome == "fail"


def test_a_rollout_whose_chunks_are_all_a_little_off_fails_by_its_mean():
    """A contributor keeps each proof within its limit, and is off in all of them."""
    tolerance = msgspec.structs.replace(FLOAT32, max_mantissa_mean=1.0, max_rollout_mantissa_mean=0.1)
    for chunks, outcome in ((2, "pass"), (40, "fail")):
        one = measured(mantissa_mean=0.9)
        zeros = np.zeros(32 * chunks)
        many = MeasuredRollout(32 * chunks, zeros.astype(np.float32), zeros, one.chunks * chunks)
        found = check_toploc([many], tolerance)
        assert found.result.outcome == outcome
    assert "rollout 0 are off by 0.9" in found.result.detail


def measured(*, rows=32, mismatches=0, mantissa_mean=0.0, margin=0.0, error=0.0, errors=None):
    """One rollout of one chunk with these numbers; margin and error are the first token's."""
    chunk = MeasuredChunk(rows, 16, ChunkResult(mismatches, mantissa_mean, 0.0))
    margins = np.zeros(rows, np.float32)
    margins[0] = margin
    if errors is None:
        errors = [error, *[0.0] * (rows - 1)]
    return MeasuredRollout(rows, margins, np.array(errors), [chunk])


@pytest.mark.parametrize(
    ("lie", "what", "hard"),
    [
        (lambda number: -0.25, "shifted by -0.25", True),
        (lambda number: 0.02, "shifted by 0.02", False),
        (lambda number: 0.1 * (-1) ** number, "off by 0.1", False),
    ],
    ids=["large shift", "small shift", "noise"],
)
def test_log_probabilities_bent_within_a_coarse_format_s_limit_are_rejected(judge, manifest, alice, lie, what, hard):
    """A contributor computes in float32, says bfloat16, and uses that format's roughness to have answers weigh more."""
    tokens = iter(range(10**6))
    bent = [
        msgspec.structs.replace(rollout, logprobs=[value + lie(next(tokens)) for value in rollout.logprobs])
        for rollout in alice.rollouts
    ]
    claimed = replace(alice, record=msgspec.structs.replace(alice.record, dtype="bfloat16"))
    judgement = judge_rollouts(judge, manifest, claimed, bent)
    assert rejected(judgement, "logprob", hard=hard)
    assert what in judgement["reason"]


def test_a_better_format_than_declared_is_noted_and_held_against_nobody(judge, manifest, alice, tmp_path):
    claimed = replace(alice, record=msgspec.structs.replace(alice.record, dtype="bfloat16"))
    judgement = judge_rollouts(judge, manifest, claimed)
    assert judgement["outcome"] == "accept"
    assert numbers(judgement, "toploc")["exact_chunks"] == len(alice.rollouts)
    coarse = judge_rollouts(judge, manifest, hand_in(make_worker(dtype="bfloat16"), manifest, tmp_path / "0.parquet"))
    assert numbers(coarse, "toploc")["exact_chunks"] < len(alice.rollouts) / 2


@pytest.mark.parametrize(
    ("name", "allowance"), [("max_mean_logprob_error", 0.1), ("max_logprob_shift", 0.1)], ids=["mean", "shift"]
)
def test_means_of_log_probability_errors_have_soft_and_hard_limits(name, allowance):
    wide = msgspec.structs.replace(BFLOAT16, max_mean_logprob_error=1.0, max_logprob_shift=1.0)
    tolerance = msgspec.structs.replace(wide, **{name: 0.02})
    for times, beyond, outcome, hard in ((0.9, 0, "pass", False), (7.9, 0, "fail", False), (8.1, 1, "fail", True)):
        rollout = measured(rows=512, errors=[times * 0.02 + beyond * allowance] * 512)
        found = check_logprobs([rollout], tolerance)
        assert (found.result.outcome, found.hard) == (outcome, hard)
    few = [measured(rows=128, errors=[0.039] * 128)]
    assert check_logprobs(few, tolerance).result.outcome == "pass"  # the mean of fewer tokens scatters more


def test_another_temperature_is_rejected(judge, manifest, tmp_path):
    """A contributor samples colder than the run asks, for better rewards. TOPLOC cannot see it."""

    class Cold(RolloutWorker):
        def sampling(self, manifest):
            return replace(super().sampling(manifest), temperature=0.7)

    judgement = judge_rollouts(judge, manifest, hand_in(make_worker(kind=Cold), manifest, tmp_path / "0.parquet"))
    assert rejected(judgement, "sampling")


def test_another_seed_is_rejected(judge, manifest, tmp_path):
    """A contributor draws with noise of its own choice, to keep the answers it likes. TOPLOC cannot see it."""

    class OtherNoise(RolloutWorker):
        def requests(self, work):
            return [replace(request, seed=b"x" * 32) for request in super().requests(work)]

    worker = make_worker(kind=OtherNoise)
    assert rejected(judge_rollouts(judge, manifest, hand_in(worker, manifest, tmp_path / "0.parquet")), "sampling")


def test_the_best_of_several_answers_is_rejected(judge, manifest, tmp_path):
    """A contributor answers each prompt more often than the group is large and hands in the best answers."""

    class Best(RolloutWorker):
        def answers(self, work, sampling, *, progress=None):
            honest = self.requests(work)
            again = [replace(request, seed=bytes(32)) for request in honest]
            first, second = self.engine.generate(honest, sampling), self.engine.generate(again, sampling)
            pairs = zip(first, second, strict=True)
            return [max(pair, key=lambda g: self.reward(work, i // work.group_size, g)) for i, pair in enumerate(pairs)]

    worker = make_worker(kind=Best)
    assert rejected(judge_rollouts(judge, manifest, hand_in(worker, manifest, tmp_path / "0.parquet")), "sampling")


def test_a_cheap_draft_with_an_honest_prefill_is_rejected(judge, manifest, tmp_path):
    """Tokens come from a cheaper policy; proofs and log-probabilities from one honest pass over them."""
    cheap = make_worker(drifted(tmp_path, 0.05))
    draft = hand_in(cheap, manifest, tmp_path / "0.parquet").rollouts
    engine = TorchEngine()
    engine.load(POLICY)
    rollouts = list(draft)
    for prefill in engine.prefill([(r.prompt_ids, r.output_ids) for r in draft]):
        rollout = draft[prefill.index]
        logits = torch.from_numpy(prefill.logits(0, len(rollout.output_ids)))
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(rollout.output_ids)[:, None])[:, 0]
        rollouts[prefill.index] = msgspec.structs.replace(
            rollout, logprobs=chosen.tolist(), proofs=build_proofs(prefill.patterns, 16)
        )
    judgement = judge_rollouts(judge, manifest, hand_in(cheap, manifest, tmp_path / "0.parquet"), rollouts)
    assert rejected(judgement, "sampling")
    assert {check["name"]: check["outcome"] for check in judgement["checks"]}["toploc"] == "pass"


# Cheats with the file.


def test_forged_rewards_are_rejected(change, alice):
    """A contributor claims a reward that its answer did not earn."""
    wrong = next(i for i, rollout in enumerate(alice.rollouts) if rollout.reward == 0)
    assert rejected(change({wrong: {"reward": 1.0}}), "reward")
    assert rejected(change({0: {"reward": 1e300}}), "reward")


def test_rewards_lowered_to_zero_are_rejected_softly(judge, manifest, tmp_path):
    """A contributor hides successes: not counted, but an environment that could not tell looks the same."""
    worker = make_worker()
    many = [hand_in(worker, manifest, tmp_path / "x.parquet", index=index) for index in range(8)]
    right = next(one for one in many if any(rollout.reward for rollout in one.rollouts))
    lowered = [msgspec.structs.replace(rollout, reward=0.0) for rollout in right.rollouts]
    assert rejected(judge_rollouts(judge, manifest, right, lowered), "reward", hard=False)


def test_rewards_that_could_not_be_told_there_are_never_punished(judge, manifest, alice):
    """Neither a few, which a slower machine may have, nor many, which might hide bad answers and stay undecided."""
    unknown = [msgspec.structs.replace(rollout, reward=math.nan) for rollout in alice.rollouts]
    few = unknown[:2] + alice.rollouts[2:]
    judgement = judge_rollouts(judge, manifest, alice, few)
    assert judgement["outcome"] == "accept"
    assert numbers(judgement, "reward")["withheld"] == 2
    assert judgement["mean_reward"] == sum(rollout.reward for rollout in few[2:]) / len(few[2:])
    judgement = judge_rollouts(judge, manifest, alice, unknown)
    assert (judgement["outcome"], judgement["hard"], judgement["mean_reward"]) == ("undecided", False, 0.0)


def test_what_the_environment_cannot_tell_is_never_punished(judge, manifest, alice, monkeypatch):
    monkeypatch.setattr(SortDigits, "reward", lambda self, task, completion: Reward(None, "timed out"))
    unknown = [msgspec.structs.replace(rollout, reward=math.nan) for rollout in alice.rollouts]
    judgement = judge_rollouts(judge, manifest, alice, unknown)
    assert (judgement["outcome"], numbers(judgement, "reward")["could_not_tell"]) == ("accept", len(unknown))
    zeros = [msgspec.structs.replace(rollout, reward=0.0) for rollout in alice.rollouts]
    assert judge_rollouts(judge, manifest, alice, zeros)["outcome"] == "accept"
    ones = [msgspec.structs.replace(rollout, reward=1.0) for rollout in alice.rollouts]
    judgement = judge_rollouts(judge, manifest, alice, ones)
    assert (judgement["outcome"], judgement["hard"]) == ("undecided", False)
    assert judgement["reason"].startswith("reward: ")


def test_a_missing_member_is_rejected(judge, manifest, alice):
    """A contributor leaves out a group's worst answer, or hands in another twice instead."""
    assert rejected(judge_rollouts(judge, manifest, alice, alice.rollouts[:-1]), "schema")
    twice = [alice.rollouts[0], *alice.rollouts[:-1]]
    assert rejected(judge_rollouts(judge, manifest, alice, twice), "schema")


def test_members_out_of_order_are_rejected(judge, manifest, alice):
    """A contributor shuffles its rows, so that places and seeds no longer belong together."""
    assert rejected(judge_rollouts(judge, manifest, alice, alice.rollouts[::-1]), "schema")


def test_counts_other_than_signed_are_rejected(judge, manifest, alice):
    """The signed record claims more tokens than the file holds."""
    record = msgspec.structs.replace(alice.record, output_tokens=alice.record.output_tokens + 1)
    assert rejected(judge_rollouts(judge, manifest, replace(alice, record=record)), "schema")


def test_swapped_proofs_are_rejected(change, alice):
    """A contributor puts one answer's proof under another answer of the same length."""
    by_length = {}
    for number, rollout in enumerate(alice.rollouts):
        by_length.setdefault(len(rollout.output_ids), []).append(number)
    pairs = [
        (a, b)
        for numbers_ in by_length.values()
        for a in numbers_
        for b in numbers_
        if alice.rollouts[a].prompt_ids != alice.rollouts[b].prompt_ids
    ]
    first, second = pairs[0]
    proofs = [alice.rollouts[number].proofs for number in (first, second)]
    assert rejected(change({first: {"proofs": proofs[1]}, second: {"proofs": proofs[0]}}), "toploc")


def test_proofs_of_another_shape_are_rejected(change, alice):
    """A contributor leaves proofs out, shortens them or fills them with zeros."""
    proof = alice.rollouts[0].proofs[0]
    for proofs in ([], [b""], [proof[:-1]], [proof, proof], [bytes(len(proof))], [b"\xff" * len(proof)]):
        assert rejected(change({0: {"proofs": proofs}}), "toploc")


def test_another_prompt_is_rejected(change, alice):
    """A contributor answers an easier prompt than its seed gives."""
    easier = alice.rollouts[-1].prompt_ids
    assert rejected(change({0: {"prompt_ids": easier}}), "prompt")
    assert rejected(change({0: {"prompt_ids": [10**6]}}), "prompt")


def test_anothers_rollouts_are_rejected(judge, manifest, alice):
    """Bob copies Alice's file and signs it as his own."""
    assert rejected(judge_rollouts(judge, manifest, replace(alice, contributor=BOB)), "prompt")


def test_a_replayed_file_is_rejected(judge, manifest, alice):
    """Alice hands in the same file again as her next submission."""
    record = msgspec.structs.replace(alice.record, index=1)
    assert rejected(judge_rollouts(judge, manifest, replace(alice, record=record)), "prompt")


def cut(rollout, length):
    return {"output_ids": rollout.output_ids[:length], "logprobs": rollout.logprobs[:length]}


def test_truncated_rollouts_are_rejected(change, alice):
    """A contributor stops early to save work, and calls it the length limit or a stop."""
    number = stopped(alice)
    short = cut(alice.rollouts[number], 2)
    assert rejected(change({number: short | {"finish_reason": "length"}}), "termination")
    assert rejected(change({number: short | {"finish_reason": "stop"}}), "termination")


def test_tokens_after_the_stop_are_rejected(change, alice):
    """A contributor goes on after the stop token, or denies that it came."""
    number = stopped(alice)
    rollout = alice.rollouts[number]
    longer = {"output_ids": [*rollout.output_ids, 5], "logprobs": [*rollout.logprobs, -1.0]}
    assert rejected(change({number: longer}), "termination")
    assert rejected(change({number: {"finish_reason": "length"}}), "termination")


def test_hostile_tokens_are_rejected(change, alice):
    """A contributor hands in token ids, lengths and numbers that would crash a careless validator."""
    rollout = alice.rollouts[0]
    count = len(rollout.output_ids)
    for token in (-1, 64, 2**31 - 1, 2**63 - 1, -(2**63)):
        assert rejected(change({0: {"output_ids": [token] * count}}), "schema")
    assert rejected(change({0: {"output_ids": []}}), "schema")
    assert rejected(change({0: {"output_ids": [5] * 1000, "logprobs": [-1.0] * 1000}}), "schema")
    assert rejected(change({0: {"logprobs": rollout.logprobs[1:]}}), "schema")
    assert rejected(change({0: {"logprobs": [float("nan")] * count}}), "schema")
    assert rejected(change({0: {"reward": float("inf")}}), "schema")
    assert rejected(change({0: {"member": -1}}), "schema")
    assert rejected(change({0: {"prompt_index": 2**62}}), "schema")


def test_forged_log_probabilities_are_rejected(change, alice):
    """A contributor flatters its log-probabilities, which training would weigh its answers by."""
    longest = max(range(len(alice.rollouts)), key=lambda number: -min(alice.rollouts[number].logprobs))
    better = [value / 2 for value in alice.rollouts[longest].logprobs]
    assert rejected(change({longest: {"logprobs": better}}), "logprob")
    slightly = [value + 0.01 for value in alice.rollouts[0].logprobs]
    assert rejected(change({0: {"logprobs": slightly}}), "logprob", hard=False)


ROW_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(0, 15), name=st.sampled_from(["output_ids", "logprobs", "proofs", "reward"]), data=st.data())
def test_any_value_in_a_row_gives_a_judgement(judge, manifest, alice, number, name, data):
    """A reader that was fooled hands over anything at all."""
    rows = [msgspec.to_builtins(rollout, builtin_types=(bytes,)) for rollout in alice.rollouts]
    rows[number] = copy.deepcopy(rows[number]) | {name: data.draw(ROW_VALUES)}
    assert judge_rows(judge, manifest, alice, rows)["outcome"] in ("accept", "reject")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROW_VALUES)
def test_anything_but_rollouts_is_rejected(judge, manifest, alice, rows):
    """The rows are not even rows."""
    assert rejected(judge_rows(judge, manifest, alice, rows), "schema")


# What is the validator's own fault.


def test_a_fault_of_the_engine_is_undecided(manifest, alice):
    class Broken(TorchEngine):
        def prefill(self, sequences):
            raise RuntimeError("the accelerator is gone")

    judge = Judge(Broken)
    judge.load(str(POLICY), CHECKPOINT)
    judgement = judge_rollouts(judge, manifest, alice)
    assert (judgement["outcome"], judgement["hard"]) == ("undecided", False)
    assert "the accelerator is gone" in judgement["reason"]


def test_a_policy_that_gives_no_numbers_is_undecided(manifest, alice, tmp_path):
    """Training diverged: the contributor must not pay for a checkpoint whose logits are NaN."""
    judgement = judge_rollouts(make_judge(drifted(tmp_path, float("nan"))), manifest, alice)
    assert (judgement["outcome"], judgement["hard"]) == ("undecided", False)
    assert "not finite" in judgement["reason"]


def test_a_verdict_holds_finite_numbers_alone(change, alice):
    """A contributor signs for log-probabilities whose errors are beyond any float: its verdict must still be one."""
    judgement = change({0: {"logprobs": [-3e38] * len(alice.rollouts[0].output_ids)}})
    assert rejected(judgement, "logprob")
    assert all(math.isfinite(value) for check in judgement["checks"] for value in check["numbers"].values())
    found = check_logprobs([measured(rows=32, errors=[math.inf] * 32)], BFLOAT16)
    assert (found.result.outcome, found.hard) == ("fail", True)
    assert "max_error" not in found.result.numbers
    assert "inf" in found.result.detail


def test_another_environment_is_undecided(judge, manifest, alice):
    """This validator's installation lacks the run's environment."""
    other = msgspec.structs.replace(manifest.environment, digest=b"e" * 32)
    judgement = judge_rollouts(judge, msgspec.structs.replace(manifest, environment=other), alice)
    assert judgement["outcome"] == "undecided"
    assert "EnvironmentUnknown" in judgement["reason"]


def test_policies_are_kept_by_use():
    judge = make_judge()
    for name in (b"1", b"2"):
        judge.load(str(POLICY), name * 32, keep=3)
    judge.load(str(POLICY), CHECKPOINT, keep=3)
    held = judge.load(str(POLICY), b"3" * 32, keep=3)["held"]
    assert held == [b"2" * 32, CHECKPOINT, b"3" * 32]


def test_a_policy_not_held_is_an_error(manifest, alice):
    with pytest.raises(ModelError, match="not loaded"):
        judge_rollouts(Judge(TorchEngine), manifest, alice)


def test_records_that_do_not_decode_are_an_error(judge):
    with pytest.raises(MalformedError, match="not a valid submission"):
        judge.judge(submission=b"\xc1", manifest=b"", run_id=b"", contributor=ALICE, rollouts=[])

"""The work of an inference node's compute process, called directly and over the pipe."""

import math
from pathlib import Path

import msgspec
import pytest
import trio
from submission_kit import ALICE, BOB, CHECKPOINT, POLICY, RUN_ID, digest, generate, hand_in, make_manifest, make_worker

from environments.base import Reward
from environments.sort_digits import SortDigits
from node.compute.process import ComputeProcess
from node.engines.torch_engine import TorchEngine
from node.inference.compute import RolloutWorker
from protocol.errors import EnvironmentUnknown, MalformedError, ModelError
from protocol.rollouts import read_rollouts


@pytest.fixture(scope="module")
def worker():
    return make_worker()


@pytest.fixture(scope="module")
def manifest():
    return make_manifest()


def prompts(handed_in):
    return [rollout.prompt_ids for rollout in handed_in.rollouts]


def test_a_submission_is_whole_groups_in_order(worker, manifest, tmp_path):
    path = tmp_path / "0.parquet"
    made = generate(worker, manifest, path)
    rollouts = read_rollouts(path, max_rollouts=16, max_tokens=256)
    assert [(r.prompt_index, r.member) for r in rollouts] == [(p, m) for p in range(4) for m in range(4)]
    assert made["sha256"] == digest(path)
    assert made["size"] == path.stat().st_size
    assert made["rollouts"] == len(rollouts) == 16
    assert made["output_tokens"] == sum(len(rollout.output_ids) for rollout in rollouts)
    assert made["mean_reward"] == pytest.approx(sum(rollout.reward for rollout in rollouts) / 16)
    assert made["engine"].startswith("torch ")
    assert made["dtype"] == "float32"
    assert made["seconds"] > 0


def test_the_same_work_gives_the_same_file(worker, manifest, tmp_path):
    first = generate(worker, manifest, tmp_path / "a.parquet")
    second = generate(worker, manifest, tmp_path / "b.parquet")
    assert first["sha256"] == second["sha256"]


def test_work_follows_from_the_submission(worker, manifest, tmp_path):
    path = tmp_path / "x.parquet"
    alices = prompts(hand_in(worker, manifest, path))
    assert prompts(hand_in(worker, manifest, path, index=1)) != alices
    assert prompts(hand_in(worker, manifest, path, contributor=BOB)) != alices


def test_rewards_are_the_environment_s(worker, manifest, tmp_path):
    environment = SortDigits()
    answers = 0
    for index in range(4):
        for rollout in hand_in(worker, manifest, tmp_path / "x.parquet", index=index).rollouts:
            question = worker._tokenizer.decode(rollout.prompt_ids[1:])
            completion = worker._tokenizer.decode(rollout.output_ids, stop_ids=(2,))
            right = completion == "".join(sorted(question[1:-1]))
            assert rollout.reward == (1.0 if right else 0.0)
            answers += right
    assert environment.name == manifest.environment.name
    assert answers > 0


def test_an_unknown_reward_is_recorded_as_such(worker, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(SortDigits, "reward", lambda self, task, completion: Reward(None, "timed out"))
    made = generate(worker, manifest, tmp_path / "x.parquet")
    assert (made["mean_reward"], made["could_not_tell"]) == (0, 16)
    rollouts = read_rollouts(tmp_path / "x.parquet", max_rollouts=16, max_tokens=64)
    assert all(math.isnan(rollout.reward) for rollout in rollouts)


def test_an_environment_that_raises_costs_the_answer_it_raised_for(worker, manifest, tmp_path, monkeypatch):
    """Another's environment breaks its promise never to raise; the node goes on."""
    judge, asked = SortDigits.reward, []

    def reward(self, task, completion):
        asked.append(completion)
        if completion == asked[0]:
            raise RuntimeError("not thought of")
        return judge(self, task, completion)

    monkeypatch.setattr(SortDigits, "reward", reward)
    made = generate(worker, manifest, tmp_path / "x.parquet")
    assert 1 <= made["could_not_tell"] < 16


def test_progress_is_reported_sparingly(worker, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr("node.inference.compute._PROGRESS_EVERY_S", 0.0)
    seen = []
    made = generate(worker, manifest, tmp_path / "x.parquet", progress=seen.append)
    assert seen[-1] == {"output_tokens": made["output_tokens"]}


def test_another_policy_than_loaded_is_refused(worker, manifest, tmp_path):
    with pytest.raises(ModelError, match="is not loaded"):
        generate(worker, manifest, tmp_path / "x.parquet", checkpoint=b"d" * 32)


def test_a_failed_load_keeps_the_policy(manifest, tmp_path):
    worker = make_worker()
    before = generate(worker, manifest, tmp_path / "x.parquet")
    with pytest.raises(ModelError):
        worker.load(str(tmp_path), b"d" * 32)
    assert generate(worker, manifest, tmp_path / "x.parquet")["sha256"] == before["sha256"]


def test_a_worker_without_a_policy_says_so(manifest, tmp_path):
    with pytest.raises(ModelError, match="held is none"):
        generate(RolloutWorker(TorchEngine()), manifest, tmp_path / "x.parquet")


def test_another_tokenizer_than_the_run_s_is_refused(worker, manifest, tmp_path):
    other = msgspec.structs.replace(manifest.model, tokenizer=b"t" * 32)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not the one"):
        generate(worker, msgspec.structs.replace(manifest, model=other), tmp_path / "x.parquet")


def test_another_environment_than_the_run_s_is_refused(worker, manifest, tmp_path):
    other = msgspec.structs.replace(manifest.environment, digest=b"e" * 32)
    with pytest.raises(EnvironmentUnknown, match="not the one this run uses"):
        generate(worker, msgspec.structs.replace(manifest, environment=other), tmp_path / "x.parquet")


def test_a_manifest_that_does_not_decode_is_refused(worker, tmp_path):
    with pytest.raises(MalformedError, match="not a valid manifest"):
        worker.generate(RUN_ID, 3, CHECKPOINT, ALICE, 0, manifest=b"\xc1", path=str(tmp_path / "x.parquet"))


def test_each_step_can_be_replaced(manifest, tmp_path):
    calls = []

    class Watched(RolloutWorker):
        def policy_dir(self, checkpoint_dir: Path) -> Path:
            calls.append("policy_dir")
            return super().policy_dir(checkpoint_dir)

        def sampling(self, manifest):
            calls.append("sampling")
            return super().sampling(manifest)

        def requests(self, work):
            calls.append("requests")
            return super().requests(work)

        def rollouts(self, work, generations):
            calls.append("rollouts")
            return super().rollouts(work, generations)

        def rewards(self, work, generations):
            return [0.25] * len(generations)

    made = generate(make_worker(kind=Watched), manifest, tmp_path / "x.parquet")
    assert calls == ["policy_dir", "sampling", "requests", "rollouts"]
    assert made["mean_reward"] == 0.25


async def test_both_compute_processes_serve_over_their_pipes(manifest, tmp_path, worker):
    path = tmp_path / "0.parquet"
    async with trio.open_nursery() as nursery:
        with trio.fail_after(120):
            contributor = ComputeProcess("node.inference.compute", name="inference", log_path=tmp_path / "i.log")
            validator = ComputeProcess("node.validator.compute", name="validator", log_path=tmp_path / "v.log")
            await nursery.start(contributor.run)
            await nursery.start(validator.run)
            policy = {"checkpoint_dir": str(POLICY), "checkpoint_id": CHECKPOINT}
            await contributor.call("load", timeout_s=60, **policy)
            await validator.call("load", timeout_s=60, **policy)
            made = await contributor.call(
                "generate",
                timeout_s=60,
                run_id=RUN_ID,
                step=3,
                checkpoint=CHECKPOINT,
                contributor=ALICE,
                index=0,
                manifest=msgspec.msgpack.encode(manifest),
                path=str(path),
            )
            honest = hand_in(worker, manifest, tmp_path / "1.parquet")
            assert made["sha256"] == honest.record.sha256
            judgement = await validator.call(
                "judge",
                timeout_s=60,
                submission=msgspec.msgpack.encode(honest.record),
                manifest=msgspec.msgpack.encode(manifest),
                run_id=RUN_ID,
                contributor=ALICE,
                rollouts=[msgspec.to_builtins(r, builtin_types=(bytes,)) for r in honest.rollouts],
            )
            assert judgement["outcome"] == "accept"
        nursery.cancel_scope.cancel()

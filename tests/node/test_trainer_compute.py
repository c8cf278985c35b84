"""The trainer's compute process: durable before it answers, and safe to ask twice."""

import contextlib
import hashlib
import os
import signal
from pathlib import Path

import pytest
import torch
import trio
from processes_kit import in_two_processes
from safetensors.torch import load_file

from node.compute.process import ComputeProcess
from node.run_create import create_run
from node.trainer.compute import TrainerCompute
from protocol.errors import ComputeError, DataDirError, MalformedError, ModelError
from protocol.identity import Identity
from trainer.parallel import gather
from trainer.recipe import ASSETS_DIR, RECIPES_DIR, load_recipe

DEMO_POLICY = ASSETS_DIR / "sort-digits"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rollouts(step):
    """One group of eight that answers a prompt with its digits, sorted by half of its members."""
    return [
        {
            "prompt_index": 0,
            "member": member,
            "prompt_ids": [1, 32, 6, 5, 4, 7, 48],
            "output_ids": [4, 5, 6, 7, 2] if member % 2 else [7, 6, 5, 4, 2],
            "logprobs": [-0.5] * 5,
            "reward": float(member % 2),
            "finish_reason": "stop",
            "proofs": [b"proof"],
            "checkpoint_step": step,
            "submission": "a",
        }
        for member in range(8)
    ]


@pytest.fixture
def make_compute(tmp_path):
    def make(name="state"):
        return TrainerCompute(load_recipe("demo"), state_dir=tmp_path / name, policy_dir=DEMO_POLICY)

    return make


def weights(answer, tmp_path):
    path = tmp_path.__class__(answer["policy_dir"]) / "model.safetensors"
    return sha256(path)


def test_a_first_start_opens_step_zero(make_compute, tmp_path):
    opened = make_compute().open()
    assert opened["step"] == 0
    assert weights(opened, tmp_path) == sha256(DEMO_POLICY / "model.safetensors")


def test_training_gives_the_next_checkpoint_and_is_remembered(make_compute, tmp_path):
    compute = make_compute()
    compute.open()
    answer = compute.train(0, rollouts(0))
    assert answer["step"] == 1
    assert answer["mean_reward"] == answer["metrics"]["reward"] == 0.5
    assert make_compute().open() == {"step": 1, "policy_dir": answer["policy_dir"]}


def test_a_step_asked_for_twice_is_trained_once(make_compute, tmp_path):
    compute = make_compute()
    compute.open()
    first = compute.train(0, rollouts(0))
    before = weights(first, tmp_path)
    assert compute.train(0, rollouts(0)) == first
    assert make_compute().train(0, []) == first
    assert weights(first, tmp_path) == before


def test_a_restart_between_steps_changes_no_bit(make_compute, tmp_path):
    through = make_compute("through")
    through.open()
    for step in range(3):
        expected = through.train(step, rollouts(step))
        restarted = make_compute("restarted")
        restarted.open()
        found = restarted.train(step, rollouts(step))
    assert weights(found, tmp_path) == weights(expected, tmp_path)
    assert found["metrics"] == expected["metrics"]


def test_a_refused_batch_does_not_spoil_the_next(make_compute, tmp_path):
    compute, other = make_compute(), make_compute("other")
    compute.open()
    other.open()
    with pytest.raises(MalformedError):
        compute.train(0, rollouts(0)[:-1])
    assert weights(compute.train(0, rollouts(0)), tmp_path) == weights(other.train(0, rollouts(0)), tmp_path)


def test_a_failure_after_training_is_redone_from_the_disk(make_compute, tmp_path, monkeypatch):
    """The disk is full when the checkpoint is written: the policy in memory is a step ahead and must not be used."""
    compute, other = make_compute(), make_compute("other")
    compute.open()
    other.open()

    def fail(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint._sync_tree", fail)
        with pytest.raises(DataDirError, match="no space is left"):
            compute.train(0, rollouts(0))
    assert weights(compute.train(0, rollouts(0)), tmp_path) == weights(other.train(0, rollouts(0)), tmp_path)


def test_a_step_without_its_checkpoint_is_refused(make_compute):
    compute = make_compute()
    compute.open()
    with pytest.raises(ModelError, match="checkpoint 5 is not here"):
        compute.train(5, rollouts(5))


def test_the_demos_policy_is_published_in_bfloat16(make_compute):
    """Restarts change no bit of it, as the test above shows: what training goes on from are the float32 masters."""
    compute = make_compute()
    compute.open()
    published = load_file(f"{compute.train(0, rollouts(0))['policy_dir']}/model.safetensors")
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}


def recipe_with(tmp_path, setting):
    """The demo's recipe with another setting of the policy, as a file."""
    demo, path = (RECIPES_DIR / "demo.toml").read_text(), tmp_path / "mine.toml"
    assert demo.count("[policy]\n") == 1
    path.write_text(demo.replace("[policy]\n", f"[policy]\n{setting}\n"))
    return path


def descendants():
    """Process ids of this process's children, and of all that came from them."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    children = {pid for pid, parent in parents.items() if parent == os.getpid()}
    found = set(children)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return children, found


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.long
async def test_two_processes_of_torchrun_train_as_one_and_end_with_the_node(tmp_path, make_compute):
    """The node speaks to the first worker through torchrun, and kill -9 of what it started leaves no process behind."""
    alice, bob = Identity.from_phrase("alice"), Identity.from_phrase("bob")
    recipe = recipe_with(tmp_path, "processes = 2")
    create_run(str(recipe), tmp_path, identity=alice, validators=[bob.peer_id], issued_at_ms=1)
    alone = make_compute("alone")
    alone.open()
    expected = [alone.train(step, rollouts(step)) for step in range(2)]
    process = ComputeProcess(
        "node.trainer.compute",
        name="trainer",
        log_path=tmp_path / "log",
        args=[str(tmp_path / "state"), str(tmp_path / "run" / "recipe.toml")],
    )
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            await nursery.start(process.run)
            await process.call("open", timeout_s=200)
            found = await process.call("train", timeout_s=60, step=0, rollouts=rollouts(0))
            with pytest.raises(ComputeError, match="whole groups"):
                await process.call("train", timeout_s=60, step=1, rollouts=rollouts(1)[:-1])
            again = await process.call("train", timeout_s=60, step=1, rollouts=rollouts(1))
            (torchrun,), everyone = descendants()
            os.kill(torchrun, signal.SIGKILL)
            while any(map(is_running, everyone)):  # noqa: ASYNC110 - the kernel has no event for other's children
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
    assert len(everyone) == 3
    for one, other in zip((found, again), expected, strict=True):
        assert one["step"] == other["step"]
        for name in ("loss", "grad_norm", "entropy"):
            assert one["metrics"][name] == pytest.approx(other["metrics"][name], rel=1e-4)


async def test_the_process_answers_the_nodes_calls(tmp_path):
    alice, bob = Identity.from_phrase("alice"), Identity.from_phrase("bob")
    create_run("demo", tmp_path, identity=alice, validators=[bob.peer_id], issued_at_ms=1)
    process = ComputeProcess(
        "node.trainer.compute",
        name="trainer",
        log_path=tmp_path / "log",
        args=[str(tmp_path / "state"), str(tmp_path / "run" / "recipe.toml")],
    )
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            await nursery.start(process.run)
            assert (await process.call("open", timeout_s=60))["step"] == 0
            answer = await process.call("train", timeout_s=60, step=0, rollouts=rollouts(0))
            nursery.cancel_scope.cancel()
    assert answer["step"] == 1
    assert answer["metrics"]["reward"] == 0.5


def test_only_the_first_of_several_processes_keeps_and_hashes_a_checkpoint(tmp_path, monkeypatch):
    """What hashing and a whole copy cost is paid once, not by every process of the machine."""
    hashed, kept = [], []

    def counted(tensors, **options):
        found = gather(tensors, **options)
        kept.append(len(found))
        return found

    monkeypatch.setattr("trainer.state_dir.file_sha256", lambda path: hashed.append(path.name) or sha256(path))
    for module in ("optimiser", "policy"):
        monkeypatch.setattr(f"trainer.{module}.gather", counted)

    def process(world):
        compute = TrainerCompute(load_recipe("demo"), state_dir=tmp_path / "state", policy_dir=DEMO_POLICY, world=world)
        if not compute.is_first:
            with contextlib.suppress(RuntimeError):  # the first process is gone
                compute.follow()
            return hashed, kept
        compute.open()
        trained = compute.train(0, rollouts(0))
        compute._loaded = None  # as after a failure: the next step begins from the disk
        compute.train(1, rollouts(1))
        return trained["metrics"]["loss"], sorted(set(hashed)), sum(kept)

    (loss, files, count), (theirs, nothing) = in_two_processes(process, tmp_path)
    assert {"model.safetensors", "optimiser.safetensors"} <= set(files)
    assert theirs == []
    assert count > 100
    assert len(nothing) >= 4
    assert sum(nothing) == 0
    alone = TrainerCompute(load_recipe("demo"), state_dir=tmp_path / "alone", policy_dir=DEMO_POLICY)
    alone.open()
    assert loss == pytest.approx(alone.train(0, rollouts(0))["metrics"]["loss"], rel=1e-4)

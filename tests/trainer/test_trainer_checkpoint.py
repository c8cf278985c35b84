"""Checkpoints are whole or absent, and a redo after a crash gives the same bits."""

import hashlib
import json
import os
import signal
import sys

import pytest

from protocol.errors import ModelError
from trainer.checkpoint import OPTIMISER_FILE, STATE_FILE, Checkpoints
from trainer.recipe import ASSETS_DIR
from trainer.step import TrainStep

DEMO_POLICY = ASSETS_DIR / "sort-digits"
WRITING_EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree", "os.chmod")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digests(saved):
    return [sha256(saved.policy_dir / "model.safetensors"), sha256(saved.path / OPTIMISER_FILE)]


class Trainer:
    """A policy in memory that belongs to a directory of checkpoints."""

    def __init__(self, state_dir, recipe):
        self.checkpoints = Checkpoints(state_dir, keep=recipe.keep_checkpoints)
        self.saved = self.checkpoints.start(DEMO_POLICY)
        policy, optimiser = self.checkpoints.restore(self.saved, recipe.optimiser)
        self.step = TrainStep(policy, optimiser, recipe)

    def train(self, rows):
        return self.step.run(self.saved.step, [row | {"checkpoint_step": self.saved.step} for row in rows])

    def save(self, metrics):
        self.saved = self.checkpoints.save(
            self.saved.step + 1,
            self.step.policy,
            self.step.optimiser,
            report={"metrics": metrics},
            previous=self.saved,
        )


def train_to(trainer, step, rows):
    while trainer.saved.step < step:
        trainer.save(trainer.train(rows[trainer.saved.step]))
    return trainer


@pytest.fixture
def rows(make_rollouts):
    return [make_rollouts(3, seed=seed) for seed in range(4)]


def test_step_zero_is_the_initial_policy_byte_for_byte(tmp_path, recipe):
    saved = Checkpoints(tmp_path, keep=2).start(DEMO_POLICY)
    assert saved.step == 0
    assert {path.name for path in saved.policy_dir.iterdir()} == {path.name for path in DEMO_POLICY.iterdir()}
    for path in DEMO_POLICY.iterdir():
        assert (saved.policy_dir / path.name).read_bytes() == path.read_bytes()


def test_a_missing_initial_policy_names_the_command(tmp_path):
    with pytest.raises(ModelError, match="intellect-node run create"):
        Checkpoints(tmp_path, keep=2).start(tmp_path / "policy-0")


def test_a_policy_keeps_the_files_beside_its_weights(tmp_path, recipe, rows):
    trainer = train_to(Trainer(tmp_path, recipe), 2, rows)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (trainer.saved.policy_dir / name).read_bytes() == (DEMO_POLICY / name).read_bytes()
    assert sha256(trainer.saved.policy_dir / "model.safetensors") != sha256(DEMO_POLICY / "model.safetensors")


def test_restarting_at_every_step_gives_the_same_bits_as_running_through(tmp_path, recipe, rows):
    through = train_to(Trainer(tmp_path / "through", recipe), 3, rows)
    for step in (1, 2, 3):
        restarted = train_to(Trainer(tmp_path / "restarted", recipe), step, rows)
    assert digests(restarted.saved) == digests(through.saved)
    assert restarted.saved.report == through.saved.report


def test_the_newest_are_kept(tmp_path, recipe, rows):
    train_to(Trainer(tmp_path, recipe), 4, rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert Checkpoints(tmp_path, keep=2).find(2) is None


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "no state", "garbage state", "file gone", "misnamed"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, recipe, rows, damage):
    saved = train_to(Trainer(tmp_path, recipe), 2, rows).saved
    weights, state = saved.policy_dir / "model.safetensors", saved.path / STATE_FILE
    if damage == "flipped bit":
        data = bytearray(weights.read_bytes())
        data[-7] ^= 1
        weights.write_bytes(data)
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "no state":
        state.unlink()
    elif damage == "garbage state":
        state.write_text("{}")
    elif damage == "file gone":
        (saved.path / OPTIMISER_FILE).unlink()
    else:
        state.write_text(json.dumps(json.loads(state.read_text()) | {"step": 7}))
    again = Trainer(tmp_path, recipe)
    assert again.saved.step == 1
    assert train_to(again, 2, rows).saved.report == saved.report


def kill_at_event(number):
    """SIGKILL this process just before its `number`-th change of the file system."""
    left = [number]

    def hook(event, arguments):
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in WRITING_EVENTS or opened:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save_and_die(trainer, metrics, number):
    """Save in a forked process that is killed on the way; True once it got through before its turn came."""
    child = os.fork()
    if child == 0:
        try:
            kill_at_event(number)
            trainer.save(metrics)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


def test_killed_at_any_point_of_a_save_a_redo_gives_the_same_bits(tmp_path, recipe, rows):
    """kill -9 before each change of the file system in turn, then start again and train the step again."""
    expected = digests(train_to(Trainer(tmp_path / "undisturbed", recipe), 3, rows).saved)
    outcomes = []
    for number in range(1, 200):
        state_dir = tmp_path / str(number)
        trainer = train_to(Trainer(state_dir, recipe), 2, rows)
        if save_and_die(trainer, trainer.train(rows[2]), number):
            break
        again = Trainer(state_dir, recipe)
        outcomes.append(again.saved.step)
        assert digests(train_to(again, 3, rows).saved) == expected
        left = sorted(path.name for path in state_dir.iterdir())
        assert left[-2:] == ["step-00000002", "step-00000003"]
        assert left[:-2] in ([], ["step-00000001"])  # a kill before the oldest was dropped; the next save drops it
    assert number > 15
    assert set(outcomes) == {2, 3}
    assert outcomes == sorted(outcomes)


def test_a_half_written_file_is_never_part_of_a_checkpoint(tmp_path, recipe, rows, monkeypatch):
    """The disk fills up in the middle of the weights."""
    trainer = train_to(Trainer(tmp_path / "state", recipe), 1, rows)
    metrics = trainer.train(rows[1])

    def write_half(model, path):
        path.write_bytes(b"half of the weights")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.save_weights", write_half)
        with pytest.raises(OSError, match="No space left"):
            trainer.save(metrics)
    again = Trainer(tmp_path / "state", recipe)
    assert again.saved.step == 1
    undisturbed = train_to(Trainer(tmp_path / "undisturbed", recipe), 2, rows)
    assert digests(train_to(again, 2, rows).saved) == digests(undisturbed.saved)


def test_a_checkpoint_without_moments_is_refused(tmp_path, recipe, rows):
    trainer = train_to(Trainer(tmp_path, recipe), 1, rows)
    (trainer.saved.path / OPTIMISER_FILE).unlink()
    with pytest.raises(ModelError, match="has no optimiser"):
        trainer.checkpoints.restore(trainer.saved, recipe.optimiser)

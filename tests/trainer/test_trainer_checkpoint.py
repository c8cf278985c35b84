"""Checkpoints are whole or absent, and a redo after a crash gives the same bits."""

import hashlib
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from write_points import Points, run_child

import trainer.checkpoint
import trainer.optimiser
import trainer.policy
from protocol.errors import DataDirError, ModelError
from trainer.checkpoint import OPTIMISER_FILE, Checkpoints
from trainer.metrics import MetricsLog
from trainer.recipe import ASSETS_DIR
from trainer.state_dir import STATE_FILE, steps_to_drop
from trainer.step import TrainStep

DEMO_POLICY = ASSETS_DIR / "sort-digits"
NAMED, BEYOND = 3, 4
"""Exit codes of children: the error was a named one; there are fewer writes than that."""


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


def train_to(running, step, rows):
    while running.saved.step < step:
        running.save(running.train(rows[running.saved.step]))
    return running


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
    running = train_to(Trainer(tmp_path, recipe), 2, rows)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (running.saved.policy_dir / name).read_bytes() == (DEMO_POLICY / name).read_bytes()
    assert sha256(running.saved.policy_dir / "model.safetensors") != sha256(DEMO_POLICY / "model.safetensors")


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


def trainer_process(state_dir, recipe, rows, *, until=3):
    """What a trainer does from its start: restore, train, write checkpoint and metrics, until a step is reached."""
    metrics = metrics_of(state_dir)
    running = Trainer(state_dir, recipe)
    keep_metrics(metrics, running)
    while running.saved.step < until:
        running.save(running.train(rows[running.saved.step]))
        keep_metrics(metrics, running)


def metrics_of(state_dir):
    return MetricsLog(state_dir.parent / f"{state_dir.name}.jsonl")


def keep_metrics(metrics, running):
    if running.saved.step:
        metrics.append({"step": running.saved.step, **running.saved.report["metrics"]})


@pytest.fixture
def at_step_two(tmp_path, recipe, rows):
    """A data directory whose next save writes one checkpoint and drops another."""
    trainer_process(tmp_path / "start", recipe, rows, until=2)

    def copy(name):
        shutil.copytree(tmp_path / "start", tmp_path / name)
        shutil.copyfile(tmp_path / "start.jsonl", tmp_path / f"{name}.jsonl")
        return tmp_path / name

    return copy


def kept_lines(state_dir):
    return [json.loads(line) for line in (state_dir.parent / f"{state_dir.name}.jsonl").read_bytes().splitlines()]


@pytest.fixture
def trained(at_step_two, recipe, rows):
    """A trainer in memory that has trained step 2 and written nothing of it; `at` moves it to another directory."""
    running = Trainer(at_step_two("trained"), recipe)
    metrics = running.train(rows[2])

    def at(state_dir):
        running.checkpoints = Checkpoints(state_dir, keep=2)
        running.saved = running.checkpoints.newest()
        return running, metrics

    return at


def write_step(trained, state_dir, points):
    """All that a trainer writes of a step, in a process that meets its end, or a full disk, at one of the writes."""
    running, metrics = trained(state_dir)
    points.install(trainer.checkpoint, trainer.optimiser, trainer.policy)
    try:
        running.save(metrics)
        keep_metrics(metrics_of(state_dir), running)
    except DataDirError as error:
        raise SystemExit(NAMED if "no space" in str(error).lower() else 1) from error
    if points.left > 0:
        raise SystemExit(BEYOND)


def test_killed_at_any_write_the_next_start_gives_the_same_bits(at_step_two, trained, recipe, rows):
    """kill -9 at each write of a step in turn; then another process starts and goes on from the disk."""
    through = at_step_two("through")
    assert run_child(partial(trainer_process, through, recipe, rows)) == 0
    expected = digests(Checkpoints(through, keep=2).newest())
    outcomes = []
    for number in range(1, 200):
        state_dir = at_step_two(f"killed-{number}")
        ended = run_child(partial(write_step, trained, state_dir, Points(number, kill=True)))
        outcomes.append(Checkpoints(state_dir, keep=2).newest().step)
        assert run_child(partial(trainer_process, state_dir, recipe, rows)) == 0
        assert digests(Checkpoints(state_dir, keep=2).newest()) == expected
        assert kept_lines(state_dir) == kept_lines(through)
        left = sorted(path.name for path in state_dir.iterdir())
        assert left[-2:] == ["step-00000002", "step-00000003"]
        assert left[:-2] in ([], ["step-00000001"])  # a kill before the oldest was dropped; the next save drops it
        shutil.rmtree(state_dir)
        if ended == BEYOND:
            break
        assert ended == -signal.SIGKILL
    assert number > 40
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}


def test_a_full_disk_at_any_write_is_named_and_leaves_nothing_half_written(at_step_two, trained, recipe, rows):
    """Each write of a step in turn finds no space left; what was there stays whole, and a second try gives the same."""
    expected = digests(train_to(Trainer(at_step_two("through"), recipe), 3, rows).saved)
    ends = []
    for number in range(1, 200):
        state_dir = at_step_two(f"full-{number}")
        ends.append(run_child(partial(write_step, trained, state_dir, Points(number, kill=False))))
        names = sorted(path.name for path in state_dir.iterdir())
        if ends[-1] == NAMED:
            assert [name for name in names if not name.startswith("step-")] == []
            assert "step-00000002" in names
        assert digests(train_to(Trainer(state_dir, recipe), 3, rows).saved) == expected
        assert [row["step"] for row in kept_lines(state_dir)] in ([1, 2], [1, 2, 3])
        shutil.rmtree(state_dir)
        if ends[-1] == BEYOND:
            break
    assert number > 40
    assert set(ends) == {0, NAMED, BEYOND}
    assert ends.count(0) < 15  # what is cleared away may fail to go, and goes later


def test_a_checkpoint_without_moments_is_refused(tmp_path, recipe, rows):
    running = train_to(Trainer(tmp_path, recipe), 1, rows)
    (running.saved.path / OPTIMISER_FILE).unlink()
    with pytest.raises(ModelError, match="has no optimiser"):
        running.checkpoints.restore(running.saved, recipe.optimiser)


@pytest.mark.parametrize(
    ("steps", "keep", "every", "dropped"),
    [
        ([0, 1, 2, 3], 2, 0, [0, 1]),
        ([3, 4], 2, 0, []),
        ([3, 4], 5, 0, []),
        ([], 5, 0, []),
        ([0, 3, 4, 5, 6, 7], 2, 3, [4, 5]),
        ([8, 9, 10, 11], 1, 10, [8, 9]),
    ],
)
def test_which_checkpoints_go(steps, keep, every, dropped):
    assert steps_to_drop(steps, keep=keep, keep_every=every) == dropped


def test_every_so_many_are_kept_for_good(tmp_path, recipe, rows):
    running = Trainer(tmp_path, recipe)
    running.checkpoints = Checkpoints(tmp_path, keep=1, keep_every=2)
    train_to(running, 4, rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000000", "step-00000002", "step-00000004"]


def test_generators_go_on_where_they_were(tmp_path, recipe, rows):
    """Whatever a model draws from torch's own generator, such as dropout, is drawn alike after a restart."""
    torch.manual_seed(11)
    running = train_to(Trainer(tmp_path, recipe), 1, rows)
    expected = torch.rand(4)
    torch.manual_seed(12)
    running.checkpoints.restore(running.saved, recipe.optimiser)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_checkpoint_of_another_model_is_named(tmp_path, recipe, rows, name):
    train_to(Trainer(tmp_path / "state", recipe), 1, rows)
    other = shutil.copytree(DEMO_POLICY, tmp_path / "other")
    (other / name).write_text((other / name).read_text() + "\n")
    with pytest.raises(ModelError, match=f"is of another model than the run: its {name}"):
        Checkpoints(tmp_path / "state", keep=2).start(other)


def test_weights_of_another_architecture_are_named(tmp_path, recipe, rows):
    """The configuration says twice as many layers as the weights have."""
    saved = train_to(Trainer(tmp_path, recipe), 1, rows).saved
    config = json.loads((saved.policy_dir / "config.json").read_text())
    (saved.policy_dir / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "layer_types": None}))
    with pytest.raises(ModelError, match="lacks the weights"):
        Checkpoints(tmp_path, keep=2).restore(saved, recipe.optimiser)


def test_checkpoints_from_before_a_divergence_survive_it(tmp_path, recipe, rows):
    """Steps that skip every optimiser step are saved, and drop nothing: the last that learned is still there."""
    running = train_to(Trainer(tmp_path, recipe), 2, rows)
    for _ in range(4):
        running.save(running.saved.report["metrics"] | {"updates": 0.0, "skipped_updates": 2.0})
    assert sorted(path.name for path in tmp_path.iterdir())[:2] == ["step-00000001", "step-00000002"]
    assert Checkpoints(tmp_path, keep=2).find(2) is not None
    running.save({"updates": 2.0, "skipped_updates": 0.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000007"]


def test_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, recipe, rows, monkeypatch):
    """Power goes at any moment: a checkpoint under its name is whole. Each file is synced after its last byte, then the
    directories that name it, then comes the rename, then the sync of the directory that it happened in."""
    running = train_to(Trainer(tmp_path, recipe), 1, rows)
    events, fsync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", path, sha256(path) if path.is_file() else sorted(path.iterdir())))
        fsync(descriptor)

    def renamed(path, target):
        events.append(("rename", path, target))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    train_to(running, 2, rows)
    final = running.saved.path
    at, work = next(
        (place, event[1]) for place, event in enumerate(events) if event[0] == "rename" and event[2] == final
    )
    before = {path: content for kind, path, content in events[:at] if kind == "sync"}
    for path in [final, *final.rglob("*")]:
        there = work / path.relative_to(final)
        now = sha256(path) if path.is_file() else sorted(work / each.relative_to(final) for each in path.iterdir())
        assert before[there] == now, f"{path.name} was not synced, or changed after it was"
    assert next(event for event in events[at + 1 :])[:2] == ("sync", tmp_path)

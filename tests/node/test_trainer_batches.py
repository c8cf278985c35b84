"""The trainer's steps with an online filter: what is trained, what is left out, when it stops waiting."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from factories import OPERATOR, make_manifest, make_submission, make_trained, make_verdict, sealed
from test_trainer_role import FakeCollector, FakeStore, FakeSwarm

from node.ledger.log import LedgerLog
from node.ledger.witness import HEAD_FILE
from node.status import StatusBoard
from node.trainer.monitor import Monitor
from node.trainer.role import TrainerParts, TrainerRole
from protocol.envelope import Signed, open_envelope, seal
from protocol.identity import Identity
from protocol.ledger import LedgerState
from protocol.records import Batch, BatchSpec, Head, Manifest, Submission, Trained
from trainer.metrics import MetricsLog

ALICE = Identity.from_phrase("alice")
MIXED, SILENT = (1.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0)
"""Rewards of a submission's two groups of two: the first with signal and the second without, or both without."""


class Compute:
    """Trains whatever it is given, and remembers it."""

    def __init__(self) -> None:
        self.opened = 0
        self.trained: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        if method == "open":
            return {"step": self.opened, "policy_dir": "/nowhere"}
        self.trained.append(params)
        metrics = {"reward": 9.0, "loss": 0.5, "ratio_max": math.inf, "entropy": math.nan}
        return {"step": params["step"] + 1, "policy_dir": "/nowhere", "metrics": metrics}


class Reader:
    """Files whose name says which submission they are."""

    def __init__(self) -> None:
        self.rewards: dict[str, tuple[float, ...]] = {}

    async def read(self, path: Path, **_: Any) -> list[dict[str, Any]]:
        rewards = self.rewards[path.name]
        return [{"prompt_index": at // 2, "member": at % 2, "reward": reward} for at, reward in enumerate(rewards)]


class Collector(FakeCollector):
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.changed = trio.Event()
        self.stopped: Callable[[], None] = lambda: None

    def file(self, key: bytes) -> Path:
        return self.directory / key.hex()

    def discard(self, key: bytes) -> None:
        self.file(key).unlink(missing_ok=True)

    async def wait_changed(self) -> None:
        await self.changed.wait()

    async def run(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.stopped()

    def has_all(self, *, but_silent: bool = False) -> bool:
        return True


class World:
    """A trainer of one step whose batch is 8 rollouts."""

    def __init__(self, directory: Path, **batch: Any) -> None:
        spec = BatchSpec(**{"rollouts_per_step": 8, "max_staleness": 1, "total_steps": 1} | batch)
        rollout = msgspec.structs.replace(make_manifest().rollout, max_submissions_per_step=16)
        self.run: Signed[Manifest] = sealed(make_manifest(batch=spec, rollout=rollout), OPERATOR)
        self.compute, self.reader, self.collector = Compute(), Reader(), Collector(directory)
        self.ledger = LedgerLog(directory / "ledger", LedgerState(self.run.id, self.run.record))
        self.board = StatusBoard(role="trainer", peer_id=OPERATOR.peer_id, run="test")
        parts: Any = {
            "identity": OPERATOR,
            "manifest": self.run,
            "swarm": FakeSwarm(),
            "store": FakeStore(),
            "ledger": self.ledger,
            "collector": self.collector,
            "compute": self.compute,
            "reader": self.reader,
            "monitor": Monitor(MetricsLog(directory / "training.jsonl"), self.board),
            "board": self.board,
            "origin_url": "https://trainer.example",
            "origin_fingerprint": b"f" * 32,
            "origin_token": lambda relay: "t" * 32,
            "discovery_state": lambda: "connected",
        }
        self.role = TrainerRole(TrainerParts(**parts))

    def hand_in(self, *files: tuple[float, ...], step: int = 0) -> None:
        """Accepted submissions for a step, of its own policy, with these rewards."""
        for rewards in files:
            index = self.ledger.state.next_index(ALICE.peer_id, step)
            submission: Signed[Submission] = make_submission(
                ALICE, self.run.id, index=index, step=step, checkpoint_step=step
            )
            self.reader.rewards[submission.id.hex()] = rewards
            self.ledger.append([submission.data, make_verdict(submission).data])
        self.collector.changed.set()
        self.collector.changed = trio.Event()

    async def settled(self) -> bool:
        """Whether the step was trained once the trainer has nothing left to do at this time."""
        await trio.testing.wait_all_tasks_blocked()
        return bool(self.compute.trained)


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    """Virtual time that the test moves by hand until it lets go."""
    autojump_clock.autojump_threshold = float("inf")
    return autojump_clock


async def test_the_batch_asks_for_more_instead_of_training_on_less(tmp_path: Path, clock: Any) -> None:
    world = World(tmp_path, signal_only=True)
    world.hand_in(MIXED, SILENT, MIXED)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.role.run)
        assert not await world.settled(), "4 of 8 rollouts have signal"
        gathering = world.board.snapshot()["details"]["gathering"]
        assert (gathering["rollouts"], gathering["groups_without_signal"], gathering["most"]) == (4, 4, 8)
        world.hand_in(MIXED, MIXED, MIXED)
        assert await world.settled()
        clock.autojump_threshold = 0
    (call,) = world.compute.trained
    assert [row["reward"] for row in call["rollouts"]] == [1.0, 0.0] * 4
    entry = world.ledger.state.committed[0]
    assert (len(entry.submissions), entry.ended, entry.silent) == (5, "whole", bytes([0b10101110, 0b10]))
    metrics = world.ledger.state.trained[0].metrics
    assert metrics["reward"] == pytest.approx(0.7), "of all rollouts, not of those that were trained on"
    assert (metrics["groups_without_signal"], metrics["rollouts_collected"]) == (6.0, 20.0)
    assert metrics["loss"] == 0.5
    assert not {"ratio_max", "entropy"} & set(metrics), "the ledger takes finite numbers alone"


async def test_at_the_deadline_it_trains_with_what_is_there(tmp_path: Path, clock: Any) -> None:
    world = World(tmp_path, signal_only=True, deadline_s=60.0, minimum_share=0.5)
    world.hand_in(MIXED, MIXED)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.role.run)
        assert not await world.settled()
        clock.jump(59.0)
        assert not await world.settled()
        clock.jump(1.5)
        assert await world.settled()
        clock.autojump_threshold = 0
    assert world.ledger.state.committed[0].ended == "deadline"
    assert len(world.compute.trained[0]["rollouts"]) == 4


async def test_at_the_deadline_it_goes_on_waiting_for_contributors_that_are_not_there(
    tmp_path: Path, clock: Any
) -> None:
    world = World(tmp_path, signal_only=True, deadline_s=60.0, minimum_share=1.0)
    world.hand_in(MIXED)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.role.run)
        assert not await world.settled()
        clock.jump(3600.0)
        assert not await world.settled()
        nursery.cancel_scope.cancel()


async def test_a_step_that_finds_too_little_signal_leaves_the_policy_alone(tmp_path: Path, clock: Any) -> None:
    """A policy that has learned its task must not be trained on the noise of the last few groups."""
    world = World(tmp_path, signal_only=True, max_tries=2, minimum_share=0.5)
    world.hand_in(SILENT, SILENT, MIXED, SILENT)
    clock.autojump_threshold = 0
    with trio.fail_after(100):
        await world.role.run()
    assert world.ledger.state.committed[0].ended == "tries"
    (call,) = world.compute.trained
    assert (call["rollouts"], call["skip"]) == ([], True)
    assert world.ledger.state.trained[0].mean_reward == pytest.approx(9 / 16)


async def test_without_a_filter_a_short_batch_is_trained_at_the_deadline(tmp_path: Path, clock: Any) -> None:
    world = World(tmp_path, deadline_s=60.0, minimum_share=0.5)
    world.hand_in(SILENT)
    clock.autojump_threshold = 0
    with trio.fail_after(200):
        await world.role.run()
    entry = world.ledger.state.committed[0]
    assert (entry.ended, entry.silent) == ("deadline", b"")
    assert len(world.compute.trained[0]["rollouts"]) == 4
    replayed = LedgerState(world.run.id, world.run.record)
    for data in LedgerLog(tmp_path / "ledger", LedgerState(world.run.id, world.run.record)).entries(0, 100):
        replayed.apply(data)
    assert msgspec.structs.asdict(replayed.committed[0]) == msgspec.structs.asdict(entry)


async def test_the_deadline_goes_on_over_a_restart(tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is started again and again must not keep a step open for ever.

    The step opened 50 s before this start, when its oldest usable policy was there, and has 60 s.
    """
    world = World(tmp_path, total_steps=3, max_staleness=0, deadline_s=60.0, minimum_share=0.5)
    world.hand_in(MIXED, MIXED)
    opened_ms = 1_800_000_000_000
    keys = tuple(world.ledger.state.shelf.usable(0))
    batch = Batch(
        run_id=world.run.id, step=0, submissions=keys, issued_at_ms=opened_ms - 90_000, ended="whole", silent=b""
    )
    trained = open_envelope(make_trained(world.run.id, 0), Trained).record
    trained = msgspec.structs.replace(trained, issued_at_ms=opened_ms)
    world.ledger.append([seal(batch, OPERATOR), seal(trained, OPERATOR)])
    monkeypatch.setattr("node.trainer.role.now_ms", lambda: opened_ms + 50_000)
    world.compute.opened = 1
    world.hand_in(MIXED, step=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.role.run)
        assert not await world.settled()
        clock.jump(9.0)
        assert not await world.settled()
        clock.jump(1.5)
        assert await world.settled()
        nursery.cancel_scope.cancel()
    assert world.ledger.state.committed[1].ended == "deadline"


async def test_the_last_head_confirms_the_whole_ledger(tmp_path: Path, clock: Any) -> None:
    """A verdict that comes as the run ends: entered after the last head, it would leave the directory unconfirmed."""
    world = World(tmp_path, deadline_s=60.0, minimum_share=0.5)
    world.hand_in(SILENT)
    world.collector.stopped = lambda: world.hand_in(SILENT)
    clock.autojump_threshold = 0
    with trio.fail_after(200):
        await world.role.run()
    head = open_envelope((world.ledger.path / HEAD_FILE).read_bytes(), Head).record
    assert (head.finished, head.ledger_length) == (True, world.ledger.state.length)
    assert len(world.ledger.state.submissions) == 2

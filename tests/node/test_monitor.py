"""Metrics, evaluations and tracking: nothing is lost or twice, and training never waits for any of them."""

import json
from pathlib import Path

import pytest
import trio
import trio.testing

from node.status import StatusBoard
from node.trainer.evaluator import Evaluator
from node.trainer.monitor import Monitor
from node.trainer.track import Service
from node.trainer.tracking import Tracker
from protocol.errors import ComputeError, ConfigError
from protocol.records import Trained
from trainer.metrics import MetricsLog
from trainer.recipe import EvaluationSettings

BOARD = {"role": "trainer", "peer_id": "peer", "run": "run"}
FOUND = {"pass_at": [{"k": 1, "value": 0.5, "low": 0.4, "high": 0.6}], "reward": 0.5}


@pytest.fixture
def board():
    return StatusBoard(**BOARD)


def trained(count):
    common = {"run_id": b"r" * 32, "checkpoint": b"c" * 32, "mean_reward": 0.5, "metrics": {"reward": 0.5}}
    return {step: Trained(step=step, issued_at_ms=step, **common) for step in range(count)}


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_a_crash_kept_from_the_file_is_written_from_the_ledger(tmp_path, board):
    path = tmp_path / "training.jsonl"
    Monitor(MetricsLog(path), board).trained(trained(3))
    path.write_bytes(path.read_bytes()[:-20])
    Monitor(MetricsLog(path), board).trained(trained(6))
    assert steps_in(path) == [0, 1, 2, 3, 4, 5]
    path.unlink()
    Monitor(MetricsLog(path), board).trained(trained(6))
    assert steps_in(path) == [0, 1, 2, 3, 4, 5]


class LookedAt(dict):
    """Counts the trained steps that are looked at."""

    count = 0

    def __getitem__(self, step):
        self.count += 1
        return super().__getitem__(step)

    def __iter__(self):
        for step in super().__iter__():
            self.count += 1
            yield step

    def items(self):
        return ((step, self[step]) for step in self)


def test_a_step_is_as_quickly_kept_however_many_were_before(tmp_path, board):
    monitor = Monitor(MetricsLog(tmp_path / "training.jsonl"), board)
    looked = []
    for count in (1, 50, 51):
        steps = LookedAt(trained(count))
        monitor.trained(steps)
        looked.append(steps.count)
    assert looked == [1, 49, 1]


def test_a_disk_that_refuses_a_line_delays_it(tmp_path, board, caplog):
    path = tmp_path / "training.jsonl"
    monitor = Monitor(MetricsLog(path), board)
    monitor.trained(trained(1))
    path.rename(tmp_path / "away")
    path.mkdir()
    monitor.trained(trained(2))
    assert "metrics not kept step=1" in caplog.text
    assert "cannot be written" in board.snapshot()["details"]["metrics_file"]
    path.rmdir()
    (tmp_path / "away").rename(path)
    monitor.trained(trained(3))
    assert steps_in(path) == [0, 1, 2]


class Evaluations:
    """Evaluates when it is let."""

    def __init__(self):
        self.asked = []
        self.gate = trio.Event()
        self.error = None

    async def __call__(self, policy_dir):
        self.asked.append(policy_dir.name)
        await self.gate.wait()
        if self.error:
            raise self.error
        return dict(FOUND)


def evaluator(evaluations, tmp_path, board, *, every=2, total=9):
    settings = EvaluationSettings(every_steps=every)
    results = MetricsLog(tmp_path / "evaluation.jsonl")
    return Evaluator(evaluations, settings, total_steps=total, results=results, board=board)


async def run_until_idle(one, *, offers=(), gate=None):
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run)
            await trio.testing.wait_all_tasks_blocked()
            for step in offers:
                one.offer(step, Path(f"/policy-{step}"))
                await trio.testing.wait_all_tasks_blocked()
            if gate is not None:
                gate.set()
            await one.finish()
            nursery.cancel_scope.cancel()


async def test_only_what_is_due_is_evaluated_and_the_newest_goes_first(tmp_path, board):
    """While the evaluation of policy 0 runs, training publishes 1 to 9 and waits for nothing."""
    evaluations = Evaluations()
    one = evaluator(evaluations, tmp_path, board)
    await run_until_idle(one, offers=range(10), gate=evaluations.gate)
    assert evaluations.asked == ["policy-0", "policy-9"]
    assert one.passed_over == 4
    details = board.snapshot()["details"]
    assert [row["step"] for row in details["evaluations"]] == [0, 9]
    assert details["evaluations_passed_over"] == 4


async def test_a_restart_neither_loses_nor_repeats_an_evaluation(tmp_path, board):
    first = Evaluations()
    first.gate.set()
    await run_until_idle(evaluator(first, tmp_path, board), offers=[0, 2])
    again = Evaluations()
    again.gate.set()
    await run_until_idle(evaluator(again, tmp_path, board), offers=[2, 4])
    assert again.asked == ["policy-4"]
    assert steps_in(tmp_path / "evaluation.jsonl") == [0, 2, 4]


async def test_an_evaluation_that_fails_is_counted_and_the_next_one_runs(tmp_path, board, caplog):
    evaluations = Evaluations()
    evaluations.gate.set()
    one = evaluator(evaluations, tmp_path, board)
    evaluations.error = ComputeError("out of memory")
    await run_until_idle(one, offers=[2])
    evaluations.error = None
    await run_until_idle(one, offers=[4])
    assert one.failed == 1
    assert "evaluation failed step=2" in caplog.text
    assert steps_in(tmp_path / "evaluation.jsonl") == [4]


async def test_nothing_is_evaluated_unless_asked_for(tmp_path, board):
    one = evaluator(Evaluations(), tmp_path, board, every=0)
    one.offer(0, Path("/policy-0"))
    with trio.fail_after(5):
        await one.finish()


async def test_a_service_that_hangs_costs_rows_and_nothing_else(board):
    async def call(method, parameters):
        await trio.sleep_forever()

    tracker = Tracker(call, board, queue_rows=3)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tracker.run)
            await trio.testing.wait_all_tasks_blocked()
            tracker.offer({"step": 0})
            await trio.testing.wait_all_tasks_blocked()
            for step in range(1, 11):
                tracker.offer({"step": step})
            assert tracker.dropped == 7
            nursery.cancel_scope.cancel()
    assert board.snapshot()["details"]["tracking_dropped"] == 7


async def test_a_service_that_fails_is_counted_and_asked_again(board):
    calls = []

    async def call(method, parameters):
        calls.append((method, parameters.get("row", {}).get("step")))
        if len(calls) == 1:
            raise ComputeError("no network")

    tracker = Tracker(call, board)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tracker.run)
            for step in range(3):
                tracker.offer({"step": step})
            await tracker.finish()
            nursery.cancel_scope.cancel()
    assert calls == [("log", 0), ("log", 1), ("log", 2), ("finish", None)]
    assert tracker.dropped == 1


def test_a_service_gets_numbers_by_step(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text(
        "calls = []\n"
        "def init(**settings): calls.append(settings)\n"
        "def log(row, step): calls.append((step, row))\n"
        "def finish(): calls.append('finish')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    service = Service("trackio", project="p", run="operator/name")
    service.log({"step": 4, "reward": 0.5, "checkpoint": "abc"})
    service.log({"step": 5, "reward": 0.75})
    service.finish()
    import trackio

    assert trackio.calls == [
        {"project": "p", "name": "operator/name", "resume": "allow"},
        (4, {"reward": 0.5}),
        (5, {"reward": 0.75}),
        "finish",
    ]


def test_a_service_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="wandb is not installed") as caught:
        Service("wandb", project="p", run="r").log({"step": 0})
    assert "pip install wandb" in caught.value.hint

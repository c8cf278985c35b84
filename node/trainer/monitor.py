"""What is kept and shown of the learning: the metrics file, evaluations, a tracking service. Training never waits here.

    <data_dir>/metrics/training.jsonl      a line a trained step, by the paper's names (trainer.metrics)
    <data_dir>/metrics/evaluation.jsonl    a line an evaluated policy (trainer.evaluation)

The ledger has every trained step's metrics, so after a crash, a full disk or a lost file the missing lines are written
from it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import trio

from node.compute.process import ComputeProcess
from node.status import StatusBoard
from node.trainer.evaluator import Evaluator
from node.trainer.tracking import Tracker
from protocol.envelope import Signed
from protocol.errors import DataDirError
from protocol.records import Manifest, Trained
from protocol.run import RunAddress
from trainer.metrics import MetricsLog
from trainer.recipe import EvaluationSettings, Recipe

log = logging.getLogger(__name__)

FINISH_DEADLINE_S: Final = 60.0
EVALUATION_TIMEOUT_S: Final = 6 * 3600.0
TRACKING_TIMEOUT_S: Final = 60.0


class StartProcess(Protocol):
    """Starts a compute process whose failure is nobody else's."""

    async def __call__(self, module: str, args: Sequence[str] = (), *, log_name: str) -> ComputeProcess: ...


class Monitor:
    """Is told what the trainer did; keeps and shows it."""

    def __init__(
        self,
        metrics: MetricsLog,
        board: StatusBoard,
        *,
        evaluator: Evaluator | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        self._metrics = metrics
        self._board = board
        self._evaluator = evaluator
        self._tracker = tracker

    async def run(self) -> None:
        """Evaluate and track until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._evaluator is not None:
                nursery.start_soon(self._evaluator.run)
            if self._tracker is not None:
                nursery.start_soon(self._tracker.run)

    async def finish(self) -> None:
        """Wait, within a deadline, for what is under way."""
        with trio.move_on_after(FINISH_DEADLINE_S):
            if self._evaluator is not None:
                await self._evaluator.finish()
            if self._tracker is not None:
                await self._tracker.finish()

    def published(self, step: int, policy_dir: Path) -> None:
        """A policy was published."""
        if self._evaluator is not None:
            self._evaluator.offer(step, policy_dir)

    def trained(self, trained: Mapping[int, Trained]) -> None:
        """The ledger's trained steps, from 0 on; those that are not in the file yet are written and tracked."""
        for step in range(self._metrics.last_step + 1, len(trained)):
            if not self._keep(_row(trained[step])):
                return

    def _keep(self, row: dict[str, Any]) -> bool:
        try:
            self._metrics.append(row)
        except DataDirError as error:  # the ledger has it: the next step writes it too
            log.warning("metrics not kept step=%d error=%r", row["step"], error.message)
            self._board.details(metrics_file=f"not written: {error.message}")
            return False
        self._board.details(metrics_file=str(self._metrics.path))
        if self._tracker is not None:
            self._tracker.offer(row)
        return True


async def build_monitor(
    directory: Path, manifest: Signed[Manifest], recipe: Recipe, *, board: StatusBoard, start: StartProcess
) -> Monitor:
    """The monitor of a run, its processes under way. Raises DataDirError where its files cannot be written."""
    metrics = MetricsLog(directory / "training.jsonl")
    evaluator = None
    if recipe.evaluation.every_steps:
        results = MetricsLog(directory / "evaluation.jsonl")
        worker = await start("node.trainer.evaluation_compute", log_name="evaluation.log")
        evaluator = Evaluator(
            partial(_evaluate, worker, manifest, recipe.evaluation),
            recipe.evaluation,
            total_steps=manifest.record.batch.total_steps,
            results=results,
            board=board,
        )
    tracker = None
    if recipe.tracking.service != "none":
        address = RunAddress(manifest.author, manifest.record.name)
        args = [recipe.tracking.service, recipe.tracking.project, str(address)]
        tracker = Tracker(partial(_track, await start("node.trainer.track", args, log_name="tracking.log")), board)
    return Monitor(metrics, board, evaluator=evaluator, tracker=tracker)


async def _evaluate(
    worker: ComputeProcess, manifest: Signed[Manifest], settings: EvaluationSettings, policy_dir: Path
) -> dict[str, Any]:
    answer: dict[str, Any] = await worker.call(
        "evaluate",
        timeout_s=EVALUATION_TIMEOUT_S,
        policy_dir=str(policy_dir),
        run_id=manifest.id,
        manifest=msgspec.msgpack.encode(manifest.record),
        settings=msgspec.to_builtins(settings),
    )
    return answer


async def _track(service: ComputeProcess, method: str, parameters: dict[str, Any]) -> None:
    await service.call(method, timeout_s=TRACKING_TIMEOUT_S, **parameters)


def _row(record: Trained) -> dict[str, Any]:
    return {"step": record.step, "at_ms": record.issued_at_ms, "checkpoint": record.checkpoint.hex(), **record.metrics}

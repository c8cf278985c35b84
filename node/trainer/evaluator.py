"""Evaluations beside the training: policies that are due, one after another, none of which training waits for.

While one runs, only the newest policy that is due waits for its turn; those between are passed over and counted.
Results are kept as JSON lines, so that a restart neither loses nor repeats one.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import trio

from node.status import StatusBoard
from protocol.errors import DataDirError, NodeError
from trainer.metrics import MetricsLog
from trainer.recipe import EvaluationSettings

log = logging.getLogger(__name__)

SHOWN: Final = 1000
"""Newest results on the status board."""

Evaluate = Callable[[Path], Awaitable[dict[str, Any]]]
"""Evaluates the policy in a directory. Raises NodeError."""


class Evaluator:
    """Evaluates what is due among the policies that it is offered."""

    def __init__(
        self,
        evaluate: Evaluate,
        settings: EvaluationSettings,
        *,
        total_steps: int,
        results: MetricsLog,
        board: StatusBoard,
    ) -> None:
        self._evaluate = evaluate
        self._every = settings.every_steps
        self._total_steps = total_steps
        self._results = results
        self._board = board
        self._next: tuple[int, Path] | None = None
        self._busy = False
        self._changed = trio.Event()
        self.passed_over = 0
        self.failed = 0

    def offer(self, step: int, policy_dir: Path) -> None:
        """A policy was published. Returns at once."""
        due = self._every and (step % self._every == 0 or step == self._total_steps)
        if not due or step <= self._results.last_step:
            return
        if self._next is not None:
            self.passed_over += 1
            log.info("evaluation passed-over step=%d for=%d", self._next[0], step)
        self._next = step, policy_dir
        self._tell()

    async def run(self) -> None:
        """Evaluate until cancelled; what fails is counted and never felt by training."""
        self._show()
        while True:
            while self._next is None:
                await self._changed.wait()
            (step, policy_dir), self._next, self._busy = self._next, None, True
            await self._one(step, policy_dir)
            self._busy = False
            self._show()
            self._tell()

    async def finish(self) -> None:
        """Wait until nothing is under way or due."""
        while self._busy or self._next is not None:
            await self._changed.wait()

    async def _one(self, step: int, policy_dir: Path) -> None:
        try:
            found = await self._evaluate(policy_dir)
            self._results.append({"step": step, **found})
            log.info("evaluated step=%d pass=%.3f", step, found["pass_at"][0]["value"])
        except DataDirError as error:
            log.warning("evaluation not kept step=%d error=%r", step, error.message)
        except NodeError as error:
            self.failed += 1
            log.warning("evaluation failed step=%d error=%r", step, error.message)

    def _show(self) -> None:
        self._board.details(
            evaluations=self._results.rows()[-SHOWN:],
            evaluations_passed_over=self.passed_over,
            evaluations_failed=self.failed,
        )

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

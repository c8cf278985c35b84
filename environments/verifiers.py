"""Tasks of Prime Intellect's `verifiers` package (0.4, its `verifiers.v1`), by the names of their tasksets.

The package runs under an interpreter of its own, where it and the taskset's wheel are installed:
INTELLECT_VERIFIERS_PYTHON names it. Rewards that need a container or a judging model cannot be repeated by a validator
and are left out; a taskset that has no others cannot be used. One turn only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from environments.base import Environment, Message, Reward, Task
from environments.worker_pool import CouldNotTellError, FailedError, WorkerPool
from protocol.errors import EnvironmentUnknown
from protocol.seeds import SeedStream

PYTHON_VARIABLE: Final = "INTELLECT_VERIFIERS_PYTHON"
MAX_COMPLETION_CHARS: Final = 1 << 18
_DEADLINE_S: Final = 120.0
_BEGIN: Final = "import sys; sys.path.append({root!r}); from environments.verifiers_worker import main; main()"


@dataclass(eq=False)
class Verifiers(Environment):
    """The first `tasks` tasks of a taskset; `config` is a JSON object of the taskset's settings."""

    name: ClassVar[str] = "verifiers"
    repeatable = False  # a taskset is anybody's code

    taskset: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
    tasks: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    config: Annotated[str, Meta(max_length=512)] = "{}"
    _pool: WorkerPool = field(init=False, repr=False)
    _held: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """What the worker says of itself, once asked: releases, and how many tasks there are."""

    def __post_init__(self) -> None:
        if not isinstance(json.loads(self.config), dict):
            raise ValueError("config is a JSON object of the taskset's settings")
        begin = _BEGIN.format(root=str(Path(__file__).parents[1]))
        self._pool = WorkerPool(
            ("-P", "-c", begin, self.taskset, str(self.tasks), self.config),
            _DEADLINE_S,
            python=os.environ.get(PYTHON_VARIABLE, sys.executable),
            path="",
        )

    @property
    def required_versions(self) -> dict[str, str]:
        """Releases of verifiers and of the taskset's distribution, as the worker's interpreter has them."""
        return dict(self._about["versions"])

    def task(self, seed: bytes) -> Task:
        """The task of a 32-byte seed. Raises EnvironmentUnknown where it cannot be drawn."""
        number = SeedStream(seed).below(int(self._about["tasks"]))
        messages: list[Message] = self._ask({"task": number})["messages"]
        return Task(messages, {"task": number})

    def reward(self, task: Task, completion: str) -> Reward:
        """The taskset's weighed rewards, added up."""
        return self.rewards([(task, completion)])[0]

    def rewards(self, pairs: Sequence[tuple[Task, str]]) -> list[Reward]:
        """The same for several, side by side."""
        fitting = [place for place, (_, text) in enumerate(pairs) if len(text) <= MAX_COMPLETION_CHARS]
        requests = [{"task": pairs[place][0].data["task"], "text": pairs[place][1]} for place in fitting]
        found = dict(zip(fitting, self._pool.map(requests, allowance=self.allowance), strict=True))
        too_long = Reward(0.0, f"longer than {MAX_COMPLETION_CHARS} characters")
        return [_reward(found[place]) if place in found else too_long for place in range(len(pairs))]

    def close(self) -> None:
        self._pool.close()

    @property
    def _about(self) -> dict[str, Any]:
        if not self._held:
            self._held = self._ask({"versions": True})
        return self._held

    def _ask(self, request: dict[str, Any]) -> Any:
        try:
            return self._pool.call(request)
        except (CouldNotTellError, FailedError) as error:
            raise EnvironmentUnknown(
                f"the taskset {self.taskset} cannot be used: {error}",
                hint=f"install verifiers and the taskset's wheel in a virtual environment of their own, and set "
                f"{PYTHON_VARIABLE} to its bin/python",
            ) from error


def _reward(found: Any) -> Reward:
    if isinstance(found, (CouldNotTellError, FailedError)):  # a taskset is anybody's code: its failure judges nobody
        return Reward(None, f"could not tell: {found}")
    if not isinstance(found, (int, float)):
        return Reward(None, "no reward of the taskset can be found out without a container")
    return Reward(float(found), "the taskset's rewards")

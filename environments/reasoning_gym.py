"""Tasks of the reasoning-gym package (extra `reasoning-gym`), as far as they are the same everywhere and safe to score.

Which those are was found by trying each (environments.reasoning_gym_survey) and is shipped as a list with the reasons
against the others. Scorers that evaluate what a policy wrote run in boxes (environments.reasoning_gym_boxed). Partial
credit is no reward here: it is 1 or 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from environments.answers import TAIL_CHARS, tagged
from environments.base import RIGHT, WRONG, Environment, Reward, Task, user_message
from environments.reasoning_gym_boxed import BoxedScorer
from environments.worker_pool import CouldNotTellError, FailedError, WorkerPool, module_command
from protocol.errors import EnvironmentUnknown
from protocol.seeds import SeedStream

SURVEY: Final = Path(__file__).parent / "assets" / "reasoning-gym-tasks.json"
_DEADLINE_S: Final = 60.0
_FULL_SCORE: Final = 0.99
_SEEDS: Final = 1 << 31
_INSTRUCTION: Final = "Write the answer between <answer> and </answer>."


class Survey(msgspec.Struct, frozen=True, rename={"release": "reasoning-gym"}):
    """The shipped list."""

    release: str
    """The package's version that was surveyed."""
    allowed: list[str]
    boxed: dict[str, str]
    """Tasks whose scorer evaluates what a policy wrote, and the form of text that it gets."""
    excluded: dict[str, str]
    """Why each of the others is not allowed."""


@cache
def survey() -> Survey:
    """Read the shipped list."""
    return msgspec.json.decode(SURVEY.read_bytes(), type=Survey)


@dataclass(eq=False)
class ReasoningGym(Environment):
    """One of the package's tasks, named by `task`; `config` is a JSON object of its settings."""

    name: ClassVar[str] = "reasoning-gym"
    version: ClassVar[int] = 2
    requires: ClassVar[tuple[str, ...]] = ("reasoning-gym", "sympy")

    task_name: Annotated[str, Meta(min_length=1, max_length=64)] = "chain_sum"
    config: Annotated[str, Meta(max_length=512)] = "{}"
    tags: bool = True
    """Ask for an answer in <answer>…</answer>; else all of the completion is the answer."""
    _settings: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False)
    _pool: WorkerPool = field(init=False, repr=False)
    _boxed: BoxedScorer | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        form = survey().boxed.get(self.task_name)
        if form is None and self.task_name not in survey().allowed:
            why = survey().excluded.get(self.task_name, f"reasoning-gym {survey().release} has no such task")
            raise ValueError(f"task_name = {self.task_name!r} may not be used: {why}")
        settings = json.loads(self.config)
        if not isinstance(settings, dict) or {"size", "seed"} & settings.keys():
            raise ValueError("config is a JSON object of settings, without size and seed")
        self._settings = settings
        self._pool = WorkerPool(module_command("environments.reasoning_gym_worker"), _DEADLINE_S)
        if form is not None:
            self._boxed = BoxedScorer(self.task_name, settings, form=form)
            self.repeatable = False

    def task(self, seed: bytes) -> Task:
        """The item of a 32-byte seed. Raises EnvironmentUnknown where the package cannot draw it."""
        number = SeedStream(seed).below(_SEEDS)
        try:
            drawn = self._pool.call(self._request(number))
        except (CouldNotTellError, FailedError) as error:
            raise EnvironmentUnknown(
                f"reasoning-gym does not draw the task {self.task_name} with {self.config}: {error}",
                hint="check the settings; the package lists them in the task's configuration class",
            ) from error
        ask = f"{drawn['question']}\n\n{_INSTRUCTION}" if self.tags else str(drawn["question"])
        return Task(user_message(ask), {"seed": number, "answer": drawn["answer"]})

    def reward(self, task: Task, completion: str) -> Reward:
        """1 for a full score."""
        return self.rewards([(task, completion)])[0]

    def rewards(self, pairs: Sequence[tuple[Task, str]]) -> list[Reward]:
        """The same for several, side by side."""
        texts = [self._answer(completion) for _, completion in pairs]
        asked = [place for place, text in enumerate(texts) if text is not None]
        answers = [(int(pairs[place][0].data["seed"]), str(texts[place])) for place in asked]
        scores = dict(zip(asked, self._scores(answers), strict=True))
        none = Reward(0.0, f"no <answer> of at most {TAIL_CHARS} characters")
        return [_reward(scores[place]) if place in scores else none for place in range(len(pairs))]

    def require_machine(self) -> None:
        """Prove the sandbox where the task's scorer needs it. Raises SandboxError, EnvironmentUnknown."""
        if self._boxed is not None:
            self._boxed.require_machine()

    def close(self) -> None:
        self._pool.close()
        if self._boxed is not None:
            self._boxed.close()

    def _scores(self, answers: Sequence[tuple[int, str]]) -> list[Any]:
        if self._boxed is not None:
            return self._boxed.scores(answers, allowance=self.allowance)
        requests = [{**self._request(number), "text": text} for number, text in answers]
        return self._pool.map(requests, allowance=self.allowance)

    def _request(self, number: int) -> dict[str, Any]:
        return {"task": self.task_name, "config": self._settings, "seed": number}

    def _answer(self, completion: str) -> str | None:
        text = tagged(completion, "answer") if self.tags else completion.strip()
        return text if text is not None and len(text) <= TAIL_CHARS else None


def _reward(score: Any) -> Reward:
    if isinstance(score, CouldNotTellError):
        return Reward(None, f"could not tell: {score}")
    if isinstance(score, FailedError):
        return Reward(0.0, "an answer that the scorer does not take")
    if not isinstance(score, (int, float)):
        return Reward(None, "the scorer gave no number")
    return RIGHT if score >= _FULL_SCORE else WRONG

"""The compute process of `data filter`: how many of a policy's answers to each task are right.

A task is right from a reward of SOLVED_FROM on. Prompts are the environment's own, without a wish for their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from environments.base import Environment, Task
from environments.registry import get_environment
from node.compute.serve import serve
from node.data_filter import MAX_NEW_TOKENS
from node.engines.assignment import Assignment, Work, prompt_ids
from node.engines.base import Engine, Generation, GenerationRequest, SamplingParams
from node.engines.registry import engine_from_environment
from node.engines.rewards import answer_text, judge
from node.engines.tokenizer import Tokenizer
from node.engines.turns import Room, go_on, turns_of
from node.run_create import model_spec
from node.run_environment import extra_stop_ids, import_data
from protocol.errors import ComputeError
from protocol.rollouts import emitted_spans
from protocol.seeds import candidate_seed, rollout_seed
from trainer.recipe import EnvironmentChoice

SOLVED_FROM: Final = 0.5


class _Subject(msgspec.Struct, frozen=True):
    environment: EnvironmentChoice
    model_dir: str
    samples: int
    temperature: Annotated[float, Meta(gt=0)]
    max_new_tokens: int | None
    seed: str


@dataclass(frozen=True)
class _Tasks(Work):
    """Tasks that share nothing: each has a seed of its own for its answers' noise, whatever else is in the call."""

    seeds: Sequence[bytes] = ()

    def noise_seed(self, prompt_index: int, member: int) -> bytes:
        return rollout_seed(self.seeds[prompt_index], 0, member)


@dataclass(frozen=True)
class _Opened:
    what: _Subject
    environment: Environment
    tokenizer: Tokenizer
    sampling: SamplingParams
    room: Room


class Solver:
    """Answers tasks with one policy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opened: _Opened | None = None

    def open(self, subject: dict[str, Any]) -> dict[str, Any]:
        """Load environment and policy; gives the environment's digest. Raises ConfigError, ModelError and others."""
        what = msgspec.convert(subject, _Subject)
        model_dir = Path(what.model_dir)
        environment = _environment(what.environment)
        model, tokenizer = model_spec(model_dir), Tokenizer(model_dir)
        self._engine.load(model_dir)
        sampling = SamplingParams(
            temperature=what.temperature,
            max_new_tokens=what.max_new_tokens or min(MAX_NEW_TOKENS, model.max_model_len // 2),
            stop_ids=(*model.stop_ids, *extra_stop_ids(environment, model_dir)),
            top_k_proof=0,
        )
        room = Room(sampling.max_new_tokens, model.max_model_len)
        self._opened = _Opened(what, environment, tokenizer, sampling, room)
        return {"environment": environment.digest}

    def solve(self, first: int, count: int) -> dict[str, Any]:
        """For each of `count` tasks its seed and how often it was solved; None: the environment could not tell.

        Answers are played to the end where the environment has several turns.
        """
        if self._opened is None:
            raise ComputeError("nothing is open")
        opened, size = self._opened, self._opened.what.samples
        seeds = [candidate_seed(opened.what.seed.encode(), number) for number in range(first, first + count)]
        work = _work(opened, seeds)
        answers = [(task, member) for task in range(count) for member in range(size)]
        requests = [
            GenerationRequest(work.assignments[task].prompt_ids, work.noise_seed(task, m)) for task, m in answers
        ]
        ask = partial(self._engine.generate, sampling=opened.sampling)
        made = go_on(work, opened.room, answers, ask(requests), ask)
        groups = [made[start : start + size] for start in range(0, len(made), size)]
        solved = [
            _solved(opened.environment, assignment.task, group, opened.tokenizer)
            for assignment, group in zip(work.assignments, groups, strict=True)
        ]
        spans = [span for answer in made for span in emitted_spans(len(answer.output_ids), turns_of(answer))]
        return {
            "tasks": [list(pair) for pair in zip(seeds, solved, strict=True)],
            "tokens": sum(stop - start for start, stop in spans),
        }


def _work(opened: _Opened, seeds: Sequence[bytes]) -> _Tasks:
    tasks = [opened.environment.task(seed) for seed in seeds]
    assignments = [Assignment(task, prompt_ids(task, opened.tokenizer)) for task in tasks]
    return _Tasks(
        b"", opened.environment, assignments, opened.what.samples, tokenizer=opened.tokenizer, seeds=tuple(seeds)
    )


def _environment(choice: EnvironmentChoice) -> Environment:
    environment = get_environment(choice.name, parameters=choice.parameters)
    if choice.data is None:
        return environment
    data = import_data(environment, Path(choice.data))
    return get_environment(choice.name, parameters=choice.parameters, data=data)


def _solved(environment: Environment, task: Task, answers: list[Generation], tokenizer: Tokenizer) -> int | None:
    judged = judge(environment, [(task, answer_text(tokenizer, answer)) for answer in answers])
    values = [reward.value for reward in judged]
    if None in values:
        return None
    return sum(value is not None and value >= SOLVED_FROM for value in values)


def main() -> None:
    solver = Solver(engine_from_environment())
    serve({"open": solver.open, "solve": solver.solve})


if __name__ == "__main__":
    main()

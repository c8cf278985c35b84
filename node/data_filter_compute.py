"""The compute process of `data filter`: how many of a policy's answers to each task are right.

A task is right from a reward of SOLVED_FROM on. Prompts are the environment's own, without a wish for their length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from environments.base import Environment, Task
from environments.registry import get_environment
from node.compute.serve import serve
from node.data_filter import MAX_NEW_TOKENS
from node.engines.assignment import prompt_ids
from node.engines.base import Engine, Generation, GenerationRequest, SamplingParams
from node.engines.registry import engine_from_environment
from node.engines.rewards import answer_text, judge
from node.engines.tokenizer import Tokenizer
from node.run_create import model_spec
from node.run_environment import extra_stop_ids, import_data
from protocol.errors import ComputeError
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


class Solver:
    """Answers tasks with one policy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opened: tuple[_Subject, Environment, Tokenizer, SamplingParams] | None = None

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
        self._opened = (what, environment, tokenizer, sampling)
        return {"environment": environment.digest}

    def solve(self, first: int, count: int) -> dict[str, Any]:
        """For each of `count` tasks its seed and how often it was solved; None: the environment could not tell."""
        if self._opened is None:
            raise ComputeError("nothing is open")
        what, environment, tokenizer, sampling = self._opened
        seeds = [candidate_seed(what.seed.encode(), number) for number in range(first, first + count)]
        tasks = [environment.task(seed) for seed in seeds]
        requests = [
            GenerationRequest(prompt_ids(task, tokenizer), rollout_seed(seed, 0, member))
            for seed, task in zip(seeds, tasks, strict=True)
            for member in range(what.samples)
        ]
        made = self._engine.generate(requests, sampling)
        groups = [made[start : start + what.samples] for start in range(0, len(made), what.samples)]
        solved = [_solved(environment, task, group, tokenizer) for task, group in zip(tasks, groups, strict=True)]
        return {
            "tasks": [list(pair) for pair in zip(seeds, solved, strict=True)],
            "tokens": sum(len(answer.output_ids) for answer in made),
        }


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

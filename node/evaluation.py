"""Evaluate a policy on an environment: generate answers to held-out prompts, judge them, give pass@k with intervals.

Used by the trainer's evaluation process and by `intellect-node eval --environment`. Rewards are the environment's own:
what a run adds to them for training, such as a reward for length, is left out. Never imports torch by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from environments.base import Environment
from node.engines.assignment import Assignment, Work, derive_work, prompt_ids, sampling_params
from node.engines.base import Engine, Generation, GenerationRequest, SamplingParams
from node.engines.rewards import answer_text, judge
from node.engines.tokenizer import Tokenizer
from node.engines.turns import Room, go_on, turns_of
from protocol.records import Manifest
from protocol.rollouts import emitted_spans
from protocol.seeds import prompt_seed
from trainer.evaluation import Answer, Evaluation, summarise
from trainer.recipe import EvaluationSettings

BATCH: Final = 256
"""Answers that are generated between two reports of progress."""

Progress = Callable[[int, int], None]
"""Called with the answers done so far and the number of all."""


def held_out_work(environment: Environment, tokenizer: Tokenizer, *, seed: bytes, prompts: int, samples: int) -> Work:
    """`samples` answers to each of `prompts` tasks that a held-out seed (protocol.seeds) draws."""
    tasks = [environment.task(prompt_seed(seed, index)) for index in range(prompts)]
    assignments = [Assignment(task, prompt_ids(task, tokenizer)) for task in tasks]
    return Work(seed, environment, assignments, samples, tokenizer=tokenizer)


def run_work(manifest: Manifest, tokenizer: Tokenizer, settings: EvaluationSettings, *, seed: bytes) -> Work:
    """The same with prompts as a run's contributors get them, from no pool. Raises EnvironmentUnknown or ModelError."""
    rollout = msgspec.structs.replace(
        manifest.rollout, prompts_per_submission=settings.prompts, group_size=settings.samples
    )
    return derive_work(msgspec.structs.replace(manifest, rollout=rollout), tokenizer, seed=seed)


def run_sampling(manifest: Manifest, settings: EvaluationSettings) -> SamplingParams:
    """How a run's evaluation draws answers: as contributors do, without proofs, unless its settings say otherwise."""
    sampling = sampling_params(manifest)
    return SamplingParams(
        temperature=settings.temperature or sampling.temperature,
        max_new_tokens=settings.max_new_tokens or sampling.max_new_tokens,
        stop_ids=sampling.stop_ids,
        top_k_proof=0,
    )


def evaluate(
    engine: Engine,
    tokenizer: Tokenizer,
    work: Work,
    sampling: SamplingParams,
    *,
    max_model_len: int,
    pass_at: Sequence[int],
    progress: Progress | None = None,
) -> Evaluation:
    """Answer and judge everything, all turns of it. The engine holds the policy already.

    `max_model_len`: tokens of a prompt with its answer at most. Raises ModelError or ConfigError.
    """
    room = Room(sampling.max_new_tokens, max_model_len)
    answers: list[Answer] = []
    for part in _parts(work):
        requests = [GenerationRequest(work.assignments[p].prompt_ids, work.noise_seed(p, m)) for p, m in part]
        ask = partial(engine.generate, sampling=sampling)
        answers += _judged(work, part, go_on(work, room, part, ask(requests), ask), tokenizer)
        if progress is not None:
            progress(len(answers), len(work.assignments) * work.group_size)
    size = work.group_size
    return summarise([answers[at : at + size] for at in range(0, len(answers), size)], pass_at=pass_at)


def _parts(work: Work) -> Iterator[list[tuple[int, int]]]:
    """(prompt, member) of every answer, cut into batches."""
    every = [(prompt, member) for prompt in range(len(work.assignments)) for member in range(work.group_size)]
    for start in range(0, len(every), BATCH):
        yield every[start : start + BATCH]


def _judged(
    work: Work, part: Sequence[tuple[int, int]], generations: Sequence[Generation], tokenizer: Tokenizer
) -> list[Answer]:
    pairs = [
        (work.assignments[prompt].task, answer_text(tokenizer, generation))
        for (prompt, _), generation in zip(part, generations, strict=True)
    ]
    return [
        Answer(reward.value, tokens=_emitted(generation), stopped=generation.finish_reason == "stop")
        for reward, generation in zip(judge(work.environment, pairs), generations, strict=True)
    ]


def _emitted(generation: Generation) -> int:
    """Tokens that the policy wrote; replies are not its own."""
    return sum(stop - start for start, stop in emitted_spans(len(generation.output_ids), turns_of(generation)))

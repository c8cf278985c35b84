"""Cheats that draw other tokens than their seeds give, and hand in log-probabilities and proofs that fit them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from node.engines.assignment import Assignment, Work
from node.engines.base import Engine, Generation, GenerationRequest, SamplingParams, TokenProgress
from node.engines.torch_engine import TorchEngine
from protocol.rollouts import Rollout
from protocol.seeds import SEED_BYTES
from simnet.zoo.workers.base import Cheat, proved
from simnet.zoo.workers.weights import Quantised

COLDER: Final = 0.8
DRAWS: Final = 4
PROMPTS_TRIED: Final = 32


class OtherDraw(Cheat):
    """Draws answers in another way; what it records of them is what an honest pass over them gives."""

    def answers(
        self, work: Work, sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> list[Generation]:
        return proved(self.engine, work, self.draw(work, sampling, progress), sampling)

    def draw(self, work: Work, sampling: SamplingParams, progress: TokenProgress | None) -> list[Generation]:
        return super().answers(work, sampling, progress=progress)


class OtherTemperature(OtherDraw):
    """Colder than the run: better rewards, less to learn from."""

    def draw(self, work: Work, sampling: SamplingParams, progress: TokenProgress | None) -> list[Generation]:
        colder = replace(sampling, temperature=COLDER * sampling.temperature)
        return super().draw(work, colder, progress)


class OtherSeed(OtherDraw):
    """The noise is the contributor's."""

    def requests(self, work: Work) -> list[GenerationRequest]:
        return [replace(request, seed=self.own_seed(request, 1)) for request in super().requests(work)]

    def own_seed(self, request: GenerationRequest, number: int) -> bytes:
        return hashlib.sha256(request.seed + bytes([self.seed % 256, number])).digest()[:SEED_BYTES]


class BestOf(OtherSeed):
    """The honest answer is among those it chooses from, and stays where none is better."""

    def draw(self, work: Work, sampling: SamplingParams, progress: TokenProgress | None) -> list[Generation]:
        honest = Cheat.requests(self, work)
        drawn = [self.engine.generate(honest, sampling, progress=progress)]
        for number in range(1, DRAWS):
            requests = [replace(request, seed=self.own_seed(request, number)) for request in honest]
            drawn.append(self.engine.generate(requests, sampling, progress=progress))
        return [self._best(work, place, choices) for place, choices in enumerate(zip(*drawn, strict=True))]

    def _best(self, work: Work, place: int, choices: Sequence[Generation]) -> Generation:
        return max(choices, key=lambda made: self.reward(work, place // work.group_size, made))


class OtherPrompt(Cheat):
    """Of the tasks of many seeds it takes the ones with the shortest prompts, and records those."""

    def answers(
        self, work: Work, sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> list[Generation]:
        return super().answers(self._easier(work), sampling, progress=progress)

    def rollouts(self, work: Work, generations: Sequence[Generation]) -> list[Rollout]:
        return super().rollouts(self._easier(work), generations)

    def _easier(self, work: Work) -> Work:
        tokenizer = self._tokenizer_of(self._checkpoint)
        seeds = [hashlib.sha256(work.seed + bytes([number])).digest() for number in range(PROMPTS_TRIED)]
        tasks = [work.environment.task(seed) for seed in seeds]
        found = [Assignment(task, tokenizer.encode_messages(task.prompt)) for task in tasks]
        shortest = sorted(found, key=lambda assignment: len(assignment.prompt_ids))
        return replace(work, assignments=shortest[: len(work.assignments)])


class EditedPrompt(Cheat):
    """One token more in the prompt that the policy reads; the file says nothing of it, and no pass of its own mends it.

    Mending the proofs by an honest pass is `OtherDraw`'s lie: then the tokens give it away.
    """

    def requests(self, work: Work) -> list[GenerationRequest]:
        return [replace(request, prompt_ids=_doubled(request.prompt_ids)) for request in super().requests(work)]


def _doubled(prompt_ids: Sequence[int]) -> list[int]:
    middle = len(prompt_ids) // 2
    return [*prompt_ids[: middle + 1], *prompt_ids[middle:]]


class DraftModel(Quantised):
    """4-bit weights draw the tokens; the right ones pass over them once, which costs a fraction."""

    def __init__(self, engine: Engine, *, seed: int, directory: Path) -> None:
        super().__init__(engine, seed=seed, directory=directory, bits=4, group=64)
        self._right: Engine | None = None

    def policy_dir(self, checkpoint_dir: Path) -> Path:
        self._right = TorchEngine(dtype=self.engine.info.dtype) if self._right else TorchEngine()
        self._right.load(checkpoint_dir)
        return super().policy_dir(checkpoint_dir)

    def answers(
        self, work: Work, sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> list[Generation]:
        drawn = super().answers(work, sampling, progress=progress)
        return drawn if self._right is None else proved(self._right, work, drawn, sampling)


WORKERS: Final[dict[str, Callable[..., Cheat]]] = {
    "other-prompt": OtherPrompt,
    "edited-prompt": EditedPrompt,
    "other-temperature": OtherTemperature,
    "other-seed": OtherSeed,
    "best-of-n": BestOf,
    "draft-model": DraftModel,
}

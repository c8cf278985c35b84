"""Cheats that change what honest answers say of themselves, or cut them short, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from node.engines.assignment import Work
from node.engines.base import Generation, SamplingParams, TokenProgress
from protocol.rollouts import Rollout
from simnet.zoo.workers.base import Cheat, proved

NOISE: Final = 0.01
SHIFT: Final = 0.25

Change = Callable[[Rollout], Rollout]


class Cut(Cheat):
    """Answers end half-way; proofs and log-probabilities fit what is left."""

    def answers(
        self, work: Work, sampling: SamplingParams, *, progress: TokenProgress | None = None
    ) -> list[Generation]:
        drawn = super().answers(work, sampling, progress=progress)
        return proved(self.engine, work, [self.cut(made, sampling) for made in drawn], sampling)

    def cut(self, made: Generation, sampling: SamplingParams) -> Generation:
        """Half of an answer, called as long as the run allows."""
        return replace(made, output_ids=_half(made), finish_reason="length")


class ForcedEnd(Cut):
    """The end token in place of the second half."""

    def cut(self, made: Generation, sampling: SamplingParams) -> Generation:
        return replace(made, output_ids=[*_half(made), sampling.stop_ids[0]], finish_reason="stop")


class Rewritten(Cheat):
    """Every row is changed after it was computed."""

    def __init__(self, *args: object, change: Change, claimed: str = "", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._change, self.claimed_dtype = change, claimed

    def rollouts(self, work: Work, generations: Sequence[Generation]) -> list[Rollout]:
        return [self._change(rollout) for rollout in super().rollouts(work, generations)]


def other_ending(rollout: Rollout) -> Rollout:
    reason = "length" if rollout.finish_reason == "stop" else "stop"
    return msgspec.structs.replace(rollout, finish_reason=reason)


def full_reward(rollout: Rollout) -> Rollout:
    return msgspec.structs.replace(rollout, reward=1.0)


def flattered(rollout: Rollout) -> Rollout:
    return msgspec.structs.replace(rollout, logprobs=[value / 2 for value in rollout.logprobs])


def noised(rollout: Rollout) -> Rollout:
    noise = np.random.default_rng(rollout.output_ids).normal(0.0, NOISE, len(rollout.logprobs))
    return _with_logprobs(rollout, np.minimum(np.array(rollout.logprobs) + noise, 0.0))


def lowered(rollout: Rollout) -> Rollout:
    return _with_logprobs(rollout, np.array(rollout.logprobs) - SHIFT)


def _with_logprobs(rollout: Rollout, values: NDArray[np.float64]) -> Rollout:
    return msgspec.structs.replace(rollout, logprobs=values.astype(np.float32).tolist())


def _half(made: Generation) -> list[int]:
    return made.output_ids[: max(1, len(made.output_ids) // 2)]


WORKERS: Final[dict[str, Callable[..., Cheat]]] = {
    "truncated": Cut,
    "forced-end": ForcedEnd,
    "flipped-ending": partial(Rewritten, change=other_ending),
    "forged-reward": partial(Rewritten, change=full_reward),
    "flattered-logprobs": partial(Rewritten, change=flattered),
    "noised-logprobs": partial(Rewritten, change=noised),
    "shifted-logprobs-as-bfloat16": partial(Rewritten, change=lowered, claimed="bfloat16"),
}

"""The compute process of `calibrate`: answers as this machine's engine gives them, checked as a validator checks them.

Generates with one number format and batch size, computes the same tokens again in float32 on the CPU as validators do,
and gives the differences as numbers, one list for each limit of the manifest's Tolerance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from node.compute.serve import serve
from node.engines.assignment import Work, derive_work, sampling_params
from node.engines.base import Engine
from node.engines.registry import engine_factory
from node.engines.tokenizer import Tokenizer
from node.engines.torch_engine import TorchEngine
from node.engines.turns import play_turns
from node.inference.compute import RolloutWorker
from node.validator.checks import (
    FULL_TOKENS,
    check_logprobs,
    check_sampling,
    check_toploc,
    decide,
    looseness,
)
from node.validator.measure import MeasuredRollout, Measurer, evidence, token_numbers
from protocol.constants import PROOF_CHUNK_TOKENS
from protocol.records import Manifest, Tolerance
from protocol.rollouts import Rollout, split_turns
from protocol.seeds import submission_seed

_CHECKPOINT: Final = bytes(32)
"""Calibration generates for no run's checkpoint; a seed needs one all the same."""


class Calibrator:
    """Generates and measures with one policy."""

    def __init__(self) -> None:
        self._reference: tuple[str, Engine] | None = None

    def measure(
        self,
        model_dir: str,
        manifest: bytes,
        dtype: str,
        device: str,
        batch: int,
        rollouts: int,
        first: int = 0,
        engine: str = "torch",
    ) -> dict[str, Any]:
        """Measure at least one and about `rollouts` answers, generated `batch` at a time; turns count one by one.

        `manifest` is the record, as msgpack; `first` is the submission index to begin with, so that other calls answer
        other prompts. Gives engine, dtype, rollouts, tokens, match, generate_s, check_s, rejected (why each submission
        that would be), evidence (node.validator.measure) and values: a list for each limit of Tolerance, what is looser
        for short answers scaled back.
        """
        with closing(engine_factory(engine)(dtype=dtype, device=device, max_batch=batch)) as made:
            return self._measure(RolloutWorker(made), model_dir, manifest, rollouts=rollouts, first=first)

    def _measure(
        self, worker: RolloutWorker, model_dir: str, manifest: bytes, *, rollouts: int, first: int
    ) -> dict[str, Any]:
        run = msgspec.msgpack.decode(manifest, type=Manifest)
        worker.load(model_dir, _CHECKPOINT)
        tokenizer = Tokenizer(Path(model_dir))
        measured: list[list[MeasuredRollout]] = []
        seconds = [0.0, 0.0]
        left = rollouts
        while left > 0:
            seed = submission_seed(
                bytes(32), 0, checkpoint=_CHECKPOINT, contributor_key=bytes(32), index=first + len(measured)
            )
            work = derive_work(run, tokenizer, seed=seed)
            part = _generate(worker, work, run, limit=left, seconds=seconds)
            measured.append(self._check(model_dir, run, work, part, seconds))
            left -= len(part)
        info = worker.engine.info
        rejected = _rejected(measured, run.tolerances.get(info.dtype))
        return {
            "engine": f"{info.name} {info.version}",
            "dtype": info.dtype,
            "rejected": rejected,
            **_numbers(measured, seconds),
        }

    def _check(
        self, model_dir: str, run: Manifest, work: Work, rollouts: Sequence[Rollout], seconds: list[float]
    ) -> list[MeasuredRollout]:
        if self._reference is None or self._reference[0] != model_dir:
            engine = TorchEngine(dtype="float32", device="cpu")
            engine.load(Path(model_dir))
            self._reference = (model_dir, engine)
        turns = [turn for rollout in rollouts for turn in split_turns(rollout, work.group_size)]
        started = time.monotonic()
        measurer = Measurer(
            turns,
            work.noise_seed,
            temperature=run.rollout.temperature,
            top_k=run.toploc.top_k,
            vocab_size=run.model.vocab_size,
        )
        for prefill in self._reference[1].prefill([(turn.prompt_ids, turn.output_ids) for turn in turns]):
            measurer.add(prefill)
        results = measurer.results()
        seconds[1] += time.monotonic() - started
        return results


def _generate(worker: RolloutWorker, work: Work, run: Manifest, *, limit: int, seconds: list[float]) -> list[Rollout]:
    """A submission's answers, or its first `limit` ones."""
    started = time.monotonic()
    ask = partial(worker.engine.generate, sampling=sampling_params(run))
    generations = play_turns(work, run, ask(worker.requests(work)[:limit]), ask)
    seconds[0] += time.monotonic() - started
    return worker.rollouts(work, generations)


def _rejected(submissions: Sequence[Sequence[MeasuredRollout]], tolerance: Tolerance | None) -> list[str]:
    """The reason of every submission that a validator would reject."""
    if tolerance is None:
        return ["dtype: not listed"] * len(submissions)
    decisions = [
        decide([check(rollouts, tolerance) for check in (check_toploc, check_sampling, check_logprobs)])
        for rollouts in submissions
    ]
    return [decision.reason for decision in decisions if decision.outcome != "accept"]


def _numbers(submissions: Sequence[Sequence[MeasuredRollout]], seconds: Sequence[float]) -> dict[str, Any]:
    every = [rollout for rollouts in submissions for rollout in rollouts]
    tokens = sum(rollout.tokens for rollout in every)
    return {
        "rollouts": len(every),
        "tokens": tokens,
        "match": sum(int((rollout.margins == 0).sum()) for rollout in every) / tokens,
        "generate_s": seconds[0],
        "check_s": seconds[1],
        "evidence": [each for rollouts in submissions for each in evidence(rollouts)],
        "values": _values(every) | _values_of_submissions(submissions),
    }


def _values(rollouts: Sequence[MeasuredRollout]) -> dict[str, list[float]]:
    numbers = token_numbers(rollouts)
    chunks = [
        (looseness(chunk.rows, PROOF_CHUNK_TOKENS), chunk.result) for rollout in rollouts for chunk in rollout.chunks
    ]
    return {
        "max_exponent_mismatches": [result.exponent_mismatches / loose for loose, result in chunks],
        "max_mantissa_mean": [result.mantissa_mean / loose for loose, result in chunks],
        "max_mantissa_median": [result.mantissa_median / loose for loose, result in chunks],
        "max_rollout_mantissa_mean": [
            rollout.mantissa_mean / looseness(rollout.tokens, PROOF_CHUNK_TOKENS) for rollout in rollouts
        ],
        "max_margin": numbers.largest_margin.tolist(),
        "max_logprob_error": numbers.largest_logprob_error.tolist(),
        "honest_margin": numbers.mean_margin.tolist(),
        "honest_mantissa": [rollout.mantissa_mean for rollout in rollouts],
    }


def _values_of_submissions(submissions: Sequence[Sequence[MeasuredRollout]]) -> dict[str, list[float]]:
    """Means over tokens, and those over prompts that are taken of their size."""
    found = [token_numbers(rollouts) for rollouts in submissions]
    loose = [looseness(int(numbers.tokens.sum()), FULL_TOKENS) for numbers in found]
    pairs = list(zip(found, loose, strict=True))
    return {
        "max_mean_margin": [numbers.mean(numbers.mean_margin) / times for numbers, times in pairs],
        "max_mean_logprob_error": [numbers.mean(numbers.mean_logprob_error) / times for numbers, times in pairs],
        "max_logprob_shift": [abs(numbers.mean(numbers.logprob_shift)) / times for numbers, times in pairs],
        "honest_logprob_shift": [shift for rollouts in submissions for _, _, shift in evidence(rollouts)],
    }


def main() -> None:
    serve({"measure": Calibrator().measure})


if __name__ == "__main__":
    main()

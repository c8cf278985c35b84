"""A contributor's test of itself before it works: does what it generates hold against its own pass over it?

The checks are a validator's (node.validator.checks), the pass is this engine's own, and answers are short: it shows a
broken engine or device within seconds. Whether another number format fits a run's limits is for calibration to say.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from node.engines.assignment import Work, derive_work, sampling_params
from node.engines.base import Engine, GenerationRequest
from node.engines.tokenizer import Tokenizer
from node.validator.checks import check_logprobs, check_sampling, check_toploc, decide
from node.validator.measure import MeasuredRollout, Measurer, token_numbers
from protocol.records import Manifest, Tolerance
from protocol.rollouts import Rollout
from protocol.seeds import submission_seed

ANSWERS: Final = 4
MAX_TOKENS: Final = 64


def self_test(engine: Engine, tokenizer: Tokenizer, run: Manifest) -> dict[str, Any]:
    """Answer a few prompts and check the answers; the engine holds a policy.

    Gives answers, tokens, share (of the tightest limit that was used up), limit (its name), reason (why a validator
    would reject; empty), seconds. Raises ModelError.
    """
    started = time.monotonic()
    tolerance = run.tolerances.get(engine.info.dtype)
    if tolerance is None:
        known = ", ".join(sorted(run.tolerances))
        return _result([], None, f"dtype: the run takes {known} and not {engine.info.dtype}", started)
    measured = _measure(engine, tokenizer, run)
    decision = decide([check(measured, tolerance) for check in (check_toploc, check_sampling, check_logprobs)])
    return _result(measured, tolerance, "" if decision.outcome == "accept" else decision.reason, started)


def _measure(engine: Engine, tokenizer: Tokenizer, run: Manifest) -> list[MeasuredRollout]:
    seed = submission_seed(bytes(32), 0, checkpoint=bytes(32), contributor_key=bytes(32), index=0)
    work = derive_work(run, tokenizer, seed=seed)
    asked = [(number, member) for number in range(len(work.assignments)) for member in range(work.group_size)][:ANSWERS]
    whole = sampling_params(run)
    sampling = replace(whole, max_new_tokens=min(whole.max_new_tokens, MAX_TOKENS))
    requests = [_request(work, number, member) for number, member in asked]
    rollouts = [
        Rollout(
            prompt_index=number,
            member=member,
            prompt_ids=work.assignments[number].prompt_ids,
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            reward=0.0,
            finish_reason=answer.finish_reason,
            proofs=answer.proofs,
        )
        for (number, member), answer in zip(asked, engine.generate(requests, sampling), strict=True)
    ]
    measurer = Measurer(
        rollouts,
        work.noise_seed,
        temperature=run.rollout.temperature,
        top_k=run.toploc.top_k,
        vocab_size=run.model.vocab_size,
    )
    for prefill in engine.prefill([(rollout.prompt_ids, rollout.output_ids) for rollout in rollouts]):
        measurer.add(prefill)
    return measurer.results()


def _request(work: Work, number: int, member: int) -> GenerationRequest:
    return GenerationRequest(work.assignments[number].prompt_ids, work.noise_seed(number, member))


def _result(
    measured: list[MeasuredRollout], tolerance: Tolerance | None, reason: str, started: float
) -> dict[str, Any]:
    shares = _shares(measured, tolerance) if measured and tolerance is not None else {}
    limit = max(shares, key=lambda name: shares[name], default="")
    return {
        "answers": len(measured),
        "tokens": sum(each.tokens for each in measured),
        "share": shares.get(limit, 0.0),
        "limit": limit,
        "reason": reason,
        "seconds": time.monotonic() - started,
    }


def _shares(measured: list[MeasuredRollout], tolerance: Tolerance) -> dict[str, float]:
    numbers = token_numbers(measured)
    found = {
        "max_margin": float(numbers.largest_margin.max()),
        "max_logprob_error": float(numbers.largest_logprob_error.max()),
        "max_mean_margin": numbers.mean(numbers.mean_margin),
        "max_rollout_mantissa_mean": max(each.mantissa_mean for each in measured),
    }
    limits = {name: float(getattr(tolerance, name)) for name in found}
    return {name: value / limits[name] for name, value in found.items() if limits[name]}

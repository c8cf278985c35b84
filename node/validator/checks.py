"""The checks of one submission, each from its cheapest evidence to a result with numbers (INTELLECT-2, section 2.3).

Whatever a rollout file holds gives results, never an exception. A failure is hard where only a lie explains it; where
the checker itself cannot tell, the result is "unknown" and costs the contributor nothing. Leaves out the engine: what
the policy computes arrives as `Prefill`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from node.engines.assignment import Work
from node.engines.base import Prefill
from node.engines.tokenizer import Tokenizer
from protocol.errors import MalformedError
from protocol.records import CheckResult, Manifest, Submission
from protocol.rollouts import Rollout
from protocol.sampling import margins, position_keys
from protocol.toploc import ChunkResult, check_proof_shape, verify_proofs

REWARD_TOLERANCE: Final = 1e-6
_TILE_LOGITS: Final = 1 << 22
"""Logits that are held at a time: rows × vocabulary."""
_MAX_DETAIL_CHARS: Final = 240


@dataclass(frozen=True)
class Finding:
    """A check's result, and whether its failure is one that no honest node can have."""

    result: CheckResult
    hard: bool = True


@dataclass(frozen=True)
class Decision:
    """What the findings come to."""

    outcome: Literal["accept", "reject", "undecided"]
    hard: bool
    reason: str


def decide(findings: Sequence[Finding]) -> Decision:
    """Reject on the first hard failure, else on the first soft one; undecided if a check could not tell."""
    failures = [finding for finding in findings if finding.result.outcome == "fail"]
    for finding in sorted(failures, key=lambda finding: not finding.hard):
        return Decision("reject", finding.hard, f"{finding.result.name}: {finding.result.detail}")
    for finding in findings:
        if finding.result.outcome == "unknown":
            return Decision("undecided", False, f"{finding.result.name}: {finding.result.detail}")
    return Decision("accept", False, "every check passed")


def decode_rollouts(rows: Any) -> list[Rollout]:
    """Rollouts from what the reader handed over. Raises MalformedError."""
    try:
        return msgspec.convert(rows, list[Rollout])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedError(f"not a list of rollouts: {str(error)[:200]}") from error


def check_schema(rollouts: Sequence[Rollout], submission: Submission, manifest: Manifest) -> Finding:
    """Whole groups in order, counts as signed, every list within its bounds."""
    fault = _count_fault(rollouts, submission, manifest)
    for number, rollout in enumerate(rollouts if not fault else ()):
        fault = _shape_fault(rollout, number, manifest)
        if fault:
            fault = f"rollout {number} {fault}"
            break
    answers = Counter((rollout.prompt_index, *rollout.output_ids) for rollout in rollouts)
    repeats = float(len(rollouts) - len(answers))
    return _finding("schema", fault, {"rollouts": float(len(rollouts)), "repeats": repeats})


def _count_fault(rollouts: Sequence[Rollout], submission: Submission, manifest: Manifest) -> str:
    due = manifest.rollouts_per_submission
    if len(rollouts) != due or submission.rollouts != due:
        return f"{len(rollouts)} rollouts in the file, {submission.rollouts} signed for, {due} are due"
    tokens = sum(len(rollout.output_ids) for rollout in rollouts)
    if tokens != submission.output_tokens:
        return f"{tokens} output tokens in the file, {submission.output_tokens} signed for"
    return ""


def _shape_fault(rollout: Rollout, number: int, manifest: Manifest) -> str:
    place = divmod(number, manifest.rollout.group_size)
    if (rollout.prompt_index, rollout.member) != place:
        return f"is member {rollout.member} of group {rollout.prompt_index}; member {place[1]} of {place[0]} is due"
    if not 1 <= len(rollout.output_ids) <= manifest.rollout.max_new_tokens:
        return f"has {len(rollout.output_ids)} output tokens; 1 to {manifest.rollout.max_new_tokens} are allowed"
    if len(rollout.logprobs) != len(rollout.output_ids):
        return f"has {len(rollout.logprobs)} log-probabilities for {len(rollout.output_ids)} tokens"
    if not all(0 <= token < manifest.model.vocab_size for token in rollout.output_ids):
        return f"has a token outside the vocabulary of {manifest.model.vocab_size}"
    if not all(math.isfinite(value) for value in (*rollout.logprobs, rollout.reward)):
        return "has a log-probability or a reward that is not finite"
    return ""


def check_prompts(rollouts: Sequence[Rollout], work: Work) -> Finding:
    """Every prompt is the one that the submission's seed gives."""
    for number, rollout in enumerate(rollouts):
        if rollout.prompt_ids != work.assignments[rollout.prompt_index].prompt_ids:
            return _finding("prompt", f"rollout {number} answers another prompt than its seed gives", {})
    return _finding("prompt", "", {"prompts": float(len(work.assignments))})


def check_termination(rollouts: Sequence[Rollout], manifest: Manifest) -> Finding:
    """Answers end at the first stop token, or at the run's length limit."""
    stop_ids = frozenset(manifest.model.stop_ids)
    for number, rollout in enumerate(rollouts):
        fault = _ending_fault(rollout, stop_ids, max_new_tokens=manifest.rollout.max_new_tokens)
        if fault:
            return _finding("termination", f"rollout {number} {fault}", {})
    stopped = sum(rollout.finish_reason == "stop" for rollout in rollouts)
    return _finding("termination", "", {"stopped": float(stopped)})


def _ending_fault(rollout: Rollout, stop_ids: frozenset[int], *, max_new_tokens: int) -> str:
    stopped = rollout.output_ids[-1] in stop_ids
    if not stop_ids.isdisjoint(rollout.output_ids[:-1]):
        return "goes on after a stop token"
    if stopped != (rollout.finish_reason == "stop"):
        return f"says it ended by {rollout.finish_reason} but {'ends' if stopped else 'does not end'} with a stop token"
    if not stopped and len(rollout.output_ids) != max_new_tokens:
        return f"was cut off after {len(rollout.output_ids)} of {max_new_tokens} tokens"
    return ""


def check_proof_shapes(rollouts: Sequence[Rollout], manifest: Manifest, *, hidden_size: int) -> Finding:
    """Each answer carries a proof per 32 tokens, of the right length; what they prove is for `PrefillChecks`."""
    for number, rollout in enumerate(rollouts):
        try:
            check_proof_shape(
                rollout.proofs, tokens=len(rollout.output_ids), hidden_size=hidden_size, top_k=manifest.toploc.top_k
            )
        except MalformedError as error:
            return _finding("toploc", f"rollout {number}: {error.message}", {})
    return _finding("toploc", "", {})


def check_rewards(rollouts: Sequence[Rollout], work: Work, *, tokenizer: Tokenizer) -> Finding:
    """Rewards as the environment gives them again.

    A contributor whose environment could not tell records 0. So a 0 that should be more is a soft failure, and a reward
    that the environment cannot tell here is left undecided unless it is 0; only a false reward above 0 is a lie.
    """
    lies: list[int] = []
    losses: list[int] = []
    unknown: list[int] = []
    for number, rollout in enumerate(rollouts):
        stop_ids = rollout.output_ids[-1:] if rollout.finish_reason == "stop" else ()
        completion = tokenizer.decode(rollout.output_ids, stop_ids=stop_ids)
        value = work.environment.reward(work.assignments[rollout.prompt_index].task, completion).value
        if value is None:
            unknown += [number] if rollout.reward != 0 else []
        elif abs(value - rollout.reward) > REWARD_TOLERANCE:
            (losses if rollout.reward == 0 else lies).append(number)
    numbers = {"different": float(len(lies) + len(losses)), "could_not_tell": float(len(unknown))}
    if lies or losses:
        return _finding("reward", f"rollout {(lies or losses)[0]} has another reward", numbers, hard=bool(lies))
    if unknown:
        return _unknown("reward", f"the environment could not tell for rollout {unknown[0]}", numbers)
    return _finding("reward", "", numbers)


@dataclass
class PrefillChecks:
    """TOPLOC, sampling margins and log-probabilities, from one pass of the policy over each answer."""

    rollouts: Sequence[Rollout]
    work: Work
    manifest: Manifest
    _chunks: list[tuple[int, ChunkResult]] = field(default_factory=list)
    _margins: list[tuple[int, NDArray[np.float32]]] = field(default_factory=list)
    _logprob_errors: list[tuple[int, float]] = field(default_factory=list)
    _broken: bool = False

    def add(self, prefill: Prefill) -> None:
        """Take one answer's pass into account."""
        rollout = self.rollouts[prefill.index]
        for logits, rows in self._logit_tiles(prefill):
            if not np.isfinite(logits).all():
                self._broken = True
                return
            self._add_tile(prefill.index, logits, rows)
        results = verify_proofs(prefill.patterns, rollout.proofs, self.manifest.toploc.top_k)
        self._chunks += [(prefill.index, result) for result in results]

    def findings(self) -> list[Finding]:
        """The results over every answer added."""
        if self._broken:
            detail = "the policy gives logits that are not finite here"
            return [_unknown(name, detail, {}) for name in ("toploc", "sampling", "logprob")]
        return [self._toploc(), self._sampling(), self._logprob()]

    def _logit_tiles(self, prefill: Prefill) -> Iterator[tuple[NDArray[np.float32], slice]]:
        count = len(prefill.patterns)
        step = max(1, _TILE_LOGITS // self.manifest.model.vocab_size)
        for start in range(0, count, step):
            stop = min(count, start + step)
            yield prefill.logits(start, stop), slice(start, stop)

    def _add_tile(self, index: int, logits: NDArray[np.float32], rows: slice) -> None:
        rollout, temperature = self.rollouts[index], self.manifest.rollout.temperature
        tokens = np.array(rollout.output_ids[rows], dtype=np.int64)
        keys = position_keys(self.work.noise_seed(rollout.prompt_index, rollout.member), rows.stop)[rows]
        self._margins.append((index, margins(logits, tokens, keys=keys, temperature=temperature)))
        errors = _logprobs(logits, tokens, temperature=temperature) - np.array(rollout.logprobs[rows])
        self._logprob_errors.append((index, float(np.abs(errors).max())))

    def _toploc(self) -> Finding:
        limits = self.manifest.toploc
        failed = [
            index
            for index, chunk in self._chunks
            if chunk.exponent_mismatches > limits.max_exponent_mismatches
            or chunk.mantissa_mean > limits.max_mantissa_mean
            or chunk.mantissa_median > limits.max_mantissa_median
        ]
        chunks = [chunk for _, chunk in self._chunks]
        numbers = {
            "chunks": float(len(chunks)),
            "failed_chunks": float(len(failed)),
            "max_exponent_mismatches": float(max(chunk.exponent_mismatches for chunk in chunks)),
            "max_mantissa_mean": max(chunk.mantissa_mean for chunk in chunks),
            "max_mantissa_median": max(chunk.mantissa_median for chunk in chunks),
            "mean_mantissa_mean": sum(chunk.mantissa_mean for chunk in chunks) / len(chunks),
        }
        fault = f"{len(failed)} of {len(chunks)} proofs fail, the first in rollout {failed[0]}" if failed else ""
        return _finding("toploc", fault, numbers)

    def _sampling(self) -> Finding:
        limits = self.manifest.sampling
        every = np.concatenate([lost for _, lost in self._margins])
        largest, mean = float(every.max()), float(every.mean(dtype=np.float64))
        numbers = {
            "tokens": float(every.size),
            "max_margin": largest,
            "mean_margin": mean,
            "match": float((every == 0).mean()),
        }
        fault = ""
        if not largest <= limits.max_margin:
            worst = max(self._margins, key=lambda entry: float(entry[1].max()))[0]
            fault = f"a token of rollout {worst} lost by {largest:.4g}; at most {limits.max_margin:.4g} is allowed"
        elif not mean <= limits.max_mean_margin:
            fault = f"tokens lost by {mean:.4g} on average; at most {limits.max_mean_margin:.4g} is allowed"
        return _finding("sampling", fault, numbers)

    def _logprob(self) -> Finding:
        worst, largest = max(self._logprob_errors, key=lambda entry: entry[1])
        limit = self.manifest.sampling.max_logprob_error
        fault = "" if largest <= limit else f"rollout {worst} is off by {largest:.4g}; at most {limit:.4g} is allowed"
        return _finding("logprob", fault, {"max_error": largest})


def _logprobs(logits: NDArray[np.float32], tokens: NDArray[np.int64], *, temperature: float) -> NDArray[np.float64]:
    """log_softmax(logits / temperature) of each row's token, float64[N]."""
    scaled = logits / np.float32(temperature)
    scaled -= scaled.max(axis=1, keepdims=True)
    totals: NDArray[np.float64] = np.exp(scaled).sum(axis=1, dtype=np.float64)
    chosen: NDArray[np.float64] = scaled[np.arange(len(tokens)), tokens] - np.log(totals)
    return chosen


def _finding(name: str, fault: str, numbers: dict[str, float], *, hard: bool = True) -> Finding:
    outcome: Literal["pass", "fail"] = "fail" if fault else "pass"
    return Finding(CheckResult(name=name, outcome=outcome, detail=fault[:_MAX_DETAIL_CHARS], numbers=numbers), hard)


def _unknown(name: str, detail: str, numbers: dict[str, float]) -> Finding:
    return Finding(CheckResult(name=name, outcome="unknown", detail=detail[:_MAX_DETAIL_CHARS], numbers=numbers), False)

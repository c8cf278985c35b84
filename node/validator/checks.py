"""The checks of one submission, each from its cheapest evidence to a result with numbers (INTELLECT-2, section 2.3).

Whatever a rollout file holds gives results, never an exception. A failure is hard where only a lie explains it, and
soft where a machine that computes oddly might; where the checker itself cannot tell, the result is "unknown" and costs
the contributor nothing. Leaves out the engine and the comparison with what it computes (node.validator.measure).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np

from node.engines.assignment import Work
from node.engines.rewards import REWARD_TOLERANCE, answer_rewards, same_reward, submission_allowance
from node.engines.tokenizer import Tokenizer
from node.engines.turns import replay_fault
from node.validator.measure import MeasuredChunk, MeasuredRollout, token_numbers
from protocol.constants import PROOF_CHUNK_TOKENS
from protocol.errors import MalformedError
from protocol.records import CheckResult, Manifest, Outcome, Submission, Tolerance
from protocol.rollouts import Rollout, emitted_spans, split_turns
from protocol.toploc import ChunkResult, check_proof_shape

REWARD_RUNS: Final = 3
"""How often in all a reward that need not repeat itself is found before it is held against a claim."""
WITHHELD_SHARE: Final = 0.125
"""Share of answers that may lack a reward which can be told here: machines differ in what they get done in time."""
HARD_FACTOR: Final = 8.0
"""A limit exceeded is a soft failure: odd hardware may do it. Beyond so many times the limit it is a lie, with an
allowance for limits near 0: half of a proof's exponents, HARD_MANTISSA units, HARD_LOGITS, HARD_MEAN_NATS."""
HARD_MANTISSA: Final = 8.0
HARD_LOGITS: Final = 1.0
HARD_MEAN_NATS: Final = 0.1
"""The same allowance for means of log-probability errors: training takes a tenth of a nat for another policy."""
MANTISSA_WORST: Final = 127.0
"""Largest difference of two mantissas; what lies above says that no exponent matched."""
CHUNKS_PER_STRAY: Final = 256
"""One stray chunk is granted to a submission, and one more for so many chunks; honest bfloat16 has one in thousands."""
FULL_TOKENS: Final = 512
"""Tokens that the limits on a submission's means over tokens are meant for."""
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


def check_dtype(submission: Submission, manifest: Manifest) -> Finding:
    """The number format that the contributor computed in is one that the run has limits for."""
    fault = ""
    if submission.dtype not in manifest.tolerances:
        fault = f"{submission.dtype!r} is not among the run's number formats: {', '.join(sorted(manifest.tolerances))}"
    return _finding("dtype", fault, {}, hard=False)


def check_signed_prompts(submission: Submission, work: Work) -> Finding:
    """The prompts signed for are those of the submission's seed; needs no rollout."""
    signed = submission.prompts == work.prompts_digest
    return _finding("prompt", "" if signed else "signed for other prompts than its seed gives", {})


def check_schema(
    rollouts: Sequence[Rollout], submission: Submission, manifest: Manifest, *, max_turns: int = 1
) -> Finding:
    """Whole groups in order, counts as signed, every list within its bounds."""
    fault = _count_fault(rollouts, submission, manifest)
    for number, rollout in enumerate(rollouts if not fault else ()):
        fault = _shape_fault(rollout, number, manifest) or _turns_fault(rollout, manifest, max_turns=max_turns)
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
    most = manifest.model.max_model_len if rollout.turns else manifest.rollout.max_new_tokens
    if not 1 <= len(rollout.output_ids) <= most:
        return f"has {len(rollout.output_ids)} output tokens; 1 to {most} are allowed"
    if len(rollout.logprobs) != len(rollout.output_ids):
        return f"has {len(rollout.logprobs)} log-probabilities for {len(rollout.output_ids)} tokens"
    if not 0 <= min(rollout.output_ids) <= max(rollout.output_ids) < manifest.model.vocab_size:
        return f"has a token outside the vocabulary of {manifest.model.vocab_size}"
    if math.isinf(rollout.reward) or not all(map(math.isfinite, rollout.logprobs)):
        return "has a log-probability that is not finite, or an infinite reward"
    return ""


def _turns_fault(rollout: Rollout, manifest: Manifest, *, max_turns: int) -> str:
    try:
        spans = emitted_spans(len(rollout.output_ids), rollout.turns)
    except MalformedError as error:
        return f"has {error.message}"
    if len(spans) > max_turns:
        return f"has {len(spans)} turns; {max_turns} are allowed"
    longest = max(stop - start for start, stop in spans)
    if longest > manifest.rollout.max_new_tokens:
        return f"has a turn of {longest} tokens; {manifest.rollout.max_new_tokens} are allowed"
    return ""


def turns_of(rollouts: Sequence[Rollout], manifest: Manifest) -> list[Rollout]:
    """The turns of rollouts of a sound schema, each as an answer of its own: what the policy emitted."""
    return [turn for rollout in rollouts for turn in split_turns(rollout, manifest.rollout.group_size)]


def check_turns(rollouts: Sequence[Rollout], work: Work, manifest: Manifest) -> Finding:
    """What lies between an answer's turns is what the environment replies, and it ends where it replies nothing.

    Where the environment fails to reply, nobody can tell.
    """
    for number, rollout in enumerate(rollouts):
        try:
            fault = replay_fault(work, manifest, rollout)
        except Exception as error:  # an environment is another's code
            return _unknown("turns", f"rollout {number}: the environment failed: {type(error).__name__}", {})
        if fault:
            return _finding("turns", f"rollout {number} {fault}", {})
    replies = sum(len(rollout.turns) // 2 - 1 for rollout in rollouts if rollout.turns)
    return _finding("turns", "", {"replies": float(replies)})


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
    """Each answer carries a proof per 32 tokens, of the right length; what they prove is for `check_toploc`."""
    for number, rollout in enumerate(rollouts):
        try:
            check_proof_shape(
                rollout.proofs, tokens=len(rollout.output_ids), hidden_size=hidden_size, top_k=manifest.toploc.top_k
            )
        except MalformedError as error:
            return _finding("toploc", f"rollout {number}: {error.message}", {})
    return _finding("toploc", "", {})


def check_rewards(rollouts: Sequence[Rollout], work: Work, *, tokenizer: Tokenizer) -> Finding:
    """Rewards as the environment gives them again, less what an answer's length costs.

    NaN says that the environment could not tell, here or there. That is held against nobody; but more than a share of
    answers without a reward that could be told here leaves the submission undecided, or bad answers could be hidden.
    What is claimed and cannot be told here is undecided too, unless nothing is claimed. Nothing claimed for what should
    be more is a soft failure, and any other difference a lie.

    Where rewards need not repeat themselves, as those of programs, what differs is found again, REWARD_RUNS times in
    all: if these differ among themselves, that answer's reward cannot be told; and no difference is more than soft.
    """
    found = _own_rewards(rollouts, work, tokenizer)
    places: dict[_Comparison, list[int]] = {"lie": [], "loss": [], "unknown": [], "withheld": []}
    penalties = [work.length_penalty(rollout.prompt_index, len(rollout.output_ids)) for rollout in rollouts]
    for number, (rollout, value, penalty) in enumerate(zip(rollouts, found, penalties, strict=True)):
        compared = _compare_reward(rollout.reward, value, nothing=-penalty)
        if compared is not None:
            places[compared].append(number)
    lies, losses, unknown = places["lie"], places["loss"], places["unknown"]
    numbers = {
        "different": float(len(lies) + len(losses)),
        "could_not_tell": float(sum(map(math.isnan, found))),
        "withheld": float(len(places["withheld"])),
    }
    if work.length is not None:
        numbers["mean_length_penalty"] = sum(penalties) / len(penalties)
    if lies or losses:
        hard = bool(lies) and work.environment.repeatable
        return _finding("reward", f"rollout {(lies or losses)[0]} has another reward", numbers, hard=hard)
    if unknown:
        return _unknown("reward", f"the environment could not tell for rollout {unknown[0]}", numbers)
    if len(places["withheld"]) > WITHHELD_SHARE * len(rollouts):
        return _unknown("reward", f"{len(places['withheld'])} answers without a reward that can be told here", numbers)
    return _finding("reward", "", numbers)


def _own_rewards(rollouts: Sequence[Rollout], work: Work, tokenizer: Tokenizer) -> list[float]:
    """What this node finds; NaN where it cannot tell, or finds now one thing and now another."""
    answers, allowance = [(rollout.prompt_index, rollout) for rollout in rollouts], submission_allowance()
    found = answer_rewards(work, tokenizer, answers, allowance=allowance)
    if work.environment.repeatable:
        return found
    differences = [value - rollout.reward for value, rollout in zip(found, rollouts, strict=True)]  # NaN if either is
    doubtful = [place for place, difference in enumerate(differences) if abs(difference) > REWARD_TOLERANCE]
    for _ in range(REWARD_RUNS - 1):
        again = answer_rewards(work, tokenizer, [answers[place] for place in doubtful], allowance=allowance)
        for place, value in zip(doubtful, again, strict=True):
            if not same_reward(value, found[place]):
                found[place] = math.nan
    return found


_Comparison = Literal["lie", "loss", "unknown", "withheld"]


def _compare_reward(recorded: float, value: float, *, nothing: float) -> _Comparison | None:
    """What a recorded reward is against this node's own, either NaN where it could not be told; None if all is well."""
    claims_nothing = abs(recorded - nothing) <= REWARD_TOLERANCE
    if math.isnan(recorded):
        return None if math.isnan(value) else "withheld"
    if math.isnan(value):
        return None if claims_nothing else "unknown"
    if abs(value - recorded) <= REWARD_TOLERANCE:
        return None
    return "loss" if claims_nothing else "lie"


def check_toploc(measured: Sequence[MeasuredRollout], tolerance: Tolerance) -> Finding:
    """Proofs against this node's own hidden states, by chunk and on average over each rollout."""
    chunks = [(number, chunk) for number, rollout in enumerate(measured) for chunk in rollout.chunks]
    granted = 1 + len(chunks) // CHUNKS_PER_STRAY
    strays = _strays(measured, tolerance, most=granted + 1)
    spare = int(len(strays) <= granted)
    failed = [number for number, chunk in chunks if not _chunk_within(chunk, tolerance, spare=spare)]
    far = [number for number, rollout in enumerate(measured) if not _rollout_within(rollout, tolerance)]
    results = [chunk.result for _, chunk in chunks]
    means = [rollout.mantissa_mean for rollout in measured]
    numbers = {
        "chunks": float(len(chunks)),
        "failed_chunks": float(len(failed)),
        "stray_chunks": float(len(strays)),
        "exact_chunks": float(sum(_is_exact(result) for result in results)),
        "failed_rollouts": float(len({*failed, *far})),
        "max_exponent_mismatches": float(max(result.exponent_mismatches for result in results)),
        "max_mantissa_mean": max(result.mantissa_mean for result in results),
        "max_mantissa_median": max(result.mantissa_median for result in results),
        "max_rollout_mantissa_mean": max(means),
        "mean_mantissa_mean": sum(means) / len(means),
    }
    fault = ""
    if failed:
        fault = f"{len(failed)} of {len(chunks)} proofs fail, the first in rollout {failed[0]}"
    elif far:
        fault = f"the mantissas of rollout {far[0]} are off by {means[far[0]]:.3g} on average"
    return _finding("toploc", fault, numbers, hard=any(_beyond_rounding(chunk, tolerance) for _, chunk in chunks))


def _is_exact(result: ChunkResult) -> bool:
    """No difference at all, which a coarse number format hardly ever leaves; told to people, held against nobody."""
    return result.exponent_mismatches == 0 and result.mantissa_mean == 0


def looseness(count: int, full: int) -> float:
    """What limits are multiplied by for a chunk of `count` < `full` rows, or a submission of few tokens.

    The mean of fewer values scatters by the root of their ratio; at most twice the limit is ever granted.
    """
    return min(2.0, math.sqrt(full / count)) if count < full else 1.0


def _chunk_within(chunk: MeasuredChunk, tolerance: Tolerance, *, spare: int = 0) -> bool:
    """Whether a proof is within the limits, `spare` of its values left out of account."""
    loose, result = looseness(chunk.rows, PROOF_CHUNK_TOKENS), chunk.result
    return (
        result.exponent_mismatches <= loose * tolerance.max_exponent_mismatches
        and result.mantissa_mean <= loose * tolerance.max_mantissa_mean + spare * MANTISSA_WORST / chunk.points
        and result.mantissa_median <= loose * tolerance.max_mantissa_median
    )


def _strays(measured: Sequence[MeasuredRollout], tolerance: Tolerance, *, most: int) -> set[tuple[int, ...]]:
    """At most so many chunks that a single value takes beyond their limits; equal answers have theirs in common.

    Rounding may give the two sides another value at the edge of the top k. At such a place the proof's polynomial means
    nothing; mostly its exponent shows it, but once in 512 times sign and exponent agree, and the mantissa is random.
    """
    found: set[tuple[int, ...]] = set()
    for number, rollout in enumerate(measured):
        for place, chunk in enumerate(rollout.chunks):
            if _chunk_within(chunk, tolerance) or len(found) == most:
                continue
            if _chunk_within(chunk, tolerance, spare=1):
                found.add(_what_came_before(rollout, number, stop=place * PROOF_CHUNK_TOKENS + chunk.rows))
    return found


def _what_came_before(measured: MeasuredRollout, number: int, *, stop: int) -> tuple[int, ...]:
    """Prompt and tokens that fix a chunk's states."""
    rollout = measured.rollout
    return (-1, number, stop) if rollout is None else (rollout.prompt_index, *rollout.output_ids[:stop])


def _rollout_within(rollout: MeasuredRollout, tolerance: Tolerance) -> bool:
    """Whether a rollout's mean is within its limit, one stray value in one of its chunks granted."""
    stray = max(chunk.rows * MANTISSA_WORST / chunk.points for chunk in rollout.chunks) / rollout.tokens
    limit = looseness(rollout.tokens, PROOF_CHUNK_TOKENS) * tolerance.max_rollout_mantissa_mean
    return rollout.mantissa_mean <= limit + stray


def _beyond_rounding(chunk: MeasuredChunk, tolerance: Tolerance) -> bool:
    """Whether only other weights, other inputs or a forged proof explain a chunk."""
    most = max(chunk.points / 2, HARD_FACTOR * tolerance.max_exponent_mismatches)
    mean = HARD_MANTISSA + HARD_FACTOR * tolerance.max_mantissa_mean + MANTISSA_WORST / chunk.points
    return chunk.result.exponent_mismatches > most or MANTISSA_WORST >= chunk.result.mantissa_mean > mean


def check_sampling(measured: Sequence[MeasuredRollout], tolerance: Tolerance) -> Finding:
    """Every token must win, or nearly win, with the noise that its seed fixes."""
    found = token_numbers(measured)
    tokens, worst = int(found.tokens.sum()), int(found.largest_margin.argmax())
    largest, mean = float(found.largest_margin[worst]), found.mean(found.mean_margin)
    most = looseness(tokens, FULL_TOKENS) * tolerance.max_mean_margin
    numbers = {
        "tokens": float(tokens),
        "max_margin": largest,
        "mean_margin": mean,
        "max_rollout_mean_margin": float(found.mean_margin.max()),
        "match": sum(rollout.tokens - int(np.count_nonzero(rollout.margins)) for rollout in measured) / tokens,
    }
    fault, limit = "", tolerance.max_margin
    if not largest <= limit:
        fault = f"a token of rollout {worst} lost by {largest:.4g}; at most {limit:.4g} is allowed"
    elif not mean <= most:
        fault = f"tokens lost by {mean:.4g} on average; at most {most:.4g} is allowed"
    return _finding("sampling", fault, numbers, hard=largest > HARD_LOGITS + HARD_FACTOR * limit)


def check_logprobs(measured: Sequence[MeasuredRollout], tolerance: Tolerance) -> Finding:
    """Recorded log-probabilities against this node's own, one by one and on average: training weighs answers by them.

    Rounding errs both ways and mostly cancels out over a submission; a contributor who shifts all of them a little, to
    have its answers count for more, or hides them in noise, moves a mean.
    """
    found = token_numbers(measured)
    worst = int(found.largest_logprob_error.argmax())
    largest, limit = float(found.largest_logprob_error[worst]), tolerance.max_logprob_error
    mean, shift = found.mean(found.mean_logprob_error), found.mean(found.logprob_shift)
    loose = looseness(int(found.tokens.sum()), FULL_TOKENS)
    most_mean, most_shift = loose * tolerance.max_mean_logprob_error, loose * tolerance.max_logprob_shift
    fault = ""
    if not largest <= limit:
        fault = f"rollout {worst} is off by {largest:.4g}; at most {limit:.4g} is allowed"
    elif not abs(shift) <= most_shift:
        fault = f"all of them together are shifted by {shift:.4g}; at most {most_shift:.4g} either way is allowed"
    elif not mean <= most_mean:
        fault = f"tokens are off by {mean:.4g} on average; at most {most_mean:.4g} is allowed"
    hard = (
        largest > HARD_LOGITS + HARD_FACTOR * limit
        or mean > HARD_MEAN_NATS + HARD_FACTOR * most_mean
        or abs(shift) > HARD_MEAN_NATS + HARD_FACTOR * most_shift
    )
    numbers = {"max_error": largest, "mean_error": mean, "shift": abs(shift)}
    return _finding("logprob", fault, numbers, hard=hard)


def checks_impossible(detail: str) -> list[Finding]:
    """The results where this node's own pass gave nothing to compare with."""
    return [_unknown(name, detail, {}) for name in ("toploc", "sampling", "logprob")]


def _finding(name: str, fault: str, numbers: dict[str, float], *, hard: bool = True) -> Finding:
    outcome: Literal["pass", "fail"] = "fail" if fault else "pass"
    return Finding(_result(name, outcome, fault, numbers), hard)


def _unknown(name: str, detail: str, numbers: dict[str, float]) -> Finding:
    return Finding(_result(name, "unknown", detail, numbers), False)


def _result(name: str, outcome: Outcome, detail: str, numbers: dict[str, float]) -> CheckResult:
    """Records hold finite numbers alone: one that is none is left out, and the detail says what follows from it."""
    finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
    return CheckResult(name=name, outcome=outcome, detail=detail[:_MAX_DETAIL_CHARS], numbers=finite)

"""The compute process of a validator: judges submissions against the policies it holds.

Cheap checks come first and the first failure among them ends the judgement, so that a forged file costs little; then
one pass of the policy gives TOPLOC, sampling and log-probabilities together, and rewards come last (INTELLECT-2,
section 2.3). A fault of this process never becomes a verdict against a contributor.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from node.compute.serve import serve
from node.engines.assignment import Work, derive_work
from node.engines.base import Engine
from node.engines.registry import engine_from_environment
from node.engines.tokenizer import Tokenizer
from node.validator.checks import (
    Decision,
    Finding,
    check_dtype,
    check_logprobs,
    check_prompts,
    check_proof_shapes,
    check_rewards,
    check_sampling,
    check_schema,
    check_signed_prompts,
    check_termination,
    check_toploc,
    check_turns,
    checks_impossible,
    decide,
    decode_rollouts,
    turns_of,
)
from node.validator.measure import MeasuredRollout, Measurer, evidence
from protocol.errors import MalformedError, ModelError
from protocol.records import CheckResult, Manifest, Submission
from protocol.rollouts import Rollout, mean_reward
from protocol.seeds import submission_seed

_log = logging.getLogger(__name__)

R = TypeVar("R", Manifest, Submission)


@dataclass(frozen=True)
class _Policy:
    engine: Engine
    tokenizer: Tokenizer


@dataclass(frozen=True)
class _Claim:
    """Who handed in what, and the run it was for."""

    run_id: bytes
    contributor: bytes
    record: Submission
    manifest: Manifest

    @property
    def seed(self) -> bytes:
        return submission_seed(
            self.run_id,
            self.record.step,
            checkpoint=self.record.checkpoint,
            contributor_key=self.contributor,
            index=self.record.index,
        )


@dataclass
class _Judged:
    """What came of one submission so far."""

    rollouts: list[Rollout] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    measured: Sequence[MeasuredRollout] = ()


class Judge:
    """Holds the newest policies, each in an engine of its own, and judges submissions of any of them."""

    def __init__(self, new_engine: Callable[[], Engine]) -> None:
        self._new_engine = new_engine
        self._policies: OrderedDict[bytes, _Policy] = OrderedDict()

    def load(self, checkpoint_dir: str, checkpoint_id: bytes, keep: int = 4) -> dict[str, Any]:
        """Hold a checkpoint's policy too, and the `keep` most recently used at most. Raises ModelError."""
        if checkpoint_id not in self._policies:
            engine = self._new_engine()
            engine.load(Path(checkpoint_dir))
            self._policies[checkpoint_id] = _Policy(engine, Tokenizer(Path(checkpoint_dir)))
        self._policies.move_to_end(checkpoint_id)
        while len(self._policies) > max(1, keep):
            self._policies.popitem(last=False)
        info = self._policies[checkpoint_id].engine.info
        return {"held": list(self._policies), "engine": f"{info.name} {info.version}", "dtype": info.dtype}

    def judge(
        self, submission: bytes, manifest: bytes, run_id: bytes, contributor: bytes, rollouts: Sequence[Any]
    ) -> dict[str, Any]:
        """Judge one submission. Records are msgpack, `rollouts` is what the reader of the file gave.

        Gives outcome, hard, reason, checks, mean_reward, output_tokens, engine, dtype, seconds, and the evidence for
        the test over many submissions (node.validator.suspicion). Any rollouts whatsoever give a judgement; raises
        MalformedError for records that do not decode, ModelError for a policy not held.
        """
        started = time.monotonic()
        claim = _Claim(run_id, contributor, _decode(submission, Submission), _decode(manifest, Manifest))
        policy = self._policy(claim.record.checkpoint)
        judged = _Judged()
        try:
            judged.rollouts = decode_rollouts(rollouts)
        except MalformedError as error:
            judged.findings.append(Finding(CheckResult(name="schema", outcome="fail", detail=error.message[:240])))
        return _judgement(_decide(judged, claim, policy), judged, policy, started=started)

    def _policy(self, checkpoint: bytes) -> _Policy:
        if checkpoint not in self._policies:
            raise ModelError(f"the policy {checkpoint.hex()[:12]} is not loaded here", hint="call load first")
        self._policies.move_to_end(checkpoint)
        return self._policies[checkpoint]


def _decide(judged: _Judged, claim: _Claim, policy: _Policy) -> Decision:
    """Run the checks, unless the rollouts did not even decode, and say what follows."""
    try:
        if not judged.findings:
            _check(judged, claim, policy)
    except MemoryError:
        raise
    except Exception as error:
        # Whatever fails in here is this validator's fault or its engine's, and must cost the contributor nothing.
        _log.exception("judgement failed contributor=%s", claim.contributor.hex()[:12])
        return Decision("undecided", False, f"internal: {type(error).__name__}: {str(error)[:200]}")
    return decide(judged.findings)


def _check(judged: _Judged, claim: _Claim, policy: _Policy) -> None:
    """Add findings, cheapest first, up to the first failure that makes the rest pointless."""
    run, rollouts = claim.manifest, judged.rollouts
    work = derive_work(run, policy.tokenizer, seed=claim.seed, step=claim.record.step)
    width = policy.engine.info.hidden_size
    cheap: tuple[tuple[bool, Callable[[], Finding]], ...] = (
        (True, lambda: check_dtype(claim.record, run)),
        (False, lambda: check_signed_prompts(claim.record, work)),
        (True, lambda: check_schema(rollouts, claim.record, run, max_turns=work.environment.max_turns)),
        (True, lambda: check_prompts(rollouts, work)),
        (True, lambda: check_termination(turns_of(rollouts, run), run)),
        (work.environment.max_turns > 1, lambda: check_turns(rollouts, work, run)),
        (False, lambda: check_proof_shapes(turns_of(rollouts, run), run, hidden_size=width)),
    )
    for shown, check in cheap:  # the others are first parts of a later check of the same name
        finding = check()
        if shown or finding.result.outcome == "fail":
            judged.findings.append(finding)
        if finding.result.outcome == "fail":
            return
    judged.findings += _prefill_findings(judged, claim, work, policy)
    judged.findings.append(check_rewards(rollouts, work, tokenizer=policy.tokenizer))


def _prefill_findings(judged: _Judged, claim: _Claim, work: Work, policy: _Policy) -> list[Finding]:
    run, rollouts = claim.manifest, turns_of(judged.rollouts, claim.manifest)
    measurer = Measurer(
        rollouts,
        work.noise_seed,
        temperature=run.rollout.temperature,
        top_k=run.toploc.top_k,
        vocab_size=run.model.vocab_size,
    )
    for prefill in policy.engine.prefill([(rollout.prompt_ids, rollout.output_ids) for rollout in rollouts]):
        measurer.add(prefill)
    measured = measurer.results()
    if measurer.broken:
        return checks_impossible("the policy gives logits that are not finite here")
    judged.measured = measured
    tolerance = run.tolerances[claim.record.dtype]
    return [
        check_toploc(measured, tolerance),
        check_sampling(measured, tolerance),
        check_logprobs(measured, tolerance),
    ]


def _judgement(decision: Decision, judged: _Judged, policy: _Policy, *, started: float) -> dict[str, Any]:
    info = policy.engine.info
    findings, rollouts = judged.findings, judged.rollouts
    sound = any(finding.result.name == "schema" and finding.result.outcome == "pass" for finding in findings)
    return {
        "outcome": decision.outcome,
        "hard": decision.hard,
        "reason": decision.reason,
        "checks": [msgspec.to_builtins(finding.result) for finding in findings],
        "mean_reward": mean_reward(rollouts) if sound else 0.0,
        "output_tokens": sum(len(rollout.output_ids) for rollout in rollouts),
        "engine": f"{info.name} {info.version}",
        "dtype": info.dtype,
        "seconds": time.monotonic() - started,
        "evidence": evidence(judged.measured),
    }


def _decode(data: bytes, kind: type[R]) -> R:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedError(f"not a valid {kind.KIND}: {str(error)[:200]}") from error


def main() -> None:
    judge = Judge(
        partial(engine_from_environment, engine="torch")
    )  # whose prefill needs no more memory than the policy
    serve({"load": judge.load, "judge": judge.judge})


if __name__ == "__main__":
    main()

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from node.compute.serve import serve
from node.engines.assignment import derive_work
from node.engines.base import Engine
from node.engines.tokenizer import Tokenizer
from node.engines.torch_engine import engine_from_environment
from node.validator.checks import (
    Decision,
    Finding,
    PrefillChecks,
    check_prompts,
    check_proof_shapes,
    check_rewards,
    check_schema,
    check_termination,
    decide,
    decode_rollouts,
)
from protocol.errors import MalformedError, ModelError
from protocol.records import CheckResult, Manifest, Submission
from protocol.rollouts import Rollout
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

        Gives outcome, hard, reason, checks, mean_reward, output_tokens, engine, dtype, seconds. Any rollouts whatsoever
        give a judgement; raises MalformedError for records that do not decode, ModelError for a policy not held.
        """
        started = time.monotonic()
        claim = _Claim(run_id, contributor, _decode(submission, Submission), _decode(manifest, Manifest))
        policy = self._policy(claim.record.checkpoint)
        findings: list[Finding] = []
        rows: list[Rollout] = []
        try:
            rows = decode_rollouts(rollouts)
        except MalformedError as error:
            findings.append(Finding(CheckResult(name="schema", outcome="fail", detail=error.message[:240])))
        return _judgement(_decide(findings, rows, claim, policy), findings, rows, policy, started=started)

    def _policy(self, checkpoint: bytes) -> _Policy:
        if checkpoint not in self._policies:
            raise ModelError(f"the policy {checkpoint.hex()[:12]} is not loaded here", hint="call load first")
        self._policies.move_to_end(checkpoint)
        return self._policies[checkpoint]


def _decide(findings: list[Finding], rollouts: Sequence[Rollout], claim: _Claim, policy: _Policy) -> Decision:
    """Run the checks, unless the rollouts did not even decode, and say what follows."""
    try:
        if not findings:
            _check(findings, rollouts, claim, policy)
    except MemoryError:
        raise
    except Exception as error:
        # Whatever fails in here is this validator's fault or its engine's, and must cost the contributor nothing.
        _log.exception("judgement failed contributor=%s", claim.contributor.hex()[:12])
        return Decision("undecided", False, f"internal: {type(error).__name__}: {str(error)[:200]}")
    return decide(findings)


def _check(findings: list[Finding], rollouts: Sequence[Rollout], claim: _Claim, policy: _Policy) -> None:
    """Add findings to the list, cheapest first, up to the first failure that makes the rest pointless."""
    run = claim.manifest
    work = derive_work(run, policy.tokenizer, seed=claim.seed)
    cheap: tuple[Callable[[], Finding], ...] = (
        lambda: check_schema(rollouts, claim.record, run),
        lambda: check_prompts(rollouts, work),
        lambda: check_termination(rollouts, run),
        lambda: check_proof_shapes(rollouts, run, hidden_size=policy.engine.info.hidden_size),
    )
    for check in cheap:
        findings.append(check())
        if findings[-1].result.outcome == "fail":
            return
    findings.pop()  # the proofs' shapes hold; what they say gives the result of that name
    checks = PrefillChecks(rollouts, work, run)
    for prefill in policy.engine.prefill([(rollout.prompt_ids, rollout.output_ids) for rollout in rollouts]):
        checks.add(prefill)
    findings += checks.findings()
    findings.append(check_rewards(rollouts, work, tokenizer=policy.tokenizer))


def _judgement(
    decision: Decision, findings: Sequence[Finding], rollouts: Sequence[Rollout], policy: _Policy, *, started: float
) -> dict[str, Any]:
    info = policy.engine.info
    sound = bool(findings) and findings[0].result.outcome == "pass"
    return {
        "outcome": decision.outcome,
        "hard": decision.hard,
        "reason": decision.reason,
        "checks": [msgspec.to_builtins(finding.result) for finding in findings],
        "mean_reward": sum(rollout.reward for rollout in rollouts) / len(rollouts) if sound else 0.0,
        "output_tokens": sum(len(rollout.output_ids) for rollout in rollouts),
        "engine": f"{info.name} {info.version}",
        "dtype": info.dtype,
        "seconds": time.monotonic() - started,
    }


def _decode(data: bytes, kind: type[R]) -> R:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedError(f"not a valid {kind.KIND}: {str(error)[:200]}") from error


def main() -> None:
    judge = Judge(engine_from_environment)
    serve({"load": judge.load, "judge": judge.judge})


if __name__ == "__main__":
    main()

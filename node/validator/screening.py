"""The screening process of a validator: everything about a submission that needs no pass of the policy.

Runs for every submission, drawn or not, in a process of its own without torch, so that cheap verdicts never wait for
costly ones. Needs the tokenizer and the width of the policy that the submission names, and nothing else of it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from node.compute.serve import serve
from node.engines.assignment import Work, derive_work
from node.engines.tokenizer import Tokenizer
from node.validator.checks import (
    Decision,
    Finding,
    check_dtype,
    check_prompts,
    check_proof_shapes,
    check_rewards,
    check_schema,
    check_signed_prompts,
    check_termination,
    check_turns,
    decide,
    decode_rollouts,
    turns_of,
)
from node.validator.duplicates import sketch_answer
from protocol.errors import MalformedError, ModelError
from protocol.records import CheckResult, Manifest, Submission
from protocol.rollouts import Rollout, mean_reward
from protocol.seeds import submission_seed

_log = logging.getLogger(__name__)

R = TypeVar("R", Manifest, Submission)
MAX_POLICIES: Final = 4
MAX_CONFIG_BYTES: Final = 1 << 20


class _Width(msgspec.Struct):
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 20)]


class Screen:
    """Screens submissions; keeps the tokenizers of the policies that it was last asked about."""

    def __init__(self) -> None:
        self._policies: OrderedDict[str, tuple[Tokenizer, int]] = OrderedDict()

    def screen(
        self,
        policy_dir: str,
        submission: bytes,
        manifest: bytes,
        run_id: bytes,
        contributor: bytes,
        rollouts: Sequence[Any],
        rewards: bool,
    ) -> dict[str, Any]:
        """Run the cheap checks, and those of rewards if asked to.

        Gives outcome, hard, reason, checks, mean_reward, output_tokens and the sketches of long answers. Any rollouts
        whatsoever give a result; raises ModelError where the policy's directory is at fault.
        """
        tokenizer, hidden_size = self._policy(policy_dir)
        record, run = _decode(submission, Submission), _decode(manifest, Manifest)
        seed = submission_seed(
            run_id, record.step, checkpoint=record.checkpoint, contributor_key=contributor, index=record.index
        )
        work = derive_work(run, tokenizer, seed=seed, step=record.step)
        findings: list[Finding] = []
        try:
            rows = decode_rollouts(rollouts)
        except MalformedError as error:
            findings.append(Finding(CheckResult(name="schema", outcome="fail", detail=error.message[:240])))
            return _screened(decide(findings), findings, [], run)
        decision = check_cheaply(findings, rows, work, record=record, run=run, hidden_size=hidden_size)
        if decision.outcome == "accept" and rewards:
            findings.append(check_rewards(rows, work, tokenizer=tokenizer))
            decision = decide(findings)
        return _screened(decision, findings, rows, run)

    def _policy(self, policy_dir: str) -> tuple[Tokenizer, int]:
        if policy_dir not in self._policies:
            self._policies[policy_dir] = (Tokenizer(Path(policy_dir)), _hidden_size(Path(policy_dir)))
        self._policies.move_to_end(policy_dir)
        while len(self._policies) > MAX_POLICIES:
            self._policies.popitem(last=False)
        return self._policies[policy_dir]


def check_cheaply(
    findings: list[Finding], rows: Sequence[Rollout], work: Work, *, record: Submission, run: Manifest, hidden_size: int
) -> Decision:
    """Every check but that of rewards: add findings, cheapest first, up to the first failure."""
    checks: tuple[Callable[[], Finding], ...] = (
        lambda: check_dtype(record, run),
        lambda: check_signed_prompts(record, work),
        lambda: check_schema(rows, record, run, max_turns=work.environment.max_turns),
        lambda: check_prompts(rows, work),
        lambda: check_termination(turns_of(rows, run), run),
        *((lambda: check_turns(rows, work, run),) if work.environment.max_turns > 1 else ()),
        lambda: check_proof_shapes(turns_of(rows, run), run, hidden_size=hidden_size),
    )
    for check in checks:
        finding = _named(check())
        findings[:] = [one for one in findings if one.result.name != finding.result.name] + [finding]
        if finding.result.outcome == "fail":
            break
    return decide(findings)


def _named(finding: Finding) -> Finding:
    """Proofs whose shape is right are not yet right proofs, and their check's name must not say so."""
    if (finding.result.name, finding.result.outcome) != ("toploc", "pass"):
        return finding
    return Finding(msgspec.structs.replace(finding.result, name="proof-shape"), finding.hard)


def _screened(
    decision: Decision, findings: Sequence[Finding], rows: Sequence[Rollout], run: Manifest
) -> dict[str, Any]:
    sound = decision.outcome != "reject"
    long = [row for row in rows if len(row.output_ids) >= run.checks.duplicate_tokens] if sound else []
    sketches = [sketch_answer(row.prompt_ids, row.output_ids, row.logprobs) for row in long]
    return {
        "outcome": decision.outcome,
        "hard": decision.hard,
        "reason": decision.reason,
        "checks": [msgspec.to_builtins(finding.result) for finding in findings],
        "mean_reward": mean_reward(rows) if sound else 0.0,
        "output_tokens": sum(len(row.output_ids) for row in rows),
        "answers": [msgspec.to_builtins(sketch, builtin_types=(bytes,)) for sketch in sketches],
    }


def _hidden_size(policy_dir: Path) -> int:
    path = policy_dir / "config.json"
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=_Width).hidden_size
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be used: {str(error)[:200]}", hint="download the checkpoint again") from error


def _decode(data: bytes, kind: type[R]) -> R:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedError(f"not a valid {kind.KIND}: {str(error)[:200]}") from error


def main() -> None:
    serve({"screen": Screen().screen})


if __name__ == "__main__":
    main()

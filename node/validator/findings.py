"""What the children of a validator say of a submission, as the role takes it in; becomes a verdict once signed."""

from __future__ import annotations

from typing import Literal

import msgspec

from node.validator.duplicates import Answer
from protocol.records import CheckResult, Tolerance


class NotYet(Exception):
    """Raised inside the role when a case waits for something; `what` names it for a person.

    `coming`: it is on its way, however long that takes. `from_others`: others have it and may never give it.
    """

    def __init__(self, what: str, *, coming: bool = False, from_others: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.coming = coming
        self.from_others = from_others


class Findings(msgspec.Struct):
    """What all checks together say."""

    outcome: Literal["accept", "reject", "undecided"]
    hard: bool
    reason: str
    checks: list[CheckResult] = []
    mean_reward: float = 0.0
    engine: str = ""
    dtype: str = ""
    seconds: float = 0.0
    evidence: list[tuple[float, float, float]] = []
    """For each prompt, as node.validator.measure.Evidence (node.validator.suspicion)."""
    passing: bool = True
    """Of an `undecided`: whether what kept this validator from telling may pass by itself (node.validator.again)."""

    def suspected(self, reason: str, *, hard: bool) -> Findings:
        """The same, with what a contributor's whole history says against it."""
        checks = [*self.checks, CheckResult(name="history", outcome="fail", detail=reason[:240])]
        if self.outcome == "reject" and (self.hard or not hard):
            return msgspec.structs.replace(self, checks=checks)
        return msgspec.structs.replace(self, outcome="reject", hard=hard, reason=f"history: {reason}", checks=checks)


class Screened(msgspec.Struct):
    """What the cheap checks say."""

    outcome: Literal["accept", "reject", "undecided"]
    hard: bool
    reason: str
    checks: list[CheckResult] = []
    mean_reward: float = 0.0
    answers: list[Answer] = []

    def findings(self) -> Findings:
        return Findings(self.outcome, self.hard, self.reason, list(self.checks), self.mean_reward)


def undecided(reason: str, *, passing: bool = True) -> Findings:
    """Nothing is held against anybody."""
    return Findings("undecided", False, reason, passing=passing)


def with_limits(check: CheckResult, tolerance: Tolerance | None) -> CheckResult:
    """A check's result with the run's limits beside its numbers, unless it names its own."""
    if check.limits or tolerance is None:
        return check
    limits = {
        "toploc": {
            "max_exponent_mismatches": float(tolerance.max_exponent_mismatches),
            "max_mantissa_mean": tolerance.max_mantissa_mean,
            "max_mantissa_median": tolerance.max_mantissa_median,
            "max_rollout_mantissa_mean": tolerance.max_rollout_mantissa_mean,
        },
        "sampling": {"max_margin": tolerance.max_margin, "mean_margin": tolerance.max_mean_margin},
        "logprob": {
            "max_error": tolerance.max_logprob_error,
            "mean_error": tolerance.max_mean_logprob_error,
            "shift": tolerance.max_logprob_shift,
        },
    }
    return msgspec.structs.replace(check, limits=limits.get(check.name, {}))

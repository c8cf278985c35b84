"""The run as the ledger's replay has it, as rows for the dashboard: steps, contributors, submissions, verdicts.

Pure reading, bounded in size. The state may be growing in another thread meanwhile, so every collection of it is copied
by one call of the interpreter before it is walked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from node.ledger.memory import looked_at, newest
from node.ledger.rows import leaderboard
from protocol.envelope import Signed
from protocol.ledger import LedgerState, LedgerSubmission
from protocol.records import Trained, Verdict
from protocol.run import RunAddress

MAX_STEPS: Final = 10_000
"""Steps that are sent; of a longer run, so many evenly spaced ones."""
MAX_CONTRIBUTORS: Final = 500
MAX_SUBMISSIONS: Final = 250
"""The newest; and as many that were not accepted, which stay when many acceptances follow."""
DIGITS: Final = 5
Row = list[float | None]
"""The cells of one step."""
MAX_REASON_CHARS: Final = 300

COLUMNS: Final = (
    "step", "at_ms", "reward", "length", "loss", "kl", "entropy", "grad_norm", "staleness", "staleness_max",
    "tokens_per_s", "train_s", "wait_s",
)  # fmt: skip


def run_facts(state: LedgerState | None, address: RunAddress) -> dict[str, Any]:
    """What the run is; only its address while its manifest is not known."""
    facts: dict[str, Any] = {"address": str(address), "name": address.name, "operator": str(address.operator)}
    if state is None:
        return facts
    manifest = state.manifest
    return facts | {
        "run_id": state.run_id.hex(),
        "trainer": str(manifest.trainer_id),
        "validators": [str(peer) for peer in manifest.validator_ids],
        "quorum": manifest.quorum,
        "environment": manifest.environment.name,
        "total_steps": manifest.batch.total_steps,
        "rollouts_per_step": manifest.batch.rollouts_per_step,
        "max_staleness": manifest.batch.max_staleness,
        "group_size": manifest.rollout.group_size,
        "max_new_tokens": manifest.rollout.max_new_tokens,
        "trained": len(state.trained),
        "submissions": len(state.submissions),
        "ledger_length": state.length,
        "ledger_tip": state.tip.hex(),
    }


def series_rows(state: LedgerState, known: Sequence[Row] = ()) -> list[Row]:
    """A row of COLUMNS for each trained step, rising; what was not measured is None.

    `known`: what this gave earlier in the run, to which only new steps are added; a thinned series is made anew.
    """
    trained = list(state.trained.values())
    if len(trained) > MAX_STEPS:
        known, kept = (), _spread(len(trained))
    else:
        known = known if len(known) <= len(trained) else ()
        kept = range(len(known), len(trained))
    return [*known, *(_row(trained[at], trained[at - 1].issued_at_ms if at else None) for at in kept)]


def contributor_rows(state: LedgerState) -> list[dict[str, Any]]:
    """The leaderboard, as `ledger show` has it."""
    return leaderboard(state, limit=MAX_CONTRIBUTORS)


def submission_rows(state: LedgerState) -> list[dict[str, Any]]:
    """The newest submissions, newest first, and those that were not accepted for longer."""
    recent = newest(state.submissions, MAX_SUBMISSIONS)
    among = set(recent)
    others = [key for key in list(state.unaccepted) if key not in among]
    found = [(key, looked_at(state.submissions, key)) for key in reversed([*others[-MAX_SUBMISSIONS:], *recent])]
    return [_submission_row(key, one) for key, one in found if one is not None]


def find_submission(state: LedgerState, submission: bytes) -> dict[str, Any] | None:
    """Everything about one submission: its row, its record, and every verdict with its checks; None if unknown."""
    from node.verdict_show import Found, describe_verdict  # which imports what draws tables: not while nobody looks

    one = looked_at(state.submissions, submission)
    if one is None:
        return None
    record = one.record
    verdicts = [describe_verdict(Found(verdict, "the ledger")) for verdict in _verdicts(one)]
    return {
        **_submission_row(submission, one),
        "checkpoint": record.checkpoint.hex(),
        "size": record.size,
        "engine": record.engine,
        "dtype": record.dtype,
        "software": record.software,
        "verdicts": [{name: row[name] for name in row if name != "envelope"} for row in verdicts],
    }


def _spread(count: int) -> Sequence[int]:
    return sorted({round(at * (count - 1) / (MAX_STEPS - 1)) for at in range(MAX_STEPS)})


def _row(trained: Trained, before_ms: int | None) -> Row:
    metrics = trained.metrics
    tokens, rollouts = metrics.get("tokens"), metrics.get("rollouts")
    seconds = (trained.issued_at_ms - before_ms) / 1000 if before_ms is not None else None
    cells = [
        trained.mean_reward,
        _ratio(tokens, rollouts),
        *(metrics.get(name) for name in ("loss", "kl", "entropy", "grad_norm", "staleness", "staleness_max")),
        _ratio(tokens, seconds),
        *(metrics.get(name) for name in ("train_seconds", "wait_seconds")),
    ]
    return [trained.step, trained.issued_at_ms, *(_short(value) for value in cells)]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole is not None and whole > 0 else None


def _short(value: float | None) -> float | None:
    """Few digits; JSON has no word for NaN and infinities."""
    return float(f"{value:.{DIGITS}g}") if value is not None and math.isfinite(value) else None


def _submission_row(key: bytes, one: LedgerSubmission) -> dict[str, Any]:
    record = one.record
    return {
        "id": key.hex(),
        "contributor": str(one.author),
        "step": record.step,
        "index": record.index,
        "checkpoint_step": record.checkpoint_step,
        "rollouts": record.rollouts,
        "tokens": record.output_tokens,
        "at_ms": record.issued_at_ms,
        "state": one.state,
        "used_in": one.used_in,
        **_telling([verdict.record for verdict in _verdicts(one)]),
    }


def _telling(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The worst that a validator said; nothing before the first verdict."""
    if not verdicts:
        return {"reward": None, "hard": False, "reason": "", "drawn": None}
    worst = min(verdicts, key=lambda verdict: ("reject", "undecided", "accept").index(verdict.outcome))
    return {
        "reward": _short(worst.mean_reward),
        "hard": worst.hard,
        "reason": worst.reason[:MAX_REASON_CHARS],
        "drawn": worst.draw.drawn,
    }


def _verdicts(one: LedgerSubmission) -> list[Signed[Verdict]]:
    return list(one.verdicts.values())

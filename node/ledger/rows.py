"""The ledger's replay as rows of plain values: for the leaderboard, a contributor's own page, tables, JSON and CSV.

Reads a state, which may be growing in another thread: contributors are copied by one call before they are walked. Keys
are peer ids as text, times are milliseconds, credits are in the unit that the manifest names.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from protocol.identity import PeerId
from protocol.ledger import LedgerState, LedgerSubmission
from protocol.run import RunAddress
from protocol.standing import Contributor

CONTRIBUTOR_COLUMNS: Final = (
    "rank", "peer_id", "standing", "credits", "mature", "maturing", "forfeited", "restored", "accepted", "rejected",
    "reasons", "reason",
)  # fmt: skip
SUBMISSION_COLUMNS: Final = (
    "id", "contributor", "step", "index", "checkpoint_step", "state", "credits", "worth", "appeal",
    "rollouts", "tokens", "used_in", "reward", "hard", "reason", "at_ms",
)  # fmt: skip
MAX_REASON_CHARS: Final = 300


def contributor_row(peer: PeerId, one: Contributor) -> dict[str, Any]:
    """Standing, credits (`mature` and `maturing` together), and what became of the work."""
    return {
        "peer_id": str(peer),
        "standing": one.standing,
        "reason": one.reason[:MAX_REASON_CHARS],
        "credits": one.credits,
        "mature": one.balance.mature,
        "maturing": one.balance.maturing,
        "forfeited": one.balance.forfeited,
        "restored": one.balance.restored,
        "accepted": one.accepted,
        "rejected": dict(one.rejected),
    }


def leaderboard(state: LedgerState, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Contributors, most credits first; who has none by accepted work, then by peer id, so that all nodes agree."""
    peers = [(peer, state.contributors[peer]) for peer in list(state.contributors)]
    best = sorted(peers, key=lambda row: (-row[1].credits, -row[1].accepted, str(row[0])))[:limit]
    return [{"rank": rank, **contributor_row(peer, one)} for rank, (peer, one) in enumerate(best, start=1)]


def submission_row(key: bytes, one: LedgerSubmission, state: LedgerState) -> dict[str, Any]:
    """One submission: what was handed in, what was said of it, what it earns."""
    record = one.record
    worth = credit_state(one, state)
    return {
        "id": key.hex(),
        "contributor": str(one.author),
        "step": record.step,
        "index": record.index,
        "checkpoint_step": record.checkpoint_step,
        "state": one.state,
        "credits": state.manifest.credits.of(record.output_tokens) if worth in ("mature", "maturing") else 0,
        "worth": worth,
        "appeal": one.appeal.hex(),
        "rollouts": record.rollouts,
        "tokens": record.output_tokens,
        "used_in": one.used_in,
        **_telling(one),
        "at_ms": record.issued_at_ms,
    }


def credit_state(one: LedgerSubmission, state: LedgerState) -> str:
    """What became of a submission's credits: `mature`, `maturing`, `forfeited`, or none, where it is not accepted."""
    if one.state != "accepted" or one.settled_step is None:
        return ""
    evicted_step = state.contributors[one.author].evicted_step
    due = one.settled_step + state.manifest.credits.maturity_steps
    over = state.manifest.batch.total_steps
    if evicted_step is None:
        return "mature" if due <= (now := len(state.trained)) or now >= over else "maturing"
    before = due <= evicted_step or evicted_step >= over
    return "mature" if before else "forfeited"


def submissions_of(state: LedgerState, peer: PeerId | None = None) -> Iterator[dict[str, Any]]:
    """The submissions of one contributor, or of all, in ledger order."""
    for key, one in state.submissions.items():
        if peer in (None, one.author):
            yield submission_row(key, one, state)


def run_row(state: LedgerState, run: RunAddress) -> dict[str, Any]:
    """Where the run stands by its ledger."""
    contributors = list(state.contributors.values())
    return {
        "run": str(run),
        "run_id": state.run_id.hex(),
        "entries": state.length,
        "tip": state.tip.hex(),
        "steps_committed": len(state.batches),
        "steps_trained": len(state.trained),
        "steps_total": state.manifest.batch.total_steps,
        "submissions": len(state.submissions),
        "contributors": len(contributors),
        "evicted": sum(one.standing == "evicted" for one in contributors),
        "credits": sum(one.credits for one in contributors),
        "mature": sum(one.balance.mature for one in contributors),
        "forfeited": sum(one.balance.forfeited for one in contributors),
        "credit_unit": state.manifest.credits.unit,
    }


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of CSV (RFC 4180), the columns' names first. Cells that a spreadsheet would compute are quoted as text."""
    yield _line(columns)
    for row in rows:
        yield _line([_cell(row.get(column)) for column in columns])


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A contributor's row with its rejections as a count and as text."""
    rejected: Mapping[str, int] = row["rejected"]
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(rejected.items()))
    return {**row, "rejected": sum(rejected.values()), "reasons": reasons}


def _telling(one: LedgerSubmission) -> dict[str, Any]:
    """The worst that a validator said."""
    verdicts = [signed.record for signed in list(one.verdicts.values())]
    if not verdicts:
        return {"reward": None, "hard": False, "reason": ""}
    worst = min(verdicts, key=lambda verdict: ("reject", "undecided", "accept").index(verdict.outcome))
    return {"reward": worst.mean_reward, "hard": worst.hard, "reason": worst.reason[:MAX_REASON_CHARS]}


def _line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Texts come from others: one that begins like a formula would be run by the reader's spreadsheet."""
    if isinstance(value, str):
        clean = "".join(letter if letter.isprintable() else " " for letter in value)
        return f"'{clean}" if clean[:1] in "=+-@" and clean else clean
    return "" if value is None else value

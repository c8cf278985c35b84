"""What the trainer's status says about the run: rewards, waiting, contributors, verdicts. Read-only over the ledger."""

from __future__ import annotations

from collections import deque
from typing import Any

from node.status import StatusBoard
from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.ledger import LedgerState
from protocol.records import Trained, Verdict

KEPT_VERDICTS = 250
"""Of those that accept, and of the others."""


class Scoreboard:
    """Turns the ledger into status details; each method is called when its event happens."""

    def __init__(self, state: LedgerState, board: StatusBoard) -> None:
        self._state = state
        self._board = board
        self._wait_s = 0.0
        self._train_s = 0.0
        self._accepts: deque[dict[str, Any]] = deque(maxlen=KEPT_VERDICTS)
        self._others: deque[dict[str, Any]] = deque(maxlen=KEPT_VERDICTS)

    def restore(self) -> None:
        """Fill in what the ledger remembers from before a restart."""
        for submission in self._state.submissions.values():
            for verdict in submission.verdicts.values():
                self._keep(verdict)
        self._board.details(total_steps=self._state.manifest.batch.total_steps)
        self._show_rewards()
        self._show_contributors()

    def verdict(self, verdict: Signed[Verdict]) -> None:
        self._keep(verdict)
        self._show_contributors()

    def _keep(self, verdict: Signed[Verdict]) -> None:
        """Rejections stay when many acceptances follow."""
        rows = self._accepts if verdict.record.outcome == "accept" else self._others
        rows.append(_verdict_row(verdict))

    def gathered(self, step: int, have: int, wanted: int) -> None:
        self._board.details(gathering={"step": step, "submissions": have, "wanted": wanted})

    def trained(self, trained: Trained) -> None:
        self._show_rewards()
        self._show_contributors()

    def waited(self, seconds: float) -> None:
        self._wait_s += seconds
        self._board.details(wait_s=round(self._wait_s, 3))

    def worked(self, seconds: float) -> None:
        self._train_s += seconds
        self._board.details(train_s=round(self._train_s, 3))

    def _show_rewards(self) -> None:
        trained = self._state.trained
        self._board.details(
            rewards=[[step, record.mean_reward] for step, record in trained.items()],
            metrics=[{"step": step, **record.metrics} for step, record in trained.items()],
        )

    def _show_contributors(self) -> None:
        rows = [self._contributor_row(peer) for peer in self._state.contributors]
        rejected: dict[str, int] = {}
        for row in rows:
            for reason, count in row["rejected"].items():
                rejected[reason] = rejected.get(reason, 0) + count
        self._board.update(accepted=sum(row["accepted"] for row in rows), rejected=rejected)
        self._board.details(
            contributors=rows,
            verdicts=[*self._others, *self._accepts],
            stale=self._state.stale(len(self._state.trained)),
            unused=len(self._state.usable(len(self._state.batches))),
        )

    def _contributor_row(self, peer: PeerId) -> dict[str, Any]:
        one = self._state.contributors[peer]
        return {
            "peer_id": str(peer),
            "accepted": one.accepted,
            "rejected": dict(one.rejected),
            "standing": one.standing,
            "reason": one.reason,
            "credits": one.credits,
        }


def _verdict_row(verdict: Signed[Verdict]) -> dict[str, Any]:
    record = verdict.record
    return {
        "submission": record.submission.hex(),
        "contributor": str(PeerId(record.contributor)),
        "validator": str(verdict.author),
        "step": record.step,
        "outcome": record.outcome,
        "hard": record.hard,
        "reason": record.reason,
        "mean_reward": record.mean_reward,
    }

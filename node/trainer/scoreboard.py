"""What the trainer's status says about the run: rewards, waiting, contributors, verdicts. Read-only over the ledger."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from node.ledger.rows import contributor_row
from node.status import StatusBoard
from node.trainer.gather import Gathered
from protocol.batches import most_submissions, wanted_submissions
from protocol.envelope import Signed
from protocol.identity import PeerId
from protocol.ledger import LedgerState
from protocol.records import Manifest, Trained, Verdict

KEPT_VERDICTS: Final = 250
"""Of those that accept, and of the others."""
KEPT_REWARDS: Final = 256
KEPT_METRICS: Final = 16
"""Newest steps that the status tells of, however long the run is; the ledger and the metrics file have all."""


class Scoreboard:
    """Turns the ledger into status details; each method is called when its event happens."""

    def __init__(self, state: LedgerState, board: StatusBoard) -> None:
        self._state = state
        self._board = board
        self._wait_s = 0.0
        self._train_s = 0.0
        self._groups_without_signal = 0
        self._stale_rollouts = 0
        self._stale_by_step: dict[int, int] = {}
        self._accepts: deque[dict[str, Any]] = deque(maxlen=KEPT_VERDICTS)
        self._others: deque[dict[str, Any]] = deque(maxlen=KEPT_VERDICTS)
        self._shown_length = -1

    def restore(self) -> None:
        """Fill in what the ledger remembers from before a restart."""
        for submission in self._state.submissions.values():
            for verdict in submission.verdicts.values():
                self._keep(verdict)
        self._board.details(total_steps=self._state.manifest.batch.total_steps)
        self._stale_rollouts = self._state.shelf.stale(self._step).rollouts
        self._groups_without_signal = sum(map(_silent, self._state.trained.values()))
        self._show_rewards()
        self._show_contributors()

    def verdict(self, verdict: Signed[Verdict]) -> None:
        """One more; it is shown with the next `catch_up`, as there may be many at a time."""
        self._keep(verdict)

    def catch_up(self) -> None:
        """Show what entries have changed since the last time."""
        if self._shown_length != self._state.length:
            self._show_contributors()

    def _keep(self, verdict: Signed[Verdict]) -> None:
        """Rejections stay when many acceptances follow."""
        rows = self._accepts if verdict.record.outcome == "accept" else self._others
        rows.append(_verdict_row(verdict))

    def gathered(self, step: int, gathered: Gathered, *, pending: int, waited_s: float) -> None:
        """What a step has so far, what it lacks, and how many submissions are still to be judged."""
        manifest = self._state.manifest
        self._board.update(pending=pending)
        self._board.details(
            gathering={
                "step": step,
                "submissions": gathered.tally.submissions,
                "wanted": wanted_submissions(manifest),
                "most": most_submissions(manifest),
                "rollouts": gathered.tally.rollouts,
                "wanted_rollouts": manifest.batch.rollouts_per_step,
                "groups_without_signal": sum(gathered.silent),
                "waited_s": round(waited_s, 1),
                "deadline_s": manifest.batch.deadline_s,
            },
            batch=_batch_text(manifest, gathered),
        )

    def stale(self, step: int, rollouts: int) -> None:
        """So many rollouts in all are too old for a step; those that were not for the one before are its own."""
        self._stale_by_step[step] = max(0, rollouts - self._stale_rollouts)
        self._stale_rollouts = max(rollouts, self._stale_rollouts)
        self._board.details(stale_rollouts=self._stale_rollouts)

    def dropped(self, step: int) -> dict[str, float]:
        """Metrics of what a step could not use any more."""
        return {"stale_rollouts": float(self._stale_by_step.pop(step, 0))}

    def trained(self, trained: Trained) -> None:
        self._groups_without_signal += _silent(trained)
        self._show_rewards()
        self._show_contributors()

    def waited(self, seconds: float) -> None:
        self._wait_s += seconds
        self._board.details(wait_s=round(self._wait_s, 3))

    def worked(self, seconds: float) -> None:
        self._train_s += seconds
        self._board.details(train_s=round(self._train_s, 3))

    @property
    def _step(self) -> int:
        return len(self._state.batches)

    def _show_rewards(self) -> None:
        trained = self._state.trained
        newest = [(step, trained[step]) for step in range(max(0, len(trained) - KEPT_REWARDS), len(trained))]
        self._board.details(
            steps_trained=len(trained),
            rewards=[[step, record.mean_reward] for step, record in newest],
            metrics=[{"step": step, **record.metrics} for step, record in newest[-KEPT_METRICS:]],
            groups_without_signal=self._groups_without_signal,
        )

    def _show_contributors(self) -> None:
        self._shown_length = self._state.length
        rows = [contributor_row(peer, one) for peer, one in list(self._state.contributors.items())]
        rejected: dict[str, int] = {}
        for row in rows:
            for reason, count in row["rejected"].items():
                rejected[reason] = rejected.get(reason, 0) + count
        self._board.update(accepted=sum(row["accepted"] for row in rows), rejected=rejected)
        self._board.details(
            stale=self._state.shelf.stale(self._step).submissions,
            unused=len(self._state.shelf.usable(self._step)),
        )
        self._board.rows(contributors=rows, verdicts=[*self._others, *self._accepts])


def _batch_text(manifest: Manifest, gathered: Gathered) -> str:
    """A batch in a line, for a person."""
    wanted, tally = manifest.batch.rollouts_per_step, gathered.tally
    if not manifest.batch.signal_only:
        return f"{tally.rollouts} of {wanted} rollouts"
    return (
        f"{tally.rollouts} of {wanted} rollouts with signal, from {tally.submissions} of at most "
        f"{most_submissions(manifest)} submissions; {sum(gathered.silent)} groups without signal left out"
    )


def _silent(trained: Trained) -> int:
    return int(trained.metrics.get("groups_without_signal", 0.0))


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

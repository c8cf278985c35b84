"""What a validator suspects each contributor of, over all it ever judged of it: protocol.sequential on three numbers.

Two tables in the docket's SQLite file. Two grades: *soft* when the node's answers depart more, on average, than any
honest machine's (the manifest's `honest_…` bounds), which rejects submissions until it mends its ways; *hard* only when
their average lies beyond HARD_FACTOR times the limits for single submissions, where no odd hardware is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from node.database import Database
from protocol.envelope import Signed
from protocol.errors import DataDirError
from protocol.records import Submission, Tolerance
from protocol.sequential import Bets, is_unlikely, observe

SOFT_RATE: Final = 1e-6
"""Chance that an honest node is ever suspected, in its whole life."""
HARD_RATE: Final = 1e-9
HARD_FACTOR: Final = 8.0
HARD_MEAN_NATS: Final = 0.1
"""Both as for single submissions (node.validator.checks)."""
MAX_COUNTED: Final = 1 << 16
"""So many submissions are known as counted, the newest, and each contributor's latest one however old it is."""
_MEASUREMENTS: Final = ("margins", "mantissas", "log-probability errors")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS suspicions (contributor BLOB PRIMARY KEY, submission BLOB NOT NULL, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS counted (seq INTEGER PRIMARY KEY AUTOINCREMENT, submission BLOB UNIQUE NOT NULL);
"""


@dataclass(frozen=True)
class Suspicion:
    """Why a contributor is suspected, and whether no hardware explains it."""

    reason: str
    hard: bool


class _State(msgspec.Struct, frozen=True):
    """One contributor's bets, soft and hard, on each of _MEASUREMENTS."""

    soft: tuple[Bets, Bets, Bets] = (Bets(), Bets(), Bets())
    hard: tuple[Bets, Bets, Bets] = (Bets(), Bets(), Bets())


class Suspicions:
    """Tests every contributor for ever. A change is on disk when its method returns. Raises DataDirError."""

    def __init__(self, path: Path) -> None:
        self._db = Database(path, _SCHEMA, name="the docket")

    def close(self) -> None:
        self._db.close()

    def weigh(
        self, submission: Signed[Submission], tolerance: Tolerance, *, evidence: Sequence[tuple[float, float, float]]
    ) -> Suspicion | None:
        """What `update` is going to say. Nothing is written."""
        return _suspicion(self._counted(submission, tolerance, evidence=evidence)[0])

    def update(
        self, submission: Signed[Submission], tolerance: Tolerance, *, evidence: Sequence[tuple[float, float, float]]
    ) -> Suspicion | None:
        """Take in a submission's evidence for each prompt, as node.validator.measure gives it; what is suspected now.

        The same submission again, after a crash or where its verdict found no room, is not counted again.
        """
        state, is_new = self._counted(submission, tolerance, evidence=evidence)
        if is_new:
            with self._db.transaction():
                self._db.change(
                    "INSERT OR REPLACE INTO suspicions VALUES (?, ?, ?)",
                    *(submission.author.public_key, submission.id, msgspec.msgpack.encode(state)),
                )
                self._db.change("INSERT INTO counted (submission) VALUES (?)", submission.id)
                self._db.change("DELETE FROM counted WHERE seq <= (SELECT MAX(seq) FROM counted) - ?", MAX_COUNTED)
        return _suspicion(state)

    def _counted(
        self, submission: Signed[Submission], tolerance: Tolerance, *, evidence: Sequence[tuple[float, float, float]]
    ) -> tuple[_State, bool]:
        """The contributor's bets with this submission in them, and whether that is new."""
        state = self._read(submission.author.public_key)
        if not evidence or self._is_counted(submission):
            return state, False
        return _advance(state, tolerance, evidence=evidence), True

    def _is_counted(self, submission: Signed[Submission]) -> bool:
        query = (
            "SELECT 1 FROM counted WHERE submission = ?"
            " UNION SELECT 1 FROM suspicions WHERE submission = ? AND contributor = ?"
        )
        return self._db.row(query, submission.id, submission.id, submission.author.public_key) is not None

    def _read(self, contributor: bytes) -> _State:
        row = self._db.row("SELECT state FROM suspicions WHERE contributor = ?", contributor)
        if row is None:
            return _State()
        try:
            return msgspec.msgpack.decode(row[0], type=_State)
        except msgspec.MsgspecError as error:
            raise DataDirError(
                f"the docket {self._db.path} is damaged: {error}",
                hint=f"move {self._db.path} away and start the node again",
            ) from error


def _advance(state: _State, tolerance: Tolerance, *, evidence: Sequence[tuple[float, float, float]]) -> _State:
    margins, mantissas, shifts = zip(*evidence, strict=True)
    return _State(
        soft=(
            observe(state.soft[0], margins, bound=tolerance.honest_margin),
            observe(state.soft[1], mantissas, bound=tolerance.honest_mantissa),
            observe(state.soft[2], shifts, bound=tolerance.honest_logprob_shift),
        ),
        hard=(
            observe(state.hard[0], margins, bound=HARD_FACTOR * tolerance.max_mean_margin),
            observe(state.hard[1], mantissas, bound=HARD_FACTOR * tolerance.max_rollout_mantissa_mean),
            observe(state.hard[2], shifts, bound=HARD_MEAN_NATS + HARD_FACTOR * tolerance.max_logprob_shift),
        ),
    )


def _suspicion(state: _State) -> Suspicion | None:
    for hard, bets, rate in ((True, state.hard, HARD_RATE), (False, state.soft, SOFT_RATE)):
        for name, bet in zip(_MEASUREMENTS, bets, strict=True):
            if is_unlikely(bet, rate / len(_MEASUREMENTS)):
                bound = "rounding explains" if hard else "honest machines have"
                return Suspicion(f"the {name} of its answers to {bet.values} prompts are larger than {bound}", hard)
    return None

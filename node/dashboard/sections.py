"""The parts of the page, as JSON that is made anew only where something changed.

The status board is looked at every time, the ledger when it has grown. What grows with the run (steps, submissions) is
bounded in node.dashboard.world; the board's long lists, which the ledger has too, are left out.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from node.dashboard.sources import Sources
from node.dashboard.world import COLUMNS, MAX_STEPS, contributor_rows, run_facts, series_rows, submission_rows
from node.status import StatusBoard
from protocol.ledger import LedgerState

SERIES: Final = "series"
MAX_TIMELINE: Final = 200
MAX_PEERS: Final = 64
_ELSEWHERE: Final = frozenset({"metrics", "rewards", "verdicts", "contributors", "evaluations"})
"""Details of the board that other sections show, from the ledger; long ones."""


class Sections:
    """`refresh`, then `text` of whatever it names. Used by one task at a time."""

    def __init__(self, board: StatusBoard, sources: Sources) -> None:
        self._board = board
        self._sources = sources
        self._texts: dict[str, bytes] = {}
        self._rows: list[list[float | None]] = []
        self._seen: tuple[int, int] | None = None
        self._trained = -1

    @property
    def names(self) -> list[str]:
        return [*self._texts, SERIES]

    def refresh(self) -> list[str]:
        """Look at everything; the names of what changed. Takes milliseconds, of any thread."""
        changed = self._changed({"node": self._node(), "evaluations": self._evaluations()})
        state = self._sources.ledger()
        if state is None:
            return changed + self._changed({"run": run_facts(None, self._sources.run)})
        seen = (id(state), state.length)
        if seen == self._seen:
            return changed
        self._seen = seen
        return changed + self._ledger(state)

    def text(self, name: str) -> bytes:
        """A section's JSON."""
        return self._texts[name]

    def steps(self, sent: int) -> tuple[bytes, int]:
        """The steps behind the first `sent` ones, and how many there are then; all of them where they were thinned."""
        first = sent if sent <= len(self._rows) < MAX_STEPS else 0
        rows = self._rows[first:]
        return msgspec.json.encode({"first": first, "columns": COLUMNS, "rows": rows}), len(self._rows)

    def _ledger(self, state: LedgerState) -> list[str]:
        changed = self._changed(
            {
                "run": run_facts(state, self._sources.run),
                "contributors": contributor_rows(state),
                "submissions": submission_rows(state),
            }
        )
        if len(state.trained) == self._trained:
            return changed
        self._trained = len(state.trained)
        self._rows = series_rows(state, self._rows)
        return [*changed, SERIES]

    def _changed(self, sections: dict[str, Any]) -> list[str]:
        texts = {name: msgspec.json.encode(value) for name, value in sections.items()}
        changed = [name for name, text in texts.items() if self._texts.get(name) != text]
        self._texts |= texts
        return changed

    def _node(self) -> dict[str, Any]:
        shown = self._board.snapshot(without=_ELSEWHERE)
        del shown["now_ms"]  # changes always; the browser has a clock
        shown["timeline"] = shown["timeline"][-MAX_TIMELINE:]
        discovery = shown["details"].get("discovery")
        if isinstance(discovery, dict) and "peers" in discovery:
            discovery["peers"] = discovery["peers"][:MAX_PEERS]
        return shown

    def _evaluations(self) -> list[list[Any]]:
        """Step, pass@1 on held-out prompts, and the ends of its 95 % interval."""
        rows = self._board.detail("evaluations") or []
        return [
            [row["step"], score["value"], score["low"], score["high"]]
            for row in rows
            for score in row.get("pass_at", ())
            if score["k"] == 1
        ]

"""An environment of several turns that the demo's policy can play: one row of digits after another."""

from __future__ import annotations

from dataclasses import dataclass

from environments.sort_digits import SortDigits


@dataclass(frozen=True)
class RowAfterRow(SortDigits):
    """Whatever is answered, another row follows, twice; the last answer counts."""

    name = "row-after-row"
    max_turns = 3

    def reply(self, task, transcript):
        if transcript[-1]["content"].endswith("9"):
            return None  # so that answers differ in their number of turns
        said = sum(map(ord, transcript[-1]["content"])) + len(transcript)
        return f"s{said % 1000}="

"""Sections of a benchmark's result: settings, tables, statements; for a terminal, as JSON and for the documentation.

`--write FILE` puts each section between its two marks in a Markdown file, so that no figure is ever copied by hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.seeds import Verdict
from protocol.atomic import write_atomically
from protocol.errors import ConfigError

_WIDTH = 128
_END = "<!-- end -->"
_STYLES = {"reproduced": "green", "not reproduced": "red", "undecided": "yellow"}


@dataclass(frozen=True)
class Statement:
    """A claim, and what the figures say to it."""

    claim: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Grid:
    """A table: columns, and as many texts in each row. The first column says what a row is."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def markdown(self) -> Iterator[str]:
        yield f"{self.title[:1].upper()}{self.title[1:]}:"
        yield ""
        yield _line(self.columns)
        yield _line(["---", *["---:"] * (len(self.columns) - 1)])
        yield from map(_line, self.rows)


@dataclass
class Section:
    """One part of a benchmark."""

    name: str
    """As `--only` and the marks in the documentation have it."""
    setting: str
    """What was run, so that it can be run again."""
    grids: list[Grid] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """Every single figure, those of each seed among them."""

    def show(self, console: Console) -> None:
        console.print(Text(f"\n{self.name}: {self.setting}"))
        for grid in self.grids:
            console.print(grid.rich())
        table = Table("statement", "verdict", "figures")
        for one in self.statements:
            table.add_row(Text(one.claim), Text(one.verdict, style=_STYLES[one.verdict]), Text(one.evidence))
        if self.statements:
            console.print(table)

    def markdown(self, *, command: str, date: str) -> str:
        """The section's lines in the documentation."""
        lines = textwrap.wrap(
            f"`{command}`, {date}. {self.setting}", _WIDTH, break_long_words=False, break_on_hyphens=False
        )
        for grid in self.grids:
            lines += ["", *grid.markdown()]
        if self.statements:
            lines += ["", _line(["statement", "verdict", "figures"]), _line(["---"] * 3)]
            lines += [_line([one.claim, f"**{one.verdict}**", one.evidence]) for one in self.statements]
        return "\n".join(lines)


def write_sections(path: Path, sections: Sequence[Section], *, bench: str, options: str, date: str) -> None:
    """Replace the sections of a Markdown file that stand between `<!-- bench NAME SECTION -->` and `<!-- end -->`.

    Raises ConfigError where the file has no such marks; then nothing is changed.
    """
    text = path.read_text(encoding="utf-8")
    for section in sections:
        begin = f"<!-- bench {bench} {section.name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(_END)
        if not (found and closed):
            raise ConfigError(
                f"{path} has no place for {section.name}",
                hint=f"put these two lines where it belongs: {begin} and {_END}",
            )
        part = "" if section.name == bench else f" --only {section.name}"
        command = f"python -m bench {bench}{part}{options}"
        text = f"{before}{begin}\n\n{section.markdown(command=command, date=date)}\n\n{_END}{after}"
    write_atomically(path, text.encode())


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""Rows of the ledger for a terminal: a table, or what is long in lines of its own under each row, where it is narrow.

Texts come from others: they are shown escaped and never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.ledger.rows import flat
from node.logs import printable

LONG_CHARS: Final = 40
"""What a table must leave to each column of long texts; otherwise they go under the row."""
GAP: Final = "  "

Row = tuple[Sequence[Any], Sequence[str]]
"""Cells, and long texts."""


def print_rows(console: Console, titles: Sequence[str], long_titles: Sequence[str], rows: Sequence[Row]) -> None:
    """A table with the long texts in its last columns if the console is wide enough for them."""
    lines = [[*titles], *([str(cell) for cell in cells] for cells, _ in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if sum(widths) + len(GAP) * len(widths) + LONG_CHARS * len(long_titles) <= console.width:
        table = Table(*titles, *long_titles, box=None)
        for cells, texts in rows:
            table.add_row(*(Text(printable(str(cell))) for cell in (*cells, *texts)))
        return console.print(table)
    texts_of = [(), *(texts for _, texts in rows)]
    for cells, texts in zip(lines, texts_of, strict=True):
        row = GAP.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for line in (row, *(f"{GAP}{GAP}{text}" for text in texts if text)):
            console.print(Text(printable(line)), soft_wrap=True)


def print_contributors(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    titles = ("rank", "standing", "mature", "maturing", "forfeited", "accepted", "rejected")
    made: list[Row] = []
    for row in map(flat, rows):
        amounts = (row["mature"], row["maturing"], row["forfeited"])
        cells = (row["rank"], row["standing"], *amounts, row["accepted"], row["rejected"])
        made.append((cells, (row["peer_id"], row["reason"] or row["reasons"])))
    print_rows(console, titles, ("contributor", "why"), made)


def print_submissions(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    titles = ("submission", "step", "index", "state", "tokens", "credits", "", "trained")
    made: list[Row] = []
    for each in rows:
        used = "" if each["used_in"] is None else f"step {each['used_in']}"
        what = (each["id"][:12], each["step"], each["index"], each["state"])
        made.append(((*what, each["tokens"], each["credits"], each["worth"], used), (each["reason"],)))
    print_rows(console, titles, ("reason",), made)


def print_kept(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """What a contributor keeps of others' words for its work (node.receipts)."""
    titles = ("submission", "step", "index", "state", "verdicts", "trained")
    made: list[Row] = []
    for each in rows:
        used = "" if each["used_in"] is None else f"step {each['used_in']}"
        what = (each["id"][:12], each["step"], each["index"], each["state"])
        made.append(((*what, len(each["validators"]), used), (each["relay"],)))
    print_rows(console, titles, ("receipt of relay",), made)

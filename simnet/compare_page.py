"""compare.html, and the same as a table on a terminal: two simulations' reports side by side.

Self-contained like a report's page, and as careful with what comes from nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from simnet.charts import Line, Mark, escape, line_chart, ticks
from simnet.compare import Comparison, Row
from simnet.markup import STYLES, framed, table
from simnet.page import fill_template, smoothed
from simnet.page import subtitle as report_subtitle
from simnet.summary import Report

MAX_TEXT_CHARS = 300
_RICH = {"better": "green", "worse": "red", "": ""}
_SIGNS = {"better": "▲ better", "worse": "▼ worse", "": ""}


def render_comparison(comparison: Comparison) -> str:
    """The whole page."""
    a, b = comparison.a, comparison.b
    return fill_template(
        "compare.html",
        title=escape(f"{a.scenario} against {b.scenario}: simulations compared"),
        heading=escape(a.title or a.scenario)
        if comparison.same_scenario
        else escape(f"{a.scenario} against {b.scenario}"),
        warning="" if comparison.same_scenario else _warning(a, b),
        a=_side("A", comparison.a_path, a),
        b=_side("B", comparison.b_path, b),
        reward=_reward(a, b),
        groups="".join(_groups(comparison.rows)),
    )


def print_comparison(comparison: Comparison) -> None:
    """The same figures as a table."""
    console = Console()
    if not comparison.same_scenario:
        console.print(Text(f"these are two scenarios: {comparison.a.scenario} and {comparison.b.scenario}", "yellow"))
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for name, path in (("A", comparison.a_path), ("B", comparison.b_path)):
        console.print(Text(f"{name} {_printable(path)}"), soft_wrap=True)
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("change", justify="right")
    for group, rows in groupby(comparison.rows, key=lambda row: row.group):
        shown.add_row(Text(group, "bold"))
        for row in rows:
            texts = (_plain(row.a), _plain(row.b), Text(row.change or row.judged, _RICH[row.judged]))
            shown.add_row(Text(f"  {_printable(row.name)}"), *texts)
    console.print(shown)


def _plain(text: str) -> Text:
    return Text(_printable(text))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_TEXT_CHARS])


def _warning(a: Report, b: Report) -> str:
    return (
        f'<p class="problem">These are two scenarios, {escape(a.scenario)} and {escape(b.scenario)}: '
        "what differs may be theirs.</p>"
    )


def _side(name: str, path: str, report: Report) -> str:
    badge = (
        '<span class="badge good">✓ passed</span>' if report.passed else '<span class="badge bad">✗ not passed</span>'
    )
    return (
        f'<h2>{name} {badge}</h2>{report_subtitle(report)}<div class="mono address">{escape(path, max_chars=300)}</div>'
    )


def _reward(a: Report, b: Report) -> str:
    curves = [
        [(float(step), mean) for step, mean in enumerate(one.reward, start=1) if mean is not None] for one in (a, b)
    ]
    if not any(curves):
        return '<p class="none">No step was trained.</p>'
    x_end = max(2.0, *(x for curve in curves for x, _ in curve))
    y_end = max(1.0, *(y for curve in curves for _, y in curve))
    lines = [Line(style, smoothed(curve)) for style, curve in zip(("smooth", "other"), curves, strict=True)]
    means = [{x: f"{y:.3f}" for x, y in curve} for curve in curves]
    hover = [
        Mark(x, f"step {x:.0f}: A {means[0].get(x, '–')}, B {means[1].get(x, '–')}")
        for x in sorted({x for curve in curves for x, _ in curve})
    ]
    plot = line_chart(lines, x_end=x_end, y_end=y_end, hover=hover)
    labels = [(x / x_end, f"{x:g}") for x in ticks(x_end)]
    return framed(plot, [f"{y_end * part / 4:.2f}" for part in range(5)], labels, "training step, smoothed")


def _groups(rows: list[Row]) -> Iterator[str]:
    for group, members in groupby(rows, key=lambda row: row.group):
        cells = [[escape(row.name), _value(row.a), _value(row.b), _change(row)] for row in members]
        yield (
            f"<section><h2>{escape(group[:1].upper() + group[1:])}</h2>"
            + table(["", "A", "B", "change"], cells, none="", numeric=(1, 2, 3))
            + "</section>"
        )


def _value(text: str) -> str:
    style = STYLES.get(text, "")
    return f'<span class="{style}">{escape(text)}</span>' if style else escape(text)


def _change(row: Row) -> str:
    style = {"better": "good", "worse": "bad"}.get(row.judged, "")
    return f'<span class="{style}">{escape(row.change)} {_SIGNS[row.judged]}</span>'

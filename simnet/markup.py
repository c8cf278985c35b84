"""Pieces of the pages that simnet writes: tables, charts in their frames, and numbers as people read them.

Cells are HTML already: whoever fills them escapes what comes from nodes (simnet.charts.escape).
"""

from __future__ import annotations

from collections.abc import Sequence

from simnet.charts import ticks

MIN_MINUTES_AXIS_S = 180
STYLES = {"passed": "good", "failed": "bad", "could not tell": "warn"}
_SIGNS = {"passed": "✓", "failed": "✗", "could not tell": "?"}


def format_bytes(count: float) -> str:
    """A number of bytes with a unit that keeps it short."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_seconds(seconds: float) -> str:
    """A duration as people say it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def format_delay(seconds: float | None) -> str:
    """A short duration, to about two digits."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else format_seconds(seconds)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, none: str, numeric: tuple[int, ...] = ()) -> str:
    """A table, or `none` in its place."""
    if not rows:
        return f'<p class="none">{none}</p>'
    styles = [' class="number"' if index in numeric else "" for index in range(len(head))]
    top = "".join(f"<th{style}>{name}</th>" for name, style in zip(head, styles, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{style}>{cell}</td>' for cell, style in zip(row, styles, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def framed(plot: str, y_labels: Sequence[str], x_labels: Sequence[tuple[float, str]], x_name: str) -> str:
    """A plot between its labels; y labels from the bottom up."""
    left = "".join(f"<span>{label}</span>" for label in reversed(y_labels))
    return (
        f'<div class="frame"><div class="y">{left}</div>{plot}<div></div>{axis(x_labels)}</div>'
        f'<div class="axis-name">{x_name}</div>'
    )


def axis(labels: Sequence[tuple[float, str]]) -> str:
    """Labels below a chart, each at its share of the width."""
    spans = "".join(f'<span style="left:{100 * min(1.0, at):.2f}%">{text}</span>' for at, text in labels)
    return f'<div class="axis">{spans}</div>'


def time_ticks(x_end_s: float) -> tuple[list[tuple[float, str]], str]:
    """Places and texts of the ticks of a time axis, and their unit."""
    unit_s, unit = (1, "seconds") if x_end_s < MIN_MINUTES_AXIS_S else (60, "minutes")
    return [(unit_s * at / x_end_s, f"{at:g}") for at in ticks(x_end_s / unit_s)], unit


def gauge(share: float) -> str:
    """A bar that is filled to a share of its width."""
    return f'<div class="gauge"><span style="width:{100 * max(0.0, min(1.0, share)):.1f}%"></span></div>'


def tick(met: bool) -> str:
    return '<span class="good" aria-label="met">✓</span>' if met else '<span class="bad" aria-label="not met">✗</span>'


def sign(outcome: str) -> str:
    """An oracle's outcome as a sign that is read out as words."""
    return f'<span class="{STYLES[outcome]} sign" aria-label="{outcome}">{_SIGNS[outcome]}</span>'


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"

"""Charts as inline SVG that stretch to the width they get: words stay in HTML, so that they can be read on a phone.

Every text that comes in is escaped here. No scripts; what hovering shows is a <title>.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_HOVER_COLUMNS = 240
_WIDTH = 1000.0
_HEIGHT = 100.0


@dataclass(frozen=True)
class Line:
    """A line of a chart; `style` is its CSS class."""

    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Interval:
    """A measured point and the ends of its interval, drawn as a dot on an upright line."""

    x: float
    y: float
    low: float
    high: float
    title: str


@dataclass(frozen=True)
class Mark:
    """Something that happened at one place on the x axis."""

    x: float
    title: str


@dataclass(frozen=True)
class Bar:
    """What a node did from `start` to `end`."""

    start: float
    end: float
    kind: str
    what: str


def escape(text: object, *, max_chars: int = 200) -> str:
    """Text that cannot be anything but text: cut, what does not print spelled out, HTML escaped."""
    shown = str(text)[: max_chars + 1]
    shown = shown if len(shown) <= max_chars else shown[: max_chars - 1] + "…"
    return html.escape("".join(char if char.isprintable() else repr(char)[1:-1] for char in shown))


def line_chart(
    lines: Sequence[Line],
    *,
    x_end: float,
    y_end: float,
    hover: Sequence[Mark],
    marks: Sequence[Mark] = (),
    intervals: Sequence[Interval] = (),
) -> str:
    """Lines over [0, x_end] × [0, y_end]. `hover` gives columns with a title, `marks` vertical lines."""
    grid = "".join(f'<path class="grid" d="M0 {y:g}H{_WIDTH:g}"/>' for y in (0, 25, 50, 75, 100))
    paths = "".join(
        f'<path class="line {escape(line.style)}" d="{_path(line.points, x_end, y_end)}"/>'
        for line in lines
        if line.points
    )
    strokes = "".join(
        f'<path class="mark" d="M{_x(mark.x, x_end)} 0V{_HEIGHT:g}"><title>{escape(mark.title)}</title></path>'
        for mark in marks
    )
    columns = "".join(_columns(hover, x_end))
    shapes = "".join(_interval(one, x_end, y_end) for one in intervals)
    return _svg("plot", _HEIGHT, grid + paths + strokes + columns + shapes)


def bar_row(bars: Sequence[Bar], *, x_end: float, marks: Sequence[Mark] = ()) -> str:
    """One node's row of the timeline."""
    shapes = "".join(_rect(bar, x_end) for bar in merge_bars(bars, min_width=x_end / 300))
    strokes = "".join(
        f'<path class="fault" d="M{_x(mark.x, x_end)} 0V20"><title>{escape(mark.title)}</title></path>'
        for mark in marks
    )
    return _svg("bars", 20, shapes + strokes)


def spark(values: Sequence[float], *, title: str) -> str:
    """A small line over time from 0 up, to stand in a table's cell."""
    end = max([*values, 1e-9])
    points = [(float(at), value) for at, value in enumerate(values)]
    line = f'<path class="line" d="{_path(points, max(1.0, len(values) - 1.0), end)}"/>' if len(values) > 1 else ""
    hover = f'<rect class="hover" width="{_WIDTH:g}" height="{_HEIGHT:g}"><title>{escape(title)}</title></rect>'
    return _svg("spark", _HEIGHT, line + hover)


def merge_bars(bars: Sequence[Bar], *, min_width: float) -> list[Bar]:
    """Join what is too short to see with its neighbours into `mixed` bars, so that a row stays small."""
    merged: list[Bar] = []
    group: list[Bar] = []
    for bar in bars:
        if group and not _joins(group, bar, min_width):
            merged.append(_mixed(group))
            group = []
        group.append(bar)
    return [*merged, _mixed(group)] if group else merged


def ticks(end: float, *, count: int = 6) -> list[float]:
    """Round numbers from 0 to about `end`."""
    if end <= 0:
        return [0.0]
    rough = end / count
    size = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 0.1
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10, 20) if size * factor >= rough)
    return [step * index for index in range(int(end / step) + 1)]


def round_up(value: float) -> float:
    """The next number whose quarters are short: the end of an axis of counts."""
    size = 10.0 ** max(0, len(str(int(value))) - 1)
    return next(size * factor for factor in (1, 2, 4, 6, 8, 10, 12, 20) if size * factor >= value)


def _interval(one: Interval, x_end: float, y_end: float) -> str:
    x = _x(one.x, x_end)
    title = f"<title>{escape(one.title)}</title>"
    return (
        f'<path class="interval" d="M{x} {_y(one.low, y_end)}V{_y(one.high, y_end)}">{title}</path>'
        f'<path class="dot" d="M{x} {_y(one.y, y_end)}h0.01">{title}</path>'  # a round dot whatever the stretch
    )


def _mixed(bars: Sequence[Bar]) -> Bar:
    if len(bars) == 1:
        return bars[0]
    start, end = bars[0].start, bars[-1].end
    working = sum(bar.end - bar.start for bar in bars if bar.kind == "working")
    share = working / (end - start) if end > start else 0.0
    return Bar(start, end, f"mixed{round(share * 4)}", f"{len(bars)} short spells, working {share:.0%} of the time")


def _joins(group: Sequence[Bar], bar: Bar, min_width: float) -> bool:
    both_short = group[-1].end - group[0].start < min_width and bar.end - bar.start < min_width
    return both_short and bar.start <= group[-1].end


def _rect(bar: Bar, x_end: float) -> str:
    width = max(0.4, (bar.end - bar.start) / x_end * _WIDTH) if x_end > 0 else 0.4
    title = f"{bar.what}, {bar.end - bar.start:.1f} s"
    return (
        f'<rect class="{escape(bar.kind)}" x="{_x(bar.start, x_end)}" y="2" width="{width:.2f}" height="16">'
        f"<title>{escape(title)}</title></rect>"
    )


def _columns(hover: Sequence[Mark], x_end: float) -> Iterator[str]:
    stride = max(1, -(-len(hover) // MAX_HOVER_COLUMNS))
    chosen = hover[::stride]
    for index, mark in enumerate(chosen):
        left = 0.0 if index == 0 else (chosen[index - 1].x + mark.x) / 2
        right = x_end if index == len(chosen) - 1 else (mark.x + chosen[index + 1].x) / 2
        x, end = float(_x(left, x_end)), float(_x(right, x_end))
        yield (
            f'<rect class="hover" x="{x:.2f}" y="0" width="{max(0.0, end - x):.2f}" height="{_HEIGHT:g}">'
            f"<title>{escape(mark.title)}</title></rect>"
        )


def _path(points: Sequence[tuple[float, float]], x_end: float, y_end: float) -> str:
    steps = (f"{_x(x, x_end)} {_y(y, y_end)}" for x, y in points)
    return "M" + "L".join(steps)


def _y(y: float, y_end: float) -> str:
    return f"{_HEIGHT - _HEIGHT * min(1.0, max(0.0, y / y_end)):.2f}"


def _x(x: float, x_end: float) -> str:
    return f"{_WIDTH * min(1.0, max(0.0, x / x_end)) if x_end > 0 else 0.0:.2f}"


def _svg(style: str, height: float, content: str) -> str:
    box = f'viewBox="0 0 {_WIDTH:g} {height:g}" preserveAspectRatio="none"'
    return f'<svg class="{style}" {box} aria-hidden="true">{content}</svg>'

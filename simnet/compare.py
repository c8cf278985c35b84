"""Two simulations' reports side by side: figures and their change, oracles, hops, waiting; as a page and as a table.

Works on report.json alone, so that reports can be kept, sent and compared anywhere. They are checked like anything that
comes from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from protocol.atomic import write_atomically
from protocol.errors import ConfigError
from simnet.files import bytes_of
from simnet.markup import format_bytes, format_delay, format_seconds
from simnet.summary import FORMAT, Report

MAX_REPORT_BYTES: Final = 64 << 20
NOTABLE: Final = 0.05
"""A smaller change than this share is nobody's gain or loss: two runs of one scenario differ by as much."""

MOST: Final = 2**53
"""Of any figure: more is nothing that was counted or timed, and would overflow in sums."""

MIN_SHOWN_SHARE: Final = 0.01
"""Of its time that a role waited for something."""

Better = Literal["more", "less", ""]
Judged = Literal["better", "worse", ""]


class Row(Struct, frozen=True):
    """One line: a figure of both reports, and what changed from the first to the second."""

    group: str
    name: str
    a: str
    b: str
    change: str = ""
    judged: Judged = ""


class Comparison(Struct, frozen=True):
    """Two reports, and what they have in common to be laid side by side."""

    a_path: str
    b_path: str
    a: Report
    b: Report
    rows: list[Row]

    @property
    def same_scenario(self) -> bool:
        return self.a.scenario == self.b.scenario


@dataclass(frozen=True)
class _Figure:
    group: str
    name: str
    value: Callable[[Report], float | None]
    text: Callable[[float], str]
    better: Better = ""


def compare_reports(a: Path, b: Path) -> Comparison:
    """Read two reports and lay them side by side. Raises ConfigError."""
    a_path, b_path = _path(a), _path(b)
    first, second = load_report(a_path), load_report(b_path)
    rows = list(_rows(first, second))
    groups = list(dict.fromkeys(row.group for row in rows))
    return Comparison(str(a_path), str(b_path), first, second, sorted(rows, key=lambda row: groups.index(row.group)))


def load_report(path: Path) -> Report:
    """A report.json. Raises ConfigError that says what is wrong with it."""
    try:
        data = bytes_of(path, "a report", max_bytes=MAX_REPORT_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="name a report.json, or the directory that holds one"
        ) from error
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise ConfigError(
                f"{path} has format {found}, and this version reads {FORMAT}",
                hint="run the scenario again with this version: intellect-node simnet run NAME",
            )
        report = msgspec.json.decode(data, type=Report, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a simulation's report: {str(error)[:200]}") from error
    place = _beyond(msgspec.to_builtins(report), "")
    if place:
        raise ConfigError(f"{path} is not a simulation's report: {place[1:81]} is more than anybody counts or times")
    return report


def _beyond(value: Any, place: str) -> str:
    """Where a number lies that no simulation gives; empty where there is none."""
    if isinstance(value, dict):
        return next(filter(None, (_beyond(inner, f"{place}.{key}") for key, inner in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_beyond(inner, place) for inner in value)), "")
    return place if isinstance(value, int | float) and not -MOST <= value <= MOST else ""


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the page. Raises DataDirError."""
    from simnet.compare_page import render_comparison

    write_atomically(path, render_comparison(comparison).encode("utf-8"))


def shown_as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain values: where the reports lie, and every line."""
    return {
        "a": comparison.a_path,
        "b": comparison.b_path,
        "same_scenario": comparison.same_scenario,
        "rows": msgspec.to_builtins(comparison.rows),
    }


class _Format(Struct):
    format: int = 1


def _path(given: Path) -> Path:
    return given / "report.json" if given.is_dir() else given


def _rows(a: Report, b: Report) -> Iterator[Row]:
    yield Row("outcome", "passed", _yes(a.passed), _yes(b.passed), judged=_judge_bool(a.passed, b.passed))
    yield Row("outcome", "outcome", a.outcome, b.outcome)
    for figure in FIGURES:
        yield _row(figure, a, b)
    yield from _oracles(a, b)
    yield from (_row(figure, a, b) for figure in _hops(a, b))
    yield from (_row(figure, a, b) for figure in _waits(a, b))
    yield from (_row(figure, a, b) for figure in _relays(a, b))


def _row(figure: _Figure, a: Report, b: Report) -> Row:
    first, second = figure.value(a), figure.value(b)
    a_text, b_text = ("–" if value is None else figure.text(value) for value in (first, second))
    row = Row(figure.group, figure.name, a_text, b_text)
    if first is None or second is None:
        return row
    judged = _judge(first, second, figure.better)
    return msgspec.structs.replace(row, change=_change(first, second), judged=judged)


def _change(first: float, second: float) -> str:
    if first == second:
        return "="
    if not first:
        return f"{second - first:+.3g}"
    change = (second - first) / abs(first)
    return f"{change:+.0%}" if abs(change) < 10 else f"× {second / first:.3g}"


def _judge(first: float, second: float, better: Better) -> Judged:
    scale = max(abs(first), abs(second))
    if not better or not scale or abs(second - first) / scale < NOTABLE:
        return ""
    return "better" if (second > first) == (better == "more") else "worse"


def _judge_bool(first: bool, second: bool) -> Judged:
    return "" if first == second else "better" if second else "worse"


def _oracles(a: Report, b: Report) -> Iterator[Row]:
    ours, theirs = ({one.name: one.outcome for one in report.oracles} for report in (a, b))
    for name in dict.fromkeys([*ours, *theirs]):
        first, second = ours.get(name), theirs.get(name)
        judged: Judged = ""
        if first and second and first != second:
            if second == "failed":
                judged = "worse"
            elif (first, second) == ("failed", "passed"):  # that nobody can tell any more is no gain
                judged = "better"
        yield Row("oracles", name, first or "–", second or "–", judged=judged)


def _hops(a: Report, b: Report) -> Iterator[_Figure]:
    for what, name in _names((hop.what, hop.name) for report in (a, b) for hop in report.hops):
        for share in ("p50_s", "p99_s"):
            value = partial(_hop_share, what=what, name=name, share=share)
            yield _Figure(f"{what}'s hops", f"{name}, {share[:3]}", value, format_delay, "less")


def _waits(a: Report, b: Report) -> Iterator[_Figure]:
    for role, what in _names((wait.role, wait.what) for report in (a, b) for wait in report.waits):
        value = partial(_wait_share, role=role, what=what)
        if max(value(a) or 0.0, value(b) or 0.0) < MIN_SHOWN_SHARE:
            continue
        yield _Figure("waiting, of all its time", f"{role} for {what}", value, _percent)


def _relays(a: Report, b: Report) -> Iterator[_Figure]:
    for name in dict.fromkeys([*a.bytes_by_relay, *b.bytes_by_relay]):
        yield _Figure("bytes", f"{name} gave out", partial(_given_out, name=name), format_bytes)


def _hop_share(report: Report, *, what: str, name: str, share: str) -> float | None:
    found = next((hop for hop in report.hops if (hop.what, hop.name) == (what, name)), None)
    return getattr(found, share) if found else None


def _wait_share(report: Report, *, role: str, what: str) -> float | None:
    return next((wait.share for wait in report.waits if (wait.role, wait.what) == (role, what)), None)


def _given_out(report: Report, *, name: str) -> float | None:
    found = report.bytes_by_relay.get(name)
    return found.bytes_out if found else None


def _names(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(pairs))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _count(value: float) -> str:
    return f"{value:.0f}"


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _wire_bytes(report: Report) -> float:
    return float(sum(relay.bytes_out for relay in report.bytes_by_relay.values()))


def _per_rollout(report: Report) -> float | None:
    """Bytes that relays gave out for each rollout that was trained."""
    rollouts = sum(piece.rollouts for piece in report.throughput.pieces)
    return _wire_bytes(report) / rollouts if rollouts else None


def _patched_share(report: Report) -> float | None:
    """Of what policies stand for, how much came as patches."""
    found = report.downloads
    stood_for = found.patched_bytes + found.saved_bytes + found.full_bytes
    return (found.patched_bytes + found.saved_bytes) / stood_for if stood_for else None


def _per_step(report: Report, whole: float) -> float | None:
    """A run that was cut short takes less of everything, and that is no gain."""
    return whole / report.steps if report.steps else None


def _cpu_s(report: Report) -> float:
    return sum(node.cpu_s for node in report.nodes)


FIGURES: Final[Sequence[_Figure]] = (
    _Figure("learning", "steps", lambda report: report.steps, _count, "more"),
    _Figure("learning", "reward, last tenth", lambda report: report.reward_last_tenth, lambda v: f"{v:.3f}", "more"),
    _Figure("learning", "reward gained", lambda report: report.reward_gain, lambda v: f"{v:+.3f}", "more"),
    _Figure("speed", "time", lambda report: report.wall_s, format_seconds),
    _Figure("speed", "time for each step", lambda report: _per_step(report, report.wall_s), format_delay, "less"),
    _Figure("speed", "steps a minute", lambda report: report.throughput.steps_per_min, _hundredths, "more"),
    _Figure("speed", "rollouts a second", lambda report: report.throughput.rollouts_per_s, _hundredths, "more"),
    _Figure("speed", "tokens a second", lambda report: report.throughput.tokens_per_s, _count, "more"),
    _Figure(
        "speed", "trainer waits, of waiting and training", lambda report: report.trainer_wait_fraction, _percent, "less"
    ),
    _Figure("speed", "CPU time", _cpu_s, format_seconds),
    _Figure("speed", "CPU time for each step", lambda report: _per_step(report, _cpu_s(report)), format_delay, "less"),
    _Figure("trust", "accepted", lambda report: report.accepted, _count),
    _Figure("trust", "rejected", lambda report: sum(report.rejected.values()), _count),
    _Figure("trust", "honest work rejected", lambda report: report.honest_rejected, _count, "less"),
    _Figure("trust", "cheats", lambda report: report.cheats, _count),
    _Figure("trust", "cheats evicted", lambda report: report.cheats_evicted, _count),
    _Figure("trust", "cheats' work accepted", lambda report: report.cheats_accepted, _count, "less"),
    _Figure("bytes", "relays gave out", _wire_bytes, format_bytes),
    _Figure("bytes", "for each trained rollout", _per_rollout, format_bytes, "less"),
    _Figure("bytes", "policies that came as patches", _patched_share, _percent, "more"),
    _Figure("machine", "unexpected ends", lambda report: len(report.unexpected_exits), _count, "less"),
    _Figure("machine", "sleeper woken late, p99", lambda report: report.machine_late_p99_ms, lambda v: f"{v:.0f} ms"),
)

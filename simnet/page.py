"""report.html: one self-contained page for people, without scripts and without anything fetched from elsewhere.

Whatever a node said of itself is escaped; how much of it is shown is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from simnet.charts import Bar, Interval, Line, Mark, bar_row, escape, line_chart, round_up, ticks
from simnet.gather import Life, NodeRecord, Recording, VerdictRow
from simnet.summary import NodeSummary, Report

MAX_VERDICTS = 500
MAX_REASONS = 20
SHORT_REASON_CHARS = 24
MIN_SMOOTHED_STEPS = 20
MAX_EVALUATIONS = 500
MIN_MINUTES_AXIS_S = 180
_TEMPLATE = Path(__file__).parent / "report.html"
_OUTCOMES = {
    "running": "still running",
    "finished": "run finished",
    "reached": "step reached",
    "timeout": "time ran out",
    "interrupted": "interrupted",
    "failed": "could not go on",
}


def render_page(report: Report, recording: Recording) -> str:
    """The whole page."""
    names = {node.peer_id: node.name for node in recording.nodes}
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{report.scenario}: simulation report"),
        heading=escape(report.title or report.scenario),
        badge=_badge(report),
        subtitle=_subtitle(report),
        problem=f'<p class="problem">{escape(report.problem, max_chars=2000)}</p>' if report.problem else "",
        tiles=_tiles(report),
        expectations=_expectations(report),
        reward=_reward_chart(report),
        progress=_progress_chart(recording),
        timeline=_timeline(recording),
        faults=_faults(recording),
        contributors=_contributors(report),
        verdicts=_verdicts(recording, names),
        traffic=_traffic(report),
        nodes=_nodes(report),
    )


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


def _badge(report: Report) -> str:
    unmet = sum(not expectation.met for expectation in report.expectations)
    if report.passed:
        return '<span class="badge good">✓ passed</span>'
    why = f"{unmet} expectation{'s' if unmet != 1 else ''} not met" if unmet else _OUTCOMES[report.outcome]
    return f'<span class="badge bad">✗ {why}</span>'


def _subtitle(report: Report) -> str:
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.started_ms / 1000))
    parts = [
        escape(report.scenario),
        _OUTCOMES[report.outcome],
        started,
        format_seconds(report.wall_s),
        f"seed {report.seed}",
    ]
    address = f'<div class="mono address">{escape(report.run)}</div>' if report.run else ""
    return f"<div>{' · '.join(parts)}</div>{address}"


def _tiles(report: Report) -> str:
    total = f"of {report.total_steps}" if report.total_steps else "trained"
    wait = report.trainer_wait_fraction
    traffic = sum(relay.bytes_out for relay in report.bytes_by_relay.values())
    tiles = [
        ("Steps", str(report.steps), total, ""),
        ("Reward", _number(report.reward_last_tenth), f"last tenth{_signed(report.reward_gain)}", ""),
        ("Accepted", str(report.accepted), "submissions", ""),
        (
            "Rejected",
            str(sum(report.rejected.values())),
            f"{report.honest_rejected} of honest nodes",
            _bad(report.honest_rejected),
        ),
        (
            "Cheats evicted",
            f"{report.cheats_evicted}/{report.cheats}",
            f"{report.cheats_accepted} of theirs accepted",
            "",
        ),
        ("Trainer waits", "–" if wait is None else f"{wait:.0%}", "of its time", ""),
        ("Relays gave out", format_bytes(traffic), f"{len(report.bytes_by_relay)} relays", ""),
    ]
    return "".join(
        f'<div class="tile {style}"><div class="label">{label}</div><div class="value">{value}</div>'
        f'<div class="note">{note}</div></div>'
        for label, value, note, style in tiles
    )


def _expectations(report: Report) -> str:
    rows = [
        [
            _tick(expectation.met),
            escape(expectation.name.replace("_", " ")),
            escape(expectation.goal),
            escape(expectation.value),
        ]
        for expectation in report.expectations
    ]
    return _table(["", "what", "goal", "found"], rows, none="The scenario expects nothing but to come to its end.")


def _reward_chart(report: Report) -> str:
    points = [(float(step), mean) for step, mean in enumerate(report.reward, start=1) if mean is not None]
    if not points:
        return '<p class="none">No step was trained.</p>'
    x_end = max(points[-1][0], 2.0)
    y_end = max(1.0, *(mean for _, mean in points))
    marks = [Mark(float(fault.step), f"step {fault.step}: {fault.node} {fault.action}") for fault in report.faults]
    hover = [Mark(step, f"step {step:.0f}: reward {mean:.3f}") for step, mean in points]
    lines = (
        [Line("raw", points), Line("smooth", _smoothed(points))]
        if len(points) >= MIN_SMOOTHED_STEPS
        else [Line("smooth", points)]
    )
    plot = line_chart(lines, x_end=x_end, y_end=y_end, hover=hover, marks=marks, intervals=_intervals(report))
    return _framed(
        plot,
        [f"{y_end * part / 4:.2f}" for part in range(5)],
        [(x / x_end, f"{x:g}") for x in ticks(x_end)],
        f"training step{_held_out(report)}",
    )


def _intervals(report: Report) -> list[Interval]:
    """pass@1 on held-out prompts, with its 95 % interval."""
    shown = [(one.step, score) for one in report.evaluations[:MAX_EVALUATIONS] for score in one.pass_at if score.k == 1]
    return [
        Interval(float(step), score.value, score.low, score.high, _pass_text(step, score.value, score.low, score.high))
        for step, score in shown
    ]


def _pass_text(step: int, value: float, low: float, high: float) -> str:
    return f"after {step} steps: pass@1 {value:.3f} on held-out prompts (95 %: {low:.3f} to {high:.3f})"


def _held_out(report: Report) -> str:
    """The last evaluation in words: what hovering shows must not be the only place."""
    last = report.evaluations[-1] if report.evaluations else None
    if last is None:
        return ""
    scores = (f"pass@{one.k} {one.value:.2f} ({one.low:.2f} to {one.high:.2f})" for one in last.pass_at[:8])
    return f" · dots: held-out prompts, after {last.step} steps {', '.join(scores)}"


def _progress_chart(recording: Recording) -> str:
    start_ms, x_end = recording.started_ms, _length_s(recording)
    samples = [((sample.at_ms - start_ms) / 1000, sample) for sample in recording.samples]
    y_end = round_up(max([max(sample.accepted, sample.rejected) for _, sample in samples], default=0) or 4)
    hover = [
        Mark(at_s, f"{at_s:.0f} s: step {sample.step}, {sample.accepted} accepted, {sample.rejected} rejected")
        for at_s, sample in samples
    ]
    lines = [
        Line("accepted", [(at_s, float(sample.accepted)) for at_s, sample in samples]),
        Line("rejected", [(at_s, float(sample.rejected)) for at_s, sample in samples]),
    ]
    plot = line_chart(lines, x_end=x_end, y_end=y_end, hover=hover)
    return _framed(plot, [f"{y_end * part / 4:g}" for part in range(5)], *_time_ticks(x_end))


def _timeline(recording: Recording) -> str:
    x_end = _length_s(recording)
    rows = []
    for node in recording.nodes:
        marks = [
            Mark((fault.at_ms - recording.started_ms) / 1000, f"{fault.node}: {fault.action} at step {fault.step}")
            for fault in recording.faults
            if fault.node == node.name
        ]
        label = f'<div class="who">{escape(node.name)}{_tag(node.cheat)}</div>'
        rows.append(label + f"<div>{bar_row(_bars(node, recording), x_end=x_end, marks=marks)}</div>")
    labels, unit = _time_ticks(x_end)
    axis = "".join(_axis_label(at, text) for at, text in labels)
    bottom = f'<div></div><div class="axis">{axis}</div>'
    return f'<div class="rows">{"".join(rows)}{bottom}</div><div class="axis-name">{unit}</div>'


def _bars(node: NodeRecord, recording: Recording) -> list[Bar]:
    return [bar for life in node.lives for bar in _bars_of_life(life, node.timeline, recording)]


def _bars_of_life(life: Life, timeline: Sequence[tuple[int, str, str]], recording: Recording) -> Iterable[Bar]:
    """What a node did in one life: until its first word it started, and what it did last it did until its end."""
    end_ms = life.ended_ms or recording.ended_ms or life.started_ms
    spells = [(life.started_ms, "waiting", "starting")]
    spells += [entry for entry in timeline if life.started_ms <= entry[0] < end_ms]
    for (at_ms, kind, what), until_ms in zip(spells, [spell[0] for spell in spells[1:]] + [end_ms], strict=True):
        if until_ms > at_ms:
            style = "working" if kind == "working" else "waiting"
            yield Bar(
                (at_ms - recording.started_ms) / 1000,
                (until_ms - recording.started_ms) / 1000,
                style,
                f"{style}: {what}",
            )


def _faults(recording: Recording) -> str:
    items = (
        f"<li><b>{escape(fault.node)}</b> {fault.action} at step {fault.step}"
        f", {format_seconds((fault.at_ms - recording.started_ms) / 1000)} after the start</li>"
        for fault in recording.faults
    )
    return f'<ul class="faults">{"".join(items)}</ul>' if recording.faults else '<p class="none">No faults struck.</p>'


def _contributors(report: Report) -> str:
    rows = [
        [
            _name(node),
            _standing(node.standing),
            str(node.accepted),
            str(sum(node.rejected.values())),
            _reasons(node.rejected),
            _reasons(node.refused),
        ]
        for node in report.nodes
        if node.role == "inference"
    ]
    return _table(
        ["contributor", "standing", "accepted", "rejected", "why", "relays refused"],
        rows,
        none="Nobody contributed.",
        numeric=(2, 3),
    )


def _verdicts(recording: Recording, names: dict[str, str]) -> str:
    verdicts = recording.trainer.verdicts[-MAX_VERDICTS:]
    head = ["step", "contributor", "verdict", "reward", "reason", "submission"]
    rejected = _table(
        head, [_verdict(verdict, names) for verdict in recording.against], none="None was rejected.", numeric=(0, 3)
    )
    every = _table(head, [_verdict(verdict, names) for verdict in verdicts], none="There are none.", numeric=(0, 3))
    return f"{rejected}<details><summary>The newest {len(verdicts)} verdicts</summary>{every}</details>"


def _verdict(verdict: VerdictRow, names: dict[str, str]) -> list[str]:
    style = {"accept": "good", "reject": "bad"}.get(verdict.outcome, "warn")
    hard = " (hard)" if verdict.hard else ""
    return [
        str(verdict.step),
        escape(names.get(verdict.contributor, verdict.contributor[-8:])),
        f'<span class="{style}">{escape(verdict.outcome)}{hard}</span>',
        _number(verdict.mean_reward),
        escape(verdict.reason),
        f'<span class="mono">{escape(verdict.submission[:12])}</span>',
    ]


def _traffic(report: Report) -> str:
    largest = max([relay.bytes_out for relay in report.bytes_by_relay.values()] + [1])
    rows = [
        [
            escape(name),
            f'<div class="gauge"><span style="width:{100 * relay.bytes_out / largest:.1f}%"></span></div>',
            format_bytes(relay.bytes_out),
            format_bytes(relay.bytes_in),
        ]
        for name, relay in report.bytes_by_relay.items()
    ]
    table = _table(["relay", "", "gave out", "took in"], rows, none="There was no relay.", numeric=(2, 3))
    return table + _downloads(report)


def _downloads(report: Report) -> str:
    """How much patches spared, over everyone who downloads."""
    found = report.downloads
    if not found.patched_bytes + found.full_bytes:
        return ""
    stood_for = format_bytes(found.patched_bytes + found.saved_bytes)
    return (
        f'<p class="aside">Policies came as {format_bytes(found.patched_bytes)} of patches and packed shards that '
        f"stood for {stood_for}, and as {format_bytes(found.full_bytes)} of whole shards.</p>"
    )


def _nodes(report: Report) -> str:
    head = ["node", "role", "state", "starts", "CPU", "memory", "peer id", "log"]
    return _table(head, [_node(node) for node in report.nodes], none="There are none.", numeric=(3, 4, 5))


def _node(node: NodeSummary) -> list[str]:
    style = "bad" if node.state.startswith(("exit code", "signal")) else ""
    return [
        _name(node),
        escape(node.role),
        f'<span class="{style}">{escape(node.state)}</span>',
        str(node.starts),
        format_seconds(node.cpu_s),
        f"{node.peak_memory_mb} MB",
        f'<span class="mono">{escape(node.peer_id)}</span>',
        f'<a href="{escape(node.log)}">log</a>',
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, none: str, numeric: tuple[int, ...] = ()) -> str:
    """A table of cells that are HTML already."""
    if not rows:
        return f'<p class="none">{none}</p>'
    styles = [' class="number"' if index in numeric else "" for index in range(len(head))]
    top = "".join(f"<th{style}>{name}</th>" for name, style in zip(head, styles, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{style}>{cell}</td>' for cell, style in zip(row, styles, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _framed(plot: str, y_labels: Sequence[str], x_labels: Sequence[tuple[float, str]], x_name: str) -> str:
    """A plot between its labels; y labels from the bottom up."""
    left = "".join(f"<span>{label}</span>" for label in reversed(y_labels))
    below = "".join(_axis_label(at, text) for at, text in x_labels)
    return (
        f'<div class="frame"><div class="y">{left}</div>{plot}<div></div><div class="axis">{below}</div></div>'
        f'<div class="axis-name">{x_name}</div>'
    )


def _axis_label(at: float, text: str) -> str:
    return f'<span style="left:{100 * min(1.0, at):.2f}%">{text}</span>'


def _time_ticks(x_end_s: float) -> tuple[list[tuple[float, str]], str]:
    """Places and texts of the ticks of a time axis, and their unit."""
    unit_s, unit = (1, "seconds") if x_end_s < MIN_MINUTES_AXIS_S else (60, "minutes")
    return [(unit_s * at / x_end_s, f"{at:g}") for at in ticks(x_end_s / unit_s)], unit


def _length_s(recording: Recording) -> float:
    return max(1.0, ((recording.ended_ms or recording.started_ms) - recording.started_ms) / 1000)


def _smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Mean of each point with its neighbours, a twentieth of the run to each side."""
    reach = max(1, len(points) // 20)
    windows = ((x, [y for _, y in points[max(0, i - reach) : i + reach + 1]]) for i, (x, _) in enumerate(points))
    return [(x, sum(window) / len(window)) for x, window in windows]


def _reasons(rejected: dict[str, int]) -> str:
    most = sorted(rejected.items(), key=lambda item: -item[1])[:MAX_REASONS]
    texts = (f"{count} × {escape(reason)}" for reason, count in most)
    lines = (f'<div class="{"why" if len(text) > SHORT_REASON_CHARS else ""}">{text}</div>' for text in texts)
    return "".join(lines) or "–"


def _standing(standing: str | None) -> str:
    style = {"evicted": "bad", "active": "good"}.get(standing or "", "")
    return f'<span class="{style}">{escape(standing or "never seen")}</span>'


def _name(node: NodeSummary) -> str:
    return f'<span class="name">{escape(node.name)}{_tag(node.cheat)}</span>'


def _tag(cheat: str | None) -> str:
    return f' <span class="tag" title="{escape(cheat)}">cheat</span>' if cheat else ""


def _tick(met: bool) -> str:
    return '<span class="good" aria-label="met">✓</span>' if met else '<span class="bad" aria-label="not met">✗</span>'


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f", {value:+.2f} on the first"


def _bad(count: int) -> str:
    return "alarm" if count else ""

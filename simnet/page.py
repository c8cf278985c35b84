"""report.html: one self-contained page for people, without scripts and without anything fetched from elsewhere.

Whatever a node said of itself is escaped; how much of it is shown is bounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from string import Template

from simnet import page_figures as figures
from simnet.charts import Bar, Interval, Line, Mark, bar_row, escape, line_chart, round_up, ticks
from simnet.gather import NodeRecord, Recording, VerdictRow
from simnet.markup import axis, format_bytes, format_seconds, framed, number, table, tick, time_ticks
from simnet.summary import NodeSummary, Report
from simnet.waits import spells

MAX_VERDICTS = 500
MAX_REASONS = 20
SHORT_REASON_CHARS = 24
MIN_SMOOTHED_STEPS = 20
MAX_EVALUATIONS = 500
MOST_FAULTS = 24
"""Longer lists are folded."""
HERE = Path(__file__).parent
OUTCOMES = {
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
    return fill_template(
        "report.html",
        title=escape(f"{report.scenario}: simulation report"),
        heading=escape(report.title or report.scenario),
        badge=_badge(report),
        subtitle=subtitle(report),
        problem=_problem(report),
        tiles=_tiles(report),
        oracles=figures.oracles(report.oracles),
        expectations=_expectations(report),
        reward=_reward_chart(report),
        speed=figures.speed(report, recording),
        progress=_progress_chart(recording),
        timeline=_timeline(recording),
        faults=_faults(recording),
        waits=figures.waits(report),
        hops=figures.hops(report),
        contributors=_contributors(report),
        verdicts=_verdicts(recording, names),
        traffic=figures.traffic(report),
        machine=figures.machine(report, recording),
        nodes=_nodes(report),
    )


def fill_template(name: str, *, title: str, **parts: str) -> str:
    """A page from its template, within the frame and with the style that all pages share."""
    body = _template(name).substitute(parts)
    style = (HERE / "page.css").read_text(encoding="utf-8")
    return _template("frame.html").substitute(title=title, style=style, body=body)


def _template(name: str) -> Template:
    return Template((HERE / name).read_text(encoding="utf-8"))


def _problem(report: Report) -> str:
    """Why it could not go on, and what it had to do without."""
    lines = [f'<p class="problem">{escape(report.problem, max_chars=2000)}</p>'] if report.problem else []
    lines += [f'<p class="sub">Note: {escape(note, max_chars=2000)}.</p>' for note in report.notes]
    return "".join(lines)


def _badge(report: Report) -> str:
    if report.passed:
        return '<span class="badge good">✓ passed</span>'
    unmet = sum(not expectation.met for expectation in report.expectations)
    failed = report.failed_oracles
    counts = ((unmet, "expectation{s} not met"), (failed, "oracle{s} failed"))
    why = ", ".join(f"{count} {what.format(s='s' * (count != 1))}" for count, what in counts if count)
    return f'<span class="badge bad">✗ {why or OUTCOMES[report.outcome]}</span>'


def subtitle(report: Report) -> str:
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.started_ms / 1000))
    parts = [
        escape(report.scenario),
        OUTCOMES[report.outcome],
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
    oracles = Counter(one.outcome for one in report.oracles)
    tiles = [
        (
            "Oracles passed",
            f"{oracles['passed']}/{len(report.oracles)}",
            f"{oracles['failed']} failed, {oracles['could not tell']} could not tell",
            _bad(oracles["failed"]),
        ),
        ("Steps", str(report.steps), total, ""),
        ("Reward", number(report.reward_last_tenth), f"last tenth{_signed(report.reward_gain)}", ""),
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
        ("Trainer waits", "–" if wait is None else f"{wait:.0%}", "of its waiting and training", ""),
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
            tick(expectation.met),
            escape(expectation.name.replace("_", " ")),
            escape(expectation.goal),
            escape(expectation.value),
        ]
        for expectation in report.expectations
    ]
    return table(["", "what", "goal", "found"], rows, none="The scenario expects nothing but to come to its end.")


def _reward_chart(report: Report) -> str:
    points = [(float(step), mean) for step, mean in enumerate(report.reward, start=1) if mean is not None]
    if not points:
        return '<p class="none">No step was trained.</p>'
    x_end = max(points[-1][0], 2.0)
    y_end = max(1.0, *(mean for _, mean in points))
    marks = [Mark(float(fault.step), f"step {fault.step}: {fault.node} {fault.action}") for fault in report.faults]
    hover = [Mark(step, f"step {step:.0f}: reward {mean:.3f}") for step, mean in points]
    lines = (
        [Line("raw", points), Line("smooth", smoothed(points))]
        if len(points) >= MIN_SMOOTHED_STEPS
        else [Line("smooth", points)]
    )
    plot = line_chart(lines, x_end=x_end, y_end=y_end, hover=hover, marks=marks, intervals=_intervals(report))
    return framed(
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
    plot = line_chart(lines, x_end=x_end, y_end=y_end, hover=hover, marks=figures.fault_marks(recording))
    return framed(plot, [f"{y_end * part / 4:g}" for part in range(5)], *time_ticks(x_end))


def _timeline(recording: Recording) -> str:
    x_end = _length_s(recording)
    every = figures.fault_marks(recording)
    rows = [f'<div class="who">faults</div><div>{bar_row([], x_end=x_end, marks=every)}</div>'] if every else []
    for node in recording.nodes:
        marks = [mark for mark, fault in zip(every, recording.faults, strict=True) if fault.node == node.name]
        label = f'<div class="who">{escape(node.name)}{_tag(node.cheat)}</div>'
        rows.append(label + f"<div>{bar_row(_bars(node, recording), x_end=x_end, marks=marks)}</div>")
    labels, unit = time_ticks(x_end)
    return f'<div class="rows">{"".join(rows)}<div></div>{axis(labels)}</div><div class="axis-name">{unit}</div>'


def _bars(node: NodeRecord, recording: Recording) -> list[Bar]:
    end_ms, start_ms = recording.ended_ms or recording.started_ms, recording.started_ms
    return [
        Bar((begin_ms - start_ms) / 1000, (stop_ms - start_ms) / 1000, kind, f"{kind}: {what}")
        for begin_ms, stop_ms, kind, what in spells(node, end_ms)
    ]


def _faults(recording: Recording) -> str:
    items = [
        f"<li><b>{escape(fault.node)}</b> {fault.action} at step {fault.step}"
        f", {format_seconds((fault.at_ms - recording.started_ms) / 1000)} after the start</li>"
        for fault in recording.faults
    ]
    if not items:
        return '<p class="none">No faults struck.</p>'
    every = f'<ul class="faults">{"".join(items)}</ul>'
    if len(items) <= MOST_FAULTS:
        return every
    return f"<details><summary>{len(items)} faults and what undid them, in their order</summary>{every}</details>"


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
    return table(
        ["contributor", "standing", "accepted", "rejected", "why", "relays refused"],
        rows,
        none="Nobody contributed.",
        numeric=(2, 3),
    )


def _verdicts(recording: Recording, names: dict[str, str]) -> str:
    verdicts = recording.trainer.verdicts[-MAX_VERDICTS:]
    head = ["step", "contributor", "verdict", "reward", "reason", "submission"]
    rejected = table(
        head, [_verdict(verdict, names) for verdict in recording.against], none="None was rejected.", numeric=(0, 3)
    )
    every = table(head, [_verdict(verdict, names) for verdict in verdicts], none="There are none.", numeric=(0, 3))
    return f"{rejected}<details><summary>The newest {len(verdicts)} verdicts</summary>{every}</details>"


def _verdict(verdict: VerdictRow, names: dict[str, str]) -> list[str]:
    style = {"accept": "good", "reject": "bad"}.get(verdict.outcome, "warn")
    hard = " (hard)" if verdict.hard else ""
    return [
        str(verdict.step),
        escape(names.get(verdict.contributor, verdict.contributor[-8:])),
        f'<span class="{style}">{escape(verdict.outcome)}{hard}</span>',
        number(verdict.mean_reward),
        escape(verdict.reason),
        f'<span class="mono">{escape(verdict.submission[:12])}</span>',
    ]


def _nodes(report: Report) -> str:
    head = ["node", "role", "state", "starts", "CPU", "memory", "peer id", "log"]
    return table(head, [_node(node) for node in report.nodes], none="There are none.", numeric=(3, 4, 5))


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


def _length_s(recording: Recording) -> float:
    return max(1.0, ((recording.ended_ms or recording.started_ms) - recording.started_ms) / 1000)


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
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


def _signed(value: float | None) -> str:
    return "" if value is None else f", {value:+.2f} on the first"


def _bad(count: int) -> str:
    return "alarm" if count else ""

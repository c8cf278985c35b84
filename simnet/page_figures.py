"""The report's sections about how the run went: oracles, speed, who waited for whom, hops, bytes, and the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simnet.charts import Line, Mark, escape, line_chart, round_up, spark
from simnet.gather import NodeRecord, Recording
from simnet.hops import Hop
from simnet.markup import format_bytes, format_delay, format_seconds, framed, gauge, sign, table, time_ticks
from simnet.oracles import Judgement
from simnet.summary import Report

MAX_MACHINE_ROWS = 200
MAX_SPARK_POINTS = 120
MIN_SHOWN_SHARE = 0.01
_HOP_HEAD = ("", "n", "p50", "p99", "longest")


def oracles(judgements: Sequence[Judgement]) -> str:
    """What every simulation is held against; the numbers are behind each line."""
    rows = [[sign(one.outcome), _judgement(one)] for one in judgements]
    return table(["", "what must hold"], rows, none="No oracle was asked.")


def _judgement(one: Judgement) -> str:
    pairs = ((escape(name), escape(_figure(value))) for name, value in one.numbers.items())
    numbers = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs)
    return (
        f"<details><summary><b>{escape(one.name)}</b> <span>{escape(one.finding)}</span></summary>"
        f"<dl>{numbers}</dl></details>"
    )


def _figure(value: float | int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else value


def speed(report: Report, recording: Recording) -> str:
    """Trained rollouts a second over time, with faults marked."""
    pieces = report.throughput.pieces
    if not pieces:
        return '<p class="none">Fewer than two steps were trained.</p>'
    x_end = max(pieces[-1].until_s, 1.0)
    points = [((one.from_s + one.until_s) / 2, one.rollouts / (one.until_s - one.from_s)) for one in pieces]
    y_end = round_up(max(rate for _, rate in points) or 4)
    hover = [
        Mark(at_s, f"{one.from_s:.0f} to {one.until_s:.0f} s: {one.steps} steps, {rate:.1f} rollouts/s")
        for (at_s, rate), one in zip(points, pieces, strict=True)
    ]
    plot = line_chart([Line("smooth", points)], x_end=x_end, y_end=y_end, hover=hover, marks=fault_marks(recording))
    labels, unit = time_ticks(x_end)
    return framed(plot, [f"{y_end * part / 4:g}" for part in range(5)], labels, f"{unit}{_speed_text(report)}")


def _speed_text(report: Report) -> str:
    found = report.throughput
    if found.steps_per_min is None:
        return ""
    return f" · {found.steps_per_min:g} steps a minute, {found.tokens_per_s:g} tokens a second"


def fault_marks(recording: Recording) -> list[Mark]:
    """Every fault at its time after the start, in seconds."""
    return [
        Mark((fault.at_ms - recording.started_ms) / 1000, f"{fault.node}: {fault.action} at step {fault.step}")
        for fault in recording.faults
    ]


def waits(report: Report) -> str:
    """Who waited for whom, of all the time that a role's nodes were there; what took hardly any is left out."""
    shown = [row for row in report.waits if row.share >= MIN_SHOWN_SHARE]
    rows = [
        [
            "" if index and shown[index - 1].role == row.role else f"<b>{escape(row.role)}</b>",
            f'{escape(row.what)} <span class="soft">of {escape(row.whom)}</span>',
            f'<div class="bar">{gauge(row.share)}<span>{row.share:.0%}</span></div>',
            format_seconds(row.seconds),
        ]
        for index, row in enumerate(shown)
    ]
    return table(["who", "waited for", "of all its time", "all together"], rows, none="Nobody waited.", numeric=(3,))


def hops(report: Report) -> str:
    """Delays of every hop, rollouts and checkpoints apart."""
    parts = []
    for what, title in (("rollout", "a rollout's life"), ("checkpoint", "a checkpoint's way")):
        rows = [_hop(hop) for hop in report.hops if hop.what == what]
        parts.append(table([title, *_HOP_HEAD[1:]], rows, none=f"No {what} was followed.", numeric=(1, 2, 3, 4)))
    left_out = sum(hop.left_out for hop in report.hops)
    if left_out:
        parts.append(f'<p class="aside">{left_out} left out: they came before all was sent, or clocks differ.</p>')
    missing = max((hop.missing for hop in report.hops), default=0)
    if missing:
        parts.append(
            f'<p class="aside">{missing} checkpoints never came to some node that was there until the end.</p>'
        )
    return "".join(parts)


def _hop(hop: Hop) -> list[str]:
    return [escape(hop.name), str(hop.count), *map(format_delay, (hop.p50_s, hop.p99_s, hop.longest_s))]


def traffic(report: Report) -> str:
    largest = max([relay.bytes_out for relay in report.bytes_by_relay.values()] + [1])
    rows = [
        [escape(name), gauge(relay.bytes_out / largest), format_bytes(relay.bytes_out), format_bytes(relay.bytes_in)]
        for name, relay in report.bytes_by_relay.items()
    ]
    head = ["relay", "", "gave out", "took in"]
    return table(head, rows, none="There was no relay.", numeric=(2, 3)) + _downloads(report)


def _downloads(report: Report) -> str:
    """How much patches spared, over everyone who downloads."""
    found = report.downloads
    if not found.patched_bytes + found.full_bytes:
        return ""
    stood_for = found.patched_bytes + found.saved_bytes
    parts = (
        ("patches, packed", found.patched_bytes, f"stood for {format_bytes(stood_for)}"),
        ("whole shards", found.full_bytes, ""),
    )
    largest = max(found.patched_bytes, found.full_bytes)
    rows = [[name, gauge(count / largest), format_bytes(count), note] for name, count, note in parts]
    return table(["policies came as", "", "bytes", ""], rows, none="", numeric=(2,))


def machine(report: Report, recording: Recording) -> str:
    """What each process took: private memory over time, descriptors, tasks, and how late its event loop was."""
    rows = [row for node in recording.nodes for row in _machine_rows(node)]
    head = ["process", "private memory", "", "descriptors", "tasks", "loop late, p99"]
    shown = table(head, rows[:MAX_MACHINE_ROWS], none="No process could be looked at.", numeric=(2, 3, 4, 5))
    late = report.machine_late_p99_ms
    note = f"The machine itself woke up a sleeping thread {late} ms late (p99)." if late is not None else ""
    more = f" {len(rows) - MAX_MACHINE_ROWS} more processes are left out." if len(rows) > MAX_MACHINE_ROWS else ""
    return shown + (f'<p class="aside">{note}{more}</p>' if note or more else "")


def _machine_rows(node: NodeRecord) -> Iterable[list[str]]:
    lags = {
        life.pid: life.status.details.discovery.loop
        for life in node.lives
        if life.status and life.status.details.discovery.loop.pulses
    }
    for seen in node.processes:
        if not seen.samples:
            continue
        stride = max(1, len(seen.samples) // MAX_SPARK_POINTS)
        memory = [float(sample.private_bytes) for sample in seen.samples[::stride]]
        last = seen.samples[-1]
        loop = lags.get(seen.pid) if seen.network else None
        yield [
            f'<span class="name">{escape(node.name)}{"" if seen.network else " · compute"}</span>',
            spark(memory, title=f"{format_bytes(min(memory))} to {format_bytes(max(memory))}"),
            format_bytes(last.private_bytes),
            "–" if last.descriptors is None else str(last.descriptors),
            "–" if last.tasks is None else str(last.tasks),
            f"{loop.p99_ms} ms" if loop else "–",
        ]

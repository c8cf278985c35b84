"""What a person sees while a simulation runs: a dashboard on a terminal, one plain line every few seconds elsewhere.

Made from the recording alone. What nodes say is cut and freed of control characters before it reaches a terminal.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from simnet.gather import NodeRecord, Recording, now_ms
from simnet.markup import format_bytes, format_seconds

PLAIN_EVERY_S = 5.0
MAX_SHOWN_CHARS = 60
MAX_LINE_CHARS = 200
_BLOCKS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {"working": "green", "waiting": "yellow", "evicted": "red", "gone": "dim", "finished": "cyan"}


class View(Protocol):
    """Shows a recording again and again."""

    def __enter__(self) -> View: ...

    def __exit__(self, *error: object) -> None: ...

    def say(self, text: str) -> None:
        """Show a message that stays."""

    def show(self, recording: Recording) -> None:
        """Show where the simulation stands."""


def make_view(console: Console, *, live: bool) -> View:
    """The dashboard where the console is a terminal and `live` asks for it, else plain lines."""
    return Dashboard(console) if live and console.is_terminal else PlainLines(console)


class PlainLines:
    """One line every few seconds, for logs and pipes."""

    def __init__(self, console: Console, *, every_s: float = PLAIN_EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
        self._next_s = 0.0

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def say(self, text: str) -> None:
        self._line(text)

    def show(self, recording: Recording) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            self._line(textwrap.shorten(plain_line(recording), MAX_LINE_CHARS, placeholder=" …"))

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Dashboard:
    """A picture of the whole swarm that is drawn over itself."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Dashboard:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def show(self, recording: Recording) -> None:
        self._live.update(dashboard(recording))


def plain_line(recording: Recording) -> str:
    """Where the run stands and who waits for what, in a line."""
    rewards = _rewards(recording)
    waiting = [
        f"{node.name}: {clean(node.status.activity)}"
        for node in recording.nodes
        if node.running and node.status and node.status.state == "waiting"
    ]
    parts = [
        format_seconds((now_ms() - recording.started_ms) / 1000),
        f"step {recording.step}/{_total(recording)}",
        f"reward {rewards[-1]:.3f}" if rewards else "reward -",
        f"accepted {recording.accepted}",
        f"rejected {sum(recording.rejected.values())}",
        f"waiting {'; '.join(waiting) or 'nobody'}",
    ]
    return "  ".join(parts)


def dashboard(recording: Recording) -> Group:
    """Header, a row for each node, and the faults that struck."""
    return Group(
        Panel(_header(recording), box=box.ROUNDED, border_style="dim"), _node_table(recording), *_fault_lines(recording)
    )


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The newest values as a row of blocks, from their least to their greatest."""
    shown = values[-width:]
    low, span = min(shown, default=0.0), max(shown, default=0.0) - min(shown, default=0.0)
    return "".join(_BLOCKS[round((value - low) / span * 7) if span > 0 else 3] for value in shown)


def clean(text: str) -> str:
    """Text as it may be shown: short, and nothing in it that could steer a terminal."""
    cut = text[:MAX_SHOWN_CHARS] + ("…" if len(text) > MAX_SHOWN_CHARS else "")
    return "".join(char if char.isprintable() else "�" for char in cut)


def _header(recording: Recording) -> Table:
    rewards = _rewards(recording)
    newest = f"  {rewards[-1]:.3f}" if rewards else "no step trained yet"
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text("run", style="dim"), Text(recording.run, overflow="ellipsis", no_wrap=True))
    grid.add_row(
        Text("step", style="dim"),
        Text(
            f"{recording.step}/{_total(recording)}   accepted {recording.accepted}   "
            f"rejected {sum(recording.rejected.values())}   {format_seconds((now_ms() - recording.started_ms) / 1000)}"
        ),
    )
    grid.add_row(Text("reward", style="dim"), Text.assemble((sparkline(rewards), "cyan"), newest))
    grid.add_row(
        Text("relays", style="dim"),
        Text("   ".join(_relay_text(node) for node in recording.nodes if node.role == "relay")),
    )
    return grid


def _relay_text(node: NodeRecord) -> str:
    details = node.status.details if node.status else None
    return (
        f"{node.name} out {format_bytes(details.bytes_out)} in {format_bytes(details.bytes_in)}"
        if details
        else f"{node.name} -"
    )


def _node_table(recording: Recording) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1), expand=True)
    # Where names say the role, the column is left out: on a narrow terminal what nodes do needs the room.
    roles = not all(node.name.startswith(node.role) and not node.cheat for node in recording.nodes)
    for heading in ("node", *(("role",) if roles else ()), "state"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what", ratio=1, no_wrap=True, overflow="ellipsis")
    for heading in ("since", "accepted", "rejected"):
        table.add_column(heading, justify="right", no_wrap=True)
    for node in recording.nodes:
        table.add_row(*_node_row(node, recording, role=roles))
    return table


def _node_row(node: NodeRecord, recording: Recording, *, role: bool) -> list[Text]:
    status = node.status
    state = (status.state if status else "starting") if node.running else _end_of(node, recording)
    since = format_seconds((now_ms() - status.since_ms) / 1000) if status and node.running else ""
    accepted, rejected = _counts(node, recording)
    return [
        Text(node.name, style="bold red" if node.cheat else "bold"),
        *([Text(f"cheat: {node.cheat}" if node.cheat else node.role)] if role else []),
        Text(clean(state), style=_STATE_STYLES.get(state, "")),
        Text(clean(status.activity) if status and node.running else ""),
        Text(since),
        Text(str(accepted) if accepted else ""),
        Text(clean(", ".join(f"{count} {reason}" for reason, count in rejected.items())), style="red"),
    ]


def _end_of(node: NodeRecord, recording: Recording) -> str:
    if not node.lives:
        return "absent"
    if recording.evicted(node):
        return "evicted"
    life = node.lives[-1]
    return {"leave": "left", "kill": "killed"}.get(life.ended_by) or f"exit {life.exit_code}"


def _counts(node: NodeRecord, recording: Recording) -> tuple[int, dict[str, int]]:
    if node.role == "trainer":
        return recording.accepted, recording.rejected
    return (node.status.accepted, node.status.rejected) if node.status else (0, {})


def _fault_lines(recording: Recording) -> list[Text]:
    return [
        Text(f"  step {fault.step}: {fault.node} {fault.action}", style="yellow") for fault in recording.faults[-5:]
    ]


def _rewards(recording: Recording) -> list[float]:
    return [mean for _, mean in sorted(recording.rewards.items()) if mean is not None]


def _total(recording: Recording) -> str:
    return str(recording.trainer.total_steps or "?")

"""Reading a node's status page from another process, and showing it on a terminal.

Texts in it may come from peers: they are shown with control characters escaped and never as markup.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.advice import next_step
from node.logs import printable
from node.status import FINAL_FILE, HOST, URL_FILE
from node.status_rows import detail_rows
from node.words import count, size, span
from protocol.errors import DataDirError, NodeError

TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 4 << 20
INTERVAL_S: Final = 1.0
_RECENT: Final = 8


def fetch_status(data_dir: Path, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """What the running node says of itself. Raises DataDirError when none runs, NodeError when it does not answer."""
    url = _url(data_dir)
    try:
        status = json.loads(_get(url, timeout_s))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NodeError(
            f"the node of {data_dir} does not answer at {url}: {error}",
            hint="it may have been killed; look at its log, or start it again",
        ) from error
    if not isinstance(status, dict):
        raise NodeError(f"what answers at {url} is no node")
    return status


def with_advice(status: dict[str, Any]) -> dict[str, Any]:
    """A status, and what to do next (node.advice)."""
    return {**status, "next": next_step(status)}


def last_status(data_dir: Path) -> dict[str, Any] | None:
    """What the last node of a directory said when it ended; None where none has, or it was killed."""
    try:
        with (data_dir / FINAL_FILE).open("rb") as file:
            last = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return last if isinstance(last, dict) else None


def print_status(status: dict[str, Any]) -> None:
    Console().print(render(status))
    if join := _details(status).get("join"):  # one unbroken line, to be copied
        Console().print(Text(f"others join with:\n{printable(str(join))}"), soft_wrap=True)


def watch_status(data_dir: Path) -> None:
    """Show the status every second until Ctrl-C or until the node ends. Raises as `fetch_status` does.

    Where no terminal is, one snapshot after the other, until whoever reads them has seen enough.
    """
    console = Console()
    with suppress(KeyboardInterrupt, BrokenPipeError):
        if not console.is_terminal:
            return _print_snapshots(data_dir)
        with Live(render(fetch_status(data_dir)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(INTERVAL_S)
                live.update(render(fetch_status(data_dir)), refresh=True)


def _print_snapshots(data_dir: Path) -> None:
    """Written by hand: rich ends the program with an error where a pipe is closed."""
    while True:
        drawn = Console(file=io.StringIO(), width=Console().width)
        with drawn.capture() as text:
            drawn.print(render(fetch_status(data_dir)))
        try:
            sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text.get()}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor is it tried again at the end
            raise
        time.sleep(INTERVAL_S)


def render(status: dict[str, Any]) -> Group:
    """A status as tables: what the node does, its relays, its latest changes."""
    return Group(_facts(status), *_relays(status), _changes(status))


def _url(data_dir: Path) -> str:
    try:
        url = (data_dir / URL_FILE).read_text(encoding="ascii")[:200].strip()
    except (OSError, ValueError) as error:
        raise DataDirError(
            f"no node runs in {data_dir}{_last_state(data_dir)}",
            hint=f"start one with --data-dir {data_dir}, or give the directory of one that runs",
        ) from error
    if urlsplit(url).hostname != HOST:
        raise DataDirError(f"{data_dir / URL_FILE} does not name a page of this computer: {url!r}")
    return url


def _last_state(data_dir: Path) -> str:
    last = last_status(data_dir)
    if last is None or "state" not in last:
        return ""
    return f"; the last one {how_it_ended(last)}"


def how_it_ended(last: dict[str, Any]) -> str:
    """The end of a node, from the last that it said of itself: `left, as it was asked to`."""
    state, activity = last.get("state"), printable(str(last.get("activity", "")))
    if state not in ("stopping", "finished", "evicted"):
        return f"ended while it was {state}: {activity}"
    waiting = _details(last).get("outbox")
    kept = f"; {count(waiting, 'finished submission')} kept for its next start" if waiting else ""
    how = {"stopping": "left, as it was asked to", "finished": "ended with its run"}
    return f"{how.get(str(state), f'ended, evicted: {activity}')}{kept}"


def _get(url: str, timeout_s: float) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(HOST, parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"answer {response.status}")
        return response.read(MAX_BYTES)
    finally:
        connection.close()


def _facts(status: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    for_s = max(0, (status.get("now_ms", 0) - status.get("since_ms", 0)) // 1000)
    rows = {
        "node": f"{status.get('role')} {status.get('peer_id')} (process {status.get('pid')})",
        "run": status.get("run"),
        "network": _network(status),
        "state": f"{status.get('state')} for {span(for_s)}: {status.get('activity')}",
        "step": _policy(status),
        "submissions": f"{status.get('accepted')} accepted, {status.get('pending')} pending{_reasons(status)}",
        "credits": _credits(status),
        "traffic": _traffic(status),
    }
    for name, value in {**rows, **detail_rows(_details(status)), "next": next_step(status)}.items():
        if value not in ("", None):
            table.add_row(Text(name, style="bold"), _text(value))
    return table


def _network(status: dict[str, Any]) -> str:
    details = _details(status)
    discovery = details.get("discovery") or {}
    relays = len(status.get("relays") or []) if status.get("role") != "relay" else None
    parts = [f"{relays} relays used of {details.get('relays_known', relays)} known"] if relays is not None else []
    parts.append(f"{len(discovery.get('peers') or [])} DHT servers known")
    if discovery.get("serves"):
        parts.append(f"from outside: {discovery.get('reachability')}")
    return ", ".join(parts)


def _policy(status: dict[str, Any]) -> str:
    newest = _details(status).get("newest_checkpoint_step")
    behind = f" (newest: {newest})" if newest is not None else ""
    return f"{_or_dash(status.get('step'))}, policy held: {_or_dash(status.get('checkpoint_step'))}{behind}"


def _credits(status: dict[str, Any]) -> str:
    """By the ledger where the node follows it, else by the verdicts that it has seen."""
    details = _details(status)
    if isinstance(said := details.get("credits"), dict):
        return ", ".join(f"{number:,} {kind}" for kind, number in said.items() if isinstance(number, int))
    tokens = details.get("accepted_tokens")
    return f"{tokens:,} tokens of accepted work, by this node's own count" if isinstance(tokens, int) else ""


def _traffic(status: dict[str, Any]) -> str:
    today = status.get("today") or {}
    if status.get("role") == "relay":
        details = _details(status)
        return f"{_size(details.get('bytes_in'))} in, {_size(details.get('bytes_out'))} out since it started"
    return f"{_size(today.get('bytes_in'))} in, {_size(today.get('bytes_out'))} out today (UTC)"


def _size(bytes_: Any) -> str:
    return size(bytes_) if isinstance(bytes_, int | float) else "-"


def _details(status: dict[str, Any]) -> dict[str, Any]:
    details = status.get("details")
    return details if isinstance(details, dict) else {}


def _reasons(status: dict[str, Any]) -> str:
    rejected = status.get("rejected") or {}
    return "".join(f", {number} rejected ({reason})" for reason, number in rejected.items())


def _relays(status: dict[str, Any]) -> list[Text]:
    """Two lines each: a whole peer id leaves no room for more on a terminal of 80 columns."""
    lines = []
    for relay in status.get("relays", []):
        moved = f"{_size(relay.get('bytes_in'))} in, {_size(relay.get('bytes_out'))} out"
        failed = f", {count(relay['failures'], 'failure')}" if relay.get("failures") else ""
        lines += [_text(f"relay {relay.get('peer_id')}"), _text(f"  {relay.get('url')}: {moved}{failed}")]
    return lines


def _changes(status: dict[str, Any]) -> Table:
    table = Table("time", "was", "with or for", box=None)
    for at_ms, kind, what in status.get("timeline", [])[-_RECENT:]:
        table.add_row(time.strftime("%H:%M:%S", time.localtime(at_ms / 1000)), _text(kind), _text(what))
    return table


def _text(value: Any) -> Text:
    return Text(printable(str(value)))


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)

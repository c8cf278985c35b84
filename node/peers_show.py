"""What a running node knows of the DHT, from its status page, for people: `intellect-node peers`.

Peer ids and addresses come from strangers: they are shown with control characters escaped and never as markup.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.logs import printable
from node.status_view import fetch_status


def describe_discovery(data_dir: Path) -> dict[str, Any]:
    """The status' part about discovery. Raises DataDirError when no node runs, NodeError when it does not answer."""
    status = fetch_status(data_dir)
    details = status.get("details")
    found = details.get("discovery") if isinstance(details, dict) else None
    return {
        "peer_id": status.get("peer_id"),
        "role": status.get("role"),
        "run": status.get("run"),
        **(found if isinstance(found, dict) else {}),
    }


def print_discovery(described: dict[str, Any]) -> None:
    console = Console()
    for line in _facts(described):
        console.print(_text(line), soft_wrap=True)
    console.print(_peers(described.get("peers", [])))
    if described.get("misdeeds"):
        console.print(_misdeeds(described["misdeeds"]))


def _facts(described: dict[str, Any]) -> list[str]:
    if "peers" not in described:
        return ["this node has not started discovery yet"]
    lines = [f"{described['role']} {described['peer_id']}"]
    lines += [f"dialled at {address}" for address in described.get("multiaddrs", [])]
    lines.append(f"from outside: {described.get('reachability')}")
    lines += [f"bootstrap {line}" for line in described.get("bootstrap", [])]
    if described.get("worst_lag_s", 0) >= 1:
        lines.append(f"the network loop was once {described['worst_lag_s']} s late: this computer is overloaded")
    return lines


def _peers(peers: list[dict[str, Any]]) -> Table:
    table = Table("DHT server", "connected", "heard of", "failures", "addresses", box=None)
    for peer in sorted(peers, key=lambda each: each.get("silent_s", 0)):
        table.add_row(
            _text(peer.get("peer_id")),
            "yes" if peer.get("connected") else "no",
            _text(f"{peer.get('silent_s')} s ago"),
            _text(peer.get("failures")),
            _text(" ".join(map(str, peer.get("addresses", [])))),
        )
    return table


def _misdeeds(rows: list[dict[str, Any]]) -> Table:
    table = Table("misbehaved", "score of 100", "banned for", "what", box=None)
    for row in rows:
        misdeeds = row.get("misdeeds")
        kinds = ", ".join(f"{count} × {kind}" for kind, count in misdeeds.items()) if misdeeds else row.get("why", "")
        table.add_row(
            _text(row.get("peer_id")), _text(row.get("score")), _text(f"{row.get('banned_for_s')} s"), _text(kinds)
        )
    return table


def _text(value: Any) -> Text:
    return Text(printable(str(value)))

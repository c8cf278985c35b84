"""What a running node knows of the DHT and of active nodes, from its status page: `intellect-node peers`.

Peer ids and addresses come from strangers: they are shown with control characters escaped and never as markup. Each
peer has one line, which begins with its whole id: a narrow terminal breaks it, and nothing cuts it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
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
        "active": details.get("active") or [] if isinstance(details, dict) else [],
    }


def print_discovery(described: dict[str, Any]) -> None:
    console = Console()
    lines = [*_facts(described), *_peers(described.get("peers", [])), *_misdeeds(described.get("misdeeds", []))]
    lines += _active(described.get("active", []))
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)


def _facts(described: dict[str, Any]) -> list[str]:
    if "peers" not in described:
        return ["this node has not started discovery yet"]
    lines = [f"{described['role']} {described['peer_id']}"]
    lines += [f"dialled at {address}" for address in described.get("multiaddrs", [])]
    lines.append(f"from outside: {described.get('reachability')}")
    lines += [f"bootstrap {line}" for line in described.get("bootstrap", [])]
    if not described["peers"]:
        lines.append("no other DHT server has answered yet")
    if described.get("worst_lag_s", 0) >= 1:
        lines.append(f"the network loop was once {described['worst_lag_s']} s late: this computer is overloaded")
    return lines


def _peers(peers: list[dict[str, Any]]) -> list[str]:
    """Who was heard of last comes first."""
    rows = [
        [
            str(peer.get("peer_id")),
            "yes" if peer.get("connected") else "no",
            f"{peer.get('silent_s')} s ago",
            str(peer.get("failures")),
            " ".join(map(str, peer.get("addresses", []))),
        ]
        for peer in sorted(peers, key=lambda each: each.get("silent_s", 0))
    ]
    return _columns(["DHT server", "connected", "heard of", "failures", "addresses"], rows)


def _misdeeds(offenders: list[dict[str, Any]]) -> list[str]:
    rows = []
    for row in offenders:
        misdeeds = row.get("misdeeds")
        kinds = ", ".join(f"{count} × {kind}" for kind, count in misdeeds.items()) if misdeeds else row.get("why", "")
        rows.append([str(row.get("peer_id")), str(row.get("score")), f"{row.get('banned_for_s')} s", str(kinds)])
    return _columns(["misbehaved", "score of 100", "banned for", "what"], rows)


def _active(nodes: list[dict[str, Any]]) -> list[str]:
    """Nodes whose heartbeats a relay heard lately."""
    rows = [
        [
            str(node.get("peer_id")),
            str(node.get("role")),
            "-" if node.get("checkpoint_step") is None else str(node.get("checkpoint_step")),
            f"{node.get('tokens_per_s') or 0:.0f}",
            str(node.get("activity")),
        ]
        for node in nodes
    ]
    return _columns(["active node", "role", "policy", "tokens/s", "what it does"], rows)


def _columns(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of cells, each as wide as the widest of its column; none without rows."""
    table = [head, *rows] if rows else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]

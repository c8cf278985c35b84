"""`intellect-node run list`: the directories of this user's nodes, the runs they are for, and whether they run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from node.homes import homes_root, known_homes
from node.logs import printable
from node.status_view import last_status


def describe_homes(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each directory with its role, run, process (0: none runs) and what the node said last."""
    found = []
    for home in known_homes(environ):
        last = last_status(home.path) or {}
        said = {"state": str(last.get("state", "")), "activity": str(last.get("activity", ""))}
        found.append(
            {"data_dir": str(home.path), "role": home.role, "run": home.run, "process": home.running, "last": said}
        )
    return found


def print_homes(homes: list[dict[str, Any]]) -> None:
    console = Console()
    if not homes:
        console.print(Text(f"no node has been started on this computer: none lies under {homes_root(os.environ)}"))
    for home in homes:
        state = f"runs, process {home['process']}" if home["process"] else _ended(home["last"])
        for line in (
            f"{home['role'] or 'no role yet'} of {home['run'] or 'no run yet'}",
            f"  {home['data_dir']}: {state}",
        ):
            console.print(Text(printable(line)), soft_wrap=True)


def _ended(last: Mapping[str, str]) -> str:
    return f"off; it ended {last['state']}: {last['activity']}" if last["state"] else "off"

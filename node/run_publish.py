"""`intellect-node run publish`: put a run's pointer into the DHT by hand, so that others find the run.

The trainer does the same for as long as it runs (node.assembly); this is for the time before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.text import Text

from node.dht_show import joined
from node.homes import KEY_FILE
from node.identity import load_identity
from node.run_link import join_line, known_peers
from node.run_pointer import run_pointer
from node.run_show import load_run
from p2p.discovery import VALIDITY_S, P2PNode
from protocol.errors import BootstrapError, ConfigError
from protocol.run import RunAddress


def publish_run(data_dir: Path, *, bootstrap: Sequence[str], timeout_s: float, passphrase: str) -> dict[str, Any]:
    """Publish the run that was created in a directory; what was published, as plain values. Raises NodeError."""
    manifest = load_run(data_dir)
    identity = load_identity(data_dir / KEY_FILE, passphrase=passphrase)
    if identity.peer_id != manifest.author:
        raise ConfigError(
            f"the key of {data_dir} is {identity.peer_id}, and the run's operator is {manifest.author}",
            hint="give the --data-dir that `run create` was given",
        )
    address = RunAddress(manifest.author, manifest.record.name)

    async def ask(node: P2PNode, address: RunAddress, left_s: float) -> dict[str, Any]:
        with trio.move_on_after(left_s):
            await node.publish_run(partial(run_pointer, identity, manifest))
            shown = {"run": str(address), "valid_s": VALIDITY_S, "servers_known": node.dht_peers}
            return {**shown, "join": join_line(address, bootstrap or known_peers(data_dir))}
        raise BootstrapError(
            f"nobody took the run within {timeout_s:g} s: {node.bootstrap_state}",
            hint="check --bootstrap, and that a relay of this run is up",
        )

    return joined(data_dir, str(address), bootstrap, ask, timeout_s=timeout_s)


def print_published(found: dict[str, Any]) -> None:
    line = f"{found['run']} can be found for {found['valid_s'] / 60:g} minutes; its trainer keeps it so while it runs"
    for each in (line, "contributors join with:", f"  {found['join']}"):
        Console().print(Text(each), soft_wrap=True)

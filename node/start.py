"""The way into a node's process: first libp2p, leanly, then everything that imports it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from p2p.lean import import_libp2p

if TYPE_CHECKING:
    from node.assembly import InferenceKind
    from node.config import NodeConfig


def start_node(config: NodeConfig, *, kind: InferenceKind | None = None) -> int:
    """Run a node to its end, as node.app does; the exit code."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its own pool keeps megabytes for a few shards
    import_libp2p()
    from node.app import run_node

    return run_node(config, kind=kind)

"""The way into a node's process: first libp2p, leanly, then everything that imports it."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Final

from p2p.lean import import_libp2p

if TYPE_CHECKING:
    from node.assembly import Kind
    from node.config import NodeConfig

MALLOPT_ARENA_MAX: Final = -8
"""M_ARENA_MAX of glibc's malloc.h."""
ARENAS: Final = 2


def start_node(config: NodeConfig, *, kind: Kind | None = None) -> int:
    """Run a node to its end, as node.app does; the exit code."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its own pool keeps megabytes for a few shards
    share_arenas()
    import_libp2p()
    from node.app import run_node

    return run_node(config, kind=kind)


def share_arenas() -> None:
    """Where malloc is glibc's: few pools for all threads. It would make nearly one for each, and none gives back."""
    try:
        ctypes.CDLL(None).mallopt(MALLOPT_ARENA_MAX, ARENAS)
    except (OSError, AttributeError, TypeError):  # another libc
        return

"""Many nodes on one machine: scenarios with faults and cheats, watched live, judged by a report.

Each node is an operating system process started through the real command line; nothing here reaches into a node. What
runs beside or around a node is a module of this package too, and must start lightly: so nothing is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simnet.runner import run_scenario

__all__ = ["run_scenario"]


def __getattr__(name: str) -> Any:
    if name == "run_scenario":
        from simnet.runner import run_scenario

        return run_scenario
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Many nodes on one machine: scenarios with faults and cheats, watched live, judged by a report.

Each node is an operating system process started through the real command line; nothing here reaches into a node.
"""

from simnet.runner import run_scenario

__all__ = ["run_scenario"]

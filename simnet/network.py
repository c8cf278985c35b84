"""What lies between the nodes of a simulation: plain loopback, network namespaces, or proxies where nobody is root.

Which one is taken, and what it leaves out of what the scenario asks, it says in `notes`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Final

import msgspec

from protocol.errors import ConfigError, NodeError
from simnet import links, netns
from simnet.interrupts import shielded
from simnet.proxy import Door, Plan, Sides
from simnet.scenario import Scenario

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
END_TIMEOUT_S: Final = 1.0


class Network:
    """Loopback: every node sees every other at once. The other kinds replace what differs."""

    notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Make it. Raises NodeError."""

    def close(self) -> None:
        """Take everything away that was made; nothing is raised."""

    def host(self, node: str) -> str:
        """The address that a node serves on."""
        return LOOPBACK

    def public_port(self, node: str, port: int) -> int:
        """The port at which others reach what a node serves on a port."""
        return port

    def wrap(self, node: str, command: Sequence[str]) -> list[str]:
        """A command line that runs where the node lies."""
        return list(command)

    def inside(self, node: str) -> AbstractContextManager[None]:
        """This thread's new sockets are the node's."""
        return nullcontext()

    def part(self, node: str, side: str) -> None:
        """Put a node on a side of a partition; the empty one is where all are that are whole. Raises NodeError."""


class NamespaceNetwork(Network):
    """A network namespace a node, cables with rates, delays and losses, and a hub that can be parted."""

    def __init__(self, scenario: Scenario) -> None:
        self._places = links.places(scenario)
        self._prefix = netns.label()
        self._sides: dict[str, str] = {}
        self._tunlink: subprocess.Popen[bytes] | None = None
        self._made = False

    def start(self) -> None:
        netns.sweep()
        everywhere = [*self._places.values()]
        short = [links.HUB, *dict.fromkeys(name for one in everywhere for name in (one.namespace, one.edge))]
        self._made = True
        netns.create([self._prefix + name for name in short])
        self._start_tunlink()
        for make in (links.cables, links.addresses, links.rates):
            netns.perform([step for place in everywhere for step in make(place)], self._prefix)
        for name in (links.HUB, *(place.edge for place in everywhere if place.edge != place.namespace)):
            netns.forward(self._prefix, name)
        netns.perform([links.hub_rules(self._places, self._sides)], self._prefix)

    def close(self) -> None:
        if self._tunlink is not None:
            _end(self._tunlink)
        if self._made:
            names = [links.HUB, *{name for one in self._places.values() for name in (one.namespace, one.edge)}]
            with shielded():
                netns.delete([self._prefix + name for name in names])

    def host(self, node: str) -> str:
        return self._places[node].address

    def wrap(self, node: str, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self._path(self._places[node].namespace)}", *command]

    def inside(self, node: str) -> AbstractContextManager[None]:
        return netns.entered(self._path(self._places[node].namespace))

    def part(self, node: str, side: str) -> None:
        self._sides[node] = side
        netns.perform([links.hub_rules(self._places, self._sides)], self._prefix)

    def _start_tunlink(self) -> None:
        cables = [
            {
                "ends": [[self._path(place.edge), links.DEVICE], [self._path(links.HUB), place.hub_device]],
                "delay_ms": place.link.delay_ms,
            }
            for place in self._places.values()
            if place.link.delay_ms
        ]
        if cables:
            self._tunlink = _started("simnet.tunlink", msgspec.json.encode({"cables": cables}))

    def _path(self, short: str) -> str:
        return str(netns.DIRECTORY / (self._prefix + short))


class ProxyNetwork(Network):
    """Loopback with a proxy in front of every server; made of nothing that needs root."""

    def __init__(
        self, scenario: Scenario, ports: Mapping[str, Sequence[int]], free_ports: Callable[[int], list[int]]
    ) -> None:
        """`ports` are those that each serving node listens on."""
        doors = [(node, port) for node, own in ports.items() for port in own]
        self._doors = [
            Door(node, public, port) for (node, port), public in zip(doors, free_ports(len(doors)), strict=True)
        ]
        self._plans = {plan.name: plan.link for plan in scenario.nodes()}
        self._sides: dict[str, str] = {}
        self._proxy: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        of = self._plans.items()
        plan = Plan(
            doors=self._doors,
            up_mbit={name: link.up_mbit for name, link in of if link.up_mbit is not None},
            down_mbit={name: link.down_mbit for name, link in of if link.down_mbit is not None},
            delay_ms={name: link.delay_ms for name, link in of if link.delay_ms},
        )
        self._proxy = _started("simnet.proxy", msgspec.json.encode(plan))

    def close(self) -> None:
        if self._proxy is not None:
            _end(self._proxy)

    def public_port(self, node: str, port: int) -> int:
        return next((door.port for door in self._doors if (door.node, door.target_port) == (node, port)), port)

    def part(self, node: str, side: str) -> None:
        self._sides = {**self._sides, node: side}
        if self._proxy is None or self._proxy.stdin is None or self._proxy.poll() is not None:
            raise NodeError("the proxy between the nodes has ended, so they cannot be parted")
        self._proxy.stdin.write(msgspec.json.encode(Sides(self._sides)) + b"\n")
        self._proxy.stdin.flush()


def make_network(
    scenario: Scenario, ports: Mapping[str, Sequence[int]], free_ports: Callable[[int], list[int]]
) -> Network:
    """The network that a scenario needs, as far as this machine and user can make it."""
    if not links.needs_network(scenario):
        return Network()
    reason = _why_not(scenario)
    if not reason:
        return NamespaceNetwork(scenario)
    made = ProxyNetwork(scenario, ports, free_ports)
    made.notes = tuple(_notes(scenario, reason))
    return made


def check_network(scenario: Scenario) -> tuple[str, ...]:
    """What this machine or user leaves out of a scenario's links. Raises ConfigError where nothing would be left."""
    if not links.needs_network(scenario):
        return ()
    reason = _why_not(scenario)
    if reason and scenario.network == "namespaces":
        raise ConfigError(
            f"scenario {scenario.name!r} is about what only network namespaces do, and there are none here: {reason}",
            hint='run it as root, or leave `network = "namespaces"` out of a copy of it to see the rest by proxies',
        )
    return tuple(_notes(scenario, reason)) if reason else ()


def _why_not(scenario: Scenario) -> str:
    return "the scenario says so" if scenario.network == "proxy" else netns.why_not()


def _notes(scenario: Scenario, reason: str) -> Iterator[str]:
    yield f"links are imitated by proxies on loopback, without network namespaces: {reason}"
    plans = scenario.nodes()
    losing = [plan.name for plan in plans if plan.link.loss]
    if losing:
        yield f"no packets are lost, which needs namespaces: {', '.join(losing)}"
    behind = [plan.name for plan in plans if plan.link.nat != "none"]
    if behind:
        yield f"nobody lies behind a translating router, which needs namespaces: {', '.join(behind)}"


def _started(module: str, line: bytes) -> subprocess.Popen[bytes]:
    """Start a helper, which ends with this process, and wait until it is ready. Raises NodeError."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    process: subprocess.Popen[bytes] | None = None
    try:
        with shielded():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        if process.stdin is None or process.stdout is None:
            raise NodeError(f"{module} has no pipes")
        process.stdin.write(line + b"\n")
        process.stdin.flush()
        if process.stdout.readline() != b"ready\n":
            raise NodeError(f"{module} ended as it started, with code {process.wait(END_TIMEOUT_S)}")
    except BaseException:
        if process is not None:
            _end(process)
        raise
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a helper by closing its input, or else by force."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""Network namespaces: a relay's side with a public address, and clients behind routers that translate addresses.

Needs root, `ip` (iproute2) and `nft` (nftables). Everything made here is taken away at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RELAY_ADDRESS = "198.51.100.1"
ROOT = Path(__file__).parents[2]
KINDS = {"port-preserving": "masquerade", "symmetric": "masquerade random,fully-random"}


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "nft") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt install iproute2 nftables)"
    probe = f"intellect-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"this system makes no network namespaces: {made.stderr.strip()}"
    tried = subprocess.run(
        ["ip", "netns", "exec", probe, "nft", "add", "table", "ip", "t"], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return f"nftables does not work here: {tried.stderr.strip()}" if tried.returncode else ""


needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@dataclass
class NatWorld:
    """The namespaces by name; `relay` is the one with the public address."""

    prefix: str
    names: list[str] = field(default_factory=list)
    cables: int = 0

    def name(self, short: str) -> str:
        return f"{self.prefix}-{short}"

    def start(self, where: str, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name(where), sys.executable, *arguments],
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )

    def run(self, where: str, arguments: list[str], *, timeout_s: float = 60) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.name(where), sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def add(self, short: str) -> None:
        _run("ip", "netns", "add", self.name(short))
        self.names.append(self.name(short))
        self.ip(short, "link", "set", "lo", "up")

    def ip(self, short: str, *arguments: str) -> None:
        _run("ip", "-n", self.name(short), *arguments)

    def link(self, one: str, one_address: str, other: str, other_address: str) -> None:
        """A cable between two namespaces."""
        self.cables += 1
        names = [f"{side[:5]}{self.cables}{index}" for index, side in enumerate((one, other))]
        _run(
            "ip", "-n", self.name(one), "link", "add", names[0], "type", "veth",
            "peer", "name", names[1], "netns", self.name(other),
        )  # fmt: skip
        for short, device, address in ((one, names[0], one_address), (other, names[1], other_address)):
            at_once = ["nodad"] if ":" in address else []  # without a second's wait for whoever else may have it
            self.ip(short, "address", "add", address, "dev", device, *at_once)
            self.ip(short, "link", "set", device, "up")

    def router(self, number: int, kind: str) -> str:
        """A client's namespace behind a router of its own; returns the client's short name."""
        router, client = f"nat{number}", f"client{number}"
        self.add(router)
        self.add(client)
        self.link("relay", f"203.0.113.{4 * number + 1}/30", router, f"203.0.113.{4 * number + 2}/30")
        self.link(router, f"192.168.{number}.1/24", client, f"192.168.{number}.2/24")
        self.ip(client, "route", "add", "default", "via", f"192.168.{number}.1")
        self.ip(router, "route", "add", "default", "via", f"203.0.113.{4 * number + 1}")
        rules = f"""
        table ip nat {{
            chain post {{
                type nat hook postrouting priority 100;
                ip saddr 192.168.{number}.0/24 oifname != "{router[:5]}*" {KINDS[kind]}
            }}
            chain forward {{
                type filter hook forward priority 0; policy drop;
                ct state established,related accept
                ip saddr 192.168.{number}.0/24 accept
            }}
        }}"""
        rules = rules.replace(f'oifname != "{router[:5]}*" ', f"ip daddr != 192.168.{number}.0/24 ")
        netns = ["ip", "netns", "exec", self.name(router)]
        subprocess.run([*netns, "nft", "-f", "-"], input=rules.encode(), check=True)
        _run(*netns, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        return client

    def addresses_of(self, number: int) -> list[str]:
        """What a client behind router `number` is known by, inside and outside."""
        return [f"192.168.{number}.2", f"203.0.113.{4 * number + 2}"]


@contextlib.contextmanager
def nat_world() -> Iterator[NatWorld]:
    world = NatWorld(f"i{os.getpid()}")
    try:
        world.add("relay")
        world.ip("relay", "address", "add", f"{RELAY_ADDRESS}/32", "dev", "lo")
        yield world
    finally:
        for name in world.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

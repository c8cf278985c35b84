"""Links of limited rate between the processes of a benchmark. Not a benchmark itself.

As root: a network namespace for each node, joined by a router, with a token bucket (tc tbf) in each direction of each
link. Otherwise proxies in one process that take every byte from two token buckets, the sender's and the receiver's.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

PIECE_BYTES: Final = 16384
BURST_S: Final = 0.02
TBF_LATENCY_MS: Final = 100


@dataclass(frozen=True)
class Link:
    """A node's rates, in Mbit/s."""

    up: float
    down: float


class Links(Protocol):
    """A context manager that makes links; `prefix` runs a command at a node, `seen_by` translates a URL for one."""

    kind: str

    def __enter__(self) -> Links: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def prefix(self, name: str) -> list[str]: ...

    def host(self, name: str) -> str: ...

    def seen_by(self, name: str, server: str, url: str) -> str: ...

    def sent(self, name: str) -> int:
        """Bytes that a node has sent over its link."""
        ...


def make_links(links: Mapping[str, Link]) -> Links:
    """Namespaces where they can be had, proxies elsewhere; says which in a line."""
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc") and _namespaces_work():
        return Namespaces(links)
    sys.stderr.write("skipped: network namespaces (need root, ip and tc); links are limited by proxies instead\n")
    return Proxies(links)


def _namespaces_work() -> bool:
    name = f"ib{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "name", "try0", "type", "veth", "peer", "name", "try1")
        _run("tc", "-n", name, "qdisc", "add", "dev", "try0", "root", *_tbf(1.0))
    except subprocess.CalledProcessError:
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return True


def _tbf(mbit: float) -> list[str]:
    burst = max(32, int(mbit * 1e6 / 8 * BURST_S / 1024))
    return ["tbf", "rate", f"{mbit:g}mbit", "burst", f"{burst}kb", "latency", f"{TBF_LATENCY_MS}ms"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Namespaces:
    """Node n has 10.77.n.2/24; the router, a namespace of its own, has 10.77.n.1."""

    kind = "namespaces"

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = dict(links)
        self._number = {name: number for number, name in enumerate(links, 1)}
        self._router = f"ib{os.getpid()}-hub"

    def __enter__(self) -> Namespaces:
        try:
            _run("ip", "netns", "add", self._router)
            _run("ip", "netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            for name, link in self._links.items():
                self._join(name, link)
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clear()

    def prefix(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._space(name)]

    def host(self, name: str) -> str:
        return f"10.77.{self._number[name]}.2"

    def seen_by(self, name: str, server: str, url: str) -> str:
        return url

    def sent(self, name: str) -> int:
        shown = subprocess.run(
            [*self.prefix(name), "cat", "/sys/class/net/link0/statistics/tx_bytes"],
            check=True,
            capture_output=True,
            text=True,
        )
        return int(shown.stdout)

    def _space(self, name: str) -> str:
        return f"ib{os.getpid()}-{name}"

    def _join(self, name: str, link: Link) -> None:
        space, number = self._space(name), self._number[name]
        _run("ip", "netns", "add", space)
        peer = ("peer", "name", f"p{number}", "netns", self._router)
        _run("ip", "-n", space, "link", "add", "name", "link0", "type", "veth", *peer)
        for where, device, address, rate in (
            (space, "link0", f"10.77.{number}.2/24", link.up),
            (self._router, f"p{number}", f"10.77.{number}.1/24", link.down),
        ):
            _run("ip", "-n", where, "address", "add", address, "dev", device)
            _run("ip", "-n", where, "link", "set", device, "up")
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *_tbf(rate))
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "route", "add", "default", "via", f"10.77.{number}.1")

    def _clear(self) -> None:
        for space in [*(self._space(name) for name in self._links), self._router]:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


class _Bucket:
    """Bytes that may pass now; asyncio."""

    def __init__(self, mbit: float) -> None:
        self._rate = mbit * 1e6 / 8
        self._free_at = 0.0
        self.passed = 0

    async def take(self, count: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_S) + count / self._rate
        self.passed += count
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class Proxies:
    """A listening port for each pair of node and server; answers pass the server's and the node's bucket."""

    kind = "proxies"

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._up = {name: _Bucket(link.up) for name, link in links.items()}
        self._down = {name: _Bucket(link.down) for name, link in links.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._ports: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Proxies:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def prefix(self, name: str) -> list[str]:
        return []

    def host(self, name: str) -> str:
        return "127.0.0.1"

    def seen_by(self, name: str, server: str, url: str) -> str:
        if (name, server) not in self._ports:
            self._ports[name, server] = self._call(self._open(name, server, urlsplit(url).port or 443))
        return f"https://127.0.0.1:{self._ports[name, server]}"

    def sent(self, name: str) -> int:
        return self._up[name].passed

    def _call(self, coroutine: Coroutine[Any, Any, int]) -> int:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _open(self, name: str, server: str, port: int) -> int:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(
                    _pump(reader, far_writer, self._up[name], self._down[server]),
                    _pump(far_reader, writer, self._up[server], self._down[name]),
                )

        listening = await asyncio.start_server(connected, "127.0.0.1", 0)
        return int(listening.sockets[0].getsockname()[1])


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *buckets: _Bucket) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            for bucket in buckets:
                await bucket.take(len(piece))
            writer.write(piece)
            await writer.drain()
    writer.close()

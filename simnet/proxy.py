"""Links without root: `python -m simnet.proxy`, TCP proxies on loopback in front of every server of a simulation.

Standard input holds JSON objects, one a line: first a `Plan`, then `Sides`. It prints `ready`, and carries until
standard input ends. Who dials is found by the owner of the socket at the other end, through /proc; where that cannot
be read, only the server's own link counts. Rates and delays are those of the scenario. Nothing is lost: to TCP's users
a loss is a delay anyway, and this one makes none for it. While two nodes are on different sides of a partition nothing
passes between them, and no connection ends for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio
from msgspec import Struct

from simnet.processes import NODE_VARIABLE, variable_of

CHUNK_BYTES: Final = 16_384
MAX_WAITING: Final = 256
"""Chunks of one direction of one connection that are under way."""
QUEUE_S: Final = 0.2
DIAL_TIMEOUT_S: Final = 10.0


class Door(Struct, frozen=True):
    """One proxy: the port that others dial, and the server behind it."""

    node: str
    port: int
    target_port: int


class Plan(Struct, frozen=True):
    """What to carry."""

    doors: list[Door]
    up_mbit: dict[str, float] = {}
    down_mbit: dict[str, float] = {}
    delay_ms: dict[str, float] = {}


class Sides(Struct, frozen=True):
    """A partition: which side each node is on; those not named are on one together."""

    sides: dict[str, str]


class Bucket:
    """A rate that all connections of a node share, in one direction."""

    def __init__(self, bits_per_s: float) -> None:
        self._bytes_per_s = bits_per_s / 8
        self._free_s = 0.0

    def pass_at(self, size: int) -> float:
        """When so many bytes have passed that come now; takes their turn."""
        self._free_s = max(self._free_s, trio.current_time()) + size / self._bytes_per_s
        return self._free_s


class Links:
    """Every node's link, and which nodes see each other."""

    def __init__(self, plan: Plan) -> None:
        self._up = {node: Bucket(mbit * 1e6) for node, mbit in plan.up_mbit.items()}
        self._down = {node: Bucket(mbit * 1e6) for node, mbit in plan.down_mbit.items()}
        self._delay_s = {node: ms / 1000 for node, ms in plan.delay_ms.items()}
        self._sides: dict[str, str] = {}
        self._changed = trio.Event()

    def part(self, sides: dict[str, str]) -> None:
        """Put nodes on sides; all others are together."""
        self._sides = sides
        self._changed.set()
        self._changed = trio.Event()

    async def whole(self, one: str, other: str) -> None:
        """Wait until two nodes see each other."""
        while self._sides.get(one, "") != self._sides.get(other, ""):
            await self._changed.wait()

    def arrives_at(self, size: int, sender: str, receiver: str) -> float:
        """When so many bytes sent now get there."""
        times = [
            bucket.pass_at(size) for bucket in (self._up.get(sender), self._down.get(receiver)) if bucket is not None
        ]
        delay_s = self._delay_s.get(sender, 0.0) + self._delay_s.get(receiver, 0.0)
        return max(times, default=trio.current_time()) + delay_s

    def room_at(self, arrives_at: float, sender: str, receiver: str) -> float:
        """Until when the sender has to wait, as a full queue in front of a slow link makes it."""
        return arrives_at - self._delay_s.get(sender, 0.0) - self._delay_s.get(receiver, 0.0) - QUEUE_S


async def serve(
    plan: Plan,
    links: Links,
    *,
    owner: Callable[[int, int], str],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Carry connections until cancelled. `owner` names the node that dialled, by its port and the proxy's."""
    async with trio.open_nursery() as nursery:
        for door in plan.doors:
            handler = partial(_carry_connection, door, links, owner)
            await nursery.start(partial(trio.serve_tcp, handler, door.port, host="127.0.0.1", handler_nursery=nursery))
        task_status.started()


async def _carry_connection(
    door: Door, links: Links, owner: Callable[[int, int], str], client: trio.SocketStream
) -> None:
    """One connection from its first byte to its last; whatever ends it ends both halves."""
    with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
        async with client:
            port = client.socket.getpeername()[1]
            caller = await trio.to_thread.run_sync(owner, port, door.port)
            await links.whole(caller, door.node)
            with trio.fail_after(DIAL_TIMEOUT_S):
                server = await trio.open_tcp_stream("127.0.0.1", door.target_port)
            async with server:
                await _both_ways(links, client, server, caller, door.node)


async def _both_ways(
    links: Links, client: trio.SocketStream, server: trio.SocketStream, caller: str, node: str
) -> None:
    with suppress(BaseExceptionGroup):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_carry, links, client, server, caller, node)
            nursery.start_soon(_carry, links, server, client, node, caller)


async def _carry(
    links: Links, source: trio.SocketStream, target: trio.SocketStream, sender: str, receiver: str
) -> None:
    """One direction of a connection, in order, each chunk when it is due; then the end, if the other side still can."""
    entry, exit_ = trio.open_memory_channel[tuple[float, bytes]](MAX_WAITING)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_deliver, links, exit_, target, sender, receiver)
        async with entry:
            while data := await source.receive_some(CHUNK_BYTES):
                arrives_at = links.arrives_at(len(data), sender, receiver)
                await entry.send((arrives_at, bytes(data)))
                await trio.sleep_until(max(trio.current_time(), links.room_at(arrives_at, sender, receiver)))


async def _deliver(
    links: Links,
    chunks: trio.MemoryReceiveChannel[tuple[float, bytes]],
    target: trio.SocketStream,
    sender: str,
    receiver: str,
) -> None:
    async with chunks:
        async for arrives_at, data in chunks:
            await trio.sleep_until(max(trio.current_time(), arrives_at))
            await links.whole(sender, receiver)
            await target.send_all(data)
    await target.send_eof()


class Owners:
    """Which node a loopback socket belongs to, as the kernel shows it to whoever runs the nodes."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def __call__(self, port: int, proxy_port: int) -> str:
        """The node whose socket has a port and is connected to another; empty where that is not to be seen."""
        inode = _inode(port, proxy_port)
        if not inode:
            return ""
        wanted = f"socket:[{inode}]"
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        self._names = {pid: name for pid in pids if (name := self._names.get(pid) or variable_of(pid, NODE_VARIABLE))}
        return next((name for pid, name in self._names.items() if _holds(pid, wanted)), "")


def _inode(port: int, proxy_port: int) -> str:
    own, other = f"0100007F:{port:04X}", f"0100007F:{proxy_port:04X}"
    with suppress(OSError):
        for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if (fields[1], fields[2]) == (own, other):
                return fields[9]
    return ""


def _holds(pid: int, wanted: str) -> bool:
    directory = f"/proc/{pid}/fd"
    with suppress(OSError):
        for descriptor in os.listdir(directory):
            with suppress(OSError):
                if os.readlink(f"{directory}/{descriptor}") == wanted:
                    return True
    return False


async def run() -> None:
    """Obey standard input until it ends."""
    stdin = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
    async with stdin, trio.open_nursery() as nursery:
        links: Links | None = None
        buffer = bytearray()
        async for data in stdin:
            buffer += data
            *lines, rest = bytes(buffer).split(b"\n")
            buffer = bytearray(rest)
            for line in lines:
                if links is None:
                    plan = msgspec.json.decode(line, type=Plan)
                    links = Links(plan)
                    await nursery.start(partial(serve, plan, links, owner=Owners()))
                    sys.stdout.write("ready\n")
                    sys.stdout.flush()
                else:
                    links.part(msgspec.json.decode(line, type=Sides).sides)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(run)

"""Cables with a delay: `python -m simnet.tunlink`, a process that carries packets between pairs of TUN devices.

Standard input holds one JSON object: `{"cables": [{"ends": [[path, device], [path, device]], "delay_ms": 40}, …]}`,
each path a network namespace's file. It makes the devices, prints `ready`, and carries until standard input ends. For
kernels without a queue that delays; needs root. Rates and losses are made elsewhere (simnet.links).
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from simnet.netns import entered

MAX_QUEUED: Final = 2000
"""Packets of one direction under way; what comes beyond them is dropped, as a full queue does."""
MAX_PACKET_BYTES: Final = 65_536
BATCH: Final = 64
_TUNSETIFF: Final = 0x400454CA
_TUN_NO_HEADER: Final = 0x0001 | 0x1000


@dataclass
class Direction:
    """One way of a cable: packets read from one descriptor, written to the other after the delay."""

    source: int
    target: int
    delay_s: float
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, now_s: float) -> None:
        """Read what has come, a bounded part of it."""
        for _ in range(BATCH):
            try:
                packet = os.read(self.source, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if len(self.queue) < MAX_QUEUED:
                self.queue.append((now_s + self.delay_s, packet))

    def give(self, now_s: float) -> None:
        """Write what is due. A device that is down or full loses it, as a cable would."""
        while self.queue and self.queue[0][0] <= now_s:
            packet = self.queue.popleft()[1]
            try:
                os.write(self.target, packet)
            except OSError:
                continue

    @property
    def due_s(self) -> float:
        return self.queue[0][0] if self.queue else float("inf")


def carry(directions: Sequence[Direction], control: int) -> None:
    """Carry packets until `control` reaches its end."""
    sources = {direction.source: direction for direction in directions}
    poll = select.epoll()
    for descriptor in (*sources, control):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        wait_s = min((direction.due_s for direction in directions), default=float("inf")) - time.monotonic()
        for descriptor, _ in poll.poll(max(0.0, min(wait_s, 1.0))):
            if descriptor in sources:
                sources[descriptor].take(time.monotonic())
            elif not os.read(control, 4096):
                return
        now_s = time.monotonic()
        for direction in directions:
            direction.give(now_s)


def open_tun(namespace: str, device: str) -> int:
    """Make a TUN device in a network namespace; its descriptor, which does not block. Raises OSError."""
    with entered(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", device.encode(), _TUN_NO_HEADER))
    return descriptor


def main() -> None:
    plan: dict[str, Any] = msgspec.json.decode(sys.stdin.buffer.readline())
    directions = []
    for cable in plan["cables"]:
        one, other = (open_tun(path, device) for path, device in cable["ends"])
        delay_s = cable["delay_ms"] / 1000
        directions += [Direction(one, other, delay_s), Direction(other, one, delay_s)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(directions, sys.stdin.fileno())


if __name__ == "__main__":
    main()

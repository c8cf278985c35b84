"""What a node's own work costs on this machine at the moment: `python -m bench.swarm_yardstick DIRECTORY`.

A client asks a server for a signed record over TLS and opens it: the parts that nodes have, in a process of about their
size, as often as a contributor sends messages. Many processes on one machine take each other's caches, and whoever
sleeps between two messages pays for it: such a request takes 0.35 ms of CPU one after another and 1.3 four times a
second, with a load of eight, where sums in a loop take 5 % more than alone. Not a benchmark itself; `python -m bench
swarm` holds CPU time against it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio
from aiohttp import web

from p2p.bridge import AioThread
from p2p.contacts import Contact
from p2p.http import HttpClient, HttpServer
from p2p.tls import load_or_create_certificate
from protocol.envelope import open_envelope, seal
from protocol.errors import NodeError
from protocol.identity import Identity
from protocol.records import Hello
from simnet.interrupts import shielded

EVERY_S: Final = 0.25
WARM_REQUESTS: Final = 8
ENDS_WITHIN_S: Final = 10.0
SERVER: Final = Identity.from_phrase("relay").peer_id
CLIENT: Final = Identity.from_phrase("client")


@contextmanager
def yardstick(directory: Path) -> Iterator[Callable[[], float]]:
    """A process that works from now on; call what it gives once: CPU ms of a request since. Raises NodeError."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.swarm_yardstick", str(directory)]
    with shielded(), (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    try:
        _line(process)
        yield lambda: _read(process)
    finally:
        _end(process)


def _read(process: subprocess.Popen[str]) -> float:
    if process.stdin is not None:
        process.stdin.close()
    return float(_line(process))


def _line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise NodeError("the process whose work CPU time is held against has ended", hint="see what it wrote: its log")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _work(directory: Path) -> None:
    certificate = load_or_create_certificate(directory)
    record = seal(Hello(run=bytes(32), relay=SERVER.public_key, nonce=bytes(32)), CLIENT)

    async def give(_: web.Request) -> web.Response:
        return web.Response(body=record)

    async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
        server = HttpServer(aio, [web.get("/", give)], host="127.0.0.1", port=0, certificate=certificate)
        address = await nursery.start(server.run)
        contact = Contact(SERVER, address.url, certificate.fingerprint, token="bench")

        async def ask() -> None:
            open_envelope((await http.get(f"{address.url}/", contact=contact)).body, Hello)

        for _ in range(WARM_REQUESTS):
            await ask()
        _say("ready")
        _say(f"{await _cost_until_told(ask) * 1e3}")
        nursery.cancel_scope.cancel()


async def _cost_until_told(ask: Callable[[], Awaitable[None]]) -> float:
    """CPU seconds of a request, on average, from now until this process' input ends."""
    began_s, count = time.process_time(), 1
    await ask()
    async with trio.open_nursery() as nursery:

        async def until_told() -> None:
            await trio.to_thread.run_sync(sys.stdin.read)
            nursery.cancel_scope.cancel()

        nursery.start_soon(until_told)
        while True:
            await trio.sleep(EVERY_S)
            await ask()
            count += 1
    return (time.process_time() - began_s) / count


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(_work, Path(sys.argv[1]))

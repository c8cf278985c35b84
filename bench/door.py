"""What TLS and tokens cost a relay: a large file over loopback in clear and under TLS, both sides' CPU; a hello.

Server and client are processes of their own. The two ways take turns and the best of each is shown, for what a busy
computer adds says nothing about either. CPU seconds are user and system together; the client hashes what it gets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import trio
from aiohttp import web

from bench.harness import Result, rate
from p2p.bridge import AioThread
from p2p.contacts import Contact
from p2p.http import FileRange, HttpClient, HttpServer, send_ranges
from p2p.tls import Certificate, load_or_create_certificate
from p2p.tokens import TokenMint
from protocol.envelope import open_envelope, seal
from protocol.identity import Identity
from protocol.records import Hello

ROUNDS: Final = 3
FILE: Final = "file"
SERVER: Final = Identity.from_phrase("relay").peer_id
CLIENT: Final = Identity.from_phrase("client")
RUN: Final = bytes(32)


def bench(*, quick: bool = False) -> Result:
    """Transfer a file both ways, then check hellos and tokens."""
    size = (64 if quick else 1024) << 20
    best: dict[str, float] = {}
    result = Result()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with (path / FILE).open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
        load_or_create_certificate(path)
        for name in ("plain", "TLS") * ROUNDS:
            taken = _transfer(path, size, tls=name == "TLS")
            for what, seconds in zip(("", " server CPU", " client CPU"), taken, strict=True):
                best[name + what] = min(seconds, best.get(name + what, seconds))
    for name in ("plain", "TLS"):
        result.figures[f"{name} MB/s"] = size / best[name] / 1e6
        result.figures[f"{name} server CPU-s/GB"] = best[f"{name} server CPU"] / size * 1e9
        result.figures[f"{name} client CPU-s/GB"] = best[f"{name} client CPU"] / size * 1e9
    result.figures["hellos checked/s"], result.figures["tokens checked/s"] = _door(quick=quick)
    result.at_most("TLS server CPU-s/GB", 1.5)
    result.at_least("tokens checked/s", 10_000)
    return result


def _transfer(path: Path, size: int, *, tls: bool) -> tuple[float, float, float]:
    """Wall seconds, the server's CPU seconds, the client's."""
    command = [sys.executable, "-m", "bench.door", str(path), str(size), "tls" if tls else "plain"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        if server.stdin is None or server.stdout is None:
            raise RuntimeError("the server's pipes are missing")
        url = server.stdout.readline().strip()
        seconds, client_s = trio.run(_fetch, url, load_or_create_certificate(path), size)
        server.stdin.write("stop\n")
        server.stdin.flush()
        server_s = float(server.stdout.readline())
        server.stdin.close()
    return seconds, server_s, client_s


async def _fetch(url: str, certificate: Certificate, size: int) -> tuple[float, float]:
    secure = url.startswith("https")
    contact = Contact(SERVER, url, certificate.fingerprint, token="bench") if secure else None
    async with AioThread() as aio, HttpClient(aio) as http:
        await http.get(f"{url}/warm", contact=contact)
        began, cpu = time.perf_counter(), time.process_time()
        await http.get_stream(f"{url}/{FILE}", lambda _: None, expected_bytes=size, contact=contact)
        return time.perf_counter() - began, time.process_time() - cpu


async def _serve(path: Path, size: int, *, tls: bool) -> None:
    async def give(request: web.Request) -> web.StreamResponse:
        with (path / FILE).open("rb", buffering=0) as file:
            return await send_ranges(request, [FileRange(file, 0, size)])

    async def warm(_: web.Request) -> web.Response:
        return web.Response()

    certificate = load_or_create_certificate(path) if tls else None
    routes = [web.get(f"/{FILE}", give), web.get("/warm", warm)]
    async with AioThread() as aio, trio.open_nursery() as nursery:
        address = await nursery.start(HttpServer(aio, routes, host="127.0.0.1", port=0, certificate=certificate).run)
        sys.stdout.write(f"{address.url}\n")
        sys.stdout.flush()
        cpu = time.process_time()
        await trio.to_thread.run_sync(sys.stdin.readline)
        sys.stdout.write(f"{time.process_time() - cpu}\n")
        sys.stdout.flush()
        nursery.cancel_scope.cancel()


def _door(*, quick: bool) -> tuple[float, float]:
    mint = TokenMint(SERVER, RUN)
    nonce = mint.challenge(CLIENT.peer_id.public_key)
    hello = seal(Hello(run=RUN, relay=SERVER.public_key, nonce=nonce), CLIENT)
    token = f"Bearer {mint.token(CLIENT.peer_id)}"
    seconds = 0.1 if quick else 1.0
    return (
        rate(lambda: mint.token(mint.check_hello(open_envelope(hello, Hello))), seconds=seconds),
        rate(lambda: mint.holder(token), seconds=seconds),
    )


if __name__ == "__main__":
    trio.run(lambda: _serve(Path(sys.argv[1]), int(sys.argv[2]), tls=sys.argv[3] == "tls"))

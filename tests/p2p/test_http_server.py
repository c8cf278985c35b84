"""A server under attack: silent, slow and greedy peers, over TLS, while an honest client is served as ever."""

import asyncio
import hashlib
import os
import socket
import ssl
from contextlib import asynccontextmanager, closing

import pytest
import trio
from aiohttp import web

from p2p.bridge import AioThread
from p2p.contacts import Contact
from p2p.http import FileRange, HttpClient, HttpServer, msgpack_response, send_ranges
from p2p.tls import load_or_create_certificate
from protocol.errors import RelayError
from protocol.identity import Identity

CAROL = Identity.from_phrase("carol").peer_id
SILENT = 300


class Served:
    """A server that says hello, and an honest client of it."""

    def __init__(self, http, url, contact):
        self.http, self.url, self.contact = http, url, contact
        self.streams = []
        self.port = int(url.rpartition(":")[2])

    async def hello(self):
        return await self.http.get(f"{self.url}/hello", contact=self.contact, timeout_s=5)

    async def tcp(self):
        self.streams.append(await trio.open_tcp_stream("127.0.0.1", self.port))
        return self.streams[-1]

    async def tls(self, *, receive_buffer=None):
        stream = await self.tcp()
        if receive_buffer:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        secure = trio.SSLStream(stream, context)
        await secure.do_handshake()
        return secure


async def say_hello(request):
    return msgpack_response("hello")


@asynccontextmanager
async def serving(tmp_path, *routes, **settings):
    certificate = load_or_create_certificate(tmp_path)
    routes = [web.get("/hello", say_hello), *routes]
    with trio.fail_after(30):
        async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
            server = HttpServer(aio, routes, host="127.0.0.1", port=0, certificate=certificate, **settings)
            url = (await nursery.start(server.run)).url
            served = Served(http, url, Contact(CAROL, url, certificate.fingerprint, token="x"))
            yield served
            for stream in served.streams:
                await trio.aclose_forcefully(stream)
            nursery.cancel_scope.cancel()


async def ended(stream):
    """The other side closed the connection, one way or another."""
    try:
        while await stream.receive_some():
            pass
    except (trio.BrokenResourceError, ssl.SSLError):
        pass


async def test_silent_connections_hold_up_nobody_and_are_closed(tmp_path):
    """300 TCP connections that never begin TLS."""
    async with serving(tmp_path, handshake_timeout_s=2.0) as served:
        silent = [await served.tcp() for _ in range(SILENT)]
        assert (await served.hello()).status == 200
        async with trio.open_nursery() as nursery:
            for stream in silent:
                nursery.start_soon(ended, stream)


@pytest.mark.parametrize(
    "limits", [{"max_connections_per_host": 3}, {"max_connections": 3}], ids=lambda each: next(iter(each))
)
async def test_silent_connections_make_room_for_a_neighbour_behind_the_same_address(tmp_path, limits):
    """One address opens all the connections that it may have and stays silent, so that none is left for the others."""
    async with serving(tmp_path, handshake_timeout_s=20, **limits) as served:
        silent = [await served.tcp() for _ in range(3)]
        assert (await served.hello()).status == 200
        await ended(silent[0])
        for stream in silent[1:]:
            await stream.aclose()


@pytest.mark.parametrize(
    "limits", [{"max_connections_per_host": 3}, {"max_connections": 3}], ids=lambda each: next(iter(each))
)
async def test_connections_that_greet_and_ask_nothing_make_room(tmp_path, limits):
    """One address opens connections, greets on each, sends half a request, so that none is left for the others."""
    async with serving(tmp_path, first_request_timeout_s=20, **limits) as served:
        held = [await served.tls() for _ in range(3)]
        for stream in held:
            await stream.send_all(b"GET /hello HTTP/1.1\r\nHost: x\r\n")
        assert (await served.hello()).status == 200
        await ended(held[0])


async def test_half_a_request_has_a_deadline_of_its_own(tmp_path):
    """Attack: a request that is never finished, on a server whose idle connections may stay for long."""
    async with serving(tmp_path, first_request_timeout_s=0.2, idle_timeout_s=60) as served:
        stream = await served.tls()
        await stream.send_all(b"GET /hello HTTP/1.1\r\nHost: x\r\n")
        await ended(stream)


async def test_connections_that_are_served_count_for_their_address(tmp_path):
    """One address has as many requests under way as it may: none of them makes way, however many more come."""

    async def go_on(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"here it comes")
            await asyncio.sleep(0.01)

    async with serving(tmp_path, web.get("/long", go_on), max_connections=5, max_connections_per_host=2) as served:
        held = [await served.tls() for _ in range(2)]
        for stream in held:
            await stream.send_all(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await stream.receive_some()
        with pytest.raises(RelayError):
            await served.hello()
        await trio.aclose_forcefully(held.pop())
        while True:
            try:
                assert (await served.hello()).status == 200
                break
            except RelayError:
                await trio.lowlevel.checkpoint()


async def test_a_handshake_in_drops_is_cut_off(tmp_path):
    """A ClientHello, one byte at a time."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    async with serving(tmp_path, handshake_timeout_s=0.5) as served, await served.tcp() as stream:
        await dribble(stream, outgoing.read())


async def test_headers_in_drops_are_cut_off(tmp_path):
    """Slow loris: headers that never end, one byte at a time."""
    async with serving(tmp_path, idle_timeout_s=0.5) as served:
        stream = await served.tls()
        await stream.send_all(b"GET /hello HTTP/1.1\r\nHost: x\r\n")
        await dribble(stream, b"X-Slow: " + b"x" * 4000)


async def dribble(stream, data):
    """Send a byte every few milliseconds until the other side ends it."""
    async with trio.open_nursery() as nursery:

        async def send():
            for at in range(len(data)):
                try:
                    await stream.send_all(data[at : at + 1])
                except trio.BrokenResourceError:
                    return
                await trio.sleep(0.02)
            raise AssertionError("every byte was taken")

        nursery.start_soon(send)
        await ended(stream)
        nursery.cancel_scope.cancel()


async def test_a_reader_of_an_answer_who_stops_is_cut_off(tmp_path, caplog):
    """A client asks for the largest answer there is, again and again, and reads none: memory for each."""

    cut = trio.Event()
    token = trio.lowlevel.current_trio_token()

    async def large(request):
        request.task.add_done_callback(lambda _: token.run_sync_soon(cut.set))  # the connection's, which is cut off
        return web.Response(body=bytes(8 << 20))

    async with serving(tmp_path, web.get("/large", large), answer_timeout_s=-511.5) as served:  # 0.5 s for 8 MiB
        stream = await served.tls(receive_buffer=4096)
        await stream.send_all(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await cut.wait()
    assert caplog.text == ""


async def test_a_trickling_reader_of_a_file_is_cut_off(tmp_path, caplog):
    """A client takes 1 KB/s of a shard, to hold a connection and an open file for days."""
    (tmp_path / "big").write_bytes(bytes(32 << 20))
    cut = trio.Event()
    token = trio.lowlevel.current_trio_token()

    async def give(request):
        with (tmp_path / "big").open("rb", buffering=0) as file:
            try:
                return await send_ranges(request, [FileRange(file, 0, 32 << 20)], stall_timeout_s=0.5)
            finally:
                token.run_sync_soon(cut.set)

    async with serving(tmp_path, web.get("/big", give)) as served:
        stream = await served.tls(receive_buffer=4096)
        await stream.send_all(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        async with trio.open_nursery() as nursery:

            async def trickle():
                while True:
                    await stream.receive_some(1024)
                    await trio.sleep(0.2)

            nursery.start_soon(trickle)
            assert (await served.hello()).status == 200
            await cut.wait()
            nursery.cancel_scope.cancel()
    assert caplog.text == ""


async def test_garbage_for_tls_is_nobodys_trouble(tmp_path, caplog):
    async with serving(tmp_path) as served:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 500, bytes(1000)):
            async with await served.tcp() as stream:
                await stream.send_all(garbage)
                await ended(stream)
        assert (await served.hello()).status == 200
    assert caplog.text == ""


async def test_files_come_whole_and_in_ranges_under_tls(tmp_path):
    data = os.urandom((3 << 20) + 5)
    (tmp_path / "data").write_bytes(data)

    async def give(request):
        with (tmp_path / "data").open("rb", buffering=0) as file:
            return await send_ranges(request, [FileRange(file, 10, 5), FileRange(file, 0, len(data))])

    async with serving(tmp_path, web.get("/data", give)) as served:
        url, whole = f"{served.url}/data", data[10:15] + data
        await served.http.get_to_file(
            url,
            tmp_path / "copy",
            expected_bytes=len(whole),
            expected_sha256=hashlib.sha256(whole).digest(),
            contact=served.contact,
        )
        assert (tmp_path / "copy").read_bytes() == whole
        part = await served.http.get(
            url, headers={"Range": "bytes=3-1048590"}, max_bytes=2 << 20, contact=served.contact
        )
        assert (part.status, part.body) == (206, whole[3:1048591])


async def test_a_file_that_shrank_ends_the_connection_and_not_the_server(tmp_path, caplog):
    (tmp_path / "data").write_bytes(bytes(100))

    async def give(request):
        with (tmp_path / "data").open("rb", buffering=0) as file:
            return await send_ranges(request, [FileRange(file, 0, 1000)])

    async with serving(tmp_path, web.get("/data", give)) as served:
        with pytest.raises(RelayError):
            await served.http.get(f"{served.url}/data", contact=served.contact)
        assert (await served.hello()).status == 200
    assert "cause=truncated" in caplog.text


async def test_a_port_is_closed_with_its_server(tmp_path):
    async with serving(tmp_path) as served:
        assert (await served.hello()).status == 200
    with closing(socket.socket()) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", served.port))

"""The HTTP border: what comes back, what is refused, and what a hostile peer cannot do to the rest."""

import asyncio
import errno
import hashlib
import os
import socket
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
import pytest
import trio
from aiohttp import web
from disk_kit import full_disk

from p2p.bridge import AioThread
from p2p.contacts import Contact
from p2p.http import (
    FileRange,
    HttpClient,
    HttpServer,
    body_chunks,
    error_response,
    listening_socket,
    msgpack_response,
    read_body,
    send_ranges,
)
from p2p.http.stream import Download
from p2p.limits import DownloadBudget
from protocol.errors import ChecksumError, DataDirError, MalformedError, PortError, RefusedError, RelayError
from protocol.identity import Identity


@asynccontextmanager
async def serving(routes, **settings):
    """A client and a server with these routes; gives (client, base URL, the HTTP thread)."""
    async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
        server = HttpServer(aio, routes, host="127.0.0.1", port=0, **settings)
        address = await nursery.start(server.run)
        yield http, address.url, aio
        nursery.cancel_scope.cancel()


async def echo(request):
    return web.Response(body=await read_body(request, max_bytes=1000, timeout_s=2))


async def test_a_cancelled_download_writes_nothing_any_more():
    """The sink is busy while the download is cancelled: the caller may close its file only afterwards."""
    busy, began, ended, may_end = trio.Event(), [], [], threading.Event()
    token = trio.lowlevel.current_trio_token()

    def sink(piece):
        began.append(len(piece))
        token.run_sync_soon(busy.set)
        may_end.wait(5)
        ended.append(len(piece))

    async def give(request):
        return web.Response(body=bytes(4 << 20))

    async def release():
        await trio.lowlevel.checkpoint()
        may_end.set()

    with trio.fail_after(10):
        async with serving([web.get("/", give)]) as (http, url, _):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(http.get_stream, url, sink, expected_bytes=4 << 20))
                await busy.wait()
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await release()
            assert len(ended) >= 1
            assert began == ended


@asynccontextmanager
async def raw_server(reply):
    """A peer that answers any request with these bytes and closes."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def answer(stream):
        async with stream:
            await stream.receive_some()
            with trio.move_on_after(2), suppress(trio.BrokenResourceError):  # the client may hang up first
                await stream.send_all(reply)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def test_get_and_post_give_status_headers_and_body():
    async def hello(request):
        return msgpack_response({"name": request.query["name"]})

    with trio.fail_after(10):
        async with serving([web.get("/v1/hello", hello), web.post("/v1/echo", echo)]) as (http, url, _):
            answer = await http.get(f"{url}/v1/hello?name=alice")
            assert (answer.status, msgspec.msgpack.decode(answer.body)) == (200, {"name": "alice"})
            assert answer.headers["content-type"] == "application/msgpack"
            assert (await http.post(f"{url}/v1/echo", b"bytes")).body == b"bytes"


async def test_a_refusal_carries_code_message_and_hint():
    async def no(request):
        return error_response(403, "evicted", "you are out", "see why")

    with trio.fail_after(10):
        async with serving([web.get("/no", no)]) as (http, url, _):
            with pytest.raises(RefusedError, match="you are out") as caught:
                await http.get(f"{url}/no")
            assert (caught.value.code, caught.value.hint) == ("evicted", "see why")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MalformedError("no"), 400, "malformed"),
        (ChecksumError("no"), 400, "bad-hash"),
        (RefusedError("no", code="over-cap"), 409, "over-cap"),
        (RefusedError("no", code="not-yet"), 404, "not-yet"),
        (RefusedError("\udcff\x1b[2J", code="not-yet"), 404, "not-yet"),
        (OSError(28, "No space left on device"), 507, "disk-full"),
        (web.HTTPNotFound(), 404, "not-found"),
    ],
)
async def test_what_a_handler_raises_becomes_a_code(error, status, code):
    statuses = []

    @web.middleware
    async def spy(request, handler):
        raise error

    async def never(request):
        raise AssertionError

    with trio.fail_after(10):
        async with serving([web.get("/", never)], middlewares=[spy]) as (http, url, _):
            with pytest.raises(RefusedError) as caught:
                await http.get(url)
            assert caught.value.code == code
            status_line = await first_line(url, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            statuses.append(int(status_line.split()[1]))
    assert statuses == [status]


async def first_line(url, request):
    host, port = url.removeprefix("http://").split(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(request)
        return (await stream.receive_some()).split(b"\r\n")[0]


async def test_a_bug_in_a_handler_shows_in_the_log_and_not_to_the_peer(caplog):
    async def broken(request):
        raise ZeroDivisionError("secret detail")

    with trio.fail_after(10):
        async with serving([web.get("/", broken)]) as (http, url, _):
            with pytest.raises(RefusedError) as caught:
                await http.get(url)
    assert caught.value.code == "internal"
    assert "secret" not in str(caught.value)
    assert "secret detail" in caplog.text


async def test_a_body_over_the_limit_is_refused():
    with trio.fail_after(10):
        async with serving([web.post("/", echo)]) as (http, url, _):
            with pytest.raises(RefusedError) as caught:
                await http.post(url, bytes(1001))
            assert caught.value.code == "too-large"


async def test_an_answer_over_the_limit_is_dropped():
    """A relay answers a small question with endless data."""

    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 16))

    with trio.fail_after(10):
        async with serving([web.get("/", endless)]) as (http, url, _):
            with pytest.raises(RelayError, match="more than the 100000 bytes"):
                await http.get(url, max_bytes=100_000)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xff" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\n\xc1\xff\xff\xff",
    ],
)
async def test_garbage_for_an_answer_is_a_relay_error(reply):
    with trio.fail_after(10):
        async with raw_server(reply) as url, AioThread() as aio, HttpClient(aio) as http:
            with pytest.raises(RelayError):
                await http.get(url, timeout_s=5)


async def test_a_silent_peer_is_given_up():
    async def silent(request):
        await asyncio.sleep(3600)

    with trio.fail_after(10):
        async with serving([web.get("/", silent)]) as (http, url, _):
            with pytest.raises(RelayError, match="silent"):
                await http.get(url, timeout_s=0.2)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "ftp://example.org/", "http://[::1/", "http://a b/", "x", ""])
async def test_a_peer_that_cannot_be_reached_is_a_relay_error(url):
    with trio.fail_after(10):
        async with AioThread() as aio, HttpClient(aio) as http:
            with pytest.raises(RelayError):
                await http.get(url, timeout_s=5)


async def test_a_refused_connection_is_told_in_words():
    """aiohttp prints its own objects, the pinned certificate's among them."""
    contact = Contact(Identity.from_phrase("carol").peer_id, "https://127.0.0.1:1", bytes(32), token="x")
    with trio.fail_after(10):
        async with AioThread() as aio, HttpClient(aio) as http:
            with pytest.raises(RelayError) as caught:
                await http.get("https://127.0.0.1:1/", contact=contact, timeout_s=5)
    assert caught.value.message == "127.0.0.1:1 cannot be reached, or broke off: Connection refused"


async def test_a_file_for_which_the_disk_has_no_room_is_this_nodes_fault(tmp_path):
    content = bytes(100_000)

    async def give(request):
        return web.Response(body=content)

    with trio.fail_after(10):
        async with serving([web.get("/", give)]) as (http, url, _):
            fetch = partial(
                http.get_to_file,
                url,
                tmp_path / "file",
                expected_bytes=len(content),
                expected_sha256=hashlib.sha256(content).digest(),
            )
            with full_disk(room=4096), pytest.raises(DataDirError, match="cannot write"):
                await fetch()
            assert list(tmp_path.iterdir()) == []
            await fetch()
            assert (tmp_path / "file").read_bytes() == content


async def test_a_disk_that_became_read_only_in_a_download_is_this_nodes_fault(tmp_path, monkeypatch):
    """It does not let go of the part that it has, either."""
    content = bytes(100_000)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    async def give(request):
        return web.Response(body=content)

    with trio.fail_after(10):
        async with serving([web.get("/", give)]) as (http, url, _):
            sizes = {"expected_bytes": len(content), "expected_sha256": bytes(32)}
            with full_disk(room=4096), monkeypatch.context() as disk:
                disk.setattr(os, "unlink", read_only)
                with pytest.raises(DataDirError, match="cannot write"):
                    await http.get_to_file(url, tmp_path / "file", **sizes)


async def test_a_servers_full_disk_is_said_without_its_paths():
    async def no_room(request):
        raise DataDirError("cannot use /home/carol/relay: database or disk is full", hint="df -h /home/carol")

    with trio.fail_after(10):
        async with serving([web.post("/", no_room)]) as (http, url, _):
            with pytest.raises(RefusedError) as caught:
                await http.post(url, b"")
            assert caught.value.code == "disk-full"
            assert "/home" not in f"{caught.value}"


async def test_a_network_without_a_route_is_a_relay_error(tmp_path, monkeypatch):
    def unreachable(*_):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    with trio.fail_after(10):
        async with AioThread() as aio, HttpClient(aio) as http:
            monkeypatch.setattr(Download, "run", unreachable)
            with pytest.raises(RelayError, match="Network is unreachable"):
                await http.get_to_file(
                    "http://192.0.2.1:1/", tmp_path / "file", expected_bytes=1, expected_sha256=bytes(32)
                )


async def test_cancelling_a_request_frees_its_connection():
    begun, gone = trio.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()

    async def held(request):
        response = web.StreamResponse()
        await response.prepare(request)
        token.run_sync_soon(begun.set)
        try:
            while True:
                await response.write(bytes(1 << 16))
        finally:
            token.run_sync_soon(gone.set)

    with trio.fail_after(10):
        async with serving([web.get("/", held)]) as (http, url, _):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(http.get, url, max_bytes=1 << 50))
                await begun.wait()
                nursery.cancel_scope.cancel()
            await gone.wait()


async def test_post_file_streams_and_get_to_file_checks(tmp_path):
    data = os.urandom(3_000_001)
    received = []

    async def take(request):
        received.extend([chunk async for chunk in body_chunks(request, max_bytes=len(data))])
        return msgpack_response(len(received))

    async def give(request):
        with (tmp_path / "data").open("rb", buffering=0) as file:
            return await send_ranges(request, [FileRange(file, 0, len(data))])

    (tmp_path / "data").write_bytes(data)
    digest = hashlib.sha256(data).digest()
    with trio.fail_after(20):
        async with serving([web.post("/", take), web.get("/", give)]) as (http, url, _):
            await http.post_file(url, tmp_path / "data")
            assert b"".join(received) == data
            await http.get_to_file(url, tmp_path / "copy", expected_bytes=len(data), expected_sha256=digest)
            assert (tmp_path / "copy").read_bytes() == data
            with pytest.raises(ChecksumError):
                await http.get_to_file(url, tmp_path / "bad", expected_bytes=len(data), expected_sha256=bytes(32))
            with pytest.raises(RelayError, match="were signed"):
                await http.get_to_file(url, tmp_path / "bad", expected_bytes=5, expected_sha256=digest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "data"]


async def test_an_upload_that_the_peer_does_not_take_is_given_up(tmp_path):
    """A relay accepts a submission's connection and never reads."""
    (tmp_path / "data").write_bytes(bytes(16 << 20))

    async def hold(request):
        await asyncio.sleep(3600)

    with trio.fail_after(20):
        async with serving([web.post("/", hold)]) as (http, url, _):
            with pytest.raises(RelayError, match="silent"):
                await http.post_file(url, tmp_path / "data", progress_timeout_s=0.3)


async def test_an_uploader_that_goes_silent_is_given_up():
    """A contributor sends half a body and holds the connection."""
    with trio.fail_after(10):
        async with serving([web.post("/", hurried)]) as (_, url, _):
            line = await first_line(url, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
            assert line.split()[1] == b"408"


async def hurried(request):
    return web.Response(body=await read_body(request, timeout_s=0.2))


@pytest.mark.parametrize("opening", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_silent_connection_is_closed(opening):
    """Slowloris: a connection that never sends a whole request."""
    with trio.fail_after(10):
        async with serving([web.post("/", echo)], idle_timeout_s=0.3) as (_, url, _):
            host, port = url.removeprefix("http://").split(":")
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                if opening:
                    await stream.send_all(opening)
                assert await stream.receive_some() == b""


async def test_an_address_that_has_all_its_connections_gives_an_idle_one_for_the_next():
    """Attack: whole requests, and then nothing, on as many connections as an address may have."""

    async def hello(request):
        return msgpack_response("hello")

    limits = {"max_connections": 4, "max_connections_per_host": 3}
    with trio.fail_after(10):
        async with serving([web.get("/", hello)], **limits) as (http, url, _):
            host, port = url.removeprefix("http://").split(":")
            held = [await trio.open_tcp_stream(host, int(port)) for _ in range(3)]
            for stream in held:
                await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
            assert (await http.get(url)).status == 200
            with suppress(trio.BrokenResourceError):
                while await held[0].receive_some():
                    pass
            for stream in held:
                await stream.aclose()


async def test_ranges_of_files_are_sent_end_to_end(tmp_path):
    (tmp_path / "one").write_bytes(b"0123456789")
    (tmp_path / "two").write_bytes(b"abcdefghij")

    async def give(request):
        with (tmp_path / "one").open("rb", buffering=0) as one, (tmp_path / "two").open("rb", buffering=0) as two:
            return await send_ranges(request, [FileRange(one, 8, 2), FileRange(two, 0, 3)])

    with trio.fail_after(10):
        async with serving([web.get("/", give)]) as (http, url, _):
            assert (await http.get(url)).body == b"89abc"
            part = await http.get(url, headers={"Range": "bytes=1-3"})
            assert (part.status, part.body, part.headers["Content-Range"]) == (206, b"9ab", "bytes 1-3/5")
            assert (await http.get(url, headers={"Range": "bytes=-2"})).body == b"bc"
            for unusable in ("bytes=9-", "bytes=3-1", "lines=1-2", "bytes=1-2,4-5"):
                with pytest.raises(RefusedError) as caught:
                    await http.get(url, headers={"Range": unusable})
                assert caught.value.code == "bad-range"


async def test_a_downloader_that_stops_reading_is_cut_off(tmp_path):
    """A client asks for a large file and takes nothing: its handler must end."""
    (tmp_path / "big").write_bytes(bytes(64 << 20))
    cut = trio.Event()
    token = trio.lowlevel.current_trio_token()

    async def give(request):
        with (tmp_path / "big").open("rb", buffering=0) as file:
            try:
                return await send_ranges(request, [FileRange(file, 0, 64 << 20)], stall_timeout_s=0.3)
            finally:
                token.run_sync_soon(cut.set)

    with trio.fail_after(10):
        async with serving([web.get("/", give)]) as (_, url, _):
            host, port = url.removeprefix("http://").split(":")
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await cut.wait()


async def test_a_taken_port_is_named_with_the_next_step():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        async with AioThread() as aio:
            with trio.fail_after(5), pytest.raises(PortError, match=f"port {port} .* taken") as caught:
                await HttpServer(aio, [], host="127.0.0.1", port=port).run()
            assert f":{port}" in caught.value.hint


@pytest.mark.parametrize(
    ("host", "port", "match"),
    [("192.0.2.1", 0, "no such address"), ("127.0.0.1", 1 << 17, "131072"), ("a..b", 0, r"a\.\.b")],
)
def test_an_unusable_address_is_a_port_error(host, port, match):
    with pytest.raises(PortError, match=match):
        listening_socket(host, port)


async def test_a_port_is_free_again_after_the_server_ends():
    async with AioThread() as aio:
        for port in (0, 0):
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    address = await nursery.start(HttpServer(aio, [], host="127.0.0.1", port=port).run)
                    nursery.cancel_scope.cancel()
                listening_socket("127.0.0.1", address.port).close()


async def test_whatever_comes_is_counted_and_large_answers_are_paced(monkeypatch):
    """The budget says how long to read no more; small answers, such as heads, are never held back."""
    pauses = []
    monkeypatch.setattr("p2p.http.client.time.sleep", pauses.append)

    async def give(request):
        return web.Response(body=bytes(int(request.query["size"])))

    class Budget(DownloadBudget):
        def take(self, count):
            super().take(count)
            return 0.25

    budget = Budget(bytes_per_s=1)
    with trio.fail_after(20):
        async with AioThread() as aio, HttpClient(aio, budget=budget) as http, trio.open_nursery() as nursery:
            server = HttpServer(aio, [web.get("/", give)], host="127.0.0.1", port=0)
            url = (await nursery.start(server.run)).url
            await http.get(f"{url}/?size=100")
            assert pauses == []
            await http.get_stream(f"{url}/?size=300000", lambda piece: None, expected_bytes=300_000)
            assert pauses
            assert set(pauses) == {0.25}
            nursery.cancel_scope.cancel()
    assert http.budget.spent[1] == 300_100

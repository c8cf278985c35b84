"""Certificates: kept, private, renewed in time; and clients that take no other one."""

import asyncio
import os
import ssl
import stat
from datetime import UTC, datetime, timedelta

import pytest
import trio
from aiohttp import web
from cryptography import x509

from p2p.bridge import AioThread
from p2p.contacts import Contact
from p2p.http import HttpClient, HttpServer, msgpack_response
from p2p.tls import FILE, LIFETIME, RENEW_BEFORE, load_or_create_certificate
from protocol.errors import DataDirError, MalformedError, RelayError
from protocol.identity import Identity

CAROL = Identity.from_phrase("carol").peer_id


def test_a_certificate_is_kept_and_its_key_is_private(tmp_path):
    made = load_or_create_certificate(tmp_path)
    assert load_or_create_certificate(tmp_path) == made
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    shown = x509.load_pem_x509_certificate(made.path.read_bytes())
    assert shown.not_valid_before_utc < datetime.now(UTC) < shown.not_valid_after_utc


def test_a_certificate_is_renewed_well_before_its_end(tmp_path):
    made = load_or_create_certificate(tmp_path)
    late = datetime.now(UTC) + LIFETIME - RENEW_BEFORE
    assert load_or_create_certificate(tmp_path, clock=lambda: late - timedelta(days=1)) == made
    assert load_or_create_certificate(tmp_path, clock=lambda: late + timedelta(days=1)) != made


@pytest.mark.parametrize("damage", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_damaged_certificate_is_replaced(tmp_path, damage):
    (tmp_path / FILE).write_bytes(damage)
    (tmp_path / FILE).chmod(0o600)
    assert load_or_create_certificate(tmp_path).server_context()


def test_a_certificate_whose_key_others_could_read_is_replaced(tmp_path, caplog):
    """A back-up restored with the wrong permissions: whoever read the key could sit in between."""
    made = load_or_create_certificate(tmp_path)
    made.path.chmod(0o644)
    assert load_or_create_certificate(tmp_path) != made
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert "others could read" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DataDirError, match=FILE):
        load_or_create_certificate(tmp_path)


def test_a_directory_that_is_none_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataDirError, match=FILE):
        load_or_create_certificate(tmp_path / "file")


async def hello(request):
    return msgpack_response(request.headers.get("Authorization", "none"))


async def test_only_the_signed_certificate_is_taken_and_no_token_goes_to_another(tmp_path):
    """Somebody in between answers with a certificate of their own and waits for a token."""
    (tmp_path / "true").mkdir()
    (tmp_path / "false").mkdir()
    true, false = (load_or_create_certificate(tmp_path / name) for name in ("true", "false"))
    heard = []

    async def spy(request):
        heard.append(dict(request.headers))
        return msgpack_response("x")

    with trio.fail_after(20):
        async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
            honest = HttpServer(aio, [web.get("/", hello)], host="127.0.0.1", port=0, certificate=true)
            between = HttpServer(aio, [web.get("/", spy)], host="127.0.0.1", port=0, certificate=false)
            urls = [(await nursery.start(server.run)).url for server in (honest, between)]
            contacts = [Contact(CAROL, url, true.fingerprint, token="secret") for url in urls]
            answer = await http.get(urls[0], contact=contacts[0])
            assert answer.body.endswith(b"Bearer secret")
            with pytest.raises(RelayError, match="another TLS certificate"):
                await http.get(urls[1], contact=contacts[1])
            nursery.cancel_scope.cancel()
    assert heard == []


async def test_a_server_with_a_certificate_speaks_no_plain_http(tmp_path):
    """Downgrade: somebody in between strips the `s`."""
    certificate = load_or_create_certificate(tmp_path)
    with trio.fail_after(20):
        async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
            server = HttpServer(aio, [web.get("/", hello)], host="127.0.0.1", port=0, certificate=certificate)
            url = (await nursery.start(server.run)).url
            assert url.startswith("https://")
            with pytest.raises(RelayError):
                await http.get(url.replace("https", "http"))
            nursery.cancel_scope.cancel()


def test_a_token_is_never_given_to_a_plain_url():
    with pytest.raises(MalformedError, match="never travel in clear"):
        Contact(CAROL, "http://127.0.0.1:1", b"f" * 32, token="secret")


async def test_old_tls_is_refused(tmp_path):
    """A client that knows nothing newer than TLS 1.2 could be made to use its weaknesses."""
    certificate = load_or_create_certificate(tmp_path)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2

    async def connect(port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=old)
        writer.close()

    with trio.fail_after(20):
        async with AioThread() as aio, trio.open_nursery() as nursery:
            server = HttpServer(aio, [], host="127.0.0.1", port=0, certificate=certificate)
            address = await nursery.start(server.run)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await aio.run(connect, address.port)
            nursery.cancel_scope.cancel()


async def test_contacts_of_one_place_share_connections(tmp_path):
    """A relay makes a new contact for the origin whenever it looks: each left an open connection behind."""
    certificate = load_or_create_certificate(tmp_path)
    ports = set()

    async def note(request):
        ports.add(request.transport.get_extra_info("peername")[1])
        return msgpack_response("x")

    with trio.fail_after(20):
        async with AioThread() as aio, HttpClient(aio) as http, trio.open_nursery() as nursery:
            server = HttpServer(aio, [web.get("/", note)], host="127.0.0.1", port=0, certificate=certificate)
            url = (await nursery.start(server.run)).url
            for token in ("first", "second", "third"):
                await http.get(url, contact=Contact(CAROL, url, certificate.fingerprint, token=token))
            nursery.cancel_scope.cancel()
    assert len(ports) == 1

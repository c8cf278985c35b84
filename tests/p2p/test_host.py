import contextlib
import errno
import logging
import socket

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.pb.crypto_pb2 import PublicKey
from libp2p.host.exceptions import StreamFailure
from libp2p.network.exceptions import SwarmException
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.insecure.pb.plaintext_pb2 import Exchange
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.secio.transport import ID as SECIO_PROTOCOL_ID
from libp2p.utils.varint import encode_uvarint
from multiaddr import Multiaddr
from p2p_world import ALICE, BOB, CAROL, LOOPBACK, MALLORY, hosts_of, info, port_of, running_host, until, works

from p2p import guard
from p2p import host as host_module
from p2p.guard import MAX_DIALS_PER_S, Guard, Pace
from p2p.host import (
    MAX_ADDRESSES_TO_DIAL,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_PEER,
    DialError,
    build_host,
    dial,
    endpoint,
    outward_address,
    parse_announce,
    parse_listen,
    probe_port,
    reachable,
    running,
    to_libp2p,
)
from p2p.scores import Misdeed, Scores
from protocol.errors import ConfigError, PortError


async def test_host_has_the_identity_key():
    with trio.fail_after(10):
        async with running_host(ALICE) as alice:
            assert str(alice.get_id()) == str(ALICE.peer_id)
            assert alice.get_addrs() == [
                Multiaddr(f"{alice.get_transport_addrs()[0]}/p2p/{ALICE.peer_id}"),
            ]


def prefixed(data):
    return encode_uvarint(len(data)) + data


async def test_impersonation_by_plaintext_is_refused():
    """Attack: offer the plaintext protocol with another peer's public key, and be taken for that peer."""
    with trio.fail_after(30):
        async with running_host(ALICE) as alice:
            carols_key = create_new_key_pair(CAROL.seed).public_key
            forged = KeyPair(create_new_key_pair(MALLORY.seed).private_key, carols_key)
            mallory = new_host(
                key_pair=create_new_key_pair(MALLORY.seed), sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(forged)}
            )
            async with mallory.run([]):
                with pytest.raises(SwarmException):
                    await mallory.connect(info(alice))
                assert not alice.get_connected_peers()
                await mallory.close()


@pytest.mark.parametrize("protocol", [SECIO_PROTOCOL_ID, PLAINTEXT_PROTOCOL_ID, "/tls/1.0.0"])
async def test_other_security_is_refused_on_the_wire(protocol):
    """Attack: propose a protocol that libp2p offers by default, and go on in clear as if it had been accepted."""
    hello = prefixed(b"/multistream/1.0.0\n")
    carols_key = create_new_key_pair(CAROL.seed).public_key.serialize()
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, await trio.open_tcp_stream("127.0.0.1", port_of(alice)) as stream:
            await stream.send_all(hello + prefixed(protocol.encode() + b"\n") + prefixed(b"ls\n"))
            offered = hello + prefixed(b"na\n") + prefixed(b"/noise\n\n")
            assert await received(stream, len(offered)) == offered
            claim = Exchange(id=str(CAROL.peer_id).encode(), pubkey=PublicKey.FromString(carols_key))
            await stream.send_all(prefixed(claim.SerializeToString()) + prefixed(b"/yamux/1.0.0\n"))
            await stream.send_eof()
            with contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass
            assert not alice.get_connected_peers()


async def received(stream, length):
    data = b""
    while len(data) < length and (more := await stream.receive_some(length - len(data))):
        data += more
    return data


async def test_peer_with_another_id_is_named():
    """Attack: take over a bootstrap peer's address and answer with another key."""
    with trio.fail_after(20):
        async with running_host(MALLORY) as mallory, running_host(ALICE, listens=False) as alice:
            with pytest.raises(DialError, match="answers as") as caught:
                await dial(alice, to_libp2p(BOB.peer_id), mallory.get_transport_addrs(), timeout_s=5)
            assert caught.value.other_peer == str(MALLORY.peer_id)


async def test_dial_tries_every_address():
    """Attack: tell a wrong address for a peer; libp2p tries a single one."""
    with trio.fail_after(20):
        async with running_host(BOB) as bob, running_host(ALICE, listens=False) as alice:
            wrong = Multiaddr("/ip4/127.0.0.1/tcp/9")
            await dial(alice, bob.get_id(), [wrong, *bob.get_transport_addrs()], timeout_s=5)
            assert alice.get_connected_peers() == [bob.get_id()]


async def test_dial_gives_up_on_silent_peers():
    """Attack: accept the connection and say nothing."""
    with trio.fail_after(20), socket.create_server(("127.0.0.1", 0)) as silent:
        async with running_host(ALICE, listens=False) as alice:
            address = Multiaddr(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}")
            with pytest.raises(DialError, match="did not answer"):
                await dial(alice, to_libp2p(BOB.peer_id), [address], timeout_s=0.3)


async def test_leaving_closes_connections():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice:
            async with running_host(BOB, listens=False) as bob:
                await bob.connect(info(alice))
                connection = alice.get_network().get_connections()[0]
            await connection.event_closed.wait()


async def test_cancelling_closes_connections():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice:
            with trio.CancelScope() as scope:
                async with running_host(BOB, listens=False) as bob:
                    await bob.connect(info(alice))
                    connection = alice.get_network().get_connections()[0]
                    scope.cancel()
                    await trio.sleep_forever()
            await connection.event_closed.wait()


async def test_port_in_use_is_named():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice:
            taken = alice.get_transport_addrs()[0]
            port = endpoint(taken)[1]
            with pytest.raises(PortError, match="another program") as caught:
                async with running(build_host(BOB), [taken]):
                    pass
            assert str(port) in caught.value.message
            assert f":{port}" in caught.value.hint


def test_foreign_address_cannot_be_listened_on():
    with pytest.raises(PortError, match="no interface"):
        probe_port(Multiaddr("/ip4/192.0.2.1/tcp/4001"))


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "/ip4/127.0.0.1", "/ip4/127.0.0.1/udp/1/quic", "/ip4/300.1.1.1/tcp/1", "/dns4/a.example/tcp/1"],
)
def test_bad_listen_addresses_are_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_listen(text)
    assert "/ip4/" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001", "/ip4/203.0.113.7/tcp/0", "/ip4/203.0.113.7"]
)
def test_addresses_that_lead_nowhere_are_not_announced(text):
    with pytest.raises(ConfigError):
        parse_announce(text)


def test_names_may_be_announced():
    assert str(parse_announce("/dns4/relay.example/tcp/4001")) == "/dns4/relay.example/tcp/4001"


def test_all_interfaces_are_announced_as_the_one_that_leads_out():
    [announced] = reachable(Multiaddr("/ip4/0.0.0.0/tcp/4001"))
    assert endpoint(announced) == (outward_address(ipv6=False), 4001)
    assert endpoint(announced)[0] != "0.0.0.0"
    assert reachable(Multiaddr("/ip4/0.0.0.0/tcp/0")) == []
    [announced] = reachable(Multiaddr("/ip6/::/tcp/4001"))
    assert endpoint(announced) == (outward_address(ipv6=True), 4001)
    assert endpoint(announced)[0] != "::"
    assert reachable(Multiaddr("/ip4/127.0.0.1/tcp/1")) == [Multiaddr("/ip4/127.0.0.1/tcp/1")]


async def test_announced_addresses_replace_the_others():
    with trio.fail_after(10):
        host = build_host(ALICE, announce=[parse_announce("/ip4/203.0.113.7/tcp/4001")])
        async with running(host, [Multiaddr(LOOPBACK)]):
            assert [str(address) for address in host.get_addrs()] == [f"/ip4/203.0.113.7/tcp/4001/p2p/{ALICE.peer_id}"]


async def test_host_without_listen_addresses_announces_none():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB, listens=False) as bob:
            await bob.connect(PeerInfo(alice.get_id(), alice.get_transport_addrs()))
            assert bob.get_addrs() == []


async def test_refusals_do_not_shut_everyone_out(caplog):
    """Attack: be refused a few times, so that libp2p's circuit breaker refuses all peers for a minute."""
    caplog.set_level(logging.DEBUG, "p2p.patches")
    with trio.fail_after(40):
        book = Scores()
        async with running_host(ALICE, guard=Guard(book)) as alice, running_host(MALLORY, listens=False) as mallory:
            for _ in range(2):
                book.blame(MALLORY.peer_id, Misdeed.WINDOW)
            for refusals in range(1, 7):
                await mallory.connect(info(alice))
                await until(lambda refusals=refusals: caplog.text.count("is banned") == refusals)
                await until(lambda: not mallory.get_connected_peers())
            async with running_host(BOB, listens=False) as bob:
                assert await works(alice, bob)


async def test_shares_hold_at_the_door(monkeypatch, caplog):
    """Attack: connections and streams of many identities from one address, beyond what one address may have."""
    caplog.set_level(logging.DEBUG, "p2p.patches")
    monkeypatch.setattr(guard, "_is_loopback", lambda ip: False)
    monkeypatch.setattr(guard, "MAX_CONNECTIONS_PER_ADDRESS", 2)
    monkeypatch.setattr(guard, "MAX_STREAMS_PER_ADDRESS", 3)
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, contextlib.AsyncExitStack() as stack:
            alice.set_stream_handler("/hold/1", hold)
            hosts = [await stack.enter_async_context(running_host(who, listens=False)) for who in (BOB, CAROL, MALLORY)]
            for host in hosts[:2]:
                await host.connect(info(alice))
                await until(lambda host=host: host.get_id() in alice.get_connected_peers())
            await hosts[2].connect(info(alice))
            await until(lambda: "127.0.0.0/24 has 2 open already" in caplog.text)
            await until(lambda: hosts[2].get_id() not in alice.get_connected_peers())
            opened = []
            for host in (hosts[0], hosts[1], hosts[0], hosts[1]):
                with contextlib.suppress(StreamFailure):  # what is beyond the share
                    opened.append(await host.new_stream(alice.get_id(), ["/hold/1"]))
            assert 0 < len(opened) <= 3


async def hold(stream):
    await trio.sleep_forever()


async def test_connections_of_one_peer_are_capped():
    """Attack: one identity on many machines, each of which connects."""
    with trio.fail_after(30):
        async with running_host(ALICE) as alice, hosts_of([MALLORY] * (MAX_CONNECTIONS_PER_PEER + 4)) as copies:
            for copy in copies:
                with contextlib.suppress(SwarmException):  # what is beyond the cap
                    await copy.connect(info(alice))
            held = alice.get_network().get_connections(copies[0].get_id())
            assert 0 < len(held) <= MAX_CONNECTIONS_PER_PEER
            async with running_host(BOB, listens=False) as bob:
                assert await works(alice, bob)


async def test_every_dial_keeps_the_pace(monkeypatch):
    """Attack: name a peer at many addresses; each is tried, but none before its turn."""
    events = []

    class Counting(Pace):
        async def wait(self):
            events.append("wait")
            await super().wait()

    async def refuse(host, peer_id, address):
        await trio.lowlevel.checkpoint()
        events.append("dial")
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr(host_module, "_dial_one", refuse)
    with trio.fail_after(20):
        async with running_host(ALICE, listens=False, guard=Guard(dials=Counting())) as alice:
            addresses = [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}") for port in range(1, 10)]
            for _ in range(3):
                with pytest.raises(DialError):
                    await dial(alice, to_libp2p(BOB.peer_id), addresses, timeout_s=5)
    assert events == ["wait", "dial"] * 3 * MAX_ADDRESSES_TO_DIAL


async def test_dials_of_a_host_are_twenty_a_second(monkeypatch, autojump_clock):
    times = []

    async def refuse(host, peer_id, address):
        await trio.lowlevel.checkpoint()
        times.append(trio.current_time())
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    async def dial_often(host):
        for _ in range(10):
            with pytest.raises(DialError):
                await dial(host, to_libp2p(BOB.peer_id), [Multiaddr("/ip4/127.0.0.1/tcp/9")], timeout_s=5)

    monkeypatch.setattr(host_module, "_dial_one", refuse)
    host = build_host(ALICE)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(dial_often, host)
    assert len(times) == 100
    assert max(sum(began <= other < began + 1 for other in times) for began in times) == MAX_DIALS_PER_S


async def test_more_connections_than_libp2p_takes_by_itself():
    limits = build_host(ALICE).get_network()._resource_manager.connection_limits
    assert limits.max_established_inbound == MAX_CONNECTIONS
    assert MAX_CONNECTIONS > 256

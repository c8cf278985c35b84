import contextlib
import socket

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.network.exceptions import SwarmException
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from multiaddr import Multiaddr
from p2p_world import ALICE, BOB, CAROL, LOOPBACK, MALLORY, info, running_host, works

from p2p.guard import Guard
from p2p.host import (
    MAX_CONNECTIONS,
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


async def test_refusals_do_not_shut_everyone_out():
    """Attack: be refused a few times, so that libp2p's circuit breaker refuses all peers for a minute."""
    with trio.fail_after(40):
        book = Scores()
        async with running_host(ALICE, guard=Guard(book)) as alice, running_host(MALLORY, listens=False) as mallory:
            for _ in range(2):
                book.blame(MALLORY.peer_id, Misdeed.WINDOW)
            for _ in range(8):
                with contextlib.suppress(SwarmException):
                    await mallory.connect(info(alice))
                    await mallory.disconnect(alice.get_id())
            async with running_host(BOB, listens=False) as bob:
                assert await works(alice, bob)


async def test_more_connections_than_libp2p_takes_by_itself():
    limits = build_host(ALICE).get_network()._resource_manager.connection_limits
    assert limits.max_established_inbound == MAX_CONNECTIONS
    assert MAX_CONNECTIONS > 256

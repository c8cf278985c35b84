"""Each fault of libp2p 0.8.1 that p2p.patches repairs, replayed by an attacker on loopback."""

import contextlib
import logging
import re
import struct
from pathlib import Path

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.exceptions import StreamFailure
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network import swarm
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerstore import create_signed_peer_record
from libp2p.utils.varint import encode_uvarint
from multiaddr import Multiaddr
from p2p_world import ALICE, BOB, CAROL, MALLORY, info, port_of, request, running_host, until, works

from p2p import guard, patches
from p2p.kad import RequestError
from p2p.patches import guard_of
from p2p.text import MAX_LOG_CHARACTERS
from protocol.errors import ConfigError

MIB = 1024 * 1024
HELLO = b"\x13/multistream/1.0.0\n"


def test_another_release_is_refused():
    with pytest.raises(ConfigError, match=r"libp2p 0\.9\.0 is installed") as caught:
        patches.check_version("0.9.0")
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize("repair", patches._REPAIRS, ids=lambda repair: repair.__name__)
def test_every_repair_names_its_test(repair):
    """So that it can be dropped when a later release no longer needs it."""
    named = re.findall(r"test_\w+", (repair.__doc__ or "").partition("Test")[2])
    written = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert named
    assert all(f"def {name}(" in written for name in named)


def test_repairs_are_in_place():
    patches.apply()
    assert swarm._HAPPY_EYEBALLS_DELAY == 0.0


async def test_auto_connector_dials_nobody():
    with trio.fail_after(10):
        async with running_host(ALICE) as alice, running_host(BOB) as bob:
            alice.get_peerstore().add_addrs(bob.get_id(), bob.get_transport_addrs(), 100)
            await alice.get_network().auto_connector.maybe_connect()
            assert not alice.get_connected_peers()


async def test_raising_handler_ends_its_stream_only():
    """Attack: a message that makes a stream handler raise, which would end the host and the process with it."""

    async def handler(stream):
        await stream.read(1)
        raise ValueError("what a peer's bytes brought about")

    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(MALLORY, listens=False) as mallory:
            alice.set_stream_handler("/bad/1", handler)
            await mallory.connect(info(alice))
            stream = await mallory.new_stream(alice.get_id(), ["/bad/1"])
            await stream.write(b"x")
            with pytest.raises(StreamError):
                await stream.read(1)
            async with running_host(BOB, listens=False) as bob:
                assert await works(alice, bob)


async def test_identify_failure_is_contained():
    """Attack: an identify answer that raises inside a trio system task, which ends the program."""
    with trio.fail_after(10):
        async with running_host(ALICE) as alice:

            async def fail(peer_id, *, reason):
                raise ValueError(reason)

            alice._identify_peer = fail
            await alice._identify_task_entry(alice.get_id(), "test")


async def test_streams_of_one_peer_are_capped():
    """Attack: one peer opens streams without end, taking all of the host's 10 000 slots."""
    opened = 0

    async def hold(stream):
        nonlocal opened
        opened += 1
        await trio.sleep_forever()

    with trio.fail_after(30):
        async with running_host(ALICE) as alice, running_host(MALLORY, listens=False) as mallory:
            alice.set_stream_handler("/hold/1", hold)
            await mallory.connect(info(alice))
            for _ in range(guard.MAX_STREAMS_PER_PEER + 8):
                with contextlib.suppress(StreamFailure):  # those beyond the cap
                    await mallory.new_stream(alice.get_id(), ["/hold/1"])
            assert 0 < opened <= guard.MAX_STREAMS_PER_PEER
            async with running_host(BOB, listens=False) as bob:
                assert await works(alice, bob)


async def test_inbound_slots_are_given_back():
    """Attack: connect and leave until the host's slots, which libp2p never gives back, are gone."""
    with trio.fail_after(30):
        async with running_host(ALICE) as alice:
            limiter = alice.get_network()._inbound_limiter
            limiter.total_tokens = 2
            async with running_host(BOB, listens=False) as bob:
                for _ in range(6):
                    assert await works(alice, bob)
                    await bob.disconnect(alice.get_id())
                    await until(lambda: not limiter.borrowed_tokens)


@pytest.mark.parametrize("said", [b"", HELLO], ids=["nothing", "hello"])
async def test_idle_sockets_do_not_shut_others_out(said, monkeypatch):
    """Attack: from the honest peer's own address, hold every socket that has not proved who it is, and fall silent."""
    monkeypatch.setattr(guard, "MAX_SILENCE_S", 0.25)
    ended = []

    async def hold(stream):
        async with stream:
            await stream.send_all(said)
            while await stream.receive_some():
                pass
            ended.append(stream)

    with trio.fail_after(30):
        async with running_host(ALICE) as alice, trio.open_nursery() as nursery:
            limiter = alice.get_network()._inbound_limiter
            limiter.total_tokens = guard.MAX_HALF_OPEN_PER_ADDRESS + 8
            for _ in range(60):
                nursery.start_soon(hold, await trio.open_tcp_stream("127.0.0.1", port_of(alice)))
            await until(lambda: len(ended) == 60 - guard.MAX_HALF_OPEN_PER_ADDRESS)  # they were too quick for the rest
            half_open = guard_of(alice)._half_open
            await until(lambda: len(half_open) == sum(each.silent_s() > 0 for each in half_open))
            async with running_host(BOB, listens=False) as bob:
                assert await works(alice, bob)
            nursery.cancel_scope.cancel()


async def test_handshakes_under_way_do_not_make_room(autojump_clock):
    """A crowd that comes back at once from one address: those who began are let through, the others try again."""
    door = guard.Guard()
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(door.handshake("203.0.113.1")) for _ in range(guard.MAX_HALF_OPEN_PER_ADDRESS)]
        await trio.sleep(guard.MAX_SILENCE_S)
        for each in first:
            each.note()
        with pytest.raises(guard.Refused), door.handshake("203.0.113.1"):
            pass
        with door.handshake("203.0.113.2"):
            pass
        assert not any(each.scope.cancel_called for each in first)


async def test_negotiation_message_does_not_fill_memory():
    """Attack: before any handshake, announce a gigabyte of negotiation and send it."""
    with trio.fail_after(30):
        async with running_host(ALICE) as alice:
            stream = await trio.open_tcp_stream("127.0.0.1", port_of(alice))
            await stream.send_all(encode_uvarint(1024 * MIB))
            sent = 0
            with contextlib.suppress(trio.BrokenResourceError):
                while sent < 200 * MIB:
                    await stream.send_all(b"x" * MIB)
                    sent += MIB
            await stream.aclose()
            assert sent < 32 * MIB  # what the kernel's buffers hold
            async with running_host(BOB, listens=False) as bob:
                assert await works(alice, bob)


async def test_unread_stream_does_not_fill_memory():
    """Attack: ignore the receive window and push data into a stream that its handler does not read."""

    async def stall(stream):
        await trio.sleep_forever()

    with trio.fail_after(60):
        async with running_host(ALICE) as alice, running_host(MALLORY, listens=False) as mallory:
            alice.set_stream_handler("/stall/1", stall)
            await mallory.connect(info(alice))
            stream = (await mallory.new_stream(alice.get_id(), ["/stall/1"])).muxed_stream
            chunk = b"z" * 65000
            frame = struct.pack("!BBHII", 0, 0, 0, stream.stream_id, len(chunk)) + chunk
            sent = 0
            victim = alice.get_network().get_connections()[0].muxed_conn
            while not victim.is_closed and sent < 120 * MIB:
                await stream.conn._write_frame(frame)
                await trio.lowlevel.checkpoint()
                sent += len(frame)
            assert sent < 60 * MIB
            async with running_host(BOB, listens=False) as bob:
                assert await works(alice, bob)


async def read_for_ever(stream):
    """The other side's half of the negotiation comes first."""
    while True:
        await stream.read(64)


async def test_silent_stream_is_ended(monkeypatch):
    """Attack: open a stream, negotiate half a protocol or nothing at all, and keep it."""
    monkeypatch.setattr(patches, "STREAM_TIMEOUT_S", 0.2)
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(MALLORY, listens=False) as mallory:
            await mallory.connect(info(alice))
            stream = await mallory.get_network().new_stream(alice.get_id())
            await stream.write(b"\x13/multi")
            with pytest.raises(StreamError):
                await read_for_ever(stream)
            assert await works(alice, mallory)


def test_logs_of_libp2p_are_cut(caplog):
    """Attack: make libp2p log what was sent, until the disk is full."""
    patches.apply()
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("libp2p.kad_dht.kad_dht").warning("y" * 100_000)
        logging.getLogger("libp2p.kad_dht.kad_dht").error("x" * 100_000)
    ours = [record.getMessage() for record in caplog.records if record.name == "p2p.patches"]
    assert [len(message) <= MAX_LOG_CHARACTERS + len("libp2p ") for message in ours] == [True]
    assert not logging.getLogger("libp2p").propagate


async def test_flood_of_peers_leaves_the_own_key():
    """Attack: answer with a thousand made-up peers, so that the peer store evicts the node's own key."""
    with trio.fail_after(20):
        async with running_host(ALICE) as alice:
            for number in range(1200):
                alice.get_peerstore().add_addrs(
                    ID(b"\x00\x24" + struct.pack(">I", number) * 9), [Multiaddr("/ip4/10.0.0.1/tcp/1")], 60
                )
            assert alice.get_private_key().to_bytes() == ALICE.seed


async def test_huge_peer_record_is_refused():
    """Attack: a signed peer record of many addresses, which servers would hand on with every answer."""
    with trio.fail_after(20):
        async with running_host(ALICE) as alice:
            keys = create_new_key_pair(MALLORY.seed)
            addresses = [Multiaddr(f"/ip4/10.0.{high}.{low}/tcp/1") for high in range(4) for low in range(250)]
            record = create_signed_peer_record(ID.from_pubkey(keys.public_key), addresses, keys.private_key)
            assert not alice.get_peerstore().consume_peer_record(record, 60)


async def test_request_to_a_peer_without_a_dht_is_an_error():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(CAROL, listens=False) as carol:
            carol.get_peerstore().add_addrs(alice.get_id(), alice.get_transport_addrs(), 60)
            with pytest.raises(RequestError):
                await request(carol, alice.get_id(), Message(type=Message.MessageType.PING))


async def test_dial_is_refused_while_peer_is_down():
    with trio.fail_after(20):
        async with running_host(ALICE, listens=False) as alice:
            nobody = ID.from_string(str(BOB.peer_id))
            alice.get_peerstore().add_addrs(nobody, [Multiaddr("/ip4/127.0.0.1/tcp/9")], 60)
            with pytest.raises(SwarmException):
                await alice.get_network().dial_peer(nobody)
            patches.forget_failed_dial(alice, nobody)
            assert not alice.get_network()._negative_peer_cache.is_blocked(str(nobody))

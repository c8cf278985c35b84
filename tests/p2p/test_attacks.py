"""What a hostile peer may send, and that it ends at most its own connection: each attack, then an honest peer.

Every attack is seen to arrive: the victim closed the socket, its handler began and ended, its multiplexer read on.
"""

import contextlib
import os
import socket
import struct
from collections import Counter

import pytest
import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.stream.exceptions import StreamError
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import encode_uvarint
from p2p_world import (
    ALICE,
    BOB,
    CAROL,
    MALLORY,
    RUN,
    advert,
    info,
    make_dht,
    port_of,
    request,
    running_host,
    until,
    works,
)

from p2p import framing, guard, kad_server
from p2p.dht_records import relay_key
from p2p.framing import Frames
from p2p.guard import Guard
from p2p.kad import RequestError
from p2p.kad_message import KAD_PROTOCOL, Known
from p2p.patches import guard_of
from p2p.reachability import PROTOCOL as DIAL_BACK
from p2p.reachability import DialBack
from p2p.scores import Misdeed, Scores
from protocol.identity import Identity

KIND = Message.MessageType
PING, IDENTIFY, PUSH = "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0", "/ipfs/id/push/1.0.0"
HELLO = b"\x13/multistream/1.0.0\n"
NOISE = HELLO + b"\x07/noise\n"
JUNK = os.urandom(5000)


def prefixed(data):
    return encode_uvarint(len(data)) + data


def kad(kind, **fields):
    return prefixed(Message(type=kind, **fields).SerializeToString())


def yamux(version, kind, flags, stream, length):
    return struct.pack("!BBHII", version, kind, flags, stream, length)


def hostile_provider():
    message = Message(type=KIND.ADD_PROVIDER, key=b"k")
    provider = message.providerPeers.add()
    provider.id = os.urandom(3)
    provider.addrs.append(os.urandom(30))
    return prefixed(message.SerializeToString())


def put(key, value):
    message = Message(type=KIND.PUT_VALUE, key=key)
    message.record.key, message.record.value = key, value
    return prefixed(message.SerializeToString())


def hostile_identify():
    message = Identify(
        public_key=os.urandom(36), listen_addrs=[os.urandom(20)] * 50, protocols=["\0" * 1000], agent_version="x" * 5000
    )
    message.observed_addr, message.signedPeerRecord = os.urandom(9), os.urandom(100)
    return prefixed(message.SerializeToString())


def gossip(**fields):
    rpc = rpc_pb2.RPC()
    rpc.publish.add(data=b"x", topicIDs=["t"], **fields)
    return prefixed(rpc.SerializeToString())


SOCKETS = {
    "nothing at all": b"",
    "garbage before any protocol": JUNK,
    "web request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + JUNK[:500],
    "negotiation of gigabytes": b"\xff\xff\xff\xff\x0f" + JUNK,
    "negotiation length without end": b"\xff" * 64,
    "handshake of garbage": NOISE + struct.pack(">H", 5000) + JUNK,
    "handshake cut short": NOISE + struct.pack(">H", 32) + b"x" * 10,
}
STREAMS = {
    "kad garbage": (KAD_PROTOCOL, prefixed(JUNK[:1000])),
    "kad length that overflows": (KAD_PROTOCOL, b"\xff" * 11),
    "kad message of a terabyte": (KAD_PROTOCOL, encode_uvarint(1 << 40) + JUNK),
    "kad message over the limit": (KAD_PROTOCOL, prefixed(bytes(20_000))),
    "kad message of nothing": (KAD_PROTOCOL, b"\0"),
    "kad unknown request": (KAD_PROTOCOL, prefixed(b"\x08\x63")),
    "kad empty key": (KAD_PROTOCOL, kad(KIND.FIND_NODE)),
    "kad key of kilobytes": (KAD_PROTOCOL, kad(KIND.FIND_NODE, key=JUNK)),
    "kad forged sender record": (KAD_PROTOCOL, kad(KIND.FIND_NODE, key=b"abc", senderRecord=os.urandom(200))),
    "kad provider that is nobody": (KAD_PROTOCOL, hostile_provider()),
    "kad key that is no text": (KAD_PROTOCOL, put(b"\xff\xfe", b"x")),
    "kad value in another namespace": (KAD_PROTOCOL, put(b"/pk/x", b"x")),
    "kad value of another author": (KAD_PROTOCOL, put(relay_key(RUN, BOB.peer_id).encode(), advert(by=MALLORY))),
    "kad hang up in a message": (KAD_PROTOCOL, encode_uvarint(500) + b"x" * 10),
    "identify push of garbage": (PUSH, prefixed(JUNK[:3000])),
    "identify push of terabytes": (PUSH, b"\xff" * 9 + b"\x01"),
    "identify push of lies": (PUSH, hostile_identify()),
    "identify is not asked but told": (IDENTIFY, JUNK),
    "ping that is too short": (PING, b"short"),
    "ping without end": (PING, JUNK * 20),
    "protocol that nobody speaks": ("/nope/9", b""),
    "dial back of garbage": (DIAL_BACK, prefixed(JUNK[:500])),
    "dial back of megabytes": (DIAL_BACK, encode_uvarint(1 << 30)),
    "handler that raises": ("/raises/1", b"x"),  # ends a stock 0.8.1 host
    "gossip garbage": ("/meshsub/1.1.0", prefixed(JUNK)),  # ends a stock 0.8.1 host that runs pubsub
    "gossip key of garbage": (
        "/meshsub/1.1.0",
        gossip(from_id=JUNK[:20], key=JUNK[:36], signature=JUNK[:64]),
    ),  # as well
}
FRAMES = {
    "yamux garbage": JUNK,
    "yamux unknown type": yamux(0, 9, 0, 1, 0),
    "yamux unknown version": yamux(7, 0, 1, 3, 4) + b"abcd",
    "yamux frame of gigabytes": yamux(0, 0, 1, 1, 0xFFFFFFF0),
    "yamux window of gigabytes": yamux(0, 1, 15, 5, 0xFFFFFFFF),
    "yamux stream zero": yamux(0, 0, 1, 0, 4) + b"abcd",
    "yamux data for no stream": yamux(0, 0, 0, 77, 4) + b"abcd",
    "yamux same stream fifty times": yamux(0, 1, 1, 3, 0) * 50,
    "yamux thousand streams": b"".join(yamux(0, 1, 1, 2 * number + 1, 0) for number in range(1000)),
    "yamux resets of streams": b"".join(yamux(0, 1, 8, 2 * number + 1, 0) for number in range(500)),
    "yamux goodbye": yamux(0, 3, 0, 0, 0),
}
GOODBYE = FRAMES["yamux goodbye"]


@contextlib.asynccontextmanager
async def victim():
    """A host with all that a relay's has, and a handler that raises. Honest peers use it after the attack."""

    async def raises(stream):
        await stream.read(1)
        raise ValueError("what a peer's bytes brought about")

    async with running_host(ALICE) as alice:
        make_dht(alice, ALICE)
        DialBack(alice).attach()
        alice.set_stream_handler("/raises/1", raises)
        yield alice
        async with running_host(BOB, listens=False) as bob:
            assert await works(alice, bob)
            client = make_dht(bob, BOB, serve=False, servers=[alice])
            assert await client.put(relay_key(RUN, BOB.peer_id), advert()) == (False, 1)


@pytest.mark.parametrize("name", SOCKETS)
async def test_socket(name):
    """Attack: bytes on a TCP connection, before anyone has proved who they are."""
    with trio.fail_after(30):
        async with victim() as alice:
            for _ in range(3):
                stream = await trio.open_tcp_stream("127.0.0.1", port_of(alice))
                await stream.send_all(SOCKETS[name])
                await stream.send_eof()
                with contextlib.suppress(trio.BrokenResourceError):  # a reset is an end as well
                    while await stream.receive_some():
                        pass
                await stream.aclose()


@pytest.mark.parametrize("name", STREAMS)
async def test_stream(name):
    """Attack: bytes on a stream, and then its end in each way there is."""
    protocol, data = STREAMS[name]
    with trio.fail_after(30):
        async with victim() as alice, running_host(MALLORY, listens=False) as mallory:
            handled, delivered, speaks = count_handled(alice), 0, not protocol.startswith(("/nope", "/meshsub"))
            for end in ("close", "reset", "disconnect"):
                if guard_of(alice).scores.is_banned(MALLORY.peer_id):
                    break
                await mallory.connect(info(alice))
                stream, agreed = await propose(mallory, alice, protocol)
                assert agreed == speaks
                await stream.write(data)
                delivered += 1
                with contextlib.suppress(StreamError):  # the victim was quicker
                    await end_stream(mallory, alice, stream, end)
                await until(lambda least=delivered * speaks: handled[protocol] >= least)  # identify: others' as well
            assert delivered >= 2


async def propose(mallory, alice, protocol):
    """A new stream, and whether the victim speaks a protocol on it; what it says to anything else is `na`."""
    stream = await mallory.get_network().new_stream(alice.get_id())
    name = prefixed(protocol.encode() + b"\n")
    await stream.write(HELLO + name)
    said = b""
    while not said.startswith((HELLO + name, HELLO + b"\x03na\n")):
        said += await stream.read(1000)
    return stream, said.startswith(HELLO + name)


def count_handled(host):
    """Streams by protocol that the host's handlers are done with, in whichever way."""
    handled = Counter()

    def counting(protocol, handler):
        async def handle(stream):
            try:
                await handler(stream)
            finally:
                handled[protocol] += 1

        return handle

    for protocol, handler in list(host.get_mux().handlers.items()):
        host.set_stream_handler(protocol, counting(str(protocol), handler))
    return handled


async def end_stream(mallory, alice, stream, end):
    if end == "close":
        await stream.close()
    elif end == "reset":
        await stream.reset()
    else:
        await mallory.disconnect(alice.get_id())


@pytest.mark.parametrize("name", FRAMES)
async def test_frames(name):
    """Attack: frames of the multiplexer that no honest peer sends."""
    with trio.fail_after(30):
        async with victim() as alice, running_host(MALLORY, listens=False) as mallory:
            await mallory.connect(info(alice))
            [connection] = mallory.get_network().get_connections(alice.get_id())
            await until(lambda: alice.get_network().get_connections(mallory.get_id()))
            [attacked] = alice.get_network().get_connections(mallory.get_id())
            await connection.muxed_conn.secured_conn.write(FRAMES[name] + GOODBYE)
            await attacked.muxed_conn.event_closed.wait()  # what came before the goodbye has been read, or was too much


@pytest.mark.parametrize("cut_at", range(0, 40, 7))
async def test_request_cut_at_any_point(cut_at):
    """Attack: a rightful request that ends too early."""
    data = kad(KIND.GET_VALUE, key=relay_key(RUN, BOB.peer_id).encode())[:cut_at]
    with trio.fail_after(30):
        async with victim() as alice, running_host(MALLORY, listens=False) as mallory:
            await mallory.connect(info(alice))
            stream = await mallory.new_stream(alice.get_id(), [KAD_PROTOCOL])
            await stream.write(data)
            await stream.reset()


async def misbehave(alice, data, *, times):
    """Send data on a new stream each time; return how many times that was let happen."""
    let = 0
    async with running_host(MALLORY, listens=False) as mallory:
        for _ in range(times):
            with contextlib.suppress(Exception):
                await mallory.connect(info(alice))
                stream = await mallory.new_stream(alice.get_id(), [KAD_PROTOCOL])
                let += 1
                await stream.write(data)
                with trio.move_on_after(1):
                    await stream.read(1)
    return let


async def test_whoever_goes_on_is_banned_and_stays_so(tmp_path):
    """Attack: send garbage again and again, also after a restart of the victim."""
    with trio.fail_after(60):
        book = Scores(tmp_path / "bans.json")
        async with running_host(ALICE, guard=Guard(book)) as alice:
            make_dht(alice, ALICE)
            assert await misbehave(alice, prefixed(JUNK[:1000]), times=20) <= 6
            assert book.is_banned(MALLORY.peer_id)
            async with running_host(CAROL, listens=False) as carol:
                assert await works(alice, carol)
        book.save()
        async with running_host(ALICE, guard=Guard(Scores(tmp_path / "bans.json"))) as alice:
            make_dht(alice, ALICE)
            assert await misbehave(alice, kad(KIND.PING), times=3) <= 1


async def test_banned_peer_is_refused():
    """Attack: come back after a ban."""
    with trio.fail_after(20):
        book = Scores()
        for _ in range(2):
            book.blame(MALLORY.peer_id, Misdeed.WINDOW)
        async with running_host(ALICE, guard=Guard(book)) as alice, running_host(MALLORY, listens=False) as mallory:
            await mallory.connect(info(alice))  # its handshake shows who it is
            for connection in mallory.get_network().get_connections():
                await connection.event_closed.wait()
            with trio.fail_after(5):
                while alice.get_connected_peers():  # noqa: ASYNC110 (the state is libp2p's)
                    await trio.sleep(0.01)


async def test_byte_by_byte_is_cut(monkeypatch):
    """Attack: one byte of a request every few seconds, for ever."""
    monkeypatch.setattr(framing, "MESSAGE_TIMEOUT_S", 0.3)
    with trio.fail_after(20):
        async with victim() as alice, running_host(MALLORY, listens=False) as mallory:
            await mallory.connect(info(alice))
            stream = await mallory.new_stream(alice.get_id(), [KAD_PROTOCOL])
            await stream.write(b"\x83\x01")
            with pytest.raises(StreamError):
                await write_for_ever(stream, b"\x08")


async def write_for_ever(stream, data):
    while True:
        await stream.write(data)
        await trio.sleep(0.05)


async def test_idle_streams_make_room_for_others(monkeypatch):
    """Attack: many peers hold all the streams that a DHT server has, and say nothing."""
    monkeypatch.setattr(kad_server, "MAX_STREAMS", 8)
    with trio.fail_after(40):
        async with victim() as alice, contextlib.AsyncExitStack() as stack:
            for number in range(3):
                sybil = await stack.enter_async_context(running_host(Identity.from_phrase(f"s{number}"), listens=False))
                await sybil.connect(info(alice))
                for _ in range(5):
                    await sybil.new_stream(alice.get_id(), [KAD_PROTOCOL])
            async with running_host(CAROL, listens=False) as carol:
                make_dht(carol, CAROL, serve=False, servers=[alice])
                await request(carol, alice.get_id(), Message(type=KIND.PING))


async def test_flood_of_requests_is_cut(monkeypatch):
    """Attack: requests as fast as they can be sent."""
    monkeypatch.setattr(kad_server, "REQUEST_BURST", 10.0)
    monkeypatch.setattr(kad_server, "REQUESTS_PER_S", 1.0)
    with trio.fail_after(20):
        async with victim() as alice, running_host(MALLORY, listens=False) as mallory:
            await mallory.connect(info(alice))
            frames = Frames(await mallory.new_stream(alice.get_id(), [KAD_PROTOCOL]), max_bytes=100_000)
            answers = 0
            with contextlib.suppress(Exception):
                for _ in range(100):
                    await frames.send(Message(type=KIND.PING).SerializeToString())
                    answers += await frames.receive(idle_s=2) is not None
            assert answers == 10


async def test_one_sender_cannot_fill_the_store():
    """Attack: mint keys and put a rightly signed value under each; own and others' values would be pushed out."""
    with trio.fail_after(40):
        async with victim() as alice, running_host(MALLORY, listens=False) as mallory:
            sender = make_dht(mallory, MALLORY, serve=False, servers=[alice]).asker
            taken = 0
            for number in range(24):
                minted = Identity.from_phrase(f"minted {number}")
                key = relay_key(RUN, minted.peer_id).encode()
                message = Message(type=KIND.PUT_VALUE, key=key)
                message.record.key, message.record.value = key, advert(by=minted)
                try:
                    await sender.request(Known(alice.get_id()), message)
                    taken += 1
                except RequestError:
                    continue
            assert taken == 16


def test_shares_of_a_neighbourhood():
    """Attack: one network takes all connections and streams; loopback is excepted, where swarms are simulated."""
    door = Guard()
    with contextlib.ExitStack() as stack:
        for number in range(guard.MAX_CONNECTIONS_PER_ADDRESS):
            stack.enter_context(door.connection(f"peer {number}", f"203.0.113.{number}"))
            stack.enter_context(door.connection(f"peer {number}", "127.0.0.1"))
        with pytest.raises(guard.Refused):
            stack.enter_context(door.connection("one more", "203.0.113.200"))
        stack.enter_context(door.connection("one more", "127.0.0.1"))
        stack.enter_context(door.connection("elsewhere", "203.0.114.1"))
    with door.connection("one more", "203.0.113.200"):
        pass


async def test_socket_that_is_half_open_does_not_delay_others():
    """Attack: open sockets, begin the handshake and stop, up to an address's share."""
    with trio.fail_after(30):
        async with victim() as alice:
            held = [socket.create_connection(("127.0.0.1", port_of(alice))) for _ in range(20)]
            for each in held:
                each.sendall(NOISE)
            async with running_host(CAROL, listens=False) as carol:
                with trio.fail_after(5):
                    assert await works(alice, carol)
            for each in held:
                each.close()

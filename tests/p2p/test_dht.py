import itertools
from contextlib import AsyncExitStack

import msgspec
import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.record import make_put_record
from multiaddr import Multiaddr
from p2p_world import ALICE, BOB, CAROL, MALLORY, RUN, advert, make_dht, request, running_host, until

from p2p import dht, kad, kad_server
from p2p.dht import READ_QUORUM
from p2p.dht_records import relay_key, relays_key
from p2p.framing import Frames
from p2p.host import build_host, running, to_libp2p
from p2p.kad import RequestError, Walk, distance
from p2p.kad_message import KAD_PROTOCOL, Known, name_peer
from p2p.routing import key_of, target_of
from protocol.errors import VersionError
from protocol.identity import Identity

RELAY_KEY = relay_key(RUN, BOB.peer_id)


async def test_only_our_namespace_is_accepted():
    """Attack: store under /pk or /ipns, whose validators libp2p adds by itself."""
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(MALLORY, listens=False) as mallory:
            server = make_dht(alice, ALICE)
            make_dht(mallory, MALLORY, serve=False, servers=[alice])
            for key in (b"/pk/x", b"plain", b"/ipns/x"):
                message = Message(type=Message.MessageType.PUT_VALUE, key=key, record=make_put_record(key, b"value"))
                with pytest.raises(RequestError):
                    await request(mallory, alice.get_id(), message)
            assert server.stored_values == 0


async def test_server_refuses_forged_values():
    """Attack: write to the wire what the own client would refuse to send."""
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(MALLORY, listens=False) as mallory:
            server = make_dht(alice, ALICE)
            make_dht(mallory, MALLORY, serve=False, servers=[alice])
            key = RELAY_KEY.encode()
            for value in (advert(by=MALLORY), b"x" * 9000, b"", advert(valid_until_ms=1)):
                message = Message(type=Message.MessageType.PUT_VALUE, key=key, record=make_put_record(key, value))
                with pytest.raises(RequestError):
                    await request(mallory, alice.get_id(), message)
            assert server.stored_values == 0


async def test_stale_local_copy_is_not_believed():
    """A server that holds an old value and a peer that has a newer one: libp2p answers with the old one for a day."""
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB) as bob, running_host(CAROL) as carol:
            first, second = make_dht(alice, ALICE), make_dht(carol, CAROL, servers=[alice])
            writer = make_dht(bob, BOB, serve=False, servers=[alice, carol])
            await writer.put(RELAY_KEY, advert(1))
            assert (await second.get(RELAY_KEY)).record.sequence == 1
            writer.bootstrap = {alice.get_id()}
            writer.forget(carol.get_id())
            await writer.put(RELAY_KEY, advert(2))
            assert first.stored_values == 1
            assert (await second.get(RELAY_KEY)).record.sequence == 2


async def test_older_value_does_not_replace_a_newer_one():
    """Attack: replay an old, rightly signed address."""
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB, listens=False) as bob:
            make_dht(alice, ALICE)
            client = make_dht(bob, BOB, serve=False, servers=[alice])
            assert await client.put(RELAY_KEY, advert(5)) == (False, 1)
            assert await client.put(RELAY_KEY, advert(4)) == (False, 0)
            assert (await client.get(RELAY_KEY)).record.sequence == 5


async def test_three_answers_decide_and_the_newest_wins():
    """Attack: answer first, with an old, rightly signed value; the read waits for three and takes the best."""
    with trio.fail_after(30):
        async with running_host(ALICE) as alice, running_host(CAROL) as carol, running_host(MALLORY) as mallory:
            servers = [make_dht(host, who) for host, who in ((alice, ALICE), (carol, CAROL), (mallory, MALLORY))]
            for server, sequence in zip(servers, (3, 9, 1), strict=True):
                server._values.put_record(RELAY_KEY.encode(), make_put_record(b"", advert(sequence)))
            async with running_host(BOB) as bob:
                reader = make_dht(bob, BOB, servers=[alice, carol, mallory])
                reader._values.put_record(RELAY_KEY.encode(), make_put_record(b"", advert(2)))
                assert (await reader.get(RELAY_KEY)).record.sequence == 9


async def test_a_read_asks_three_that_have_it_and_no_more(monkeypatch):
    """Attack: the server nearest to a key keeps answering with an old value. Asked one by one, the third decides."""
    monkeypatch.setattr(kad, "PARALLEL_REQUESTS", 1)
    people = [Identity.from_phrase(f"holder {number}") for number in range(4)]
    async with AsyncExitStack() as stack:
        stack.enter_context(trio.fail_after(30))
        hosts = [await stack.enter_async_context(running_host(who)) for who in people]
        servers = [make_dht(host, who) for host, who in zip(hosts, people, strict=True)]
        nearest_first = sorted(servers, key=lambda server: key_of(server.host.get_id()) ^ target_of(RELAY_KEY.encode()))
        for server, sequence in zip(nearest_first, (1, 2, 9, 20), strict=True):
            server._values.put_record(RELAY_KEY.encode(), make_put_record(b"", advert(sequence)))
        bob = await stack.enter_async_context(running_host(BOB, listens=False))
        reader = make_dht(bob, BOB, serve=False, servers=hosts)
        assert (await reader.get(RELAY_KEY)).record.sequence == 9
        assert reader.asker.sent == {"GET_VALUE": READ_QUORUM}


async def test_contact_that_fell_silent_leaves(monkeypatch):
    """A server that is gone is asked twice whether it is there; one that answers stays."""
    monkeypatch.setattr(dht, "SILENT_S", 0.0)
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB, listens=False) as bob:
            make_dht(alice, ALICE)
            async with running_host(CAROL) as carol:
                make_dht(carol, CAROL)
                client = make_dht(bob, BOB, serve=False, servers=[alice, carol])
                assert await client.join() == 2
                await client.check_silent()
                assert client.peers == 2
                assert client.asker.sent["PING"] == 2
            await until(lambda: bob.get_connected_peers() == [alice.get_id()])
            await client.check_silent()
            assert client.peers == 2  # once may be bad luck
            client.asker.forgive()
            await client.check_silent()
            assert client.servers() == [alice.get_id()]


async def test_stream_that_asks_nothing_is_ended(monkeypatch):
    """Attack: open a stream for requests and send none."""
    monkeypatch.setattr(kad_server, "IDLE_TIMEOUT_S", 0.2)
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(MALLORY, listens=False) as mallory:
            make_dht(alice, ALICE)
            await mallory.connect(PeerInfo(alice.get_id(), alice.get_transport_addrs()))
            stream = await mallory.new_stream(alice.get_id(), [KAD_PROTOCOL])
            with pytest.raises(StreamEOF):
                await stream.read(1)


async def test_node_on_the_internet_is_sent_to_no_private_address():
    """Attack: name servers at addresses of the victim's own network, so that it looks around in there."""
    private = to_libp2p(MALLORY.peer_id)

    async def lie(stream):
        frames = Frames(stream, max_bytes=10_000)
        await frames.receive(idle_s=5)
        answer = Message(type=Message.MessageType.FIND_NODE)
        name_peer(answer.closerPeers.add(), private, [Multiaddr("/ip4/127.0.0.1/tcp/9")], b"")
        await frames.send(answer.SerializeToString())

    dialled = []
    with trio.fail_after(20):
        async with running_host(CAROL) as carol:
            carol.set_stream_handler(KAD_PROTOCOL, lie)
            for announce in ([], [Multiaddr("/ip4/8.8.8.8/tcp/4001")]):
                host = build_host(BOB, announce=announce)
                async with running(host, [Multiaddr("/ip4/127.0.0.1/tcp/0")]):
                    client = make_dht(host, BOB, servers=[carol])
                    await client.join()
                    dialled.append(client.asker.is_paused(private))
    assert dialled == [True, False]  # a node that is itself on loopback may be sent there


async def test_provide_says_how_many_took_it():
    """libp2p's answers yes when every server has refused."""

    async def refuse(stream):
        await stream.read(1000)
        raise ValueError("refused")

    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(CAROL) as carol, running_host(BOB) as bob:
            make_dht(alice, ALICE)
            carol.set_stream_handler(KAD_PROTOCOL, refuse)
            relay = make_dht(bob, BOB, servers=[alice, carol])
            assert await relay.provide(relays_key(RUN)) == 1
            alice.set_stream_handler(KAD_PROTOCOL, refuse)
            for connection in bob.get_network().get_connections():
                await connection.close()
            assert await relay.provide(relays_key(RUN)) == 0


async def test_repeated_value_is_stored_again():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB, listens=False) as bob:
            make_dht(alice, ALICE)
            client = make_dht(bob, BOB, serve=False, servers=[alice])
            value = advert(5)
            assert [await client.put(RELAY_KEY, value) for _ in range(2)] == [(False, 1)] * 2


async def test_clients_are_in_no_routing_table():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB, listens=False) as bob:
            server = make_dht(alice, ALICE)
            client = make_dht(bob, BOB, serve=False, servers=[alice])
            await client.join()
            await server.adopt()
            assert (client.peers, server.peers) == (1, 0)


async def test_made_up_peers_do_not_enter_the_routing_table():
    """Attack: answer with peers that do not exist; libp2p takes them in unasked and then hands them on."""

    async def lie(stream):
        await stream.read(1000)
        peers = [
            Message.Peer(id=to_libp2p(Identity.from_phrase(str(number)).peer_id).to_bytes(), addrs=[nowhere])
            for number in range(10)
        ]
        answer = Message(type=Message.MessageType.FIND_NODE, closerPeers=peers).SerializeToString()
        await stream.write(bytes([len(answer) & 0x7F | 0x80, len(answer) >> 7]) + answer)
        await stream.close()

    nowhere = Multiaddr("/ip4/127.0.0.1/tcp/9").to_bytes()
    with trio.fail_after(20):
        async with running_host(MALLORY) as mallory, running_host(BOB, listens=False) as bob:
            mallory.set_stream_handler(KAD_PROTOCOL, lie)
            client = make_dht(bob, BOB, serve=False, servers=[mallory])
            assert await client.join() == 1
            assert client.servers() == [mallory.get_id()]


async def test_garbage_answers_are_request_errors():
    """Attack: answer a request with noise, with nothing, or with a length of a terabyte."""
    answers = itertools.cycle([b"\x05noise", b"", b"\xff" * 12, b"\x80\x80\x80\x80\x80\x01"])

    async def babble(stream):
        await stream.read(1000)
        await stream.write(next(answers))
        await stream.close()

    with trio.fail_after(20):
        async with running_host(MALLORY) as mallory, running_host(BOB, listens=False) as bob:
            mallory.set_stream_handler(KAD_PROTOCOL, babble)
            make_dht(bob, BOB, serve=False, servers=[mallory])
            for _ in range(4):
                with pytest.raises(RequestError):
                    await request(bob, mallory.get_id(), Message(type=Message.MessageType.PING))


async def test_silent_peer_costs_one_timeout(monkeypatch):
    """Attack: accept requests and never answer; the connection is ended and the peer leaves the routing table."""

    async def answer_once(stream):
        frames = Frames(stream, max_bytes=10_000)
        await frames.receive(idle_s=5)
        await frames.send(Message(type=Message.MessageType.FIND_NODE).SerializeToString())
        await trio.sleep_forever()

    with trio.fail_after(20):
        async with running_host(MALLORY) as mallory, running_host(BOB, listens=False) as bob:
            mallory.set_stream_handler(KAD_PROTOCOL, answer_once)
            client = make_dht(bob, BOB, serve=False, servers=[mallory])
            assert await client.join() == 1
            monkeypatch.setattr(kad, "REQUEST_TIMEOUT_S", 0.3)
            assert await client.get(RELAY_KEY) is None
            assert client.peers == 1  # once may be bad luck
            assert not bob.get_connected_peers()
            assert await client.get(RELAY_KEY) is None  # it is left alone for a while, so this costs nothing
            mallory.set_stream_handler(KAD_PROTOCOL, trio.sleep_forever)
            client.asker.forgive()
            assert await client.get(RELAY_KEY) is None
            assert client.peers == 0


async def test_providers_are_found_through_a_server():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB) as bob, running_host(CAROL, listens=False) as carol:
            make_dht(alice, ALICE)
            relay = make_dht(bob, BOB, servers=[alice])
            assert await relay.provide(relays_key(RUN)) == 1
            client = make_dht(carol, CAROL, serve=False, servers=[alice])
            [found] = await client.providers(relays_key(RUN))
            assert found.peer_id == bob.get_id()
            await relay.put(RELAY_KEY, advert(7))
            assert (await client.get_from(found, RELAY_KEY)).record.sequence == 7


async def test_walk_is_bounded_however_many_peers_it_is_told_of():
    """Attack: name new, closer peers for ever."""
    numbers = itertools.count()

    async def ask(known):
        return [Known(to_libp2p(Identity.from_phrase(f"peer {next(numbers)}").peer_id)) for _ in range(20)]

    with trio.fail_after(20):
        walk = Walk(b"key", ask)
        answered = await walk.run([Known(to_libp2p(ALICE.peer_id))])
        assert len(answered) <= 32
        distances = [distance(peer, b"\0" * 32) for peer in answered]
        assert len(set(distances)) == len(answered)


async def test_walk_ends_when_enough_have_answered():
    asked = []

    async def ask(known):
        asked.append(known)
        return []

    with trio.fail_after(20):
        await Walk(b"key", ask, lambda: len(asked) >= 1).run([Known(to_libp2p(who.peer_id)) for who in (ALICE, BOB)])
        assert len(asked) <= 2


def of_version_2(by):
    """An advert as a program of the next protocol version would sign it."""
    fields = msgspec.msgpack.decode(advert(7)) | {"domain": "intellect-node/2", "author": by.peer_id.public_key}
    parts = (fields["domain"].encode(), fields["kind"].encode(), fields["author"], fields["payload"])
    signed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return msgspec.msgpack.encode(fields | {"signature": by.sign(signed)})


async def test_another_protocol_version_is_named_if_the_author_proves_it():
    """Attack: anyone tells a node that it is out of date. The key's own author alone is believed."""
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(CAROL, listens=False) as carol:
            server = make_dht(alice, ALICE)
            server._values.put_record(RELAY_KEY.encode(), make_put_record(b"", advert(1)))
            reader = make_dht(carol, CAROL, serve=False, servers=[alice])
            held = server._values.get(RELAY_KEY.encode())
            held.value = of_version_2(MALLORY)
            assert await reader.get(RELAY_KEY) is None
            held.value = of_version_2(BOB)
            with pytest.raises(VersionError, match="'intellect-node/2'") as caught:
                await reader.get(RELAY_KEY)
    assert caught.value.author == BOB.peer_id
    assert "pip install --upgrade intellect-node" in caught.value.hint

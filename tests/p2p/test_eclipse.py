"""Eclipse with real hosts: eight hostile servers around a key, and in the victim's table, against five honest ones.

The hostile ones answer every question, name only one another, take what is put, hand nothing out, and name as many
relays as an answer may hold, none of which exists. Larger numbers, without sockets, are in test_routing.
"""

import os

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from p2p_world import BOB, CAROL, RUN, advert, hosts_of, info, make_dht, running_host

from p2p.dht_records import relay_key, relays_key
from p2p.dht_stores import MAX_PROVIDERS
from p2p.discovery import MAX_RELAYS
from p2p.framing import Frames
from p2p.host import to_libp2p
from p2p.kad import REPLICAS
from p2p.kad_message import KAD_PROTOCOL, name_peer
from p2p.routing import key_of, target_of
from protocol.identity import Identity, PeerId

HONEST, HOSTILE, DRAWN = 5, 8, 200
VALUE_KEY = relay_key(RUN, BOB.peer_id)


def nearest_of_many(key):
    """Identities that lie around a key: an attacker draws until it has enough of them."""
    drawn = [Identity.from_phrase(f"drawn {number}") for number in range(DRAWN)]
    return sorted(drawn, key=lambda each: key_of(to_libp2p(each.peer_id)) ^ target_of(key))[:HOSTILE]


def collude(hosts):
    """Make hosts a network that says it is all there is."""
    for host in hosts:
        others = [other for other in hosts if other is not host]

        async def lie(stream, others=others):
            frames = Frames(stream, max_bytes=100_000)
            while (data := await frames.receive(idle_s=20)) is not None:
                asked = Message.FromString(data)
                answer = Message(type=asked.type, key=asked.key)
                for other in others:
                    name_peer(answer.closerPeers.add(), other.get_id(), other.get_transport_addrs(), b"")
                if asked.type == Message.MessageType.GET_PROVIDERS:
                    for _ in range(MAX_PROVIDERS):
                        invented = to_libp2p(PeerId(os.urandom(32)))
                        name_peer(answer.providerPeers.add(), invented, other.get_transport_addrs(), b"")
                await frames.send(answer.SerializeToString())

        host.set_stream_handler(KAD_PROTOCOL, lie)


@pytest.mark.parametrize("sought", ["value", "providers"])
async def test_eclipsed_victim_finds_what_honest_servers_hold(sought):
    """Attack: surround a key with identities drawn for it, fill a victim's table first, and withhold what is there."""
    key = VALUE_KEY.encode() if sought == "value" else relays_key(RUN)
    people = [BOB, *(Identity.from_phrase(f"honest {number}") for number in range(HONEST))]
    with trio.fail_after(60):
        async with hosts_of([*people, *nearest_of_many(key)]) as hosts, running_host(CAROL, listens=False) as carol:
            bob, honest, hostile = hosts[0], hosts[1 : HONEST + 1], hosts[HONEST + 1 :]
            collude(hostile)
            for host, identity in zip(honest, people[1:], strict=True):
                await make_dht(host, identity, servers=[honest[0], hostile[0]]).join()
            writer = make_dht(bob, BOB, servers=[honest[1], hostile[1]])
            await (writer.put(VALUE_KEY, advert()) if sought == "value" else writer.provide(key))
            assert await found_by_victim(carol, honest[2:4], hostile, sought)


async def found_by_victim(carol, entries, hostile, sought):
    """Whether one finds it that knew hostile servers alone before it had two honest bootstrap peers and a hostile one.

    Each search begins at one of them, drawn anew; nodes search again until they have found something.
    """
    victim = make_dht(carol, CAROL, serve=False, servers=[hostile[2]])
    await victim.join()
    assert set(victim.servers()) == {host.get_id() for host in hostile}
    assert victim.peers >= REPLICAS
    victim.bootstrap = {host.get_id() for host in (*entries, hostile[2])}
    for entry in entries:
        await carol.connect(info(entry))
    for _ in range(12):
        if sought == "value" and await victim.get(VALUE_KEY):
            return True
        tried = (await victim.providers(relays_key(RUN)))[:MAX_RELAYS] if sought == "providers" else []
        if to_libp2p(BOB.peer_id) in {known.peer_id for known in tried}:
            return True
    return False

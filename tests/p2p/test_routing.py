import itertools
import os
import random

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiaddr import Multiaddr
from p2p_world import ALICE, BOB, CAROL, MALLORY, RUN, info, make_dht, running_host

from p2p import kad
from p2p.addresses import Scope, ip_of, is_dialable, neighbourhood, parse_addresses, scope_of, scope_of_ip
from p2p.dht import PUT_WIDTH, READ_QUORUM, _holders
from p2p.dht_records import relays_key
from p2p.host import to_libp2p
from p2p.kad import MAX_VISITS, REPLICAS, RequestError, Walk
from p2p.kad_message import Known, closer_peers, name_peer
from p2p.routing import BUCKET_SIZE, MAX_PER_NEIGHBOURHOOD, RoutingTable, key_of, target_of
from protocol.identity import PeerId

OWN = to_libp2p(ALICE.peer_id)


def peer():
    return to_libp2p(PeerId(os.urandom(32)))


def at(ip, port=4001):
    return (Multiaddr(f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}"),)


def add(table, ip, peer_id=None):
    return table.answered(peer_id or peer(), at(ip), ip)


def new_table(clock=lambda: 0.0):
    return RoutingTable(OWN, clock=clock)


@pytest.mark.parametrize(
    ("ip", "scope"),
    [
        ("127.0.0.1", Scope.LOOPBACK),
        ("::1", Scope.LOOPBACK),
        ("::ffff:127.0.0.1", Scope.LOOPBACK),
        ("0.0.0.0", Scope.LOOPBACK),
        ("10.1.2.3", Scope.PRIVATE),
        ("192.168.1.1", Scope.PRIVATE),
        ("100.64.0.1", Scope.PRIVATE),
        ("169.254.169.254", Scope.PRIVATE),
        ("fe80::1%eth0", Scope.PRIVATE),
        ("224.0.0.1", Scope.PRIVATE),
        ("8.8.8.8", Scope.GLOBAL),
        ("2a00:1450::1", Scope.GLOBAL),
    ],
)
def test_scopes(ip, scope):
    assert scope_of_ip(ip) == scope


def test_neighbourhoods():
    assert neighbourhood("8.8.8.8") == neighbourhood("8.8.8.200") == neighbourhood("::ffff:8.8.8.1")
    assert neighbourhood("2a00:1450:1:1::1") == neighbourhood("2a00:1450:1:1:ffff::9")
    assert neighbourhood("2a00:1450:1:1::1") != neighbourhood("2a00:1450:1:2::1")


def test_addresses_that_lead_nowhere_are_passed_over():
    raw = ["/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1", "/ip4/8.8.8.8/tcp/0", "/ip4/8.8.8.8/udp/1", "/ip4/8.8.8.8/tcp/1"]
    encoded = [Multiaddr(text).to_bytes() for text in raw]
    assert [str(each) for each in parse_addresses([b"", b"\xff" * 300, b"x", *encoded])] == [raw[-1]]
    assert not is_dialable(Multiaddr("/dns4/relay.example"))
    assert scope_of(Multiaddr("/dns4/relay.example/tcp/1")) == Scope.GLOBAL
    assert ip_of(Multiaddr("/dns4/relay.example/tcp/1")) is None


def test_hundred_sybils_of_one_network_get_ten_places():
    """Attack: a hundred identities in one /24."""
    table = new_table()
    for number in range(100):
        add(table, f"8.8.8.{number}")
    assert len(table) <= MAX_PER_NEIGHBOURHOOD
    honest = [add(table, f"9.{number}.1.1") for number in range(20)]
    assert sum(honest) >= 18


def test_one_network_fills_no_bucket():
    """Attack: identities ground so that they fall into one bucket."""
    table = new_table()
    same_bucket = []
    while len(same_bucket) < 6:
        made = peer()
        if (key_of(made) ^ key_of(OWN)) >> 255:
            same_bucket.append(made)
    assert [add(table, f"2a00:1450:1:1::{number}", made) for number, made in enumerate(same_bucket, 1)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_full_bucket_keeps_its_old_contacts():
    """Attack: push the known peers out with new ones. Only one that does not answer gives way."""
    table = new_table()
    far = [made for made in (peer() for _ in range(120)) if (key_of(made) ^ key_of(OWN)) >> 255]
    for number, made in enumerate(far[: BUCKET_SIZE + 5]):
        add(table, f"11.{number}.0.1", made)
    held = {contact.peer_id for contact in table}
    assert held == set(far[:BUCKET_SIZE])
    table.failed(far[0])
    assert add(table, "12.0.0.1", far[30])
    assert far[0] not in table


def test_dead_contacts_leave_and_own_id_never_enters():
    now = 0.0
    table = new_table(lambda: now)
    assert not add(table, "8.8.8.8", OWN)
    one = peer()
    assert add(table, "8.8.8.8", one)
    assert not table.answered(one, at("8.8.8.9"), "8.8.8.9")
    assert table.get(one).addresses == at("8.8.8.9")
    table.failed(one)
    table.answered(one, (), None)
    table.failed(one)
    assert one in table
    table.failed(one)
    assert one not in table
    add(table, "8.8.8.8", one)
    now = 400.0
    assert [contact.peer_id for contact in table.silent_for(300)] == [one]
    assert not table.answered(peer(), (), "8.8.4.4")  # nowhere to dial


def answer_naming(entries):
    answer = Message(type=Message.MessageType.FIND_NODE)
    for peer_id, addresses in entries:
        name_peer(answer.closerPeers.add(), peer_id, addresses, b"")
    return answer


def test_answer_names_neither_us_nor_itself_nor_private_addresses_nor_thousands():
    """Attack: send whoever asks to itself, to its own network, or to a thousand places."""
    teller, other = peer(), peer()
    answer = answer_naming(
        [
            (OWN, at("8.8.8.8")),
            (teller, at("8.8.8.8")),
            (peer(), at("192.168.1.1")),
            (peer(), at("127.0.0.1")),
            (peer(), ()),
            (other, (*at("10.0.0.1"), *at("8.8.4.4"))),
        ]
    )
    assert closer_peers(answer, own=OWN, teller=teller, scope=Scope.GLOBAL) == [Known(other, at("8.8.4.4"))]
    assert len(closer_peers(answer, own=OWN, teller=teller, scope=Scope.LOOPBACK)) == 3
    many = answer_naming([(peer(), at("8.8.8.8")) for _ in range(1000)])
    assert len(closer_peers(many, own=OWN, teller=teller, scope=Scope.GLOBAL)) == 20


class Swarm:
    """Nodes with tables but no sockets: what a walk asks and is told. Bad ones name only one another."""

    def __init__(self, honest, bad, *, near=None, seed=0):
        self.draw = random.Random(seed)
        self.honest = [peer() for _ in range(honest)]
        self.bad = {self._near(near) if near else peer() for _ in range(bad)}
        self.holds = {}

    def _near(self, key):
        """The nearest of many identities to a key: an attacker draws until some fit."""
        return min((peer() for _ in range(60)), key=lambda each: key_of(each) ^ target_of(key))

    def named_by(self, peer_id, key):
        known = list(self.bad) if peer_id in self.bad else [*self.honest, *self.bad]
        closest = sorted(known, key=lambda each: key_of(each) ^ target_of(key))
        return [Known(each) for each in closest[:20]]

    def asking(self, key, found):
        async def ask(known):
            await trio.lowlevel.checkpoint()
            if known.peer_id not in self.bad and key in self.holds.get(known.peer_id, ()):
                found.append(known.peer_id)
            return self.named_by(known.peer_id, key)

        return ask

    def seeds(self):
        """Three bootstrap peers, one of them bad."""
        return [Known(each) for each in (*self.draw.sample(self.honest, 2), self.draw.choice(list(self.bad)))]

    async def put(self, key):
        answered = await Walk(key, self.asking(key, []), width=PUT_WIDTH).run(self.seeds())
        for holder in _holders(answered):
            if holder not in self.bad:
                self.holds.setdefault(holder, set()).add(key)

    async def get(self, key):
        found = []
        walk = Walk(key, self.asking(key, found), lambda: len(found) >= READ_QUORUM, width=MAX_VISITS)
        await walk.run(self.seeds())
        return bool(found)


@pytest.mark.parametrize(("honest", "bad"), [(10, 10), (50, 15)])
@pytest.mark.parametrize("ground", [False, True])
async def test_eclipse_does_not_hide_values(honest, bad, ground):
    """Attack: peers that name only one another and withhold what they hold; also ground to lie around the key."""
    found = []
    with trio.fail_after(60):
        for number in range(30):
            key = f"key {number}".encode()
            swarm = Swarm(honest, bad, near=key if ground else None, seed=number)
            await swarm.put(key)
            found.append(await swarm.get(key))
    assert sum(found) >= 0.95 * len(found)


async def test_withheld_answers_do_not_count():
    """Attack: answer, but say that nothing is held."""
    held = {peer() for _ in range(3)}
    votes = []

    async def ask(known):
        await trio.lowlevel.checkpoint()
        if known.peer_id in held:
            votes.append(known.peer_id)
        return []

    with trio.fail_after(10):
        others = [Known(peer()) for _ in range(20)]
        await Walk(b"key", ask, lambda: len(votes) >= 3, width=MAX_VISITS).run([*others, *map(Known, held)])
    assert set(votes) == held


async def test_walk_with_a_third_dead_finds_its_way():
    dead = {peer() for _ in range(20)}
    alive = [peer() for _ in range(40)]

    async def ask(known):
        await trio.lowlevel.checkpoint()
        if known.peer_id in dead:
            raise RequestError("dead")
        return [Known(each) for each in [*alive, *dead]]

    with trio.fail_after(10):
        answered = await Walk(b"key", ask).run([Known(alive[0])])
    nearest = sorted(alive, key=lambda each: key_of(each) ^ target_of(b"key"))[:REPLICAS]
    assert set(nearest) <= set(answered)


async def test_wrong_addresses_told_first_do_not_hide_a_peer():
    """Attack: name an honest peer with an address where it is not, before others name it with the right one."""
    hidden, seen = peer(), []
    right, wrong = at("8.8.8.8"), at("9.9.9.9")
    order = itertools.count()

    async def ask(known):
        await trio.lowlevel.checkpoint()
        if known.peer_id == hidden:
            seen.append(known.addresses)
            return []
        return [Known(hidden, wrong if next(order) == 0 else right)]

    with trio.fail_after(10):
        await Walk(b"key", ask).run([Known(peer()), Known(peer())])
    assert seen == [(*wrong, *right)]


async def test_failed_peer_is_left_alone_for_a_while(monkeypatch):
    """A dead peer that others still name costs one dial, not one each time."""
    with trio.fail_after(20):
        async with running_host(BOB) as bob, running_host(ALICE, listens=False) as alice:
            make_dht(bob, BOB)
            client = make_dht(alice, ALICE, serve=False, servers=[bob])
            gone = to_libp2p(MALLORY.peer_id)
            client.bootstrap.add(gone)
            monkeypatch.setattr(kad, "REQUEST_TIMEOUT_S", 1.0)
            alice.get_peerstore().add_addrs(gone, [Multiaddr("/ip4/127.0.0.1/tcp/9")], 600)
            await client.join()
            assert client.asker.is_paused(gone)
            sent = client.asker.sent.total()
            await client.join()
            assert client.asker.sent.total() == sent + 1


async def test_server_that_cannot_be_dialled_is_not_named():
    """A server behind a firewall has dialled this one; it answers, but others could not reach it."""

    async def nobody(peer_id, addresses):
        await trio.lowlevel.checkpoint()
        return False

    with trio.fail_after(20):
        async with running_host(BOB) as bob, running_host(ALICE) as alice:
            server, other = make_dht(bob, BOB), make_dht(alice, ALICE, servers=[bob])
            server._reach = nobody
            await other.join()
            await server.adopt()
            assert (other.peers, server.peers) == (1, 0)


async def test_foreign_kademlia_nodes_do_not_enter():
    """A node that speaks IPFS's Kademlia, and not this network's, is in nobody's table."""
    with trio.fail_after(20):
        async with running_host(BOB) as bob, running_host(MALLORY) as foreign:
            server = make_dht(bob, BOB)
            foreign.set_stream_handler("/ipfs/kad/1.0.0", trio.sleep_forever)
            await foreign.connect(info(bob))
            await bob.connect(info(foreign))
            await server.adopt()
            await server.join([foreign.get_id()])
            assert server.peers == 0


async def test_streams_are_used_again():
    with trio.fail_after(20):
        async with running_host(BOB) as bob, running_host(ALICE, listens=False) as alice:
            make_dht(bob, BOB)
            client = make_dht(alice, ALICE, serve=False, servers=[bob])
            for _ in range(10):
                await client.join()
            [connection] = alice.get_network().get_connections(bob.get_id())
            assert len(connection.get_streams()) <= 2
            assert client.asker.sent.total() == 10


async def test_provider_announces_itself_alone():
    """Attack: announce another peer as a relay."""
    with trio.fail_after(20):
        async with running_host(BOB) as bob, running_host(MALLORY) as mallory:
            make_dht(bob, BOB)
            liar = make_dht(mallory, MALLORY, servers=[bob])
            message = Message(type=Message.MessageType.ADD_PROVIDER, key=relays_key(RUN))
            name_peer(message.providerPeers.add(), to_libp2p(CAROL.peer_id), at("8.8.8.8"), b"")
            with pytest.raises(RequestError):
                await liar.asker.request(Known(bob.get_id()), message)
            assert await liar.providers(relays_key(RUN)) == []

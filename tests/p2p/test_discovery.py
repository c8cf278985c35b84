import contextlib
import socket
import time
from collections import Counter

import pytest
import trio
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr
from p2p_world import (
    ALICE,
    BOB,
    CAROL,
    LOOPBACK,
    MALLORY,
    RUN,
    advert,
    make_node,
    now_ms,
    pointer,
    running_host,
    running_nodes,
    until,
    works,
)

from p2p.dht import RunDHT
from p2p.dht_records import relay_key
from p2p.discovery import REPUBLISH_S, VALIDITY_S, P2PNode
from p2p.host import DialProblem, to_libp2p
from p2p.kad_message import KAD_PROTOCOL
from p2p.peers import MAX_PEERS, PeerBook, RememberedPeer
from p2p.scores import Misdeed
from protocol.errors import BootstrapError, ConfigError, PortError
from protocol.identity import Identity
from protocol.run import RunAddress

DAVE = Identity.from_phrase("dave")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The pauses of a node that has time, cut short: what happens does not depend on them."""
    monkeypatch.setattr("p2p.discovery._ADOPT_S", 0.1)
    monkeypatch.setattr("p2p.discovery._SETTLE_S", 0.2)
    monkeypatch.setattr("p2p.discovery._FIRST_REFRESH_S", 0.5)
    monkeypatch.setattr("p2p.bootstrap.FIRST_RETRY_S", 0.2)


def adverts_of(identity):
    return lambda sequence: advert(sequence, by=identity)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def relay_at(port, identity, path, *, bootstrap=()):
    return P2PNode(
        identity,
        listen=[f"/ip4/127.0.0.1/tcp/{port}"],
        announce=[],
        bootstrap=bootstrap,
        dht_server=True,
        run_address=RUN,
        data_dir=path / identity.peer_id.short,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "relay.example:4001",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/127.0.0.1/tcp/4001/p2p/nonsense",
        f"/ip4/127.0.0.1/udp/4001/p2p/{BOB.peer_id}",
        f"/ip4/0.0.0.0/tcp/4001/p2p/{BOB.peer_id}",
        f"/ip4/127.0.0.1/tcp/0/p2p/{BOB.peer_id}",
        "/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
def test_bad_bootstrap_address_is_named(tmp_path, text):
    with pytest.raises(BootstrapError) as caught:
        make_node(ALICE, tmp_path, bootstrap=[text])
    assert repr(text) in caught.value.message
    assert "--bootstrap /ip4/" in caught.value.hint


def test_only_servers_listen(tmp_path):
    for serves, listen in ((True, []), (False, [LOOPBACK])):
        with pytest.raises(ConfigError):
            P2PNode(
                ALICE,
                listen=listen,
                announce=[],
                bootstrap=[],
                dht_server=serves,
                run_address=RUN,
                data_dir=tmp_path,
            )


async def test_port_in_use_is_reported(tmp_path):
    with trio.fail_after(20), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bob = relay_at(port, BOB, tmp_path)
        with pytest.raises(PortError, match=str(port)):
            await bob.run()


async def test_lone_relay_is_found_by_who_dials_it(tmp_path):
    """Nobody else serves yet: the relay holds its own records, and the run's pointer, for those who dial it."""
    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(30):
        async with running_nodes(bob):
            await bob.publish_advert(adverts_of(BOB))
            assert [found.author for found in await bob.find_relays()] == [BOB.peer_id]
            trainer = make_node(ALICE, tmp_path, bootstrap=bob.multiaddrs)
            client = make_node(CAROL, tmp_path, bootstrap=bob.multiaddrs)
            async with running_nodes(trainer, client):
                await trainer.publish_run(pointer)
                manifest = await client.find_run(RUN)
                assert manifest.author == ALICE.peer_id
                assert [found.author for found in await client.find_relays()] == [BOB.peer_id]
                assert client.multiaddrs == []
                assert client.dht_peers == 1
                assert bob.dht_peers == 0


async def test_relays_find_each_other(tmp_path):
    """The one that was first gives its records to those that come, without waiting for its next turn."""
    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(40):
        async with running_nodes(bob) as nursery:
            await bob.publish_advert(adverts_of(BOB))
            carol = make_node(CAROL, tmp_path, serves=True, bootstrap=bob.multiaddrs)
            dave = make_node(DAVE, tmp_path, serves=True, bootstrap=bob.multiaddrs)
            async with running_nodes(carol, dave):
                nursery.start_soon(carol.publish_advert, adverts_of(CAROL))
                nursery.start_soon(dave.publish_advert, adverts_of(DAVE))
                client = make_node(ALICE, tmp_path, bootstrap=dave.multiaddrs)
                async with running_nodes(client):
                    found = []
                    while len(found) < 3:
                        found = await client.find_relays()
                    assert {one.author for one in found} == {BOB.peer_id, CAROL.peer_id, DAVE.peer_id}
                await until(lambda: carol.dht_peers == dave.dht_peers == bob.dht_peers == 2)


async def test_what_is_published_outlives_its_publisher(tmp_path):
    bob, carol = make_node(BOB, tmp_path, serves=True), make_node(CAROL, tmp_path, serves=True)
    with trio.fail_after(30):
        async with running_nodes(bob, carol):
            dave = make_node(DAVE, tmp_path, serves=True, bootstrap=[*bob.multiaddrs, *carol.multiaddrs])
            trainer = make_node(ALICE, tmp_path, bootstrap=[*bob.multiaddrs, *carol.multiaddrs])
            async with running_nodes(dave, trainer):
                await trainer.publish_run(pointer)
                await until(lambda: dave.dht_peers == 2)
                await dave.publish_advert(adverts_of(DAVE))
            client = make_node(MALLORY, tmp_path, bootstrap=bob.multiaddrs)
            async with running_nodes(client):
                assert await client.find_run(RUN) is not None
                assert [found.author for found in await client.find_relays()] == [DAVE.peer_id]


async def test_sequences_rise_also_across_restarts(tmp_path):
    sequences = []

    def make(sequence):
        sequences.append(sequence)
        return advert(sequence)

    with trio.fail_after(30):
        for _ in range(2):
            bob = make_node(BOB, tmp_path, serves=True)
            async with running_nodes(bob):
                await bob.publish_advert(make)
                await bob.publish_advert(make)
    assert sequences == sorted(set(sequences))
    assert len(sequences) == 4


async def test_what_is_published_is_signed_anew_before_it_ends(tmp_path, monkeypatch):
    """Turn after turn, also when nobody comes or goes: servers then hold a higher sequence that ends later."""
    monkeypatch.setattr("p2p.discovery.REPUBLISH_S", 0.2)
    made = []

    def make(sequence):
        made.append(sequence)
        return advert(sequence)

    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(40):
        async with running_nodes(bob):
            carol = make_node(CAROL, tmp_path, serves=True, bootstrap=bob.multiaddrs)
            async with running_nodes(carol):
                await until(lambda: carol.dht_peers == bob.dht_peers == 1)
                await bob.publish_advert(make)
                dht = carol._running_dht()
                key = relay_key(RUN, BOB.peer_id)

                def held():
                    record = dht._values.get(key.encode())
                    return dht.validator.open(key, record.value).record if record else None

                await until(held)
                first, announced = held(), dht.server.answered["ADD_PROVIDER"]
                await until(lambda: len(made) > 4 and held().sequence > made[3])
                assert held().valid_until_ms > first.valid_until_ms
                assert dht.server.answered["ADD_PROVIDER"] >= announced + 3
    assert made == sorted(set(made))
    assert 4 * 1.2 * REPUBLISH_S < VALIDITY_S  # four turns may fail, at the longest jitter


async def test_record_from_a_wrong_clock_names_the_clock(tmp_path, caplog):
    """A trainer whose clock is ten minutes ahead: its servers refuse what it puts, and it is told why that may be."""
    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(30):
        async with running_nodes(bob):
            trainer = P2PNode(
                ALICE,
                listen=[],
                announce=[],
                bootstrap=bob.multiaddrs,
                dht_server=False,
                run_address=RUN,
                data_dir=tmp_path / "alice",
                clock=lambda: time.time() + 600,
            )
            async with running_nodes(trainer):
                await until(lambda: trainer.dht_peers)
                with trio.move_on_after(10) as waiting:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(trainer.publish_run, lambda number: pointer(number, **ahead(600)))
                        await until(lambda: "compare_this_clock:_timedatectl" in caplog.text)
                        nursery.cancel_scope.cancel()
                assert not waiting.cancelled_caught
                assert bob._running_dht().stored_values == 0


def ahead(seconds):
    return {"issued_at_ms": now_ms() + seconds * 1000, "valid_until_ms": now_ms() + 2 * seconds * 1000}


async def send_garbage(host, peer_id):
    with contextlib.suppress(Exception):  # the node hangs up at some point
        stream = await host.new_stream(peer_id, [KAD_PROTOCOL])
        await stream.write(b"\xff" * 64)
        await stream.read(1)


async def test_bans_of_a_node_outlive_it(tmp_path):
    """Attack: send garbage to a relay until it hangs up, and come back after it has been started again."""
    with trio.fail_after(30):
        bob = make_node(BOB, tmp_path, serves=True)
        async with running_nodes(bob), running_host(MALLORY, listens=False) as mallory:
            there = info_from_p2p_addr(Multiaddr(bob.multiaddrs[0]))
            await mallory.connect(there)
            while not bob.scores.is_banned(MALLORY.peer_id):
                await send_garbage(mallory, there.peer_id)
            await until((tmp_path / BOB.peer_id.short / "bans.json").exists)
            await until(lambda: not mallory.get_connected_peers())
        bob = make_node(BOB, tmp_path, serves=True)
        async with running_nodes(bob), running_host(MALLORY, listens=False) as mallory:
            await mallory.connect(info_from_p2p_addr(Multiaddr(bob.multiaddrs[0])))
            await until(lambda: not mallory.get_connected_peers())
            async with running_host(CAROL, listens=False) as carol:
                assert await works(bob._host, carol)


async def test_bootstrap_peers_that_are_of_no_use_are_named(tmp_path):
    """One has banned this node and drops it after the handshake; one is a libp2p host, but of another network."""
    bob = make_node(BOB, tmp_path, serves=True)
    for _ in range(2):
        bob.scores.blame(CAROL.peer_id, Misdeed.WINDOW)
    with trio.fail_after(30):
        async with running_nodes(bob), running_host(MALLORY) as foreign:
            entries = [*bob.multiaddrs, str(foreign.get_addrs()[0])]
            client = make_node(CAROL, tmp_path, bootstrap=entries)
            async with running_nodes(client):
                await until(lambda: "took the connection and does not answer" in client.bootstrap_state)
                await until(lambda: "is no DHT server of this network" in client.bootstrap_state)
                assert "0 of 2 bootstrap peers connected" in client.bootstrap_state
                assert DialProblem.HUNG_UP.value in client.bootstrap_state


async def test_a_node_looks_around_now_and_then(tmp_path, monkeypatch):
    """Also when nobody comes or goes: what is past its time goes, the silent are asked, the table is filled up."""
    called = Counter()

    def counting(name, original):
        async def call(self, *args):
            called[name] += 1
            return await original(self, *args)

        return call

    for name in ("expire", "check_silent", "join"):
        monkeypatch.setattr(RunDHT, name, counting(name, getattr(RunDHT, name)))
    monkeypatch.setattr("p2p.discovery._REFRESH_S", 0.2)
    with trio.fail_after(20):
        async with running_nodes(make_node(BOB, tmp_path, serves=True)):
            await until(lambda: len(called) == 3 and min(called.values()) >= 2)


async def test_a_node_watches_its_loop(tmp_path):
    node, watched = make_node(ALICE, tmp_path), trio.Event()

    async def watch():
        watched.set()
        await trio.sleep_forever()

    node.canary.run = watch
    with trio.fail_after(10):
        async with running_nodes(node):
            await watched.wait()
    node.canary.note(2.5)
    assert node.describe()["worst_lag_s"] == 2.5


async def test_refused_record_is_not_published(tmp_path):
    """A record that this node has no right to publish is refused before it leaves."""
    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(20):
        async with running_nodes(bob):
            with trio.move_on_after(0.5) as waited:
                await bob.publish_advert(adverts_of(MALLORY))
            assert waited.cancelled_caught
            assert await bob.find_relays(timeout_s=0.2) == []


async def test_unknown_run_is_none_in_time(tmp_path):
    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(20):
        async with running_nodes(bob):
            client = make_node(CAROL, tmp_path, bootstrap=bob.multiaddrs)
            async with running_nodes(client):
                assert await client.find_run(RunAddress(MALLORY.peer_id, "none"), timeout_s=0.5) is None
                assert await client.find_relays(timeout_s=0.5) == []


async def test_bootstrap_peer_that_comes_later_is_used(tmp_path):
    port = free_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{BOB.peer_id}"
    client = make_node(CAROL, tmp_path, bootstrap=[address])
    with trio.fail_after(40):
        async with running_nodes(client):
            await until(lambda: "try 1" in client.bootstrap_state)
            assert "0 of 1 bootstrap peers connected" in client.bootstrap_state
            assert f"/ip4/127.0.0.1/tcp/{port}" in client.bootstrap_state
            asker, other = client._running_dht().asker, to_libp2p(DAVE.peer_id)
            asker._pause(other)  # while this node was cut off, everyone seemed dead
            async with running_nodes(relay_at(port, BOB, tmp_path)):
                await until(lambda: "1 of 1 bootstrap peers connected" in client.bootstrap_state)
                await until(lambda: client.dht_peers == 1)
                assert not asker.is_paused(other)


async def test_bootstrap_peer_with_another_id_is_named(tmp_path):
    """Attack: answer at a bootstrap address with another key."""
    mallory = make_node(MALLORY, tmp_path, serves=True)
    with trio.fail_after(20):
        async with running_nodes(mallory):
            address = mallory.multiaddrs[0].replace(str(MALLORY.peer_id), str(BOB.peer_id))
            client = make_node(CAROL, tmp_path, bootstrap=[address])
            async with running_nodes(client):
                await until(lambda: "answers as" in client.bootstrap_state)
                assert f"answers as {MALLORY.peer_id} instead of {BOB.peer_id}" in client.bootstrap_state
                assert client.dht_peers == 0


async def test_remembered_peers_replace_a_dead_bootstrap(tmp_path):
    bob, port = make_node(BOB, tmp_path, serves=True), free_port()
    dead = f"/ip4/127.0.0.1/tcp/{port}/p2p/{MALLORY.peer_id}"
    with trio.fail_after(40):
        async with running_nodes(bob):
            await bob.publish_advert(adverts_of(BOB))
            async with running_nodes(make_node(CAROL, tmp_path, bootstrap=bob.multiaddrs)):
                await until(lambda: (tmp_path / CAROL.peer_id.short / "peers.json").exists())
            client = make_node(CAROL, tmp_path, bootstrap=[dead])
            async with running_nodes(client):
                assert [found.author for found in await client.find_relays()] == [BOB.peer_id]


async def test_own_address_as_bootstrap_is_ignored(tmp_path):
    port = free_port()
    bob = relay_at(port, BOB, tmp_path, bootstrap=[f"/ip4/127.0.0.1/tcp/{port}/p2p/{BOB.peer_id}"])
    assert bob.bootstrap_state.startswith("no bootstrap peers given")


def remembered(number):
    return RememberedPeer(str(Identity.from_phrase(str(number)).peer_id), [f"/ip4/10.0.0.1/tcp/{number + 1}"], number)


def test_peer_book_is_bounded_and_keeps_the_newest(tmp_path):
    book = PeerBook(tmp_path / "peers.json")
    assert book.note(remembered(number) for number in range(100))
    assert not book.note([remembered(99)])
    book.save()
    reread = PeerBook(tmp_path / "peers.json").peers
    assert [peer.seen_ms for peer in reread] == list(range(99, 99 - MAX_PEERS, -1))


@pytest.mark.parametrize("content", [b"", b"{", b'[{"peer_id": 3}]', b'[{"peer_id":"' + b"x" * 600_000 + b'"}]'])
def test_damaged_peer_book_is_begun_anew(tmp_path, content):
    (tmp_path / "peers.json").write_bytes(content)
    assert PeerBook(tmp_path / "peers.json").peers == []


async def test_remembered_nonsense_is_skipped(tmp_path, caplog):
    """Attack: a peers.json that somebody has edited."""
    book = PeerBook(tmp_path / CAROL.peer_id.short / "peers.json")
    book.note([RememberedPeer("nonsense", ["nonsense"], 1), RememberedPeer(str(BOB.peer_id), ["/ip4/127.0.0.1/x"], 2)])
    book.save()
    client = make_node(CAROL, tmp_path)
    with trio.fail_after(20):
        async with running_nodes(client):
            await until(lambda: caplog.text.count("remembered_peer_malformed") == 2)

"""What a relay, a DHT server and another contributor can learn of a contributor: its address is in no record.

Relays listen on 127.0.0.2 and 127.0.0.3; contributors connect from 127.0.0.1, which therefore must be nowhere.
"""

import logging

import msgspec
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiaddr import Multiaddr
from p2p_world import ALICE, BOB, CAROL, MALLORY, RUN, advert, pointer, running_nodes, until

from p2p.dht_records import relay_key, relays_key, run_key
from p2p.discovery import P2PNode
from p2p.host import to_libp2p
from p2p.kad import addresses_of
from p2p.kad_message import Known
from protocol import records
from protocol.identity import Identity

DAVE = Identity.from_phrase("dave")
WHERE = b"127.0.0.1"
WHERE_PACKED = Multiaddr("/ip4/127.0.0.1").to_bytes()


def node(identity, path, *, listen=None, bootstrap=()):
    return P2PNode(
        identity,
        listen=[f"/ip4/{listen}/tcp/0"] if listen else [],
        announce=[],
        bootstrap=bootstrap,
        dht_server=listen is not None,
        run_address=RUN,
        data_dir=path / identity.peer_id.short,
    )


def is_silent_about_contributors(data):
    return WHERE not in data and WHERE_PACKED not in data


def questions():
    contributor = to_libp2p(CAROL.peer_id).to_bytes()
    kinds = Message.MessageType
    yield Message(type=kinds.FIND_NODE, key=contributor)
    yield Message(type=kinds.GET_PROVIDERS, key=relays_key(RUN))
    yield Message(type=kinds.GET_PROVIDERS, key=contributor)
    yield Message(type=kinds.GET_VALUE, key=run_key(RUN).encode())
    yield Message(type=kinds.GET_VALUE, key=relay_key(RUN, CAROL.peer_id).encode())
    yield Message(type=kinds.GET_VALUE, key=relay_key(RUN, BOB.peer_id).encode())


async def test_a_contributors_address_is_in_no_answer_and_no_file(tmp_path, monkeypatch, caplog):
    """A contributor and a trainer take part; then all that servers hold, tell and log is looked through."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("p2p.discovery._ADOPT_S", 0.2)
    monkeypatch.setattr("p2p.discovery._SETTLE_S", 0.2)
    monkeypatch.setattr("p2p.discovery._FIRST_REFRESH_S", 0.5)
    first = node(BOB, tmp_path, listen="127.0.0.2")
    with trio.fail_after(40):
        async with running_nodes(first) as nursery:
            second = node(DAVE, tmp_path, listen="127.0.0.3", bootstrap=first.multiaddrs)
            contributor = node(CAROL, tmp_path, bootstrap=first.multiaddrs)
            trainer = node(ALICE, tmp_path, bootstrap=first.multiaddrs)
            spy = node(MALLORY, tmp_path, bootstrap=first.multiaddrs)
            async with running_nodes(second, contributor, trainer, spy):
                for relay, identity, number in ((first, BOB, 2), (second, DAVE, 3)):
                    url = f"https://127.0.0.{number}:8470"
                    nursery.start_soon(
                        relay.publish_advert,
                        lambda sequence, by=identity, url=url: advert(sequence, by=by, http_url=url),
                    )
                await trainer.publish_run(pointer)
                await contributor.find_run(RUN)
                found = []
                while len(found) < 2:
                    found = await contributor.find_relays()
                await until(lambda: spy.dht_peers == 2)
                answers = [
                    (await spy._running_dht().asker.request(Known(to_libp2p(relay.peer_id)), question))
                    for relay in (first, second)
                    for question in questions()
                ]
                held = [msgspec.json.encode(relay.describe()["peers"]) for relay in (first, second)]
                stores = [
                    relay._running_dht()._values.get(key).value
                    for relay in (first, second)
                    for key in relay._running_dht()._values.keys()  # noqa: SIM118 (a store, not a dict)
                ]
                known = [
                    str(address).encode()
                    for relay in (first, second)
                    for peer in (CAROL, ALICE)
                    for address in addresses_of(relay._host, Known(to_libp2p(peer.peer_id)))
                ]
                own = [msgspec.json.encode(client.multiaddrs) for client in (contributor, trainer)]
    captured = [answer.SerializeToString() for answer in answers] + held + stores + known + own
    assert len(stores) >= 3
    assert any(answer.closerPeers for answer in answers)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert "published key=" in caplog.text
    assert all(map(is_silent_about_contributors, [*captured, *files, caplog.text.encode()]))
    names = {bytes(each.id) for answer in answers for each in (*answer.closerPeers, *answer.providerPeers)}
    assert names == {to_libp2p(peer.peer_id).to_bytes() for peer in (BOB, DAVE)}


def test_no_record_of_a_contributor_has_a_place_for_an_address():
    """Only relays say where they are, and the trainer says it to its relays alone."""
    tells = set()
    for kind in vars(records).values():
        if isinstance(kind, type) and issubclass(kind, records.Record) and kind is not records.Record:
            names = {field.name for field in msgspec.structs.fields(kind)}
            if any("url" in name or "addr" in name or name in ("host", "ip", "port") for name in names):
                tells.add(kind.__name__)
    assert tells == {"RelayAdvert", "OriginNotice"}

"""`intellect-node dht` against a relay and a trainer."""

import socket
from functools import partial

import pytest
import trio
from p2p_world import ALICE, BOB, RUN, advert, make_node, pointer, running_nodes
from trio.testing import MockClock

from node.dht_show import find_run, get_record, joined, print_record, print_run
from p2p.peers import PeerBook, RememberedPeer
from protocol.errors import BootstrapError, ConfigError, NodeError, RelayError


async def asked(tmp_path, ask):
    """What a question answers while a relay and a trainer of the run are up."""
    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(40):
        async with running_nodes(bob):
            trainer = make_node(ALICE, tmp_path, bootstrap=bob.multiaddrs)
            async with running_nodes(trainer):
                await bob.publish_advert(lambda sequence: advert(sequence, by=BOB))
                await trainer.publish_run(pointer)
                return await trio.to_thread.run_sync(ask, bob.multiaddrs)


async def test_run_and_relays_are_found(tmp_path, capsys):
    found = await asked(tmp_path, lambda addresses: find_run(tmp_path, run=str(RUN), bootstrap=addresses, timeout_s=10))
    assert [relay["author"] for relay in found["relays"]] == [str(BOB.peer_id)]
    assert found["manifest"]["author"] == str(ALICE.peer_id)
    print_run(found)
    assert "https://127.0.0.1:1" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["run", str(BOB.peer_id)])
async def test_record_is_shown_with_its_times(tmp_path, capsys, key):
    found = await asked(
        tmp_path, lambda addresses: get_record(tmp_path, key, run=str(RUN), bootstrap=addresses, timeout_s=10)
    )
    assert found["record"]["kind"] == ("run-pointer" if key == "run" else "relay-advert")
    print_record(found)
    assert "valid for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("errors", "raised"),
    [((RelayError("no relay has it"),), RelayError), ((RelayError("one"), ValueError("a bug")), ExceptionGroup)],
)
def test_what_fails_within_nurseries_has_its_own_name(tmp_path, errors, raised):
    """Whoever asks through a moment's client is told what failed; what has no name is not hidden."""

    async def fail(error):
        raise error

    async def ask(*_):
        async with trio.open_nursery() as nursery:
            for error in errors:
                nursery.start_soon(fail, error)

    with pytest.raises(raised):
        joined(tmp_path, str(RUN), [f"/ip4/127.0.0.1/tcp/1/p2p/{BOB.peer_id}"], ask, timeout_s=5)


async def test_remembered_peers_will_do(tmp_path):
    def ask(addresses):
        address, _, peer_id = addresses[0].rpartition("/p2p/")
        book = PeerBook(tmp_path / "peers.json")
        book.note([RememberedPeer(peer_id, [address], 1)])
        book.save()
        return get_record(tmp_path, "run", run=str(RUN), bootstrap=[], timeout_s=10)

    assert (await asked(tmp_path, ask))["record"] is not None


async def test_record_that_nobody_has(tmp_path, capsys):
    found = await asked(
        tmp_path,
        lambda addresses: get_record(tmp_path, str(ALICE.peer_id), run=str(RUN), bootstrap=addresses, timeout_s=1),
    )
    print_record(found)
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.parametrize("ask", [find_run, partial(get_record, key="run")])
def test_all_of_it_ends_in_time(tmp_path, monkeypatch, ask):
    """Attack: a bootstrap peer that takes the connection and says nothing. On a clock of its own: no second passes."""
    clock = MockClock(autojump_threshold=0)
    monkeypatch.setattr("node.dht_show.trio.run", partial(trio.run, clock=clock))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        entry = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{BOB.peer_id}"
        with pytest.raises(BootstrapError, match="no answer yet"):
            ask(tmp_path, run=str(RUN), bootstrap=[entry], timeout_s=4)
    assert clock.current_time() <= 4 + 0.5


def test_status_that_hangs_takes_a_part_of_the_time(tmp_path, monkeypatch):
    """Attack: a status page of this computer that never answers."""
    asked = []

    def hang(data_dir, *, timeout_s):
        asked.append(timeout_s)
        raise NodeError("it does not answer")

    monkeypatch.setattr("node.dht_show.fetch_status", hang)
    with pytest.raises(ConfigError, match="it does not answer"):
        find_run(tmp_path, run=None, bootstrap=[], timeout_s=4)
    assert asked == [2]


async def test_key_that_is_none_is_refused(tmp_path):
    with pytest.raises(BaseExceptionGroup) as caught:
        await asked(
            tmp_path, lambda addresses: get_record(tmp_path, "/pk/x", run=str(RUN), bootstrap=addresses, timeout_s=5)
        )
    assert "not a key" in str(caught.value.exceptions)


def test_nobody_to_ask_is_said(tmp_path):
    with pytest.raises(BootstrapError, match="remembers no peers"):
        find_run(tmp_path, run=str(RUN), bootstrap=[], timeout_s=1)


def test_no_run_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no --run is given"):
        find_run(tmp_path, run=None, bootstrap=[], timeout_s=1)

import contextlib
import errno
import itertools
import os
import socket

import pytest
import trio
from multiaddr import Multiaddr
from p2p_world import ALICE, BOB, CAROL, MALLORY, advert, info, make_node, pointer, running_host, running_nodes, until

from p2p import bootstrap as bootstrap_module
from p2p import host as host_module
from p2p.bootstrap import Bootstraps, read_targets, resolve_txt_by_dns
from p2p.guard import MAX_DIALS_PER_S, Pace
from p2p.host import DialError, DialProblem, dial, to_libp2p
from protocol.errors import BootstrapError
from protocol.identity import Identity


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


BOBS = f"/ip4/127.0.0.1/tcp/4001/p2p/{BOB.peer_id}"
CAROLS = f"/dns4/relay.example/tcp/4001/p2p/{CAROL.peer_id}"


def records(**by_name):
    async def resolve(name):
        await trio.lowlevel.checkpoint()
        found = by_name.get(name.removeprefix("_dnsaddr.").replace(".", "_"))
        if found is None:
            raise OSError(f"{name} does not exist; next: `dig TXT {name}`")
        return found

    return resolve


async def refreshed(*texts, resolve=None):
    made = Bootstraps(texts, own=ALICE.peer_id, resolve_txt=resolve)
    for entry in made.entries:
        await made._refresh(entry)
    return made


async def test_names_are_followed_to_their_peers():
    """Records of other kinds, of this node itself, and nonsense are passed over; records may lead to further names."""
    resolve = records(
        swarm_example=[
            f"dnsaddr={BOBS}",
            "dnsaddr=/dnsaddr/eu.swarm.example",
            f"dnsaddr=/ip4/9.9.9.9/tcp/1/p2p/{ALICE.peer_id}",
            "dnsaddr=/ip4/9.9.9.9/udp/1/quic-v1/p2p/x",
            "v=spf1 -all",
        ],
        eu_swarm_example=[f"dnsaddr={CAROLS}"],
    )
    with trio.fail_after(5):
        made = await refreshed("/dnsaddr/swarm.example", resolve=resolve)
        assert made.peer_ids == {to_libp2p(BOB.peer_id), to_libp2p(CAROL.peer_id)}
        made = await refreshed(f"/dnsaddr/swarm.example/p2p/{CAROL.peer_id}", resolve=resolve)
        assert made.peer_ids == {to_libp2p(CAROL.peer_id)}


async def test_names_that_lead_in_circles_end():
    """Attack: a name that leads to itself, and one with thousands of records."""
    resolve = records(
        loop_example=["dnsaddr=/dnsaddr/loop.example"] * 3,
        many_example=[
            f"dnsaddr=/ip4/8.8.8.8/tcp/1/p2p/{Identity.from_phrase(str(number)).peer_id}" for number in range(500)
        ],
    )
    with trio.fail_after(10):
        made = await refreshed("/dnsaddr/loop.example", "/dnsaddr/many.example", resolve=resolve)
        assert len(made.targets) == bootstrap_module.MAX_TARGETS
        assert "names no peer" in " ".join(made.describe())


async def test_name_without_records_is_said_with_the_next_step():
    with trio.fail_after(5):
        made = await refreshed("/dnsaddr/nowhere.example", resolve=records())
        name = "_dnsaddr.nowhere.example"
        assert made.describe() == [f"/dnsaddr/nowhere.example: {name} does not exist; next: `dig TXT {name}`"]


async def test_resolver_that_is_not_there_is_an_os_error(monkeypatch):
    import dns.asyncresolver

    async def resolve(*args, **kwargs):
        await trio.lowlevel.checkpoint()
        raise dns.resolver.LifetimeTimeout(timeout=5, errors=[])

    monkeypatch.setattr(dns.asyncresolver, "resolve", resolve)
    with trio.fail_after(5), pytest.raises(OSError, match="dig TXT"):
        await resolve_txt_by_dns("_dnsaddr.swarm.example")


async def test_file_is_read_again_each_time(tmp_path):
    path = tmp_path / "peers.txt"
    path.write_text(f"# relays of the run\n\n  {BOBS}\n")
    with trio.fail_after(5):
        made = await refreshed(f"@{path}")
        assert made.peer_ids == {to_libp2p(BOB.peer_id)}
        path.write_text(f"{BOBS}\n{CAROLS}\n")
        await made._refresh(made.entries[0])
        assert len(made.peer_ids) == 2
        path.unlink()
        await made._refresh(made.entries[0])
        assert len(made.peer_ids) == 2  # what it said before is kept
        assert "cannot read the bootstrap file" in " ".join(made.describe())


@pytest.mark.parametrize("text", ["", "/dnsaddr/", "/dnsaddr/a b", "/dnsaddr/x/p2p/0OIl", "@/nowhere/at/all", "/ip4/x"])
def test_entries_that_make_no_sense_are_refused(text):
    with pytest.raises(BootstrapError) as caught:
        Bootstraps([text], own=ALICE.peer_id)
    assert "--bootstrap" in caught.value.hint


def test_file_with_a_wrong_line_is_refused(tmp_path):
    (tmp_path / "peers.txt").write_text(f"{BOBS}\nnonsense\n")
    with pytest.raises(BootstrapError, match="nonsense"):
        read_targets(tmp_path / "peers.txt")


async def problem_of(alice, address, peer=BOB, timeout_s=5.0):
    with pytest.raises(DialError) as caught:
        await dial(alice, to_libp2p(peer.peer_id), [Multiaddr(address)], timeout_s=timeout_s)
    return caught.value.problem, str(caught.value)


async def test_each_way_to_fail_has_its_own_words(monkeypatch):
    """Refused, silent, unknown name, no route, another key, another program: never one message for all."""
    found = {}
    with trio.fail_after(30), socket.create_server(("127.0.0.1", 0)) as silent:
        async with running_host(ALICE, listens=False) as alice, running_host(MALLORY) as mallory:
            found["refused"] = await problem_of(alice, "/ip4/127.0.0.1/tcp/9")
            found["filtered"] = await problem_of(alice, f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}", timeout_s=0.2)
            found["other"] = await problem_of(alice, str(mallory.get_transport_addrs()[0]))

            async def unknown(*args):
                await trio.lowlevel.checkpoint()
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

            with monkeypatch.context() as patch:
                patch.setattr(trio.socket, "getaddrinfo", unknown)
                found["name"] = await problem_of(alice, "/dns4/relay.example/tcp/4001")

            async def unreachable(*args):
                await trio.lowlevel.checkpoint()
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

            with monkeypatch.context() as patch:
                patch.setattr(host_module, "_dial_one", unreachable)
                found["unreachable"] = await problem_of(alice, "/ip6/2a00:1450::1/tcp/4001")

            async def unable(*args):
                await trio.lowlevel.checkpoint()
                raise OSError(errno.EMFILE, "Too many open files")

            with monkeypatch.context() as patch:
                patch.setattr(host_module, "_dial_one", unable)
                found["local"] = await problem_of(alice, "/ip4/127.0.0.1/tcp/4001")

            async def web(stream):
                await stream.receive_some(1000)
                await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                await stream.aclose()

            async def full(stream):
                await stream.receive_some(1000)
                await stream.aclose()

            async with trio.open_nursery() as nursery:
                for name, serve in (("not a node", web), ("hung up", full)):
                    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
                    nursery.start_soon(trio.serve_listeners, serve, [listener])
                    port = listener.socket.getsockname()[1]
                    found[name] = await problem_of(alice, f"/ip4/127.0.0.1/tcp/{port}")
                nursery.cancel_scope.cancel()
    assert {name: problem for name, (problem, _) in found.items()} == {
        "refused": DialProblem.REFUSED,
        "filtered": DialProblem.FILTERED,
        "other": DialProblem.OTHER_PEER,
        "name": DialProblem.NAME,
        "unreachable": DialProblem.UNREACHABLE,
        "local": DialProblem.LOCAL,
        "not a node": DialProblem.NOT_A_NODE,
        "hung up": DialProblem.HUNG_UP,
    }
    for _, text in found.values():
        assert text.count("/tcp/") == 1
        assert not any(raw in text for raw in ("msg_bytes", "Errno", "varint", "Incomplete"))
    assert len({problem.value for problem, _ in found.values()}) == len(found)
    assert "relay.example" in found["name"][1]


async def test_names_are_resolved_when_dialled():
    with trio.fail_after(20):
        async with running_host(BOB) as bob, running_host(ALICE, listens=False) as alice:
            port = bob.get_transport_addrs()[0].value_for_protocol("tcp")
            await dial(alice, bob.get_id(), [Multiaddr(f"/dns4/localhost/tcp/{port}")], timeout_s=5)
            assert alice.get_connected_peers() == [bob.get_id()]


async def test_bootstrap_that_comes_back_is_found_within_a_minute(autojump_clock):
    """However long it was away: the pause between tries stays under a minute, jitter and dial included."""
    dials = []

    async def refuse(peer_id, address):
        dials.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        raise DialError("refused", DialProblem.REFUSED)

    async def connected(target):
        raise AssertionError

    made = Bootstraps([BOBS], own=ALICE.peer_id)
    with trio.move_on_after(24 * 3600):
        await made.run(refuse, connected)
    pauses = [later - sooner for sooner, later in itertools.pairwise(dials)]
    assert max(pauses) + bootstrap_module.DIAL_TIMEOUT_S < 60
    assert len({round(pause, 3) for pause in pauses[-20:]}) > 10
    assert "next: the computer is up but nothing listens there" in made.describe()[0]


async def test_entries_are_tried_side_by_side(autojump_clock):
    """One that does not answer delays no other."""
    reached = []

    async def attempt(peer_id, address):
        if peer_id == to_libp2p(BOB.peer_id):
            await trio.sleep(8)
            raise DialError("silent", DialProblem.FILTERED)
        await trio.lowlevel.checkpoint()

    async def connected(target):
        await trio.lowlevel.checkpoint()
        reached.append((target.peer_id, trio.current_time()))

    began = trio.current_time()
    with trio.move_on_after(5):
        await Bootstraps([BOBS, CAROLS], own=ALICE.peer_id).run(attempt, connected)
    assert [(peer, at - began) for peer, at in reached] == [(to_libp2p(CAROL.peer_id), 0)]


async def test_two_halves_become_one_table(tmp_path, monkeypatch):
    """Two groups that were bootstrapped apart meet when one node knows both."""
    monkeypatch.setattr("p2p.discovery._MERGE_PAUSE_S", 0.3)
    monkeypatch.setattr("p2p.discovery._ADOPT_S", 0.2)
    names = ["left one", "left two", "left three", "right one", "right two", "right three"]
    people = [Identity.from_phrase(name) for name in names]
    with trio.fail_after(60):
        first, second = (make_node(people[index], tmp_path, serves=True) for index in (0, 3))
        async with running_nodes(first, second):
            rest = [
                make_node(people[index], tmp_path, serves=True, bootstrap=(first if index < 3 else second).multiaddrs)
                for index in (1, 2, 4, 5)
            ]
            async with running_nodes(*rest):
                everyone = [first, second, *rest]
                await until(lambda: all(node.dht_peers == 2 for node in everyone))
                bridge = make_node(BOB, tmp_path, serves=True, bootstrap=[*first.multiaddrs, *second.multiaddrs])
                async with running_nodes(bridge):
                    await until(lambda: all(node.dht_peers == 6 for node in [*everyone, bridge]))


async def test_poisoned_bootstrap_does_not_hide_the_run(tmp_path):
    """Attack: one of two bootstrap peers names made-up peers, this node and itself, and holds nothing."""
    from libp2p.kad_dht.pb.kademlia_pb2 import Message

    from p2p.framing import Frames
    from p2p.kad_message import KAD_PROTOCOL, name_peer

    async def lie(stream):
        frames = Frames(stream, max_bytes=100_000)
        while (data := await frames.receive(idle_s=5)) is not None:
            asked = Message.FromString(data)
            answer = Message(type=asked.type, key=asked.key)
            for number in range(20):
                invented = to_libp2p(Identity.from_phrase(f"invented {number}").peer_id)
                name_peer(answer.closerPeers.add(), invented, [Multiaddr("/ip4/127.0.0.1/tcp/9")], b"")
            name_peer(answer.closerPeers.add(), to_libp2p(CAROL.peer_id), [Multiaddr("/ip4/127.0.0.1/tcp/9")], b"")
            await frames.send(answer.SerializeToString())

    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(40):
        async with running_nodes(bob), running_host(MALLORY) as mallory:
            mallory.set_stream_handler(KAD_PROTOCOL, lie)
            await bob.publish_advert(lambda sequence: advert(sequence, by=BOB))
            poisoned = f"{info(mallory).addrs[0]}/p2p/{MALLORY.peer_id}"
            trainer = make_node(ALICE, tmp_path, bootstrap=[poisoned, *bob.multiaddrs])
            client = make_node(CAROL, tmp_path, bootstrap=[poisoned, *bob.multiaddrs])
            async with running_nodes(trainer, client):
                await trainer.publish_run(pointer)
                assert (await client.find_run(client._address)).author == ALICE.peer_id
                assert [each.author for each in await client.find_relays()] == [BOB.peer_id]


async def test_bootstrap_state_says_an_address_once_and_no_bytes_of_a_stranger(tmp_path):
    """Attack: answer at a bootstrap address with a web page, and have it shown to whoever looks at the node."""

    async def web(stream):
        await stream.receive_some(1000)
        await stream.send_all(b"HTTP/1.1 400 \x1b[31mBad\r\n\r\n" + b"x" * 3000)
        await stream.send_eof()
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.receive_some(1000)
        await stream.aclose()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, web, [listener])
            address = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}"
            node = make_node(CAROL, tmp_path, bootstrap=[f"{address}/p2p/{BOB.peer_id}"])
            async with running_nodes(node):
                await until(lambda: "try 1" in node.bootstrap_state and "not tried" not in node.bootstrap_state)
                await until(lambda: "no answer yet" not in node.bootstrap_state)
                state = node.bootstrap_state
            nursery.cancel_scope.cancel()
    assert state.count(address) == 1
    assert "answers, but not in libp2p's protocol" in state
    assert DialProblem.NOT_A_NODE.value in state
    assert "HTTP/1.1" not in state


async def test_bootstrap_that_is_being_dialled_says_so():
    made, held = Bootstraps([BOBS], own=ALICE.peer_id), trio.Event()

    async def attempt(peer_id, address):
        held.set()
        await trio.sleep_forever()

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            assert "not tried yet" in made.describe()[0]
            nursery.start_soon(made.run, attempt, None)
            await held.wait()
            assert "no answer yet (try 1" in made.describe()[0]
            nursery.cancel_scope.cancel()


async def test_dials_are_paced(autojump_clock):
    pace, times = Pace(), []

    async def dialler():
        await pace.wait()
        times.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(dialler)
    assert most_in_a_second(times) == MAX_DIALS_PER_S
    assert max(times) - min(times) < 6


def most_in_a_second(times):
    return max(sum(began <= other < began + 1 for other in times) for began in times)


async def test_two_hundred_come_back_without_a_storm(autojump_clock):
    """A relay comes back that two hundred have lost: it takes 32 handshakes at a time, half a second each."""
    up_at, handshakes, dials, back = 60.0, trio.CapacityLimiter(32), {}, {}
    began = trio.current_time()

    def dialling(number):
        async def attempt(peer_id, address):
            dials.setdefault(number, []).append(trio.current_time())
            await trio.lowlevel.checkpoint()
            if trio.current_time() < began + up_at:
                raise DialError("refused", DialProblem.REFUSED)
            try:
                handshakes.acquire_on_behalf_of_nowait(number)
            except trio.WouldBlock:
                raise DialError("hung up", DialProblem.NOT_A_NODE) from None
            try:
                await trio.sleep(0.5)
            finally:
                handshakes.release_on_behalf_of(number)

        return attempt

    async with trio.open_nursery() as nursery:
        for number in range(200):

            async def connected(target, number=number):
                await trio.lowlevel.checkpoint()
                back[number] = trio.current_time()
                if len(back) == 200:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(Bootstraps([BOBS], own=ALICE.peer_id).run, dialling(number), connected)
    assert max(back.values()) - began - up_at < 120
    assert max(most_in_a_second(times) for times in dials.values()) <= MAX_DIALS_PER_S
    arrivals = sorted(at for times in dials.values() for at in times if at >= began + up_at)
    assert len(arrivals) < 3 * 200


@pytest.mark.long
async def test_two_hundred_hosts_reconnect(tmp_path):
    """The same with real hosts: the relay is stopped and started again on its port."""
    port = free_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{BOB.peer_id}"

    async def client(number, back):
        identity = Identity.from_phrase(f"client {number}")
        async with running_host(identity, listens=False) as host:

            async def attempt(peer_id, at):
                await dial(host, peer_id, [at], timeout_s=8)

            async def connected(target):
                await trio.lowlevel.checkpoint()
                back.add(number)

            await Bootstraps([address], own=identity.peer_id).run(attempt, connected)

    with trio.fail_after(400):
        back = set()
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(client, number, back)
            for _ in range(2):
                async with running_host(BOB, at=f"/ip4/127.0.0.1/tcp/{port}") as bob:
                    with trio.fail_after(120):
                        await until(lambda: len(back) == 200)
                        await until(lambda bob=bob: len(bob.get_connected_peers()) == 200)
                back.clear()
                await trio.sleep(15)  # until all have noticed
            nursery.cancel_scope.cancel()


def test_a_pipe_as_bootstrap_file_is_refused_at_once(tmp_path):
    """Reading it would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BootstrapError, match="not a regular file"):
        read_targets(tmp_path / "pipe")

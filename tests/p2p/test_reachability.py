import msgspec
import pytest
import trio
from libp2p.request_response import BytesCodec, RequestResponse
from p2p_world import ALICE, BOB, CAROL, MALLORY, advert, info, make_node, running_host, running_nodes, until

from p2p import reachability
from p2p.discovery import P2PNode
from p2p.guard import Guard, Pace
from p2p.reachability import (
    PROTOCOL,
    DialBack,
    Finding,
    Question,
    Reachability,
    can_be_dialled,
    conclude,
    until_next,
)

HERE = "/ip4/127.0.0.1/tcp/9"


async def ask(alice, bob, question):
    """Alice asks Bob to dial her back."""
    await alice.connect(info(bob))
    DialBack(bob).attach()
    return await DialBack(alice).ask(bob.get_id(), question)


async def test_listening_node_is_reachable():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB) as bob:
            finding = await ask(alice, bob, Question(str(alice.get_transport_addrs()[0])))
            assert finding == Finding(seen_as="127.0.0.1")
            assert not conclude([finding], Question(HERE)).problem


async def test_existing_connection_proves_nothing():
    """libp2p's own check answers over the connection that is there: always reachable. A closed port is closed."""
    with trio.fail_after(20):
        async with running_host(ALICE, listens=False) as alice, running_host(BOB) as bob:
            finding = await ask(alice, bob, Question(HERE))
            assert "refused" in finding.dht
            result = conclude([finding], Question(HERE))
            assert "open TCP port 9" in result.hint
            assert "cannot reach this relay" in str(result)


async def test_another_key_at_the_address_is_told():
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB) as bob, running_host(CAROL) as carol:
            finding = await ask(alice, bob, Question(str(carol.get_transport_addrs()[0])))
            assert f"answers as {CAROL.peer_id}" in finding.dht


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/ip4/192.0.2.1/tcp/22", "but it comes from 127.0.0.1"),
        ("/ip4/169.254.169.254/tcp/80", "but it comes from 127.0.0.1"),
        ("/dns4/localhost.invalid/tcp/22", "cannot be resolved"),
        ("/ip4/127.0.0.1/tcp/0", "no address of a TCP port"),
        ("/ip4/127.0.0.1/udp/53", "no address of a TCP port"),
        ("nonsense", "no address"),
    ],
)
async def test_nobody_else_is_dialled(text, why, monkeypatch):
    """Attack: have a relay look into other networks by asking it to dial them."""

    async def dials(*args):
        raise AssertionError

    monkeypatch.setattr(reachability, "try_to_dial", dials)
    with trio.fail_after(30):
        async with running_host(MALLORY) as mallory, running_host(BOB) as bob:
            assert why in (await ask(mallory, bob, Question(text))).dht


async def test_url_of_somebody_else_is_not_fetched():
    """Attack: have a relay fetch URLs."""
    with trio.fail_after(20):
        async with running_host(MALLORY) as mallory, running_host(BOB) as bob:
            finding = await ask(mallory, bob, Question(url="https://192.0.2.1/"))
            assert finding.http.startswith(reachability.ELSEWHERE)
            assert conclude([finding], Question(url="https://192.0.2.1/")).http is None


@pytest.mark.parametrize("says", [b"peer", b"somebody else"])
async def test_url_is_checked_for_who_is_there(says):
    async def serve(stream):
        await stream.receive_some(1000)
        body = str(ALICE.peer_id).encode() if says == b"peer" else says
        await stream.send_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
        await stream.aclose()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, running_host(ALICE) as alice, running_host(BOB) as bob:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
            finding = await ask(alice, bob, Question(url=url))
            assert finding.http == ("" if says == b"peer" else f"{url} is answered by something else")
            nursery.cancel_scope.cancel()


async def test_asking_is_rationed():
    """Attack: have a relay dial all the time."""
    with trio.fail_after(20):
        async with running_host(ALICE) as alice, running_host(BOB) as bob:
            assert await ask(alice, bob, Question(HERE)) is not None
            assert await DialBack(alice).ask(bob.get_id(), Question(HERE)) is None


@pytest.mark.parametrize("data", [b"\xff" * 100, msgspec.msgpack.encode({"multiaddr": "x" * 300}), b"\x91" * 900])
async def test_garbage_question_is_an_error(data):
    """Attack: a question that is none."""
    with trio.fail_after(20):
        async with running_host(MALLORY) as mallory, running_host(BOB) as bob:
            await mallory.connect(info(bob))
            DialBack(bob).attach()
            with pytest.raises(Exception, match=r".*"):
                await RequestResponse(mallory).send_request(bob.get_id(), [PROTOCOL], data, codec=BytesCodec())
            assert await ask(mallory, bob, Question(HERE)) is not None


def test_what_findings_come_to():
    question = Question("/ip4/10.0.0.5/tcp/4001", "https://relay.example:8470")
    assert not conclude([], question).asked
    assert "not checked" in str(Reachability())
    nat = Finding(seen_as="8.8.8.8", dht="its address is told as 10.0.0.5, but it comes from 8.8.8.8")
    assert "--announce" in conclude([nat], question).hint
    assert not conclude([nat, Finding(seen_as="8.8.8.8")], question).problem
    web = Finding(seen_as="8.8.8.8", http="did not answer")
    assert "8470" in conclude([web], question).hint
    assert until_next(conclude([web], question)) < until_next(conclude([Finding(seen_as="x")], question))


async def test_ipv6_peers_are_known_by_their_address():
    with trio.fail_after(20):
        async with running_host(ALICE, at="/ip6/::1/tcp/0") as alice, running_host(BOB, at="/ip6/::1/tcp/0") as bob:
            finding = await ask(alice, bob, Question(str(alice.get_transport_addrs()[0])))
            assert finding == Finding(seen_as="::1")


class Counting(Pace):
    taken = 0

    async def wait(self):
        self.taken += 1
        await super().wait()


async def test_only_what_answers_can_be_dialled():
    pace = Counting()
    with trio.fail_after(20):
        async with running_host(ALICE) as alice:
            addresses = alice.get_transport_addrs()
            assert await can_be_dialled(alice.get_id(), addresses, dials=pace)
            assert not await can_be_dialled(alice.get_id(), [], dials=pace)
        assert not await can_be_dialled(alice.get_id(), addresses, dials=pace)
    assert pace.taken == 2


async def test_dialling_back_keeps_the_nodes_pace():
    """Attack: many peers, each of which asks once to be dialled back. The dialling host is new each time."""
    pace = Counting()
    with trio.fail_after(20):
        async with running_host(BOB, guard=Guard(dials=pace)) as bob:
            for person in (ALICE, CAROL):
                async with running_host(person) as asker:
                    await ask(asker, bob, Question(HERE))
    assert pace.taken == 2


async def test_relays_check_one_another(tmp_path, monkeypatch):
    monkeypatch.setattr("p2p.discovery.FIRST_CHECK_S", 0.2)
    bob = make_node(BOB, tmp_path, serves=True)
    with trio.fail_after(40):
        async with running_nodes(bob):
            carol = make_node(CAROL, tmp_path, serves=True, bootstrap=bob.multiaddrs)
            async with running_nodes(carol):
                await carol.publish_advert(lambda sequence: advert(sequence, by=CAROL))
                await until(lambda: carol.reachability.asked)
                assert carol.reachability.dht is True


@pytest.mark.parametrize("listen", ["/ip6/::1/tcp/0"])
async def test_ipv6_works(tmp_path, listen):
    def node(identity, bootstrap, *, serves):
        return P2PNode(
            identity,
            listen=[listen] if serves else [],
            announce=[],
            bootstrap=bootstrap,
            dht_server=serves,
            run_address=make_node(ALICE, tmp_path)._address,
            data_dir=tmp_path / identity.peer_id.short,
        )

    bob = node(BOB, [], serves=True)
    with trio.fail_after(40):
        async with running_nodes(bob):
            assert all(address.startswith("/ip6/::1/tcp/") for address in bob.multiaddrs)
            await bob.publish_advert(lambda sequence: advert(sequence, by=BOB, http_url="https://[::1]:8470"))
            client = node(CAROL, bob.multiaddrs, serves=False)
            async with running_nodes(client):
                [found] = await client.find_relays()
                assert found.record.http_url == "https://[::1]:8470"
                bracketed = await reachability._address_of("::1", 8470)
                assert bracketed == "::1"

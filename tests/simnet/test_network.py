"""Networks that are really made: namespaces where this is root, proxies everywhere."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from simnet_world import wait_for

from protocol.errors import ConfigError, NodeError
from simnet import netns, network
from simnet.fleet import free_ports
from simnet.network import NamespaceNetwork, Network, ProxyNetwork, check_network, make_network
from simnet.scenario import parse_scenario

needs_namespaces = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "-")


def test_why_there_are_no_namespaces_is_said_in_one_line(monkeypatch):
    """Root in a container may lack what nft needs; nft then shows its input again, with marks below it."""

    def refused(command, lines=None):
        if "nft" in command:
            raise NodeError("nft add table ip t: Error: Operation not permitted\nadd table ip t\n^^^^^^^^^^^^^^^")

    monkeypatch.setattr(netns, "run_tool", refused)
    assert (
        netns._why_not_probed("x") == "nftables does not work here: nft add table ip t: Error: Operation not permitted"
    )


@pytest.fixture
def linked(small):
    small["link"] = {"far": {"delay_ms": 30, "up_mbit": 8}, "home": {"nat": "symmetric"}}
    small["fleet"][2]["link"] = "far"
    small["fleet"][3]["link"] = "home"
    return parse_scenario(small, name="linked")


def answer(made, node, port):
    """Serve one connection after the other at a node, saying who called."""
    with made.inside(node):
        server = socket.create_server((made.host(node), port))

    def serve():
        while True:
            try:
                connection, peer = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(peer[0].encode())

    threading.Thread(target=serve, daemon=True).start()
    return server


def call(made, node, address, *, timeout_s=5.0):
    """What a node hears when it connects; how long it took."""
    started = time.monotonic()
    with made.inside(node):
        connection = socket.create_connection(address, timeout=timeout_s)
    with connection:
        return connection.recv(100).decode(), time.monotonic() - started


@needs_namespaces
def test_nodes_in_namespaces_have_the_links_of_the_scenario(linked):
    """One network for all of it, since making one takes a while: addresses, delay, router, partition, end."""
    made = NamespaceNetwork(linked)
    try:
        made.start()
        server = answer(made, "relay-0", 7000)
        address = made.host("relay-0"), 7000
        assert call(made, "wrong-model-0", address)[0] == "10.77.5.2"
        said, seconds = call(made, "validator-0", address)
        assert (said, seconds >= 0.06) == ("10.77.3.2", True)
        assert made.host("inference-0") == "192.168.77.2"
        assert call(made, "inference-0", address)[0] == "10.77.4.2"
        made.part("wrong-model-0", "away")
        with pytest.raises(TimeoutError):
            call(made, "wrong-model-0", address, timeout_s=0.5)
        call(made, "inference-0", address)
        made.part("wrong-model-0", "")
        call(made, "wrong-model-0", address)
        ran = subprocess.run(
            made.wrap("relay-0", [sys.executable, "-c", "import socket; print(socket.if_nameindex())"]),
            capture_output=True,
            text=True,
            check=True,
        )
        assert "'cable'" in ran.stdout
        assert "'eth0'" not in ran.stdout
        server.close()
    finally:
        made.close()
    assert not [name for name in Path("/run/netns").iterdir() if name.name.startswith(netns.label())]


@needs_namespaces
def test_what_a_killed_simulation_left_behind_is_taken_away_and_nothing_else():
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, own = f"simnet-{ended.pid}-1-hub", f"{netns.label()}own"
    netns.create([left, own])
    try:
        netns.sweep()
        names = {path.name for path in Path("/run/netns").iterdir()}
        assert left not in names
        assert own in names
    finally:
        netns.delete([left, own])


@needs_namespaces
def test_a_tools_refusal_is_a_named_error():
    with pytest.raises(NodeError, match="ip"):
        netns.create(["a/b"])


def test_without_root_proxies_stand_in_and_say_what_they_leave_out(linked, monkeypatch):
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    made = make_network(linked, {"relay-0": (1, 2)}, free_ports)
    assert isinstance(made, ProxyNetwork)
    assert made.notes == (
        "links are imitated by proxies on loopback, without network namespaces: this is not root",
        "nobody lies behind a translating router, which needs namespaces: inference-0",
    )


def test_a_scenario_that_is_about_namespaces_is_refused_by_name_without_them(linked, monkeypatch):
    about = msgspec.structs.replace(linked, network="namespaces")
    monkeypatch.setattr(netns, "why_not", lambda: "this is not root")
    with pytest.raises(ConfigError, match=r"'linked' is about what only .* there are none here: this is not root"):
        check_network(about)
    assert len(check_network(linked)) == 2
    monkeypatch.setattr(netns, "why_not", lambda: "")
    assert check_network(about) == ()


def test_plain_scenarios_have_plain_loopback(small):
    made = make_network(parse_scenario(small, name="x"), {}, free_ports)
    assert type(made) is Network
    assert (made.host("a"), made.public_port("a", 5), made.wrap("a", ["b"])) == ("127.0.0.1", 5, ["b"])


def test_a_proxy_process_carries_and_parts_and_ends_with_its_input(linked):
    (port,) = free_ports(1)
    made = ProxyNetwork(linked, {"relay-0": (port,)}, free_ports)
    made.start()
    try:
        server = answer(made, "relay-0", port)
        address = "127.0.0.1", made.public_port("relay-0", port)
        assert address[1] != port
        assert call(made, "inference-0", address)[0] == "127.0.0.1"
        made.part("relay-0", "away")
        with pytest.raises(TimeoutError):
            call(made, "inference-0", address, timeout_s=0.5)
        made.part("relay-0", "")
        call(made, "inference-0", address)
        server.close()
    finally:
        made.close()
    assert made._proxy.returncode is not None
    with pytest.raises(NodeError, match="proxy between the nodes has ended"):
        made.part("relay-0", "away")


def test_a_helper_that_cannot_start_is_a_named_error():
    with pytest.raises(NodeError, match="ended as it started"):
        network._started("simnet.proxy", b"{}")


def test_a_helper_ends_when_whoever_started_it_is_killed(linked):
    """Attack: `kill -9` of the simulation; what it cannot end must end by itself."""
    code = (
        "import sys, time\n"
        "from simnet import network\n"
        "started = network._started('simnet.proxy', b'{\"doors\": []}')\n"
        "print(started.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    helper = int(parent.stdout.readline())
    assert Path(f"/proc/{helper}").exists()
    parent.kill()
    parent.communicate()
    wait_for(lambda: not Path(f"/proc/{helper}").exists())

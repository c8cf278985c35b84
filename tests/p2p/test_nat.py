"""Contributors need no open port: discovery, and the whole loop, through network address translation."""

import json
import re
import signal
import subprocess
import time

import pytest
from nat_world import RELAY_ADDRESS, ROOT, nat_world, needs_namespaces

from protocol.identity import Identity

PORT, HTTP_PORT, ORIGIN_PORT = 8471, 8470, 8472
RUN = f"{Identity.from_phrase('operator').peer_id}/nat"


def cli(*arguments):
    return ["-m", "cli", *map(str, arguments)]


def identity(world, where, directory):
    return world.run(where, cli("id", "--data-dir", directory)).strip().splitlines()[-1]


def wait_for(path, text, process, *, timeout_s):
    """Until a log says something; says what it has said when it does not in time."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if text in path.read_text(errors="replace"):
            return
        assert process.poll() is None, path.read_text(errors="replace")[-3000:]
        time.sleep(0.1)
    raise AssertionError(f"{text!r} is not in the log after {timeout_s} s:\n{path.read_text(errors='replace')[-3000:]}")


def stop(processes):
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_relay(
    world, tmp_path, run, processes, *, listen=f"/ip4/{RELAY_ADDRESS}", http=("--http-host", RELAY_ADDRESS)
):
    log = tmp_path / "relay.log"
    relay = world.start(
        "relay",
        cli(
            "--role", "relay", "--run", run, "--data-dir", tmp_path / "relay",
            "--listen", f"{listen}/tcp/{PORT}", *http, "--http-port", HTTP_PORT,
        ),
        log,
    )  # fmt: skip
    processes.append(relay)
    wait_for(log, "others join with", relay, timeout_s=60)
    [peer] = set(re.findall(r"/p2p/(12D3KooW\w+)", log.read_text()))
    return f"{listen}/tcp/{PORT}/p2p/{peer}"


def ask(world, where, tmp_path, run, key, bootstrap):
    """What `dht get` says in a namespace."""
    flags = ("--run", run, "--bootstrap", bootstrap, "--data-dir", tmp_path / "nobody")
    return json.loads(world.run(where, cli("dht", "get", key, *flags, "--json")))["record"]["record"]


def files_with(directory, addresses):
    """Files, logs too, that hold one of some addresses."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" and path.stat().st_size for path in files)
    return [str(path) for path in files if any(address.encode() in path.read_bytes() for address in addresses)]


@needs_namespaces
def test_relay_is_found_through_translation(tmp_path):
    """Clients behind routers that let nothing in, of both kinds, find the relay; its table does not know them."""
    with nat_world() as world:
        clients = [world.router(1, "port-preserving"), world.router(2, "symmetric")]
        processes, found = [], []
        try:
            bootstrap = start_relay(world, tmp_path, RUN, processes)
            relay = bootstrap.rpartition("/")[2]
            for client in clients:
                found.append(ask(world, client, tmp_path, RUN, relay, bootstrap))
            peers = json.loads(world.run("relay", cli("peers", "--data-dir", tmp_path / "relay", "--json")))
        finally:
            stop(processes)
        known_by = [*world.addresses_of(1), *world.addresses_of(2)]
    assert [record["http_url"] for record in found] == [f"https://{RELAY_ADDRESS}:{HTTP_PORT}"] * 2
    assert peers["peers"] == []
    assert files_with(tmp_path, known_by) == []


@needs_namespaces
def test_relay_is_found_over_ipv6(tmp_path):
    """A relay that listens on `::` tells its global address, and is dialled there and at its private one."""
    private, public = "fd12:3456:789a:1", "2a00:1450:4001:2"
    with nat_world() as world:
        world.add("client")
        for prefix in (private, public):
            world.link("relay", f"{prefix}::1/64", "client", f"{prefix}::2/64")
        world.ip("relay", "-6", "route", "add", "default", "via", f"{public}::2")
        processes = []
        try:
            http = ("--http-host", "::", "--public-url", f"https://[{public}::1]:{HTTP_PORT}")
            relay = start_relay(world, tmp_path, RUN, processes, listen="/ip6/::", http=http)
            peer = relay.rpartition("/")[2]
            found = [
                ask(world, "client", tmp_path, RUN, peer, f"/ip6/{prefix}::1/tcp/{PORT}/p2p/{peer}")
                for prefix in (private, public)
            ]
        finally:
            stop(processes)
    assert [record["multiaddrs"] for record in found] == [[f"/ip6/{public}::1/tcp/{PORT}/p2p/{peer}"]] * 2
    assert files_with(tmp_path, [f"{private}::2", f"{public}::2"]) == []


@needs_namespaces
@pytest.mark.long
def test_whole_loop_works_through_translation(tmp_path):
    """Inference and validator behind routers of both kinds; relay and trainer outside; two steps are trained.

    Afterwards no file and no log, of any of the four, holds a contributor's address, inside or outside its router.
    """
    recipe = tmp_path / "nat.toml"
    demo = (ROOT / "trainer" / "recipes" / "demo.toml").read_text()
    recipe.write_text(
        demo.replace("total_steps = 50", "total_steps = 2").replace("rollouts_per_step = 256", "rollouts_per_step = 64")
    )
    with nat_world() as world:
        first, second = world.router(1, "port-preserving"), world.router(2, "symmetric")
        validator = identity(world, second, tmp_path / "validator")
        created = world.run(
            "relay",
            cli("run", "create", "--recipe", recipe, "--data-dir", tmp_path / "trainer", "--validator", validator),
        )
        run, processes = created.strip().splitlines()[-1], []
        try:
            bootstrap = start_relay(world, tmp_path, run, processes)
            common = ["--run", run, "--bootstrap", bootstrap, "--threads", "1"]
            for role, where, extra in (
                ("trainer", "relay", ["--http-host", RELAY_ADDRESS, "--http-port", str(ORIGIN_PORT)]),
                ("validator", second, []),
                ("inference", first, []),
            ):
                arguments = cli("--role", role, "--data-dir", tmp_path / role, *common, *extra)
                processes.append(world.start(where, arguments, tmp_path / f"{role}.log"))
            for process in processes[1:]:
                assert process.wait(240) == 0, [
                    log.read_text(errors="replace")[-2000:] for log in tmp_path.glob("*.log")
                ]
        finally:
            stop([process for process in processes if process.poll() is None])
        known_by = [*world.addresses_of(1), *world.addresses_of(2)]
    final = json.loads((tmp_path / "inference" / "status-final.json").read_text())
    assert final["state"] == "finished"
    assert final["accepted"] > 0
    assert {path.stem for path in tmp_path.glob("*.log")} == {"relay", "trainer", "validator", "inference"}
    assert files_with(tmp_path, known_by) == []

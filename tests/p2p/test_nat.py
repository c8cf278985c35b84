"""Contributors need no open port: discovery, and the whole loop, through network address translation."""

import json
import signal
import subprocess
import time

import pytest
from nat_world import RELAY_ADDRESS, ROOT, nat_world, needs_namespaces

PORT, HTTP_PORT, ORIGIN_PORT = 8471, 8470, 8472


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


def start_relay(world, tmp_path, run, processes):
    peer = identity(world, "relay", tmp_path / "relay")
    log = tmp_path / "relay.log"
    relay = world.start(
        "relay",
        cli(
            "--role", "relay", "--run", run, "--data-dir", tmp_path / "relay",
            "--listen", f"/ip4/{RELAY_ADDRESS}/tcp/{PORT}", "--http-host", RELAY_ADDRESS, "--http-port", HTTP_PORT,
        ),
        log,
    )  # fmt: skip
    processes.append(relay)
    wait_for(log, "others join with", relay, timeout_s=60)
    return f"/ip4/{RELAY_ADDRESS}/tcp/{PORT}/p2p/{peer}"


@needs_namespaces
def test_relay_is_found_through_translation(tmp_path):
    """Clients behind routers that let nothing in, of both kinds, find the relay; its table does not know them."""
    with nat_world() as world:
        clients = [world.router(1, "port-preserving"), world.router(2, "symmetric")]
        operator = identity(world, "relay", tmp_path / "operator")
        processes, found = [], []
        try:
            bootstrap = start_relay(world, tmp_path, f"{operator}/nat", processes)
            relay = bootstrap.rpartition("/")[2]
            for client in clients:
                flags = ("--run", f"{operator}/nat", "--bootstrap", bootstrap, "--data-dir", tmp_path / client)
                found.append(json.loads(world.run(client, cli("dht", "get", relay, *flags, "--json"))))
            peers = json.loads(world.run("relay", cli("peers", "--data-dir", tmp_path / "relay", "--json")))
        finally:
            stop(processes)
    urls = {answer["record"]["record"]["http_url"] for answer in found}
    assert urls == {f"https://{RELAY_ADDRESS}:{HTTP_PORT}"}
    assert peers["peers"] == []


@needs_namespaces
@pytest.mark.long
def test_whole_loop_works_through_translation(tmp_path):
    """Inference and validator behind routers of both kinds; relay and trainer outside; two steps are trained.

    Afterwards no file of the relay or the trainer holds a contributor's address, inside or outside its router.
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
    files = [path for role in ("relay", "trainer") for path in (tmp_path / role).rglob("*") if path.is_file()]
    assert files
    assert [
        (str(path), address) for path in files for address in known_by if address.encode() in path.read_bytes()
    ] == []

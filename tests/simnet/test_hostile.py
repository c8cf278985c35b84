"""Hostile peers as processes of their own: each attacks a real DHT server, shows its status, and leaves when asked."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from simnet_world import wait_for

from protocol.identity import Identity
from protocol.run import RunAddress
from simnet.attacks import ATTACKS
from simnet.hostile import ACTS, SYBILS, Field, _around_the_key

RUN = RunAddress(Identity.from_phrase("alice").peer_id, "test")
VICTIM = """
import sys, time
from pathlib import Path
import trio
from p2p.discovery import P2PNode
from protocol.identity import Identity
from protocol.run import RunAddress

async def main():
    run = RunAddress.parse(sys.argv[1])
    node = P2PNode(Identity.from_phrase("bob"), listen=["/ip4/127.0.0.1/tcp/0"], announce=[], bootstrap=[],
                   dht_server=True, run_address=run, data_dir=Path(sys.argv[2]))
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        print(node.multiaddrs[0], flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def test_every_attack_that_a_scenario_may_name_exists():
    assert ACTS.keys() == ATTACKS.keys()


def test_an_eclipse_lies_nearer_to_the_key_than_chance_would_have_it():
    from p2p.dht_records import relays_key
    from p2p.host import to_libp2p
    from p2p.routing import key_of, target_of

    near = _around_the_key(Field(RUN, [], "127.0.0.1", None, seed=3))
    distances = [key_of(to_libp2p(one.peer_id)) ^ target_of(relays_key(RUN)) for one in near]
    assert len(near) == SYBILS
    assert max(distances) < 2**256 // 16


@pytest.fixture
def victim(tmp_path: Path):
    (tmp_path / "victim").mkdir()
    command = [sys.executable, "-c", VICTIM, str(RUN), str(tmp_path / "victim")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_it_attacks_and_the_victim_lives_on(victim, tmp_path: Path, attack: str):
    process, address = victim
    data = tmp_path / "hostile"
    subprocess.run([sys.executable, "-m", "cli", "id", "--data-dir", str(data)], check=True, stdout=subprocess.DEVNULL)
    flags = ["--run", str(RUN), "--bootstrap", address, "--listen", "/ip4/127.0.0.1/tcp/0", "--data-dir", str(data)]
    hostile = subprocess.Popen([sys.executable, "-m", "simnet.hostile", attack, *flags])
    try:
        wait_for((data / "status.url").exists, timeout_s=60)
        if attack != "eclipse":  # which waits until it is asked
            wait_for(lambda: status(data)["details"].get("acts", 0) >= 3, timeout_s=60)
        time.sleep(1)
        assert process.poll() is None
        hostile.send_signal(signal.SIGINT)
        assert hostile.wait(30) == 0
    finally:
        hostile.kill()
        hostile.wait()


def status(data):
    url = (data / "status.url").read_text().strip()
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)

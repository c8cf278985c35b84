"""What must be right before a node starts, and what `doctor` makes of it."""

import json
import os
import shutil
import socket
import sys

import pytest

from node import doctor, preflight
from node.config import resolve
from node.doctor import Patient, examine
from node.homes import KEY_FILE, say_about
from node.identity import load_or_create_identity
from node.preflight import Finding, PreflightFailed, examine_locally, require_ready
from node.version_check import Reported
from protocol.errors import BootstrapError
from protocol.identity import Identity

RUN = f"{Identity.from_phrase('alice').peer_id}/demo"


class Usage:
    def __init__(self, free):
        self.free = free


def config(tmp_path, **settings):
    return resolve({"role": "inference", "run": RUN, "data_dir": str(tmp_path), **settings}, environ={}).config


def finding(name, settings):
    return next(each for each in examine_locally(settings) if each.name == name)


def test_a_good_machine_passes(tmp_path):
    found = list(examine_locally(config(tmp_path)))
    assert [each.name for each in found if each.state == "failed"] == []
    require_ready(config(tmp_path))


@pytest.mark.parametrize(
    ("name", "state", "spoil"),
    [
        ("python", "failed", lambda patch: patch.setattr(sys, "version_info", (3, 10, 1))),
        ("torch", "failed", lambda patch: patch.setattr("importlib.util.find_spec", lambda name: None)),
        ("memory", "warning", lambda patch: patch.setattr(preflight, "_available_memory", lambda: 1000)),
        ("memory", "skipped", lambda patch: patch.setattr(preflight, "_available_memory", lambda: None)),
        ("clock", "failed", lambda patch: patch.setattr(preflight.time, "time", lambda: 0.0)),
        ("data directory", "failed", lambda patch: patch.setattr(os, "access", lambda path, mode: False)),
        ("disk", "failed", lambda patch: patch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 20))),
        ("disk", "warning", lambda patch: patch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30))),
    ],
)
def test_each_fault_is_found_and_has_a_fix(tmp_path, monkeypatch, name, state, spoil):
    spoil(monkeypatch)
    found = finding(name, config(tmp_path))
    assert found.state == state
    assert found.fix or state == "skipped"
    if state == "failed":
        with pytest.raises(PreflightFailed, match=name) as caught:
            require_ready(config(tmp_path))
        assert caught.value.hint == found.fix


def test_a_key_that_others_can_read_fails(tmp_path):
    load_or_create_identity(tmp_path)
    assert finding("key", config(tmp_path)).state == "ok"
    (tmp_path / KEY_FILE).chmod(0o644)
    found = finding("key", config(tmp_path))
    assert (found.state, found.fix) == ("failed", f"chmod 600 {tmp_path / KEY_FILE}")


def test_a_relays_ports_are_tried(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        relay = {"role": "relay", "http_host": "127.0.0.1", "http_port": port, "listen": ["/ip4/127.0.0.1/tcp/0"]}
        found = finding("ports", config(tmp_path, **relay))
        assert (found.state, str(port) in found.what, "ss -ltnp" in found.fix) == ("failed", True, True)
        assert finding("ports", config(tmp_path)).state == "skipped"
    assert finding("ports", config(tmp_path, **relay)).state == "ok"


def test_a_relay_that_may_store_more_than_there_is_is_warned(tmp_path):
    found = finding("disk", config(tmp_path, role="relay", disk_quota_bytes=1 << 60))
    assert found.state == "warning"
    assert "disk_quota_bytes" in found.fix


# ------------------------------------------------------------------------------------------------------------- doctor


def patient(tmp_path, **settings):
    given = {"role": "inference", "run": RUN, "data_dir": str(tmp_path), **settings}
    return Patient.resolve(given, file=None, remembered={}, environ={})


@pytest.fixture
def reported(monkeypatch):
    """What relays answer, in the place of a network."""

    def set_to(*relays, error=None):
        def joined(data_dir, run, bootstrap, ask, *, timeout_s):
            if error is not None:
                raise error
            return {"state": "", "peers": 2, "reported": list(relays)}

        monkeypatch.setattr(doctor, "joined", joined)

    return set_to


def network(tmp_path):
    return {each.name: each for each in doctor._network(patient(tmp_path), 1.0)}


def relay(name, *, protocol=1, clock=0.0):
    return Reported(name, "intellect-node/0.1.0", protocol, clock)


def test_a_healthy_network(tmp_path, reported):
    reported(relay("one"), relay("two", clock=0.4))
    found = network(tmp_path)
    assert {name: each.state for name, each in found.items()} == {
        "bootstrap": "ok",
        "relays": "ok",
        "clock of relays": "ok",
    }


@pytest.mark.parametrize(
    ("relays", "name", "state"),
    [
        ([], "relays", "failed"),
        ([relay("one", protocol=0, clock=None)], "relays", "failed"),
        ([relay("one"), relay("two", protocol=0, clock=None)], "relays", "warning"),
        ([relay("one", clock=1e6), relay("two", clock=1e6), relay("liar")], "clock of relays", "failed"),
        ([relay("one"), relay("two"), relay("liar", clock=1e6)], "clock of relays", "ok"),
    ],
)
def test_network_faults(tmp_path, reported, relays, name, state):
    """The last one is an attack: one relay says another time to have nodes set their clocks wrong."""
    reported(*relays)
    assert network(tmp_path)[name].state == state


def test_nobody_answers(tmp_path, reported):
    reported(error=BootstrapError("nobody could be asked: refused", hint="check --bootstrap"))
    found = network(tmp_path)
    assert (found["bootstrap"].state, found["bootstrap"].fix) == ("failed", "check --bootstrap")
    assert found["relays"].state == "skipped"


def test_without_a_run_the_network_is_left_out(tmp_path):
    found = Patient.resolve({"data_dir": str(tmp_path)}, file=None, remembered={}, environ={"XDG_DATA_HOME": "/none"})
    assert found.run == ""
    assert {each.state for each in doctor._network(found, 1.0)} == {"skipped"}


def test_the_only_node_here_is_examined(tmp_path):
    home = tmp_path / "intellect-node" / "relay-demo-x"
    load_or_create_identity(home)
    say_about(home, role="relay", run=RUN)
    found = Patient.resolve({}, file=None, remembered={}, environ={"XDG_DATA_HOME": str(tmp_path)})
    assert (found.config.role, found.run, found.config.data_dir) == ("relay", RUN, home)


def test_the_engine_checks_itself_with_the_demos_policy(tmp_path):
    """A real compute process: what a contributor's start does."""
    found = doctor._engine(patient(tmp_path, threads=1))
    assert [(each.name, each.state) for each in found] == [("device", "ok"), ("proof margin", "ok")], found
    assert "4 answers of the demo's policy" in found[1].what


def test_a_device_that_is_not_there_is_named(tmp_path, monkeypatch):
    async def fail(*_):
        raise BootstrapError("torch cannot use the device 'cuda'", hint="use cpu")

    monkeypatch.setattr(doctor, "_test_engine", fail)
    (found,) = doctor._engine(patient(tmp_path, device="cuda"))
    assert (found.name, found.state, found.fix) == ("device", "failed", "use cpu")
    assert "cuda" in found.what


def test_the_command(run_cli, tmp_path):
    done = run_cli("doctor", "--quick", "--data-dir", tmp_path / "d")
    assert done.code == 0, done.out
    assert "ok      python: 3." in done.out
    found = json.loads(run_cli("doctor", "--quick", "--json", "--role", "relay", "--run", RUN).out)
    assert {each["name"] for each in found} >= {"python", "disk", "key", "ports"}
    (tmp_path / "d").mkdir()
    load_or_create_identity(tmp_path / "d")
    (tmp_path / "d" / KEY_FILE).chmod(0o644)
    failed = run_cli("doctor", "--quick", "--data-dir", tmp_path / "d")
    assert failed.code == 1
    assert "FAILED  key: " in failed.out
    assert f"next: chmod 600 {tmp_path / 'd' / KEY_FILE}" in failed.out


def test_nothing_is_made_by_looking(tmp_path):
    examine(patient(tmp_path / "gone"), quick=True, timeout_s=1.0, say=print)
    assert not (tmp_path / "gone").exists()
    assert isinstance(finding("disk", config(tmp_path / "gone")), Finding)

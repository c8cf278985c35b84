"""Light contributors: their answers are the shared engine's, valid for their own seeds, and take their time."""

import threading
import time
from multiprocessing.connection import Listener

import pytest

from protocol.errors import ComputeError, ModelError
from protocol.identity import Identity
from simnet.light.__main__ import parse
from simnet.light.compute import LightWorker
from simnet.light.shared_compute import SharedEngine

BOB = Identity.from_phrase("bob").peer_id
RUN = f"{BOB}/light"
BOOTSTRAP = f"/ip4/127.0.0.1/tcp/1/p2p/{BOB}"
WORK = {"run_id": b"r" * 32, "step": 1, "contributor": b"a" * 32, "index": 0, "manifest": b"", "path": "x.parquet"}


class FakeWorker:
    """Stands in for the real engine, which takes seconds to start."""

    def __init__(self):
        self.loaded = []
        self.made = []

    def load(self, directory, checkpoint):
        if directory == "gone":
            raise ModelError("there is no policy")
        self.loaded.append((directory, checkpoint))

    def generate(self, **work):
        self.made.append(work)
        return {"sha256": b"s" * 32, "size": 7}


@pytest.fixture
def worker():
    return FakeWorker()


@pytest.fixture
def socket(worker, tmp_path):
    path = str(tmp_path / "engine")
    engine = SharedEngine(worker)
    with Listener(path, family="AF_UNIX") as listener:

        def accept():
            while True:
                try:
                    connection = listener.accept()
                except OSError:
                    return
                threading.Thread(target=engine.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield path


def test_contributors_share_an_engine_that_loads_each_policy_once(socket, worker):
    alice, bob = LightWorker(socket, every_s=0.0), LightWorker(socket, every_s=0.0)
    for contributor in (alice, bob):
        contributor.load("one", b"c1")
        assert contributor.generate(checkpoint=b"c1", **WORK) == {"sha256": b"s" * 32, "size": 7}
    bob.load("two", b"c2")
    bob.generate(checkpoint=b"c2", **WORK)
    alice.generate(checkpoint=b"c1", **WORK)
    assert worker.loaded == [("one", b"c1"), ("two", b"c2"), ("one", b"c1")]
    assert worker.made[0] == {**WORK, "checkpoint": b"c1"}


def test_a_policy_that_is_gone_is_said_and_the_engine_goes_on(socket, worker):
    alice = LightWorker(socket, every_s=0.0)
    alice.load("gone", b"c1")
    with pytest.raises(ComputeError, match="there is no policy"):
        alice.generate(checkpoint=b"c1", **WORK)
    alice.load("here", b"c2")
    alice.generate(checkpoint=b"c2", **WORK)
    assert worker.loaded == [("here", b"c2")]


def test_a_submission_takes_its_time(socket, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    alice = LightWorker(socket, every_s=500.0)
    alice.load("one", b"c1")
    alice.generate(checkpoint=b"c1", **WORK)
    assert 490 < slept[0] <= 500


def test_settings_are_those_of_an_inference_node(tmp_path):
    config, arguments = parse(["engine", "2.5", "--run", RUN, "--data-dir", str(tmp_path), "--bootstrap", BOOTSTRAP])
    assert (config.role, config.run, config.bootstrap) == ("inference", RUN, (BOOTSTRAP,))
    assert arguments == ["engine", "2.5"]

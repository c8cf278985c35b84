"""An engine that is stuck for good costs a contributor one start of its compute process, never its work."""

import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import trio
from factories import make_head, make_manifest, sealed

from node.compute.process import ComputeProcess
from node.inference.outbox import Outbox
from node.inference.role import InferenceParts, InferenceRole
from node.status import StatusBoard
from protocol.errors import ComputeCrashed
from protocol.identity import Identity

ALICE, OPERATOR = Identity.from_phrase("alice"), Identity.from_phrase("operator")
MANIFEST = sealed(make_manifest(), OPERATOR)

WORKER = """
import ctypes, os, pathlib, time
from node.compute.serve import serve
from node.compute.watchdog import Watchdog

def wedge(seconds):
    with Watchdog(seconds):
        ctypes.PyDLL(None).sleep(600)  # native code that keeps the interpreter to itself
def steady(steps):
    with Watchdog(0.5) as dog:
        for _ in range(steps):
            time.sleep(0.1)
            dog.feed()
    time.sleep(0.6)
    return "done"
def load(checkpoint_dir, checkpoint_id): return {}
def generate(index, path, **others):
    mark = pathlib.Path(os.environ["MARK"])
    if not mark.exists():
        mark.touch()
        wedge(0.2)
    pathlib.Path(path).write_bytes(b"rollouts")
    return dict(sha256=bytes(32), size=8, rollouts=1, output_tokens=1, prompts=bytes(32), mean_reward=0.0,
        could_not_tell=0, engine="test 1", dtype="float32", seconds=1.0)
serve(dict(wedge=wedge, steady=steady, load=load, generate=generate))
"""


@pytest.fixture
async def worker(tmp_path, nursery):
    (tmp_path / "stuck_worker.py").write_text(WORKER)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    env = {"PYTHONPATH": path, "MARK": str(tmp_path / "mark")}
    process = ComputeProcess("stuck_worker", name="worker", log_path=tmp_path / "w.log", env=env)
    await nursery.start(process.run)
    return process


async def test_native_code_that_never_returns_ends_the_process_and_says_where_it_was(worker):
    with trio.fail_after(60), pytest.raises(ComputeCrashed, match="stopped answering"):
        await worker.call("wedge", timeout_s=50, seconds=0.2)
    assert worker.crash_exit == -signal.SIGALRM
    assert not worker.died_of_memory
    assert "in wedge" in worker.log_path.read_text()
    with trio.fail_after(60):
        assert await worker.call("steady", timeout_s=50, steps=1) == "done"


async def test_work_that_goes_on_is_left_alone_and_so_is_what_follows(worker):
    with trio.fail_after(60):
        assert await worker.call("steady", timeout_s=50, steps=8) == "done"
    assert worker.restarts == 0


class Swarm:
    """One step, and no relay near."""

    manifest = MANIFEST
    clients = ()

    def __init__(self):
        self.head = make_head(MANIFEST.id, 1, collecting=True, step=1, checkpoint_step=1)

    async def wait_head(self, after):
        if after >= self.head.record.sequence:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return self.head

    async def wait_evicted(self):
        await trio.sleep_forever()

    def choose_relay(self, **_):
        return None


class Policies:
    def newest(self, oldest_step):
        return 1, bytes(32), Path()

    def kept(self, checkpoint):
        return nullcontext(Path())


class SilentFeeds:
    async def next(self):
        await trio.sleep_forever()


async def test_the_work_of_a_stuck_engine_is_done_by_the_next_one(worker, tmp_path, nursery, monkeypatch):
    """The engine wedges during the first submission: the same one is generated again, and no other index is used."""
    board = StatusBoard(role="inference", peer_id=ALICE.peer_id, run="test")
    outbox = Outbox(tmp_path / "outbox.sqlite")
    parts = InferenceParts(ALICE, Swarm(), Policies(), worker, outbox, SilentFeeds(), board, tmp_path / "work")
    added, receiver = trio.open_memory_channel(0)
    role = InferenceRole(parts)
    original = role.post

    def post(step, index, policy, made):
        original(step, index, policy, made)
        with suppress(trio.WouldBlock):
            added.send_nowait((step, index))

    monkeypatch.setattr(role, "post", post)
    nursery.start_soon(role.run)
    with trio.fail_after(60):
        assert await receiver.receive() == (1, 0)
    assert worker.restarts == 1

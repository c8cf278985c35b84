"""Asking a node to leave: the signal goes to the holder of the lock and to nobody else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from node import leaving
from node.datadir import LOCK_FILE, DataDir
from node.leaving import leave
from node.status import FINAL_FILE
from protocol.errors import DataDirError, NodeError

ROOT = Path(__file__).parents[2]
NODE = """
import signal, sys
from pathlib import Path
from node.datadir import DataDir
needed = int(sys.argv[2])
with DataDir(Path(sys.argv[1])):
    signals = []
    signal.signal(signal.SIGINT, lambda *_: signals.append(1))
    print("ready", flush=True)
    while len(signals) < needed:
        signal.pause()
sys.exit(10 + len(signals))
"""


@pytest.fixture
def start(tmp_path):
    """A process that uses the directory until it has had so many signals; its exit code tells how many."""
    children = []

    def started(signals):
        command = [sys.executable, "-c", NODE, str(tmp_path), str(signals)]
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout.readline() == b"ready\n"
        return child

    yield started
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def test_one_signal_and_its_end_is_told(start, tmp_path):
    child = start(1)
    (tmp_path / FINAL_FILE).write_text('{"state": "stopping", "activity": "handing in finished rollouts"}')
    said = []
    leave(tmp_path, now=False, timeout_s=30, say=said.append)
    assert child.wait(10) == 11
    assert said[0].startswith(f"process {child.pid} was asked to leave")
    assert said[-1] == "it has left, as it was asked to"


def test_now_is_a_second_signal(start, tmp_path):
    child = start(2)
    leave(tmp_path, now=True, timeout_s=30, say=print)
    assert child.wait(10) == 12


def test_one_that_goes_on_is_told_of(start, tmp_path, monkeypatch):
    monkeypatch.setattr(leaving, "POLL_S", 0.01)
    child = start(5)
    with pytest.raises(NodeError, match=f"process {child.pid} still runs") as caught:
        leave(tmp_path, now=False, timeout_s=0.05, say=print)
    assert "--now" in caught.value.hint


def test_no_node_runs(tmp_path):
    with pytest.raises(DataDirError, match="no node runs"):
        leave(tmp_path, now=False, timeout_s=1, say=print)


def test_a_number_in_the_lock_file_is_not_believed(tmp_path, monkeypatch):
    """Attack: whoever can write the lock file names a process of ours to have it signalled."""
    signalled = []
    monkeypatch.setattr(os, "kill", lambda process, number: signalled.append(process))
    with DataDir(tmp_path), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as innocent:
        (tmp_path / LOCK_FILE).write_text(f"{innocent.pid}\n")
        with pytest.raises(NodeError, match="not as process"):
            leave(tmp_path, now=False, timeout_s=1, say=print)
        innocent.stdin.close()
    assert signalled == []

"""What goes wrong inside a node's process, seen from such a process."""

import json
import subprocess
import sys
import time

import pytest
from simnet_world import wait_for

from simnet.meddle import Control, write_control

MODULE = """
import json, os, sqlite3, sys, time
from pathlib import Path
from node.clock import now_ms
assert __name__ == "__main__"
for line in sys.stdin:
    started = time.monotonic()
    with open(sys.argv[1], "wb") as file: os.fsync(file.fileno())
    synced = time.monotonic() - started
    started = time.monotonic()
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.execute("CREATE TABLE t (a)")
    database.execute("INSERT INTO t VALUES (1)")
    with database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO t VALUES (2)")
    changed = time.monotonic() - started
    print(json.dumps([now_ms() / 1000, time.time(), synced, changed]), flush=True)
"""


@pytest.fixture
def node(tmp_path):
    """A process with a control file; gives what it finds of its clock and disk."""
    (tmp_path / "meddled_module.py").write_text(MODULE)
    write_control(tmp_path / "control.json", Control())
    command = [sys.executable, "-m", "simnet.meddle", str(tmp_path / "control.json"), "meddled_module"]
    with subprocess.Popen(
        [*command, str(tmp_path / "file")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:

        def look():
            process.stdin.write("\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield look
        process.stdin.close()


def test_a_clock_moves_while_the_node_runs_and_back_again(node, tmp_path):
    assert abs(node()[0] - time.time()) < 30
    write_control(tmp_path / "control.json", Control(clock_ahead_s=-7200))
    wait_for(lambda: node()[0] < time.time() - 7000)
    signed, wall, *_ = node()
    assert abs(signed - wall) < 30
    write_control(tmp_path / "control.json", Control())
    wait_for(lambda: abs(node()[0] - time.time()) < 30)


def test_a_slow_disk_takes_longer_to_make_things_durable(node, tmp_path):
    write_control(tmp_path / "control.json", Control(sync_ms=100))
    wait_for(lambda: node()[2] >= 0.1)
    assert node()[3] >= 0.2

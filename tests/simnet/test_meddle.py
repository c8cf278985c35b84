"""What goes wrong inside a node's processes, seen from such processes."""

import json
import os
import subprocess
import sys
import time

import pytest
from simnet_world import wait_for

from simnet.meddle import Control, write_control, write_hook

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
NODE = """
import json, sys
import trio
from pathlib import Path
from node.compute.process import ComputeProcess

async def main():
    compute = ComputeProcess("writing_compute", name="compute", log_path=Path(sys.argv[1] + ".log"))
    async with trio.open_nursery() as nursery:
        await nursery.start(compute.run)
        for line in sys.stdin:
            print(json.dumps(await compute.call("write", timeout_s=30, path=sys.argv[1])), flush=True)
        nursery.cancel_scope.cancel()

trio.run(main)
"""
COMPUTE = """
import time
from pathlib import Path
from node.compute.serve import serve
from protocol.atomic import write_atomically

def write(path):
    started = time.monotonic()
    write_atomically(Path(path), b"policy")
    return [time.time(), time.monotonic() - started]

serve({"write": write})
"""


@pytest.fixture
def start(tmp_path):
    """Starts a module's process under a control file; gives a function that reads what it finds of clock and disk."""
    for name, code in {"meddled_module": MODULE, "node_module": NODE, "writing_compute": COMPUTE}.items():
        (tmp_path / f"{name}.py").write_text(code)
    write_control(tmp_path / "control.json", Control())
    write_hook(tmp_path / "hook", tmp_path / "control.json")
    paths = [str(tmp_path / "hook"), str(tmp_path), *filter(None, sys.path)]
    processes = []

    def begin(module):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(tmp_path / "file")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        processes.append(process)

        def look():
            process.stdin.write("\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        return look

    yield begin
    for process in processes:
        process.communicate(timeout=30)


@pytest.fixture
def node(start):
    return start("meddled_module")


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


def test_a_slow_disk_and_a_wrong_clock_reach_the_compute_process(start, tmp_path):
    """One that the node starts as it always does: a policy is made durable there, not in the network process."""
    compute = start("node_module")
    assert abs(compute()[0] - time.time()) < 30
    write_control(tmp_path / "control.json", Control(clock_ahead_s=7200, sync_ms=150))
    wait_for(lambda: compute()[1] >= 0.15)
    assert compute()[0] > time.time() + 7000

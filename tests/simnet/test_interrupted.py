"""Ctrl-C at any moment of a real simulation in a process of its own: all children are gone within five seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from simnet_world import wait_for

from simnet.processes import ProcessTable

ALL_GONE_S = 5.0
SCENARIO = """
[link.far]
delay_ms = 5
[[fleet]]
role = "trainer"
[[fleet]]
role = "relay"
[[fleet]]
role = "validator"
[[fleet]]
role = "inference"
link = "far"
disk_mb = 72
[until]
timeout_s = 60
"""
INTERRUPTED_IMPORT = """
import os
import signal
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass  # as some libraries do

sys.meta_path.insert(0, Interrupting())
"""
FAKE = """
import sys
sys.path.insert(0, {here!r})
from simnet_world import FakeCommands, without_ledgers
from simnet import report, run_scenario
report.gather_evidence = without_ledgers
print("begun", flush=True)
sys.exit(run_scenario({scenario!r}, {out!r}, live=False, commands=FakeCommands()))
"""


def begin(tmp_path, *, command=None):
    """Start a simulation that leads a session of its own, as a shell's job does."""
    scenario = tmp_path / "small.toml"
    scenario.write_text(SCENARIO)
    here = str(Path(__file__).parent)
    script = FAKE.format(here=here, scenario=str(scenario), out=str(tmp_path / "out"))
    return subprocess.Popen(
        command or [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def children_of(process):
    return ProcessTable().descendants(process.pid)


def interrupt(process, *, known=frozenset()):
    """Ctrl-C in a terminal; how long it takes until no descendant that was there, or came meanwhile, is left."""
    started, seen = time.monotonic(), set(known)
    os.killpg(process.pid, signal.SIGINT)  # the tools that make the network, too, if they are in the terminal's group
    while True:
        seen |= children_of(process)
        if not ProcessTable().alive(seen) and (not children_of(process) or process.poll() is not None):
            return time.monotonic() - started
        assert time.monotonic() - started < 30, "processes are left"
        time.sleep(0.01)


def left_of(process):
    """Network namespaces and mounts of a simulation that has ended."""
    begin = f"simnet-{process.pid}-"
    names = [path.name for path in Path("/run/netns").glob(f"{begin}*")]
    return names + [line for line in Path("/proc/self/mounts").read_text().splitlines() if begin in line]


LONG = [
    pytest.param(moment, marks=pytest.mark.long) for moment in ("first child", "network", "first node", "all nodes")
]


@pytest.mark.parametrize("moment", ["identities", "second round", *LONG])
def test_all_children_are_gone_within_five_seconds(tmp_path, moment):
    out = tmp_path / "out"
    conditions = {
        "first child": lambda: children_of(process),
        "network": lambda: (out / "nodes").exists(),
        "identities": lambda: any(out.glob("nodes/*/data")),
        "first node": lambda: any(out.glob("nodes/relay-0/log.txt")),
        "all nodes": lambda: len(list(out.glob("nodes/*/log.txt"))) == 4,
        "second round": lambda: len(list(out.glob("nodes/*/data/status.url"))) == 4,
    }
    process = begin(tmp_path)
    try:
        wait_for(conditions[moment], timeout_s=60)
        assert interrupt(process, known=children_of(process)) < ALL_GONE_S
        process.communicate(timeout=30)
        assert process.returncode == 130
        assert left_of(process) == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_a_second_interrupt_while_it_closes_leaves_nothing_behind(tmp_path):
    process = begin(tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("out/nodes/*/data/status.url"))) == 4, timeout_s=60)
        known = children_of(process)
        os.killpg(process.pid, signal.SIGINT)
        assert interrupt(process, known=known) < ALL_GONE_S
        process.communicate(timeout=30)
        assert left_of(process) == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.5, 3, 8, 14, 20, 30])
def test_real_nodes_are_gone_within_five_seconds(tmp_path, after_s):
    """Whatever a real fleet is doing by then: identities, the run, first steps, training."""
    out = str(tmp_path / "out")
    process = begin(
        tmp_path, command=[sys.executable, "-m", "cli", "simnet", "run", "partition", "--short", "--out", out]
    )
    try:
        time.sleep(after_s)
        assert interrupt(process, known=children_of(process)) < ALL_GONE_S
        process.communicate(timeout=60)
        assert process.returncode in (130, -signal.SIGINT)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("module", ["node.commands.policy", "simnet.runner", "simnet.fleet"])
def test_ctrl_c_while_the_program_is_still_being_read_ends_it_without_a_traceback(tmp_path, module):
    """The first seconds of a command pass with imports."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IMPORT.format(module=module))
    done = subprocess.run(
        [sys.executable, "-m", "cli", "simnet", "run", "demo", "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr

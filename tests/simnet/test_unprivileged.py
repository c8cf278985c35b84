"""A simulation by somebody who is not root: real proxies in place of links, and word of everything that is left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simnet.processes import ProcessTable

SCENARIO = """
[run]
recipe = "demo"
[link.home]
delay_ms = 5
loss = 0.01
[link.router]
nat = "symmetric"
[[fleet]]
role = "trainer"
[[fleet]]
role = "relay"
[[fleet]]
role = "validator"
link = "router"
[[fleet]]
role = "inference"
link = "home"
[[fault]]
node = "inference-0"
action = "partition"
at_step = 1
for_s = 0.2
[[fault]]
node = "validator-0"
action = "disk-full"
at_step = 1
for_s = 0.2
[until]
timeout_s = 60
[expect]
steps_at_least = 10
"""
SIMULATION = """
import os, sys
sys.path.insert(0, {here!r})
from simnet_world import FakeCommands, without_ledgers
from simnet import report, run_scenario, runner
report.gather_evidence = without_ledgers
runner.FINISH_GRACE_S = 0.5
assert os.geteuid() != 0
sys.exit(run_scenario({scenario!r}, {out!r}, live=False, commands=FakeCommands(trainer_0={{"total_steps": 40}})))
"""
NOTES = (
    "links are imitated by proxies on loopback, without network namespaces: this is not root",
    "no packets are lost, which needs namespaces: inference-0",
    "nobody lies behind a translating router, which needs namespaces: validator-0",
    "full disks are imitated by a limit on the size of files: this is not root",
)


@pytest.fixture
def somebody() -> list[str]:
    """What makes a command that of somebody who is not root: a user namespace without any user in it, or nothing."""
    if os.geteuid() != 0:
        return []
    within = ["unshare", "--user"]
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system makes no user namespaces")
    return within


def simulate(somebody: list[str], tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    scenario = tmp_path / "small.toml"
    scenario.write_text(text)
    script = SIMULATION.format(here=str(Path(__file__).parent), scenario=str(scenario), out=str(tmp_path / "out"))
    return subprocess.run(
        [*somebody, sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


def test_it_runs_by_proxies_and_says_what_they_leave_out(somebody, tmp_path):
    before = ProcessTable().descendants(os.getpid())
    done = simulate(somebody, tmp_path, SCENARIO)
    notes = [line.removeprefix("note: ") for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert (done.returncode, tuple(notes)) == (0, NOTES), done.stdout + done.stderr
    assert set(ProcessTable().descendants(os.getpid())) <= set(before)


def test_what_only_namespaces_can_do_is_refused_by_name(somebody, tmp_path):
    done = simulate(somebody, tmp_path, 'network = "namespaces"\n' + SCENARIO)
    assert done.returncode == 1
    assert "ConfigError: scenario 'small' is about what only network namespaces do" in done.stderr
    assert "this is not root" in done.stderr
    assert not (tmp_path / "out").exists()

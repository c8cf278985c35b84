"""Processes of a simulation that was killed are ended by the next one, and nobody else's."""

import os
import subprocess
from contextlib import contextmanager

import pytest
from simnet_world import FakeCommands

from simnet import leftovers
from simnet.commands import environment_of
from simnet.fleet import Fleet
from simnet.netns import is_left_over, label
from simnet.processes import key_of
from simnet.scenario import parse_scenario

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@contextmanager
def sleeping(**variables):
    """A process that would sleep for long, with more variables than we have."""
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, **variables}, start_new_session=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def dead(monkeypatch):
    """A label taken for that of a simulation that has ended, here alone: another simulation's sweep leaves it alone."""
    name = f"{label()}left-over-0"
    monkeypatch.setattr(leftovers, "is_left_over", lambda other: other == name)
    return name


def test_what_a_killed_simulation_left_running_is_killed(dead):
    with (
        sleeping(SIMNET_SIMULATION=dead) as left,
        sleeping(SIMNET_SIMULATION=f"{label()}relay-0") as living,
        sleeping(SIMNET_SIMULATION="simnet-relay-0") as odd,
        sleeping(OTHER=dead) as other,
    ):
        assert leftovers.sweep() == 1
        assert left.wait(10) == -9
        assert [one.poll() for one in (living, odd, other)] == [None, None, None]


def test_a_simulation_whose_end_nobody_has_waited_for_has_ended():
    """As in a container whose first process waits for nobody's end."""
    with sleeping() as simulation:
        name = "simnet-{0.pid}-{0.start_ticks}-relay-0".format(key_of(simulation.pid))
        with sleeping(SIMNET_SIMULATION=name) as left, sleeping(SIMNET_SIMULATION="simnet-relay-0") as odd:
            assert not is_left_over(name)
            simulation.kill()
            os.waitid(os.P_PID, simulation.pid, os.WEXITED | os.WNOWAIT)
            leftovers.sweep()
            assert left.wait(10) == -9
            assert odd.poll() is None
        simulation.wait()
        assert is_left_over(name)
        assert not is_left_over(f"{label()}relay-0")


def test_what_is_another_users_or_runs_in_a_container_is_left_alone(dead, monkeypatch):
    """There pids mean something else, so that a simulation that lives looks as if it had ended."""
    with sleeping(SIMNET_SIMULATION=dead) as left:
        with monkeypatch.context() as patch:
            patch.setattr(leftovers.os, "readlink", lambda path: path)
            assert leftovers.sweep() == 0
        with monkeypatch.context() as patch:
            patch.setattr(leftovers.os, "geteuid", lambda: 2**31)
            assert leftovers.sweep() == 0
        assert left.poll() is None


def test_every_process_of_a_node_carries_the_simulations_label(small, tmp_path):
    with Fleet(parse_scenario(small, name="small"), tmp_path, commands=FakeCommands()) as fleet:
        plan = fleet.members["inference-0"].plan
        assert environment_of(plan)["SIMNET_SIMULATION"] == f"{label()}inference-0"

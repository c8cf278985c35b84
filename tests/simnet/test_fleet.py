import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from simnet_world import FakeCommands, peer_id, wait_for

from protocol.errors import ConfigError, NodeError
from simnet import fleet as fleet_module
from simnet import gatherer as gatherer_module
from simnet import memory
from simnet.commands import CliCommands, Launch
from simnet.fleet import Fleet, free_ports
from simnet.gather import NodeRecord, Recording, now_ms
from simnet.gatherer import Gatherer
from simnet.interrupts import interruptible
from simnet.meddle import Control
from simnet.memory import check_memory, fitted, needed_memory_mb
from simnet.network import Network
from simnet.processes import ProcessTable
from simnet.scenario import DISK_MB, Fault, NodePlan, load_scenario, parse_scenario

RECIPE = Path("recipe.toml")


@pytest.fixture
def scenario(small):
    return parse_scenario(small, name="small")


def started(scenario, tmp_path, **behaviour):
    fleet = Fleet(scenario, tmp_path, commands=FakeCommands(**behaviour))
    fleet.prepare(RECIPE)
    for name in fleet.members:
        fleet.start(name)
    wait_for(lambda: all((member.data_dir / "status.url").exists() for member in fleet.members.values()))
    return fleet


def fault(action, **fields):
    return Fault(node="inference-0", action=action, at_s=0.0, **fields)


def exists(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def pids_of(member) -> list[int]:
    return [member.process.pid, int((member.data_dir / "child.pid").read_text())]


def test_identities_and_the_run_come_from_the_commands_last_line(scenario, tmp_path):
    with Fleet(scenario, tmp_path, commands=FakeCommands()) as fleet:
        fleet.prepare(RECIPE)
        assert {name: member.peer_id for name, member in fleet.members.items()} == {
            name: peer_id(name) for name in fleet.members
        }
        assert fleet.run == f"{peer_id('trainer-0')}/simnet"


def test_leaving_the_fleet_leaves_no_process_not_even_children_in_sessions_of_their_own(scenario, tmp_path):
    with started(scenario, tmp_path, inference_0={"orphans": True}) as fleet:
        pids = [pid for member in fleet.members.values() for pid in pids_of(member)]
        assert all(exists(pid) for pid in pids)
    assert not [pid for pid in pids if exists(pid)]
    assert all((tmp_path / "nodes" / name / "log.txt").exists() for name in fleet.members)


def test_a_node_that_ignores_signals_is_killed(scenario, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_module, "TERM_AFTER_S", 0.2)
    monkeypatch.setattr(fleet_module, "END_TIMEOUT_S", 0.4)
    with started(scenario, tmp_path, inference_0={"stubborn": True}) as fleet:
        pids = pids_of(fleet.members["inference-0"])
    assert not [pid for pid in pids if exists(pid)]
    assert fleet.members["inference-0"].process.returncode == -signal.SIGKILL


def test_a_kill_takes_the_nodes_children_with_it(scenario, tmp_path):
    with started(scenario, tmp_path) as fleet:
        member = fleet.members["inference-0"]
        pids = pids_of(member)
        assert fleet.apply(fault("kill")) == "struck"
        wait_for(lambda: not [pid for pid in pids if exists(pid)])
        assert (member.process.returncode, member.ended_by) == (-signal.SIGKILL, "kill")


def test_a_stopped_node_stands_still_until_it_continues(scenario, tmp_path):
    with started(scenario, tmp_path) as fleet:
        pid = fleet.members["inference-0"].process.pid

        def state():
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

        fleet.apply(fault("stop"))
        wait_for(lambda: state() == "T")
        fleet.apply(fault("continue"))
        wait_for(lambda: state() != "T")


def test_a_node_leaves_and_joins_again_in_the_same_data_directory(scenario, tmp_path):
    with started(scenario, tmp_path) as fleet:
        member = fleet.members["inference-0"]
        first = member.process.pid
        assert fleet.apply(fault("join")) == "not yet"
        fleet.apply(fault("leave"))
        wait_for(lambda: fleet.apply(fault("join")) == "struck")
        assert member.process.pid != first
        assert member.ended_by == ""


def test_a_node_is_asked_to_leave_only_once_it_answers(scenario, tmp_path):
    """Before it handles signals, Python itself would end it with an error that is not the node's."""
    with Fleet(scenario, tmp_path, commands=FakeCommands(inference_0={"slow_start_s": 0.5})) as fleet:
        fleet.prepare(RECIPE)
        fleet.start("inference-0")
        member = fleet.members["inference-0"]
        assert fleet.apply(fault("leave")) == "not yet"
        wait_for(lambda: fleet.apply(fault("leave")) == "struck")
        assert member.process.wait(10) == 0
        assert member.ended_by == "leave"


def test_a_node_that_never_answers_is_asked_all_the_same_in_the_end(scenario, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_module, "LEAVE_TIMEOUT_S", 0.3)
    with Fleet(scenario, tmp_path, commands=FakeCommands(inference_0={"slow_start_s": 600})) as fleet:
        fleet.prepare(RECIPE)
        fleet.start("inference-0")
        wait_for(lambda: fleet.apply(fault("leave")) == "struck")
        assert fleet.members["inference-0"].process.wait(10) != 0


def test_a_node_that_leaves_at_the_close_is_not_signalled_a_second_time(scenario, tmp_path):
    with started(scenario, tmp_path, inference_0={"leaves_in_s": 0.5}) as fleet:
        fleet.apply(fault("leave"))
    member = fleet.members["inference-0"]
    assert (member.process.returncode, member.ended_by) == (0, "close")


def test_a_full_disk_explains_an_end_and_a_free_one_brings_the_node_back(small, tmp_path):
    small["fault"] = [{"node": "inference-0", "action": "disk-full", "at_s": 1, "for_s": 2}]
    with started(parse_scenario(small, name="small"), tmp_path) as fleet:
        member = fleet.members["inference-0"]
        fleet.apply(fault("disk-full"))
        with pytest.raises(OSError, match=r"No space left|File too large"):
            (member.data_dir / "file").write_bytes(bytes(100_000))
        member.process.kill()
        member.process.wait()
        assert member.ended_by == "disk-full"
        fleet.apply(fault("disk-free"))
        assert (member.running, member.ended_by) == (True, "")
        fleet.apply(fault("disk-full"))
        fleet.apply(fault("disk-free"))
        assert (member.running, member.ended_by) == (True, "")
    assert (member.data_dir / "child.pid").exists()


def test_a_node_that_is_started_on_a_full_disk_may_end_for_want_of_room_and_comes_back(small, tmp_path):
    small["fault"] = [{"node": "inference-0", "action": "disk-full", "at_s": 1, "for_s": 2}]
    with started(parse_scenario(small, name="small"), tmp_path) as fleet:
        member = fleet.members["inference-0"]
        for action in ("disk-full", "kill", "join"):
            assert fleet.apply(fault(action)) == "struck"
        wait_for(lambda: member.answers)
        assert member.ended_by == "disk-full"
        fleet.reap()
        member.process.kill()
        member.process.wait()
        fleet.apply(fault("disk-free"))
        assert (member.running, member.ended_by) == (True, "")
        for action in ("kill", "join"):
            fleet.apply(fault(action))
        assert (member.running, member.ended_by) == (True, ""), "the disk has room again"


def test_a_wrong_clock_is_told_to_the_process_and_taken_back(small, tmp_path):
    small["fleet"][3]["clock_ahead_s"] = 30
    with started(parse_scenario(small, name="small"), tmp_path) as fleet:
        path = fleet.members["inference-0"].control_path
        assert read_control(path).clock_ahead_s == 30
        fleet.apply(fault("clock", seconds=-60))
        assert read_control(path).clock_ahead_s == -60
        fleet.apply(fault("disk-slow", sync_ms=20))
        fleet.apply(fault("clock"))
        assert (read_control(path).clock_ahead_s, read_control(path).sync_ms) == (30, 20)
        hook = fleet.members["inference-0"].hook
        assert paths_of(fleet.members["inference-0"])[0] == str(hook)
        assert str(path) in (hook / "sitecustomize.py").read_text()
        assert not fleet.members["validator-0"].control_path.exists()
        assert "meddled" not in paths_of(fleet.members["validator-0"])[0]


def paths_of(member):
    """The PYTHONPATH that a node's process was given."""
    variables = Path(f"/proc/{member.process.pid}/environ").read_text().split("\0")
    return next(one for one in variables if one.startswith("PYTHONPATH=")).removeprefix("PYTHONPATH=").split(":")


def read_control(path):
    return msgspec.json.decode(path.read_bytes(), type=Control)


def test_statuses_are_gathered_and_every_life_of_a_node_is_told_apart(scenario, tmp_path):
    records = [NodeRecord(plan.name, plan.role, peer_id(plan.name), plan.cheat) for plan in scenario.nodes()]
    recording = Recording(scenario, "run", 0, now_ms(), records)
    with started(scenario, tmp_path) as fleet:
        gatherer = Gatherer(fleet, recording)
        gatherer.poll()
        assert all(record.status and record.status.peer_id == record.peer_id for record in records)
        fleet.apply(fault("kill"))
        gatherer.poll()
        fleet.apply(fault("join"))
        wait_for(lambda: (gatherer.poll(), records[3].lives[-1].status)[1])
        gatherer.close()
    first, second = records[3].lives
    assert (first.exit_code, first.ended_by, second.ended_ms) == (-signal.SIGKILL, "kill", None)


def records_of(scenario):
    records = [NodeRecord(plan.name, plan.role, peer_id(plan.name), plan.cheat) for plan in scenario.nodes()]
    return Recording(scenario, "run", 0, now_ms(), records), {record.name: record for record in records}


def test_a_life_that_ends_and_the_next_that_begins_between_two_looks_are_told_apart(scenario, tmp_path):
    """A restart is a kill and a join at once; a crash just before a join is one all the same."""
    recording, records = records_of(scenario)
    with started(scenario, tmp_path) as fleet:
        gatherer = Gatherer(fleet, recording)
        gatherer.poll()
        for _ in range(2):
            assert fleet.apply(fault("kill")) == fleet.apply(fault("join")) == "struck"
        fleet.members["relay-0"].process.kill()
        fleet.members["relay-0"].process.wait()
        fleet.apply(Fault(node="relay-0", action="join", at_s=0.0))
        gatherer.poll()
        gatherer.close()
    lives = records["inference-0"].lives
    assert [(life.exit_code, life.ended_by) for life in lives] == [(-9, "kill"), (-9, "kill"), (None, "")]
    assert all(one.ended_ms <= later.started_ms for one, later in pairwise(lives))
    assert [(life.exit_code, life.ended_by) for life in records["relay-0"].lives] == [(-9, ""), (None, "")]


def test_a_node_that_runs_and_does_not_answer_is_silent_until_it_does(scenario, tmp_path, monkeypatch):
    """Attack: a node hangs; its last status is kept, and must not pass for a new one."""
    monkeypatch.setattr(gatherer_module, "SILENT_MS", 300)
    recording, records = records_of(scenario)
    with started(scenario, tmp_path) as fleet:
        gatherer = Gatherer(fleet, recording)
        gatherer.poll()
        life = records["inference-0"].lives[-1]
        heard_ms = life.status_at_ms
        os.kill(fleet.members["inference-0"].process.pid, signal.SIGSTOP)
        wait_for(lambda: (gatherer.poll(), life.silences and life.silences[0][1] > heard_ms + 2000)[1])
        assert (life.silences[0][0], life.status_at_ms) == (heard_ms, heard_ms)
        os.kill(fleet.members["inference-0"].process.pid, signal.SIGCONT)
        wait_for(lambda: (gatherer.poll(), life.status_at_ms > heard_ms)[1])
        assert life.first_status_at_ms == heard_ms
        gatherer.close()
    assert len(life.silences) == 1
    assert all(not one.lives[-1].silences for name, one in records.items() if name != "inference-0")


@pytest.mark.parametrize("action", ["stop", "kill", "restart", "partition", "disk-full", "disk-slow"])
def test_no_fault_strikes_a_node_that_has_ended_by_itself(small, tmp_path, action):
    small["fault"] = [{"node": "inference-0", "action": "disk-slow", "at_s": 1, "for_s": 2, "sync_ms": 5}]
    with started(parse_scenario(small, name="small"), tmp_path) as fleet:
        member = fleet.members["inference-0"]
        member.process.kill()
        member.process.wait()
        assert fleet.apply(fault(action, sync_ms=5 if action == "disk-slow" else None)) == "missed"
        assert (member.ended_by, member.control.sync_ms) == ("", 0)
        assert fleet.apply(fault("disk-normal")) == fleet.apply(fault("join")) == "struck"


def test_a_command_that_fails_is_told_with_what_it_printed(scenario, tmp_path):
    class Failing(FakeCommands):
        def create_identity(self, data_dir):
            return [sys.executable, "-c", "import sys; sys.exit('no room for a key')"]

    with Fleet(scenario, tmp_path, commands=Failing()) as fleet, pytest.raises(NodeError, match="no room for a key"):
        fleet.prepare(RECIPE)


def test_an_identity_that_is_none_is_refused(scenario, tmp_path):
    class Odd(FakeCommands):
        def create_identity(self, data_dir):
            return [sys.executable, "-c", "print('hello')"]

    with Fleet(scenario, tmp_path, commands=Odd()) as fleet, pytest.raises(NodeError, match="it printed 'hello'"):
        fleet.prepare(RECIPE)


def test_settings_of_the_caller_do_not_reach_the_nodes(scenario, tmp_path, monkeypatch):
    monkeypatch.setenv("INTELLECT_NODE_STATUS_PORT", "1")
    with started(scenario, tmp_path) as fleet:
        environ = Path(f"/proc/{fleet.members['inference-0'].process.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=1" in environ
    assert not [line for line in environ if line.startswith(b"INTELLECT_")]


def test_a_nice_node_runs_at_its_level(small, tmp_path):
    small["fleet"][3]["nice"] = 7
    with started(parse_scenario(small, name="small"), tmp_path) as fleet:
        assert os.getpriority(os.PRIO_PROCESS, fleet.members["inference-0"].process.pid) == 7


def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path, "12D3KooW/demo", ("/ip4/127.0.0.1/tcp/1/p2p/12D3",), p2p_port=2, http_port=3, seed=4)


def plan(role: str, cheat: str | None = None) -> NodePlan:
    return NodePlan(name="x-0", role=role, cheat=cheat, threads=1, nice=0, absent=False)


def test_only_relays_listen_and_only_relays_and_the_trainer_serve_http(tmp_path):
    lines = {role: CliCommands().start(plan(role), launch(tmp_path)) for role in ("relay", "trainer", "validator")}
    assert "--listen" in lines["relay"]
    assert "--listen" not in lines["trainer"]
    assert "--http-port" in lines["trainer"]
    assert "--http-port" not in lines["validator"]


def test_a_cheat_is_started_through_the_zoo_with_the_flags_of_an_inference_node(tmp_path):
    honest = CliCommands().start(plan("inference"), launch(tmp_path))
    cheat = CliCommands().start(plan("inference", "wrong-model"), launch(tmp_path))
    assert honest[:6] == [sys.executable, "-P", "-m", "cli", "--role", "inference"]
    assert cheat[:7] == [sys.executable, "-P", "-m", "simnet.zoo", "wrong-model", "--cheat-seed", "4"]
    assert honest[6:] == cheat[7:]


def test_a_machine_without_room_is_told_the_estimate():
    scenario = load_scenario("demo")
    needed = needed_memory_mb(scenario)
    check_memory(scenario, needed)
    check_memory(scenario, None)
    with pytest.raises(ConfigError, match=rf"about {needed} MB .* for 8 nodes; 100 MB are free"):
        check_memory(scenario, 100)


def test_a_scenario_says_what_nodes_of_a_large_policy_take(small):
    without = needed_memory_mb(parse_scenario(small, name="small"))
    small["fleet"][3]["memory_mb"] = 5000
    assert needed_memory_mb(parse_scenario(small, name="small")) == without - memory.COMPUTE_NODE_MB + 5000


def test_what_fills_a_machine_is_as_many_as_it_holds(small):
    small["fleet"].append({"role": "watch", "count": 50, "fill": True})
    scenario = parse_scenario(small, name="small")
    least = needed_memory_mb(parse_scenario({**small, "fleet": small["fleet"][:5]}, name="x"))
    counts = {
        free: len(fitted(scenario, free).matching("watch-*"))
        for free in (0, least + 3 * memory.WATCH_MB, least + 1000 * memory.WATCH_MB)
    }
    assert list(counts.values()) == [1, 3, 50]
    assert fitted(scenario, None) is scenario


def test_what_fills_a_machine_leaves_room_for_the_disks_in_its_memory(small):
    """Also for those that nodes have because a fault fills them."""
    small["fleet"].append({"role": "watch", "count": 50, "fill": True})
    small["random"] = [{"nodes": "watch-*", "actions": ["disk-full"], "count": 3, "from_s": 1.0, "to_s": 9.0}]
    scenario = parse_scenario(small, name="small")
    each_mb = memory.WATCH_MB + DISK_MB
    least = needed_memory_mb(scenario) - 50 * each_mb
    made = fitted(scenario, least + 7 * each_mb + 50)
    assert len(made.matching("watch-*")) == 7
    check_memory(made, least + 7 * each_mb + 50)


def test_a_hostile_peer_is_started_as_itself(tmp_path):
    hostile = NodePlan(name="x-0", role="hostile", attack="flood", cheat=None, threads=1, nice=0, absent=False)
    line = CliCommands().start(hostile, launch(tmp_path))
    assert line[3:7] == ["simnet.hostile", "flood", "--seed", "4"]
    assert "--threads" not in line


def test_a_relay_behind_a_proxy_tells_others_the_proxy(tmp_path):
    behind = replace(launch(tmp_path), announce="/ip4/127.0.0.1/tcp/9", public_url="https://127.0.0.1:10")
    line = CliCommands().start(plan("relay"), behind)
    assert line[line.index("--announce") + 1] == "/ip4/127.0.0.1/tcp/9"
    assert line[line.index("--public-url") + 1] == "https://127.0.0.1:10"
    assert line[line.index("--listen") + 1] == "/ip4/127.0.0.1/tcp/2"


def test_free_ports_differ():
    assert len(set(free_ports(50))) == 50


def test_what_is_made_between_nodes_takes_none_of_their_ports(small, tmp_path, monkeypatch):
    """Nobody listens on them yet."""
    doors = []

    def network(_scenario, _ports, draw):
        doors.extend(draw(20))
        return Network()

    monkeypatch.setattr(fleet_module, "make_network", network)
    monkeypatch.setattr(fleet_module.random, "sample", lambda ports, k: list(ports)[:k])  # twice the same ones
    fleet = Fleet(parse_scenario(small, name="small"), tmp_path, commands=FakeCommands())
    own = {port for member in fleet.members.values() for port in (member.p2p_port, member.http_port)}
    assert (len(own), len(set(doors) - own)) == (10, 20)


def test_an_interrupt_while_a_node_is_started_leaves_the_moment_at_which_it_was(scenario, tmp_path, monkeypatch):
    start = subprocess.Popen

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return start(*arguments, **options)

    with Fleet(scenario, tmp_path, commands=FakeCommands()) as fleet, interruptible():
        monkeypatch.setattr(fleet_module.subprocess, "Popen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fleet.start("inference-0")
        member = fleet.members["inference-0"]
        assert member.process is not None
        assert 0 <= now_ms() - member.started_ms < 60_000
        monkeypatch.undo()


def test_a_process_table_knows_grandchildren():
    code = "import subprocess,sys; print(subprocess.Popen(['sleep','60']).pid, flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        grandchild = int(child.stdout.readline())
        table = ProcessTable()
        assert {child.pid, grandchild} <= {key.pid for key in table.descendants(os.getpid())}
        assert table.alive(table.descendants(child.pid)) == table.descendants(child.pid)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.communicate()

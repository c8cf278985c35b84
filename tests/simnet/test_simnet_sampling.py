import os
import subprocess
import sys
from pathlib import Path

import pytest
from simnet_world import wait_for

from simnet import sampling
from simnet.processes import NODE_VARIABLE, ProcessTable
from simnet.sampling import ProcessSample, ProcessSeen, Pulse, look, processes_within

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


def environment(node):
    return {**os.environ, NODE_VARIABLE: node}


@needs_proc
def test_a_process_is_looked_at_with_what_it_has_for_itself(tmp_path):
    hoard = "import sys; kept = bytearray(b'x' * 40_000_000); files = [open('/dev/null') for _ in range(20)]; print()"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{hoard}; sys.stdout.flush(); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, env=environment("here"),
    )  # fmt: skip
    try:
        child.stdout.readline()
        table, seen = ProcessTable(), []
        key = table.key(child.pid)
        look(table, [key], seen, network_pid=child.pid, tasks=7)
        look(table, [key], seen, network_pid=child.pid, tasks=8)
        (record,) = seen
        assert record.network
        assert record.command.startswith("python")
        assert [sample.tasks for sample in record.samples] == [7, 8]
        assert record.samples[0].private_bytes > 40_000_000
        assert record.samples[0].descriptors >= 23
        assert processes_within({"here": tmp_path}) == {"here": [child.pid]}
    finally:
        child.communicate()
    look(ProcessTable(), [key], seen, network_pid=child.pid, tasks=9)
    assert len(record.samples) == 2
    assert processes_within({"here": tmp_path}) == {}


def test_a_long_life_is_sampled_ever_more_rarely_and_evenly(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_SAMPLES", 10)
    record = ProcessSeen(1, 0, True)
    for at in range(100):
        record.add(ProcessSample(at, 0))
    times = [sample.at_ms for sample in record.samples]
    assert len(times) <= 10
    assert times == list(range(0, 100, record.stride))[: len(times)]


def test_directories_whose_names_begin_alike_are_told_apart(tmp_path):
    (tmp_path / "relay-1").mkdir()
    (tmp_path / "relay-10").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        cwd=tmp_path / "relay-10",
        env=environment("relay-10"),
    )
    try:
        found = processes_within({name: tmp_path / name for name in ("relay-1", "relay-10")})
    finally:
        child.communicate(b"\n")
    assert found == ({"relay-10": [child.pid]} if Path("/proc/self").exists() else {})


@needs_proc
def test_a_person_who_reads_a_nodes_log_in_its_directory_is_no_process_of_it(tmp_path):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=tmp_path) as shell:
        try:
            assert processes_within({"relay-1": tmp_path}) == {}
        finally:
            shell.communicate()


def test_a_pulse_measures_how_late_a_sleeper_wakes(monkeypatch):
    monkeypatch.setattr(sampling, "PULSE_S", 0.001)
    pulse = Pulse()
    assert pulse.late_ms(0.99) is None
    pulse.start()
    wait_for(lambda: pulse.late_ms(0.99) is not None)
    pulse.stop()
    assert pulse.late_ms(0.0) >= 0

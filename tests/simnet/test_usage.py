"""What processes use: CPU time of all of them, past ones too, and the most memory that they had at one time."""

import os
import subprocess
import sys

import pytest

from simnet.processes import ProcessTable, Usage

BUSY = """
import os, sys, time
held = bytearray(40 << 20)
while time.process_time() < 0.2: pass
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def busy():
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    yield child
    child.communicate()


def test_cpu_time_and_memory_are_those_of_the_processes_and_stay_when_they_end(busy):
    usage, table = Usage(), ProcessTable()
    usage.note(table, [table.key(busy.pid)])
    assert 0.15 < usage.cpu_s < 5
    assert 40 << 20 <= usage.peak_bytes < 1 << 30
    before = usage.cpu_s, usage.peak_bytes
    usage.note(ProcessTable(), [])
    assert (usage.cpu_s, usage.peak_bytes) == before


def test_looking_twice_counts_once_and_two_processes_add_up(busy):
    usage, table = Usage(), ProcessTable()
    for _ in range(2):
        usage.note(table, [table.key(busy.pid), table.key(os.getpid())])
    both = Usage()
    both.note(table, [table.key(os.getpid())])
    alone = both.cpu_s
    both.note(table, [table.key(busy.pid)])
    assert usage.cpu_s == pytest.approx(both.cpu_s)
    assert both.cpu_s > alone
    assert usage.peak_bytes > both.peak_bytes


def test_a_pid_that_nobody_has_is_no_process():
    assert ProcessTable().key(2**31 - 1) is None

"""The memory oracle on what sampling finds of real processes, whose minutes pass faster than they would."""

import os
import subprocess
import sys
import time

import pytest
from oracle_world import judgement, make_evidence, process

from simnet import sampling
from simnet.processes import ProcessTable
from simnet.sampling import SAMPLE_S, look

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")

SECONDS = 900
"""So that five minutes are left after a long life's warm-up."""
GROWING = """
import sys
behaviour, every_s = sys.argv[1], float(sys.argv[2])
kept, number = [], 0
print(flush=True)
for line in sys.stdin:
    number += 1
    if behaviour == "leaks":
        kept.append(bytearray(b"x" * int(2e6 * every_s / 60)))
    elif number * every_s < 60:
        kept.append(bytearray(b"x" * 1_500_000))
    else:
        kept[-1] = bytearray(b"x" * (1_500_000 + 300_000 * (number % 2)))
    print(flush=True)
"""


def watch(monkeypatch, *behaviours):
    """Processes of a node that behave so, as they are looked at for a quarter of an hour."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", GROWING, behaviour, str(SAMPLE_S)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for behaviour in behaviours
    ]
    try:
        for child in children:
            child.stdout.readline()
        table, seen, began_ns = ProcessTable(), [], time.time_ns()
        keys = [table.key(child.pid) for child in children]
        for number in range(int(SECONDS / SAMPLE_S)):
            for child in children:
                child.stdin.write(b"\n")
                child.stdin.flush()
                child.stdout.readline()
            monkeypatch.setattr(sampling.time, "time_ns", lambda at=number: began_ns + int(at * SAMPLE_S * 1e9))
            look(table, keys, seen, network_pid=children[0].pid, tasks=None)
        return seen
    finally:
        monkeypatch.undo()
        for child in children:
            child.communicate()


def test_two_megabytes_a_minute_are_found_and_warming_up_is_not(monkeypatch):
    leaks, warms_up = watch(monkeypatch, "leaks", "warms-up")
    evidence = make_evidence()
    evidence.recording.nodes[1].processes = [warms_up]
    found = judgement(evidence, "memory")
    assert found.outcome == "passed", found
    evidence.recording.nodes[1].processes = [warms_up, leaks]
    found = judgement(evidence, "memory")
    assert (found.outcome, found.numbers["of"]) == ("failed", evidence.recording.nodes[1].name), found
    assert found.numbers["steepest MB/min"] == pytest.approx(2.0, abs=0.3)


def test_what_was_not_judged_is_said_with_the_reason():
    evidence = make_evidence()
    for node in evidence.recording.nodes:
        node.processes = [process([50_000_000] * 5)]
    found = judgement(evidence, "memory")
    assert found.outcome == "could not tell"
    assert found.finding == (
        f"A slope needs 300 s of a process's life, and the longest of {len(evidence.recording.nodes)} was 40 s: "
        "nothing was judged."
    )
    evidence.recording.nodes[0].processes.append(process([50_000_000] * 60))
    assert judgement(evidence, "memory").finding.endswith("5 were not judged, as they were there too briefly.")

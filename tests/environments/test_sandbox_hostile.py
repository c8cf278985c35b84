"""Attacks on the sandbox: programs that want out, or at what is around, in boxes of both kinds, as root and as others.

No escape, no harm to the secret, the servers and the process beside, no process left three seconds later, no growth of
the process that runs them, and each ended within GRACE_S of its wall limit. Runs in a process of its own, which may
become an ordinary user.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile
import pytest

from environments.sandbox.launch import INSIDE_DIR, find_bwrap

NOBODY = 65534
ROOT = Path(__file__).parents[2]
GROWTH_KB = 8192
GRACE_S = 5
"""For a busy machine to let the driver notice that a wall limit has passed."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
combinations = [
    pytest.param("bubblewrap", NOBODY, id="bubblewrap-user"),
    pytest.param("landlock", 0, id="landlock-root"),
    pytest.param("bubblewrap", 0, id="bubblewrap-root", marks=pytest.mark.long),
    pytest.param("landlock", NOBODY, id="landlock-user", marks=pytest.mark.long),
]


def run_hostile(kind, uid, *what):
    if kind == "bubblewrap" and not find_bwrap():
        pytest.skip("bubblewrap is not installed")
    if uid == 0 and os.getuid() != 0:
        pytest.skip("runs as root alone")
    if os.getuid() == 0 and uid and not all(above.stat().st_mode & 0o1 for above in INSIDE_DIR.parents):
        pytest.skip("an ordinary user cannot read this directory")
    command = [sys.executable, "-B", hostile.__file__, kind, str(uid), *what]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def wrong(result):
    """What is wrong with how a program ended; empty if it was stopped as it must be."""
    name, ended, printed = result["name"], result["ended"], result["printed"]
    if "ESCAPED" in printed:
        return f"{name}: {printed}"
    if result["took"] > hostile.LIMITS.wall_s + GRACE_S:
        return f"{name} took {result['took']} s"
    late = name in hostile.HEAVY and ended == "did not end in time"
    if name in hostile.ENDS:
        return "" if ended == hostile.ENDS[name] or late else f"{name} {ended} {result['detail']}"
    stopped = "BLOCKED" in printed or late or ended in hostile.MAY_END.get(name, ())
    return "" if stopped else f"{name} {ended} ({result['detail']}): {printed!r}"


@linux
@pytest.mark.parametrize(("kind", "uid"), combinations)
def test_no_program_gets_out(kind, uid):
    """Attack: everything that research and the kernel's manual offer to a program that wants out."""
    *results, last = run_hostile(kind, uid)
    assert [found for found in map(wrong, results) if found] == []
    assert {result["name"] for result in results} == set(hostile.programs(1, 2, 3, 4, "/s", "/d"))
    summary = last["summary"]
    assert summary["processes"] is False, f"a process was left {hostile.GONE_WITHIN_S:g} s later"
    assert summary["killed_s"] < hostile.GONE_WITHIN_S, "boxes did not end when they were killed"
    assert summary["files"] == ["key"]
    assert summary["secret"] is True
    assert summary["harmed"] is False
    assert summary["grown_kb"] < GROWTH_KB


@linux
@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
def test_nothing_outlives_a_killed_node(kind):
    """Attack: a program that runs on after the node that judges it was killed."""
    uid = NOBODY if os.getuid() == 0 else os.getuid()
    assert run_hostile(kind, uid, "kill") == [{"processes": False}]

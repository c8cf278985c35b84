"""Importing libp2p without what is never used of it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from p2p.lean import UNUSED, import_libp2p
import_libp2p()
import node.app
print([name for name in sys.modules if name.partition(".")[0] in UNUSED], "libp2p" in sys.modules)
import httpx, requests, zeroconf
print(requests.get.__module__, httpx.Client.__module__, zeroconf.Zeroconf.__module__)
print([each for each in sys.meta_path if type(each).__module__ == "p2p.lean"])
"""


def test_a_node_starts_without_them_and_they_can_be_had_afterwards():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    loaded, real, finders = done.stdout.splitlines()
    assert loaded == "[] True"
    assert real == "requests.api httpx zeroconf._core"
    assert finders == "[]"

"""The public shardcast 0.3.2 package, run as its three roles in processes of their own. Not a benchmark itself.

It is fetched once with pip into the user's cache, never into this program's environment. What it needs by hand: wget, a
probe file `data1.bin` at every server, and a client that asks for news by itself.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from protocol.errors import ComputeError

REQUIREMENT: Final = "shardcast==0.3.2"
DATA_PROBE: Final = "data1.bin"
START_TIMEOUT_S: Final = 60.0
INSTALL_TIMEOUT_S: Final = 120.0

_SCRIPT: Final = """
import os, resource, sys, threading, time
import shardcast
role, directory, port, upstream = sys.argv[1:5]

def say(word, value):
    print(word, value, flush=True)

def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)

def download(client):
    while not client.list_available_versions():
        time.sleep(0.2)
    if client.download_version("v1"):
        say("complete", time.monotonic())

if role == "origin":
    shardcast.initialize(directory, port=int(port))
elif role == "middle":
    shardcast.MiddleNode([upstream], directory, port=int(port), check_interval=1)
else:
    client = shardcast.ClientNode([upstream], directory)
    threading.Thread(target=download, args=(client,), daemon=True).start()
before = cpu()
say("ready", 0)
for line in sys.stdin:
    if line.strip() == "report":
        say("report", cpu() - before)
    else:
        say("broadcasting", time.monotonic())
        shardcast.broadcast(line.strip())
os._exit(0)
"""


def installed_package() -> Path | None:
    """Where the package is, fetched now if need be; None when it cannot be had."""
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "intellect-node-bench" / "shardcast-0.3.2"
    )
    if (cache / "shardcast").is_dir():
        return cache
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(cache), REQUIREMENT]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError):
        return None
    return cache


class PublicNode:
    """One role of the package; a context manager."""

    def __init__(self, role: str, directory: Path, package: Path, upstream: str = "") -> None:
        from bench.shardcast import free_port

        port = free_port()
        self.role = role
        self.url = f"http://127.0.0.1:{port}"
        self._said: queue.Queue[tuple[str, float]] = queue.Queue()
        self._log = directory.with_suffix(".log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, role, str(directory), str(port), upstream],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(package)},
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> PublicNode:
        self.wait("ready", timeout_s=START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def order(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def report(self) -> float:
        """CPU seconds of the process and of its children since it was ready."""
        self.order("report")
        return self.wait("report", timeout_s=START_TIMEOUT_S)

    def wait(self, word: str, *, timeout_s: float) -> float:
        """What it says with the next such word. Raises ComputeError."""
        give_up = time.monotonic() + timeout_s
        while (left_s := give_up - time.monotonic()) > 0:
            try:
                said, value = self._said.get(timeout=left_s)
            except queue.Empty:
                break
            if said == word:
                return value
            if said == "ended":
                break
        raise ComputeError(f"shardcast's {self.role} did not say {word!r}", hint=f"see {self._log.name}")

    def _listen(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                word, _, value = line.partition(" ")
                if word in ("ready", "report", "complete", "broadcasting"):
                    self._said.put((word, float(value)))
        self._said.put(("ended", 0.0))

"""What a node costs that has nothing to do: help, a relay's start, and a relay with a run that stands still.

Figures are CPU seconds, not times: how busy this machine is otherwise does not change them much. The relay is a real
process with the demo's run, whose trainer has published a policy and left; contributors' long polls are not part of it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from bench.harness import Result
from node.identity import load_or_create_identity
from node.run_create import create_run
from protocol.errors import NodeError
from protocol.identity import Identity

HELP_S: Final = 0.5
START_S: Final = 3.0
IDLE_SHARE: Final = 0.02
IDLE_MB: Final = 150
SETTLE_S: Final = 10.0
"""After the start, when peers are looked for often."""
WATCH_S: Final = 30.0
UP_WITHIN_S: Final = 120.0


def bench(*, quick: bool) -> Result:
    """Help, start, idling."""
    result = Result()
    result.figures["help_cpu_s"] = _help_cpu_s(tries=1 if quick else 3)
    with tempfile.TemporaryDirectory(prefix="bench-idle-") as work:
        result.figures |= _relay(Path(work), settle_s=1.0 if quick else SETTLE_S, watch_s=3.0 if quick else WATCH_S)
    result.at_most("help_cpu_s", HELP_S)
    result.at_most("relay_start_cpu_s", START_S)
    result.at_most("idle_cpu_share", IDLE_SHARE)
    result.at_most("idle_rss_mb", IDLE_MB)
    return result


def _help_cpu_s(*, tries: int) -> float:
    """The least of some: the first one compiles what it imports."""
    found = []
    for _ in range(tries + 1):
        before = _children_cpu_s()
        subprocess.run(_command("--help"), stdout=subprocess.DEVNULL, check=True, env=_environment())
        found.append(_children_cpu_s() - before)
    return min(found)


def _relay(work: Path, *, settle_s: float, watch_s: float) -> dict[str, float]:
    operator = load_or_create_identity(work / "trainer")
    validator = Identity.from_phrase("validator").peer_id
    made = create_run("demo", work / "trainer", identity=operator, validators=[validator], issued_at_ms=1)
    with _node(work / "relay", "relay", str(made.address), work) as relay:
        _wait_for(work / "relay" / "node.log", relay, holds="others join with")
        started = _cpu_s(relay)
        peer_id = load_or_create_identity(work / "relay").peer_id
        bootstrap = f"/ip4/127.0.0.1/tcp/{_port(work, 'relay')}/p2p/{peer_id}"
        with _node(work / "trainer", "trainer", str(made.address), work, "--bootstrap", bootstrap) as trainer:
            _wait_for_policy(work / "relay", trainer)
        time.sleep(settle_s)
        before = _cpu_s(relay)
        time.sleep(watch_s)
        return {
            "relay_start_cpu_s": started,
            "idle_cpu_share": (_cpu_s(relay) - before) / watch_s,
            "idle_rss_mb": relay.memory_info().rss / 1e6,
        }


@contextmanager
def _node(data_dir: Path, role: str, run: str, work: Path, *flags: str) -> Iterator[psutil.Process]:
    command = _command("--role", role, "--run", run, "--data-dir", str(data_dir), "--http-host", "127.0.0.1", *flags)
    command += ["--http-port", "0", "--threads", "1"]
    command += ["--listen", f"/ip4/127.0.0.1/tcp/{_port(work, role)}"]
    log = (work / f"{role}.log").open("wb")
    process = subprocess.Popen(command, stderr=log, env=_environment())
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _wait_for(path: Path, process: psutil.Process, *, holds: str) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while not path.exists() or holds not in path.read_text(errors="replace"):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE or time.monotonic() > deadline:
            raise NodeError(f"the relay does not serve: {_last_words(path.parent)}")
        time.sleep(0.05)


def _wait_for_policy(relay_dir: Path, trainer: psutil.Process) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while not any(relay_dir.glob("checkpoints/step-*")):
        if trainer.status() == psutil.STATUS_ZOMBIE or time.monotonic() > deadline:
            raise NodeError(f"the relay got no policy: {_last_words(relay_dir)}")
        time.sleep(0.2)


def _last_words(data_dir: Path) -> str:
    log = data_dir / "node.log"
    return log.read_text(errors="replace")[-500:] if log.exists() else "it left no log"


def _port(work: Path, role: str) -> int:
    """The same for each call with the same arguments."""
    path = work / f"{role}.port"
    if not path.exists():
        with socket.create_server(("127.0.0.1", 0)) as probe:
            path.write_text(str(probe.getsockname()[1]))
    return int(path.read_text())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _command(*flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "cli", *flags]


def _environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("INTELLECT_")}
    return {**clean, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "80"}

"""A checkpoint from origin to relay to client on loopback, against the public shardcast package and nginx with curl.

Three processes a side, files in memory where the machine lets us, sides in turn, medians. Ours runs over TLS with known
certificates, as nodes do, and once more in clear, to be held against what is in clear: shardcast 0.3.2, which looks for
news every second, and nginx with curl, which copy the file over two hops and check nothing; they run over TLS too. What
is missing (pip for shardcast, wget, nginx, curl) is skipped and said. CPU is that of all processes of a side from the
moment they are ready. Three processes fill two cores: there, time follows CPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.cast import CastNode
from bench.harness import Result
from bench.public_shardcast import DATA_PROBE, PublicNode, installed_package
from p2p.tls import load_or_create_certificate
from protocol.errors import ComputeError

BYTES: Final = 1_000_000_000
QUICK_BYTES: Final = 128_000_000
ROUNDS: Final = 3
SHARD_BYTES: Final = 16 << 20
WAIT_S: Final = 600.0
SETTLE_S: Final = 1.0
"""Until everybody waits for the next checkpoint, as in a run."""
ROLES: Final = ("origin", "relay", "client")
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass
class Measured:
    """One run of one side; seconds. `first_s`: until the client has its first shard, where that can be told."""

    wall_s: float
    cpu_s: float
    first_s: float = float("nan")
    memory: tuple[int, ...] = ()
    """Anonymous memory of origin, relay and client, in bytes, everything that they loaded at their start included."""


def bench(*, quick: bool) -> Result:
    """Distribute one file again and again."""
    sides = {"ours": ours, "ours_in_clear": ours_in_clear} | available_sides()
    found: dict[str, list[Measured]] = {name: [] for name in sides}
    with work_directory(quick_bytes(quick)) as root:
        policy = random_policy(root / "policy", quick_bytes(quick))
        for turn in range(1 if quick else ROUNDS):
            for name, measure in sides.items():
                with fresh(root / f"{name}-{turn}") as directory:
                    found[name].append(measure(policy, directory))
    return result_of(found)


def quick_bytes(quick: bool) -> int:
    return QUICK_BYTES if quick else BYTES


def result_of(found: Mapping[str, Sequence[Measured]]) -> Result:
    figures: dict[str, float] = {}
    for name, runs in found.items():
        figures[f"{name}_s"] = statistics.median(run.wall_s for run in runs)
        figures[f"{name}_cpu_s"] = statistics.median(run.cpu_s for run in runs)
        if name in ("ours", "ours_in_clear", "shardcast"):
            figures[f"{name}_first_shard_s"] = statistics.median(run.first_s for run in runs)
    for number, role in enumerate(ROLES):
        figures[f"{role}_memory_mb"] = max(run.memory[number] for run in found["ours"]) / 1e6
    result = Result(figures)
    ratios = {
        "time_ratio": ("ours_in_clear_s", "shardcast_s", 1 / 3),
        "time_ratio_ours_tls": ("ours_s", "shardcast_s", None),
        "first_shard_ratio": ("ours_in_clear_first_shard_s", "shardcast_first_shard_s", 1 / 10),
        "first_verified_ratio": ("ours_first_shard_s", "shardcast_s", 1 / 10),
        "cpu_ratio": ("ours_in_clear_cpu_s", "nginx_cpu_s", 2.0),
        "cpu_ratio_tls": ("ours_cpu_s", "nginx_tls_cpu_s", 2.0),
    }
    for ratio, (mine, other, most) in ratios.items():
        if other in figures:
            figures[ratio] = figures[mine] / figures[other]
            if most is not None:
                result.at_most(ratio, most)
    for role in ROLES:
        result.at_most(f"{role}_memory_mb", 100)
    return result


def available_sides() -> dict[str, Any]:
    """The other sides that this machine can run; says in a line what is left out."""
    sides: dict[str, Any] = {}
    package = installed_package()
    if package is not None and shutil.which("wget"):
        sides["shardcast"] = lambda policy, directory: shardcast(policy, directory, package)
    else:
        sys.stderr.write("skipped: shardcast (needs pip to fetch shardcast==0.3.2, and wget)\n")
    if shutil.which("nginx") and shutil.which("curl"):
        sides["nginx"] = lambda policy, directory: nginx_and_curl(policy, directory, secure=False)
        sides["nginx_tls"] = lambda policy, directory: nginx_and_curl(policy, directory, secure=True)
    else:
        sys.stderr.write("skipped: nginx and curl (apt-get install nginx-light curl)\n")
    return sides


# ---------------------------------------------------------------------------------------------------------- our side


def ours_in_clear(policy: Path, directory: Path) -> Measured:
    return ours(policy, directory, secure=False)


def ours(policy: Path, directory: Path, *, secure: bool = True) -> Measured:
    """From the call that publishes until the client has installed the checkpoint."""
    setup: dict[str, Any] = {"shard_bytes": SHARD_BYTES, "secure": secure}
    with ExitStack() as nodes:
        client = nodes.enter_context(CastNode("client", directory / "client", **setup))
        relay = nodes.enter_context(CastNode("relay", directory / "relay", **setup)).wait_ready()
        origin = CastNode("origin", directory / "origin", relays=[relay.peer], **setup)
        nodes.enter_context(origin)
        for node in (origin, client):
            node.wait_ready()
        relay.upstream(origin, tokens=origin.ready.get("tokens"))
        client.upstream(relay)
        time.sleep(SETTLE_S)
        origin.order(do="publish", path=str(policy), step=1)
        began = origin.wait("publishing", timeout_s=WAIT_S)["at"]
        first = client.wait("first-shard", timeout_s=WAIT_S)["at"]
        ended = client.wait("complete", timeout_s=WAIT_S)["at"]
        origin.wait("published", timeout_s=WAIT_S)
        reports = [node.report() for node in (origin, relay, client)]
    memory = tuple(said["memory"] for said in reports)
    return Measured(ended - began, sum(said["cpu_s"] for said in reports), first - began, memory)


# --------------------------------------------------------------------------------------------------------- shardcast


def shardcast(policy: Path, directory: Path, package: Path) -> Measured:
    """From the call that broadcasts until the client has the reassembled file."""
    for role in ("origin", "middle", "client"):
        (directory / role).mkdir()
        (directory / role / DATA_PROBE).write_bytes(bytes(1024))
    with ExitStack() as nodes:
        origin = nodes.enter_context(PublicNode("origin", directory / "origin", package))
        middle = nodes.enter_context(PublicNode("middle", directory / "middle", package, origin.url))
        client = nodes.enter_context(PublicNode("client", directory / "client", package, middle.url))
        time.sleep(SETTLE_S)
        origin.order(str(policy / "weights.bin"))
        began = origin.wait("broadcasting", timeout_s=WAIT_S)
        first = wait_for_shard(directory / "client")
        ended = client.wait("complete", timeout_s=WAIT_S)
        cpu_s = sum(node.report() for node in (origin, middle, client))
    return Measured(ended - began, cpu_s, first - began)


def wait_for_shard(directory: Path) -> float:
    """When the first shard lies, whole but unverified, in a shardcast client's directory."""
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        if any(directory.glob("temp_v1/shard_*.bin")):
            return time.monotonic()
        time.sleep(0.005)
    raise ComputeError("the shardcast client got no shard")


# ---------------------------------------------------------------------------------------------------- nginx and curl


def nginx_and_curl(policy: Path, directory: Path, *, secure: bool) -> Measured:
    """Copy the file to a relay's directory, and from there to a client's."""
    relay, client = directory / "relay", directory / "client"
    for each in (relay, client):
        each.mkdir()
    with ExitStack() as servers:
        first = servers.enter_context(Nginx(policy, directory / "nginx-origin", secure=secure))
        second = servers.enter_context(Nginx(relay, directory / "nginx-relay", secure=secure))
        began, children = time.monotonic(), children_cpu_s()
        for server, target in ((first, relay), (second, client)):
            command = ["curl", "-sfk", "-o", str(target / "weights.bin"), f"{server.url}/weights.bin"]
            subprocess.run(command, check=True, timeout=WAIT_S)
        wall_s = time.monotonic() - began
        cpu_s = children_cpu_s() - children + first.cpu_s() + second.cpu_s()
    return Measured(wall_s, cpu_s)


class Nginx:
    """One nginx with one worker that serves a directory by sendfile."""

    def __init__(self, root: Path, directory: Path, *, secure: bool) -> None:
        directory.mkdir()
        self._port = free_port()
        self.url = f"{'https' if secure else 'http'}://127.0.0.1:{self._port}"
        self._config = directory / "nginx.conf"
        tls = ""
        if secure:
            pem = load_or_create_certificate(directory).path
            tls = f"ssl_certificate {pem}; ssl_certificate_key {pem}; ssl_protocols TLSv1.3;"
        temporary = "".join(
            f"{kind}_temp_path {directory / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        self._config.write_text(
            f"daemon off; worker_processes 1; pid {directory / 'pid'}; error_log {directory / 'error.log'};"
            "user root; events { worker_connections 64; } http { access_log off; sendfile on; "
            f"{temporary} server {{ listen 127.0.0.1:{self._port}{' ssl' if secure else ''}; root {root}; {tls} }} }}"
        )
        self._before = 0.0

    def __enter__(self) -> Nginx:
        self._process = subprocess.Popen(["nginx", "-c", str(self._config)], stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + 10
        while subprocess.run(["curl", "-sk", "-o", os.devnull, self.url], check=False).returncode:
            if time.monotonic() > give_up:
                raise ComputeError("nginx did not start")
            time.sleep(0.05)
        self._before = self._used()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(10)

    def cpu_s(self) -> float:
        return self._used() - self._before

    def _used(self) -> float:
        """Of master and worker."""
        pid = self._process.pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sum(process_cpu_s(each) for each in [pid, *map(int, workers)])


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------------------------- files


@contextmanager
def work_directory(size: int) -> Iterator[Path]:
    """In memory if ten copies fit there, so that no disk is measured."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 10 * size
    with tempfile.TemporaryDirectory(prefix="bench-", dir=memory if roomy else None) as root:
        yield Path(root)


@contextmanager
def fresh(directory: Path) -> Iterator[Path]:
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def random_policy(directory: Path, size: int) -> Path:
    directory.mkdir()
    with (directory / "weights.bin").open("wb") as file:
        for start in range(0, size, 1 << 20):
            file.write(os.urandom(min(1 << 20, size - start)))
    return directory

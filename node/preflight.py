"""What must be right before a node starts: looked at by start-up, which refuses or warns, and by `doctor`, which tells.

Each check takes the settings and gives one finding: what is so and, where that is not well, the next command. None of
them needs a network or imports torch; what does is in node.doctor.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from node.config import NodeConfig
from node.homes import KEY_FILE, holder
from node.identity import load_identity
from node.words import size
from protocol.errors import NodeError

_log = logging.getLogger(__name__)

PYTHON: Final = (3, 11)
COMPUTES: Final = ("trainer", "inference", "validator")
SERVES: Final = ("relay",)
LEAST_DISK_BYTES: Final = 64 << 20
"""Without so much not even a log and a database can be kept."""
LITTLE_DISK_BYTES: Final = 2 << 30
LITTLE_MEMORY_BYTES: Final = {"relay": 256 << 20, "watch": 256 << 20}
"""By role; the others compute, and need COMPUTE_MEMORY_BYTES."""
COMPUTE_MEMORY_BYTES: Final = 1 << 30
OLDEST_CLOCK_S: Final = 1_735_689_600
"""2025-01-01: a computer whose clock says less has lost it."""

State = Literal["ok", "warning", "failed", "skipped"]


class Finding(msgspec.Struct, frozen=True):
    """One check's result."""

    name: str
    state: State
    what: str
    fix: str = ""


class PreflightFailed(NodeError):
    """Raised when a node cannot start here; the hint mends it."""


Check = Callable[[NodeConfig], Finding]


def require_ready(config: NodeConfig) -> None:
    """Run every check as start-up does: warn of what is doubtful. Raises PreflightFailed for what cannot work."""
    for finding in examine_locally(config, starting=True):
        if finding.state == "failed":
            raise PreflightFailed(f"{finding.name}: {finding.what}", hint=finding.fix)
        if finding.state == "warning":
            _log.warning("%s: %s; next: %s", finding.name, finding.what, finding.fix)


def examine_locally(config: NodeConfig, *, starting: bool = False) -> Iterator[Finding]:
    """Each check's finding. `starting` leaves out what start-up itself finds with a better error: key and ports."""
    for check in CHECKS:
        if not (starting and check in LEFT_TO_START):
            yield check(config)


def check_python(config: NodeConfig) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON or sys.maxsize < 2**32:
        return Finding("python", "failed", f"{version} is too old, or not of 64 bits", "install Python 3.11 or later")
    return Finding("python", "ok", version)


def check_torch(config: NodeConfig) -> Finding:
    """Whether torch is installed; whether it works is seen when it computes."""
    if config.role not in COMPUTES:
        return Finding("torch", "skipped", "this role does not compute")
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "failed", "is not installed", "pip install torch==2.13.0")
    return Finding("torch", "ok", importlib.metadata.version("torch"))


def check_memory(config: NodeConfig) -> Finding:
    available = _available_memory()
    least = COMPUTE_MEMORY_BYTES if config.role in COMPUTES else LITTLE_MEMORY_BYTES[config.role]
    if available is None:
        return Finding("memory", "skipped", "this system does not tell")
    what = f"{size(available)} free"
    if available < least:
        fix = f"close other programs: a {config.role} needs {size(least)} and the policy's size"
        return Finding("memory", "warning", what, fix)
    return Finding("memory", "ok", what)


def check_disk(config: NodeConfig) -> Finding:
    directory = _existing(config.data_dir)
    free = shutil.disk_usage(directory).free
    what = f"{size(free)} free for {config.data_dir}"
    if free < LEAST_DISK_BYTES:
        return Finding("disk", "failed", what, f"free some (df -h {directory}), or give another --data-dir")
    if config.role in SERVES and config.disk_quota_bytes > free:
        fix = f"set disk_quota_bytes below {free}, or free some"
        return Finding("disk", "warning", f"{what}, less than disk_quota_bytes allows to store", fix)
    if free < LITTLE_DISK_BYTES:
        return Finding("disk", "warning", what, f"free some (df -h {directory}): policies of the run are kept here")
    return Finding("disk", "ok", what)


def check_data_dir(config: NodeConfig) -> Finding:
    directory = _existing(config.data_dir)
    if not os.access(directory, os.W_OK | os.X_OK):
        fix = f"look at its owner (ls -ld {directory}), or give another --data-dir"
        return Finding("data directory", "failed", f"{directory} cannot be written by this user", fix)
    process = holder(config.data_dir)
    used = f", in use by process {process}" if process and process != os.getpid() else ""
    return Finding("data directory", "ok", f"{config.data_dir}{used}")


def check_clock(config: NodeConfig) -> Finding:
    """By itself; beside relays' clocks it is looked at as soon as one answers."""
    now = time.time()
    if now < OLDEST_CLOCK_S:
        said = time.strftime("%Y-%m-%d", time.gmtime(now))
        return Finding("clock", "failed", f"says {said}", "timedatectl set-ntp true")
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)))


def check_key(config: NodeConfig) -> Finding:
    path = config.data_dir / KEY_FILE
    if not path.exists() and not path.is_symlink():
        return Finding("key", "ok", "none yet; the first start makes it")
    try:
        identity = load_identity(path, passphrase=config.passphrase.text)
    except NodeError as error:
        return Finding("key", "failed", error.message, error.hint)
    return Finding("key", "ok", f"{identity.peer_id}, for its owner alone")


def check_ports(config: NodeConfig) -> Finding:
    if config.role not in SERVES:
        return Finding("ports", "skipped", "this role needs no open port")
    if holder(config.data_dir):
        return Finding("ports", "ok", "in use by this node, which runs; who can reach it: intellect-node peers")
    for host, port in _addresses(config):
        try:
            with socket.create_server((host, port), family=_family(host)):
                continue
        except OSError as error:
            fix = f"see who has it: ss -ltnp 'sport = :{port}', or give another port"
            return Finding("ports", "failed", f"{host} port {port}: {error.strerror}", fix)
    ports = ", ".join(str(port) for _, port in _addresses(config))
    return Finding("ports", "ok", f"TCP {ports} are free; open them to all in the firewall and the router")


CHECKS: Final[tuple[Check, ...]] = (
    *(check_python, check_torch, check_memory, check_disk, check_data_dir, check_clock, check_key, check_ports),
)
LEFT_TO_START: Final = (check_key, check_ports)


def _addresses(config: NodeConfig) -> list[tuple[str, int]]:
    found = [(config.http_host, config.http_port)]
    for multiaddr in config.listen:
        _, _, host, _, port = multiaddr.split("/")
        found.append((host, int(port)))
    return [(host, port) for host, port in found if port]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def _available_memory() -> int | None:
    """Free memory of this machine, or what the container that this process is in still allows."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no container, or none with a limit
        return available
    return min(available, limit - used)

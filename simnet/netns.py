"""Network namespaces of one simulation: made, entered and taken away. Needs root, iproute2, nftables and util-linux.

Names begin with the pid and start time of the simulation, so that what one left behind that was killed is known and
taken away by the next.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from protocol.errors import NodeError
from simnet.interrupts import shielded
from simnet.links import Step
from simnet.processes import ProcessKey, key_of, runs
from simnet.tools import run_tool

DIRECTORY: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
_NAME: Final = re.compile(r"simnet-(\d+)-(\d+)-.+")


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "this is not root"
    missing = [name for name in ("ip", "tc", "nft", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt install iproute2 nftables util-linux)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    with shielded():
        return _why_not_probed(f"{label()}probe")


def _why_not_probed(probe: str) -> str:
    try:
        run_tool(["ip", "netns", "add", probe])
    except NodeError as error:
        return f"this system makes no network namespaces: {_first_line(error)}"
    try:
        run_tool(["nsenter", f"--net={DIRECTORY / probe}", "nft", "add table ip t"])
    except NodeError as error:
        return f"nftables does not work here: {_first_line(error)}"
    finally:
        delete([probe])
    return ""


def _first_line(error: NodeError) -> str:
    """What a tool said first; nft shows its input again below it."""
    return error.message.splitlines()[0]


def label() -> str:
    """What the names of this process's namespaces and mounts begin with."""
    key = key_of(os.getpid())
    return f"simnet-{os.getpid()}-{key.start_ticks if key else 0}-"


def is_left_over(name: str) -> bool:
    """Whether something so named belongs to a simulation that has ended."""
    match = _NAME.fullmatch(name)
    return match is not None and not runs(ProcessKey(int(match[1]), int(match[2])))


def sweep() -> None:
    """Take away what simulations left behind that had no chance to."""
    with suppress(FileNotFoundError):
        delete(name for name in os.listdir(DIRECTORY) if is_left_over(name))


def create(names: Sequence[str]) -> None:
    """Make namespaces by their whole names. Raises NodeError."""
    run_tool(["ip", "-batch", "-"], "".join(f"netns add {name}\n" for name in names))


def delete(names: Iterator[str] | Sequence[str]) -> None:
    """Take namespaces away; one that is gone is no error."""
    lines = "".join(f"netns del {name}\n" for name in names)
    if lines:
        with suppress(NodeError):
            run_tool(["ip", "-force", "-batch", "-"], lines)


def perform(steps: Sequence[Step], prefix: str) -> None:
    """Do steps in order; their namespaces are short names behind `prefix`. Raises NodeError with the tool's words."""
    for step in steps:
        lines = re.sub(r"\{([nr]\d+)\}", rf"{prefix}\1", "\n".join(step.lines)) + "\n"
        inside = ["nsenter", f"--net={DIRECTORY / (prefix + step.namespace)}"]
        run_tool([*inside, step.tool, *(("-f", "-") if step.tool == "nft" else ("-batch", "-"))], lines)


def forward(prefix: str, namespace: str) -> None:
    """Let a namespace pass on packets between its devices. Raises NodeError."""
    try:
        with entered(str(DIRECTORY / (prefix + namespace))):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
    except OSError as error:
        raise NodeError(f"a namespace cannot be made to forward: {error.strerror}") from error


@contextmanager
def entered(path: str) -> Iterator[None]:
    """This thread's new sockets and devices belong to another network namespace, given by its file. Raises OSError."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set(path)
        try:
            yield
        finally:
            _set_descriptor(before)
    finally:
        os.close(before)


def _set(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _set_descriptor(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

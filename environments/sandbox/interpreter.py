"""Which Python runs inside the boxes, and the files that it needs.

What a program prints can depend on the language's release, so whoever uses a sandbox names one, and every machine runs
that one. A virtual environment's own interpreter stands for the one below it: boxes have the standard library alone.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.errors import SandboxError

_PACKAGES: Final = ("site-packages", "dist-packages")
_SYSTEM_LIBRARIES: Final = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_QUERY_TIMEOUT_S: Final = 30
_QUERY: Final = """
import json, os, sys, sysconfig
variable = sysconfig.get_config_var
print(json.dumps({
    "executable": os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable),
    "version": "%d.%d.%d" % sys.version_info[:3],
    "implementation": sys.implementation.name,
    "paths": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
    "libraries": variable("LIBDIR") if variable("Py_ENABLE_SHARED") else "",
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python, and where its files lie."""

    executable: Path
    version: str
    files: tuple[Path, ...]
    """Files and directories that it reads, system libraries included; none lies inside another."""
    library_path: str
    """For the dynamic loader; empty where it finds everything without."""

    @functools.cached_property
    def packages(self) -> tuple[Path, ...]:
        """Directories of installed packages among those files. They differ from machine to machine: none is shown."""
        roots = [path for path in self.files if path.is_dir() and not path.is_symlink()]
        patterns = [f"{above}{name}" for above in ("", "*/", "*/*/") for name in _PACKAGES]
        return tuple(sorted({found for root in roots for each in patterns for found in root.glob(each)}))

    @functools.cached_property
    def without_packages(self) -> tuple[list[Path], list[Path]]:
        """Files and directories that may be read with all below them, and directories that may be listed and no more.

        The latter hold packages beside the standard library, which the interpreter looks for there.
        """
        readable: list[Path] = []
        listed: list[Path] = []
        waiting = [path for path in self.files if not path.is_symlink()]
        while waiting:
            path = waiting.pop()
            if path in self.packages:
                continue
            if not any(each.is_relative_to(path) for each in self.packages):
                readable.append(path)
                continue
            waiting += [each for each in path.iterdir() if not each.is_symlink()]
            if (path / "os.py").exists():
                listed.append(path)
        return readable, listed

    @property
    def reachable_by_all(self) -> bool:
        """Whether every user of this machine may read it."""
        return all(_open_to_all(path) for path in self.files)


def interpreters(version: str | None) -> Iterator[Interpreter]:
    """Every Python of a release ("3.11") that is found here, the node's own release where none is named.

    Raises SandboxError where there is none.
    """
    release = version or f"{sys.version_info.major}.{sys.version_info.minor}"
    any_found = False
    for candidate in _candidates(release):
        found = _describe(candidate)
        if found is not None and found.version.startswith(f"{release}."):
            any_found = True
            yield found
    if not any_found:
        raise SandboxError(
            f"no Python {release} that could run inside the sandbox is installed here",
            hint=f"install it, for example: uv python install {release}, or apt-get install python{release}",
        )


def _candidates(release: str) -> list[str]:
    on_path = shutil.which(f"python{release}")
    names = [sys.executable, *([on_path] if on_path else [])]
    names += [f"{place}/python{release}" for place in ("/usr/bin", "/usr/local/bin")]
    uv = os.path.expanduser("~/.local/share/uv/python")
    names += sorted(glob.glob(f"{uv}/cpython-{release}.*/bin/python{release}"))
    return list(dict.fromkeys(name for name in names if os.path.exists(name)))


@functools.lru_cache(maxsize=32)
def _describe(candidate: str) -> Interpreter | None:
    try:
        done = subprocess.run(
            [candidate, "-I", "-S", "-c", _QUERY], capture_output=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
        facts = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if facts["implementation"] != "cpython" or not facts["executable"]:
        return None
    libraries = facts["libraries"] or ""
    own = [facts["executable"], *facts["paths"], *([libraries] if libraries else [])]
    files = _outermost([Path(path) for path in [*_SYSTEM_LIBRARIES, *own] if os.path.exists(path)])
    outside = bool(libraries) and not libraries.startswith(_SYSTEM_LIBRARIES)
    return Interpreter(Path(facts["executable"]), facts["version"], files, libraries if outside else "")


def _outermost(paths: list[Path]) -> tuple[Path, ...]:
    """Without those that lie inside another; what is a link stays beside its target."""
    unique = sorted(dict.fromkeys(paths), key=lambda path: len(path.parts))
    kept: list[Path] = []
    for path in unique:
        if not any(path.is_relative_to(above) for above in kept if not above.is_symlink()):
            kept.append(path)
    return tuple(kept)


def _open_to_all(path: Path) -> bool:
    needed = 0o5 if path.is_dir() else 0o4
    return path.stat().st_mode & needed == needed and all(above.stat().st_mode & 0o1 for above in path.parents)

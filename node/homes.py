"""Where nodes keep their state when nobody says: one directory for each role and run, under the XDG data directory.

    $XDG_DATA_HOME/intellect-node/<role>-<run's name>-<last 8 of its operator>/
    $XDG_DATA_HOME/intellect-node/new/      a key that was made before its node: the next new directory takes it

Each has a key of its own, since a key is used by one node at a time. `node.json` says what a directory is for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from node.datadir import LOCK_FILE, disk_error, make_directory
from protocol.atomic import write_atomically
from protocol.errors import ConfigError, DataDirError
from protocol.run import RunAddress

DATA_DIR_VARIABLE: Final = "INTELLECT_NODE_DATA_DIR"
NEW: Final = "new"
KEY_FILE: Final = "identity.key"
ABOUT_FILE: Final = "node.json"
_PROGRAM: Final = "intellect-node"
_MAX_ABOUT_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Home:
    """A node's directory and what is known of it; role and run are empty where it never ran."""

    path: Path
    role: str = ""
    run: str = ""

    @property
    def running(self) -> int:
        """The process that uses it now; 0: none."""
        return holder(self.path)


def homes_root(environ: Mapping[str, str]) -> Path:
    """Where the default directories lie. Raises ConfigError where this user has no home."""
    given = environ.get("XDG_DATA_HOME", "")
    if given and Path(given).is_absolute():  # a relative one is to be ignored (XDG base directory specification)
        return Path(given) / _PROGRAM
    return expand(Path("~/.local/share")) / _PROGRAM


def expand(path: Path) -> Path:
    """An absolute path, `~` replaced. Raises ConfigError where this user has no home."""
    try:
        return path.expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            "this user has no home directory: HOME is not set, and the system knows none",
            hint="give --data-dir DIR, or set HOME or XDG_DATA_HOME",
        ) from error


def default_home(role: str, run: RunAddress, environ: Mapping[str, str]) -> Path:
    """The directory of one role in one run."""
    return homes_root(environ) / f"{role}-{run.name}-{str(run.operator)[-8:]}"


def known_homes(environ: Mapping[str, str]) -> list[Home]:
    """Every directory under the root in which a node ran or a run was made, by name."""
    try:
        found = sorted(path for path in homes_root(environ).iterdir() if path.name != NEW and path.is_dir())
    except OSError:
        return []
    return [about(path) for path in found if (path / KEY_FILE).exists()]


def about(path: Path) -> Home:
    """What a directory says of itself."""
    try:
        with (path / ABOUT_FILE).open("rb") as file:
            said = msgspec.json.decode(file.read(_MAX_ABOUT_BYTES), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        said = {}
    return Home(path, str(said.get("role", ""))[:32], str(said.get("run", ""))[:128])


def say_about(path: Path, *, role: str, run: str) -> None:
    """Write down what a directory is for. Raises DataDirError."""
    if about(path) != Home(path, role, run):
        write_atomically(path / ABOUT_FILE, msgspec.json.encode({"role": role, "run": run}) + b"\n")


def chosen_home(given: Path | None, environ: Mapping[str, str]) -> Path:
    """The directory that a command is about: the one given, the only one there is, or the only one whose node runs.

    Raises ConfigError where several could be meant, DataDirError where there is none.
    """
    if found := named_home(given, environ):
        return found
    homes = known_homes(environ)
    running = [home for home in homes if home.running]
    for candidates in (running, homes):
        if len(candidates) == 1:
            return candidates[0].path
    if not homes:
        raise DataDirError(
            f"no node has been started on this computer: there is none under {homes_root(environ)}",
            hint="start one: intellect-node --role inference --run <address>@<relay>; or give --data-dir",
        )
    names = ", ".join(home.path.name for home in running or homes)
    raise ConfigError(
        f"several nodes' directories lie under {homes_root(environ)}: {names}", hint="say which one with --data-dir"
    )


def named_home(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The directory that a flag or a variable names."""
    named = given or (Path(variable) if (variable := environ.get(DATA_DIR_VARIABLE)) else None)
    return expand(named) if named else None


def home_or_new(given: Path | None, environ: Mapping[str, str]) -> Path:
    """As `chosen_home`; where there is none yet, the one that the next new node takes over."""
    if given is None and not environ.get(DATA_DIR_VARIABLE) and not known_homes(environ):
        return homes_root(environ) / NEW
    return chosen_home(given, environ)


def settle(path: Path, environ: Mapping[str, str]) -> None:
    """Before a default directory is used for the first time: take over the one that waits. Raises DataDirError."""
    waiting = homes_root(environ) / NEW
    if path.parent != waiting.parent or path.exists() or not (waiting / KEY_FILE).exists():
        return
    try:
        waiting.rename(path)
    except OSError as error:
        raise disk_error(error, path) from error


def holder(path: Path) -> int:
    """The process whose node uses a directory now, by the kernel's lock; 0: none; -1: one that has no number yet."""
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() and int(text) > 0 else -1
    except OSError:
        return 0
    else:
        return 0
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def ready_new(environ: Mapping[str, str]) -> Path:
    """The directory for a key that has no node yet, made when missing. Raises DataDirError."""
    path = homes_root(environ) / NEW
    make_directory(path)
    return path

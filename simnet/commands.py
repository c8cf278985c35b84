"""Command lines: those that start the nodes of a simulation, and the short ones that are run before.

`Commands` is the seam to the program under test: `CliCommands` is the real command line, tests give their own.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocol.errors import NodeError
from simnet.interrupts import shielded
from simnet.leftovers import mark
from simnet.network import LOOPBACK
from simnet.processes import NODE_VARIABLE, send
from simnet.scenario import NodePlan

SETUP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Launch:
    """What a node's command line needs beside its plan."""

    data_dir: Path
    run: str
    bootstrap: tuple[str, ...]
    p2p_port: int
    http_port: int
    seed: int
    host: str = LOOPBACK
    announce: str = ""
    """A multiaddr for others, where they reach the node by another one than it listens on."""
    public_url: str = ""
    settings: Path | None = None
    """A file for `--config`."""

    @property
    def listen(self) -> str:
        return f"/ip4/{self.host}/tcp/{self.p2p_port}"


class Commands(Protocol):
    """Builds the command lines of the program under test."""

    def create_identity(self, data_dir: Path) -> list[str]:
        """Print the node's peer id as the last line of stdout."""

    def create_run(self, trainer_dir: Path, recipe: Path, *, name: str, validators: Sequence[str]) -> list[str]:
        """Print the run's address as the last line of stdout."""

    def start(self, plan: NodePlan, launch: Launch) -> list[str]:
        """Run the node until it ends or is told to."""


class CliCommands:
    """The real command line, run by this interpreter."""

    _PYTHON = (sys.executable, "-P", "-m")  # -P: nothing that lies in the working directory is taken for a module

    def create_identity(self, data_dir: Path) -> list[str]:
        return [*self._PYTHON, "cli", "id", "--data-dir", str(data_dir)]

    def create_run(self, trainer_dir: Path, recipe: Path, *, name: str, validators: Sequence[str]) -> list[str]:
        flags = ["--recipe", str(recipe), "--name", name, "--data-dir", str(trainer_dir)]
        for validator in validators:
            flags += ["--validator", validator]
        return [*self._PYTHON, "cli", "run", "create", *flags]

    def start(self, plan: NodePlan, launch: Launch) -> list[str]:
        module = self._module(plan, launch)
        return [*self._PYTHON, *module, *self._place_flags(plan, launch), *self._work_flags(plan, launch)]

    def _module(self, plan: NodePlan, launch: Launch) -> list[str]:
        if plan.cheat:
            return ["simnet.zoo", plan.cheat, "--cheat-seed", str(launch.seed)]
        if plan.attack:
            return ["simnet.hostile", plan.attack, "--seed", str(launch.seed)]
        return ["cli", "--role", plan.role]

    def _place_flags(self, plan: NodePlan, launch: Launch) -> list[str]:
        flags = ["--run", launch.run, "--data-dir", str(launch.data_dir)]
        for address in launch.bootstrap:
            flags += ["--bootstrap", address]
        if plan.role in ("relay", "hostile"):
            flags += ["--listen", launch.listen]
        if plan.role == "relay" and launch.announce:
            flags += ["--announce", launch.announce]
        if plan.role in ("relay", "trainer"):
            flags += ["--http-host", launch.host, "--http-port", str(launch.http_port)]
            flags += ["--public-url", launch.public_url] if launch.public_url else []
        return flags

    def _work_flags(self, plan: NodePlan, launch: Launch) -> list[str]:
        if plan.role == "hostile":
            return []
        flags = ["--join-timeout-s", "0"]
        if plan.role not in ("relay", "watch"):
            flags += ["--threads", str(plan.threads)]
        if plan.engine != "torch":
            flags += ["--engine", plan.engine]
        return [*flags, "--config", str(launch.settings)] if launch.settings is not None else flags


class ShortCommands:
    """Commands that print something and end, by any thread; those that still run can be ended."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []
        self._over = False

    def last_line(self, command: list[str], env: dict[str, str]) -> str:
        """The last line that a short command prints. Raises NodeError when it fails or prints nothing."""
        shown = shlex.join(command)[:500]
        with shielded():
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.append(process)
        if self._over:  # another thread ended all that there were at that moment
            self.end()
        try:
            printed, said = process.communicate(timeout=SETUP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise NodeError(f"a command took longer than {SETUP_TIMEOUT_S:.0f} s: {shown}") from error
        lines = printed.strip().splitlines()
        if process.returncode or not lines:
            raise NodeError(f"a command ended with code {process.returncode}: {said.strip()[-1500:]}", hint=shown)
        return lines[-1].strip()

    def end(self) -> None:
        """Kill the short commands that still run, and those that are started from now on."""
        self._over = True
        for process in list(self._running):
            if process.poll() is None:
                send(process.pid, signal.SIGKILL, group=True)


def environment_of(plan: NodePlan, *, hook: Path | None = None) -> dict[str, str]:
    """The caller's without settings of nodes; this program is found wherever it lies; threads are bounded.

    `hook`: where something is wrong with the node's clock or disk, the directory that sees to it (simnet.meddle).
    """
    root = str(Path(__file__).resolve().parent.parent)
    paths = [*([str(hook)] if hook else []), root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INTELLECT_")}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(plan.threads),
        NODE_VARIABLE: plan.name,
        **mark(plan.name),
    }

"""The other side of `python -m bench trainer`: an interpreter that has TRL, and a process of it that does jobs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from protocol.errors import ConfigError

ROOT: Final = Path(__file__).parent.parent
ENVIRONMENT: Final = ROOT / ".venv-trl"
PACKAGES: Final = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0")
"""As here; everything else is pinned by constraints-trl.txt."""
INSTALLED: Final = "installed.txt"
"""In the environment, written last: without it, the installation was interrupted."""


def find_python(given: Path | None) -> Path:
    """The interpreter that was given, or the one in .venv-trl, which is made if need be. Raises ConfigError."""
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"--trl-python: there is no interpreter {given}")
        return given
    python, marker = ENVIRONMENT / "bin" / "python", ENVIRONMENT / INSTALLED
    if not python.is_file() or not marker.is_file() or marker.read_text(encoding="utf-8") != _contents():
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        _install(python)
        marker.write_text(_contents(), encoding="utf-8")
    return python


def _contents() -> str:
    return "".join(f"{package}\n" for package in PACKAGES)


def _install(python: Path) -> None:
    sys.stderr.write(f"installing {', '.join(PACKAGES)} into {ENVIRONMENT}, once\n")
    constraints = str(ROOT / "constraints-trl.txt")
    commands = (
        [sys.executable, "-m", "venv", str(ENVIRONMENT)],
        [str(python), "-m", "pip", "install", "--quiet", "-c", constraints, *PACKAGES],
    )
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            raise ConfigError(
                f"TRL cannot be installed: `{' '.join(command)}` failed",
                hint="install it by hand (constraints-trl.txt) and give --trl-python PATH",
            )


class TrlPeer:
    """A process of bench/trl_worker.py on one thread; messages are lines of JSON. Raises ConfigError if it dies."""

    def __init__(self, python: Path, directory: Path) -> None:
        """`directory` takes what TRL prints."""
        self._log = directory / "trl.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-W", "ignore", str(Path(__file__).with_name("trl_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,  # so that it imports nothing of this project by accident
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
            )
        self._pipes = self._process.stdin, self._process.stdout
        try:
            self.versions: dict[str, str] = self.receive()
        except ConfigError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        for pipe in self._pipes:
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it was not there to read
                    pipe.close()
        self._process.kill()
        self._process.wait()

    def send(self, message: dict[str, Any]) -> None:
        """Hand over a job, or what was asked for."""
        writer = self._pipes[0]
        if writer is None:
            raise self._died()
        try:
            writer.write(json.dumps(message).encode() + b"\n")
            writer.flush()
        except BrokenPipeError as error:
            raise self._died() from error

    def receive(self) -> dict[str, Any]:
        """Wait for its next answer."""
        line = self._pipes[1].readline() if self._pipes[1] is not None else b""
        if not line:
            raise self._died()
        message: dict[str, Any] = json.loads(line)
        return message

    def _died(self) -> ConfigError:
        tail = self._log.read_text(encoding="utf-8", errors="replace").strip()[-600:]
        return ConfigError(
            f"TRL's process ended: {tail}",
            hint="it needs an environment as in constraints-trl.txt: remove .venv-trl to have it made anew",
        )

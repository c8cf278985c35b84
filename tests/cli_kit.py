"""The command line in this process: as fast as a call, with what it prints and the code it ends with."""

import io
import logging
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


class Terminalless(io.TextIOWrapper):
    """What a pipe is: encodes, and is no terminal."""


@pytest.fixture
def run_cli(tmp_path, monkeypatch):
    """Run `intellect-node ARGS` with a home of its own; keyword arguments are environment variables."""
    import cli

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args, encoding="utf-8", **env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        out, err = (Terminalless(io.BytesIO(), encoding=encoding) for _ in range(2))
        monkeypatch.setattr(sys, "argv", ["intellect-node", *map(str, args)])
        code = 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code or 0
        for name in env:
            monkeypatch.delenv(name)
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode(encoding, "replace"))
        return Done(code, *texts)

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    os.environ.pop("INTELLECT_NODE_PASSPHRASE", None)

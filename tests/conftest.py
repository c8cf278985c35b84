"""Fixtures of all tests: three people, and an environment without this machine's own settings."""

import os
import signal

import pytest
from cli_kit import run_cli as run_cli

from protocol.identity import Identity

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests and their children share the cores
for name in [name for name in os.environ if name.startswith("INTELLECT_")]:
    del os.environ[name]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as it is where a script started this in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def alice():
    return Identity.from_phrase("alice")


@pytest.fixture
def bob():
    return Identity.from_phrase("bob")


@pytest.fixture
def carol():
    return Identity.from_phrase("carol")

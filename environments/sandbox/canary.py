"""The proof that a kind of isolation holds on this machine: a program that tries to get out, and must not.

It runs in a real box before the first program that nobody trusts does. Each attempt is made for real, against a real
secret file, this very process and the real network; one that succeeds, or an answer that is missing, refuses the kind.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Final

from environments.sandbox.box import Box, Ended
from environments.sandbox.inside import values
from environments.sandbox.limits import MARGIN_THREADS, THREADS
from protocol.errors import BoxError

_SECRET: Final = "what no program in a box may ever read"
_BLOCKED: Final = "blocked"
_PROBES: Final = '''
import ctypes, os, resource, _thread

def attempt(action):
    """"blocked", or what it got."""
    try:
        return "open: %.80r" % (action(),)
    except (OSError, ValueError, MemoryError, RuntimeError):
        return "blocked"

def read(path):
    with open(path) as file:
        return file.read()

def write(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT)

def native(function, *arguments):
    """By libc itself, around everything that Python has around it."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = getattr(libc, function)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), function)
    return result

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    return child

def start_threads(count):
    wait = _thread.allocate_lock()
    wait.acquire()
    _thread.stack_size(1 << 16)
    for _ in range(count):
        _thread.start_new_thread(wait.acquire, ())
    return count

def inherited():
    for descriptor in range(4, 1024):
        try:
            os.fstat(descriptor)
        except OSError:
            continue
        return descriptor
    raise OSError("none")

def probe(secret, directory, parent, threads):
    return {
        "read a secret": attempt(lambda: read(secret)),
        "list its directory": attempt(lambda: os.listdir(directory)),
        "read the password file": attempt(lambda: read("/etc/passwd")),
        "write beside the secret": attempt(lambda: write(directory + "/canary")),
        "write to /tmp": attempt(lambda: write("/tmp/intellect-node-canary")),
        "write where it is": attempt(lambda: write("canary")),
        "make a directory": attempt(lambda: os.mkdir(directory + "/made")),
        "change the secret's mode": attempt(lambda: os.chmod(secret, 0o777)),
        "open a TCP socket": attempt(lambda: native("socket", 2, 1, 0)),
        "open a UDP socket": attempt(lambda: native("socket", 2, 2, 0)),
        "open a Unix socket": attempt(lambda: native("socket", 1, 1, 0)),
        "see other processes": attempt(lambda: os.listdir("/proc")),
        "signal the node": attempt(lambda: os.kill(parent, 0)),
        "signal the driver": attempt(lambda: os.kill(os.getppid(), 0)),
        "trace the driver": attempt(lambda: native("ptrace", 16, os.getppid(), 0, 0)),
        "start a process": attempt(fork),
        "run another program": attempt(lambda: os.execv("/bin/sh", ["sh"])),
        "make a namespace": attempt(lambda: native("unshare", 0x10000000)),
        "become root": attempt(lambda: native("setuid", 0)),
        "keep memory outside its own": attempt(lambda: native("memfd_create", b"canary", 0)),
        "take more memory": attempt(lambda: len(bytearray(1 << 40))),
        "raise a limit": attempt(lambda: resource.setrlimit(resource.RLIMIT_CPU, (1 << 30, 1 << 30))),
        "use what the driver has open": attempt(inherited),
        "start too many threads": attempt(lambda: start_threads(threads)),
    }
'''


def prove_isolation(box: Box) -> None:
    """Let the canary try everything in a box that is ready. Raises BoxError that names what was possible."""
    with tempfile.TemporaryDirectory(prefix="intellect-canary-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        secret = directory / "secret"
        secret.write_text(_SECRET, encoding="utf-8")
        arguments = (str(secret), str(directory), os.getpid(), threads_of_probe())
        outcome = box.call(_PROBES, "probe", arguments)
        left = sorted(path.name for path in directory.iterdir())
    if outcome.ended is not Ended.WELL:
        raise BoxError(f"the canary {outcome.ended.value} ({outcome.detail}), so isolation is not proven")
    if left != ["secret"]:
        raise BoxError(f"isolation does not hold: the canary left {left}")
    _judge(outcome.result)


def threads_of_probe() -> int:
    """More than any box is allowed: what its user has already, the margin, and the limit."""
    return 4 * (THREADS + MARGIN_THREADS)


def _judge(result: bytes) -> None:
    try:
        found: Any = values.loads(result)
    except ValueError as error:
        raise BoxError("the canary's answer cannot be read, so isolation is not proven") from error
    if not isinstance(found, dict) or len(found) < _PROBES.count("attempt(lambda") + 2:
        raise BoxError("the canary's answer is incomplete, so isolation is not proven")
    possible = [f"{name} ({result})" for name, result in found.items() if result != _BLOCKED]
    if possible:
        raise BoxError(f"isolation does not hold: a program could {'; '.join(possible)[:500]}")

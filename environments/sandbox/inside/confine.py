"""Taking away from the process that asks for it, for good: user, files, limits, and at last system calls.

Linux alone; libc is called by ctypes, so nothing needs to be installed. Every function raises OSError where the kernel
refuses, and then nothing that is not trusted may run.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Mapping, Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
# Calls 444 to 446 on every architecture (landlock(7)).
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_RIGHTS_BY_ABI: Final = ((1, (1 << 13) - 1), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
"""All that Landlock can forbid to do with files, and since which version of it."""
_READING: Final = 0x1 | 0x4 | 0x8  # EXECUTE, which mapping a library needs from some versions on, READ_FILE, READ_DIR
_READING_A_FILE: Final = 0x1 | 0x4
_LISTING: Final = 0x8

_libc = ctypes.CDLL(None, use_errno=True)


def drop_user(uid: int) -> None:
    """Become an ordinary user for good. Raises OSError."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def set_limits(limits: Mapping[str, int]) -> None:
    """Set resource limits (the names after RLIMIT_), never above what already holds."""
    for name, wanted in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        ceiling = resource.getrlimit(which)[1]
        value = wanted if ceiling == resource.RLIM_INFINITY else min(wanted, ceiling)
        resource.setrlimit(which, (value, value))


def restrict_files(readable: Sequence[str], listed: Sequence[str] = ()) -> int:
    """Landlock: from now on nothing can be opened but what lies under `readable`, and that for reading alone.

    Directories in `listed`, and those below them, can be listed as well.

    Gives the version of Landlock's interface, 0 where the kernel has none and nothing was done. Raises OSError.
    """
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return 0
    rights = sum(right for since, right in _RIGHTS_BY_ABI if version >= since)
    # Versions 4 and 6 added fields for TCP and for signals and abstract sockets.
    attributes = struct.pack("QQQ", rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)))
    for path in readable:
        _allow(ruleset, path, _READING if os.path.isdir(path) else _READING_A_FILE)
    for path in listed:
        _allow(ruleset, path, _LISTING)
    forbid_new_privileges()
    _checked(_libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    os.close(ruleset)
    return int(version)


def _allow(ruleset: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, opened)
    _checked(_libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0)))
    os.close(opened)


def end_with_parent(parent: int) -> None:
    """Be killed when the process that forked this one is gone, or at once if it is gone already."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        raise OSError("the parent is gone")


def forbid_new_privileges() -> None:
    """No program run from here on gains rights by its owner or its file capabilities."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter, an array of `struct sock_filter`, for this thread and what it starts."""
    forbid_new_privileges()
    buffer = ctypes.create_string_buffer(program, len(program))
    described = _Program(len(program) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(described), 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)

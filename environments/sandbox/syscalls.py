"""What a confined program may ask of the kernel, for x86-64 and aarch64: an allow-list.

Enough for CPython's standard library with threads and read-only files. There are no processes, no sockets, no files
to write, no signals to others, no shared memory beyond the address-space limit, and no way to change a limit. Numbers
are those of the kernel's unistd.h; calls that an architecture lacks are left out of its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

EPERM: Final = 1
EACCES: Final = 13
ENOTTY: Final = 25
ENOSYS: Final = 38
FIRST_NEW_CALL: Final = 424
"""From here on calls have the same number everywhere and are denied with ENOSYS, and libc takes an older one."""


@dataclass(frozen=True)
class Condition:
    """What a 32-bit half of an argument must be, once masked: one of `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    upper: bool = False
    """Look at the more significant half of the 64 bits."""


@dataclass(frozen=True)
class Guard:
    """A call that is allowed where all conditions hold, and otherwise fails with `errno`."""

    conditions: tuple[Condition, ...]
    errno: int = EPERM


@dataclass(frozen=True)
class Architecture:
    """A machine's audit architecture and its numbers."""

    audit: int
    allowed: Mapping[str, int]
    guarded: Mapping[str, int]


_NO_WRITING: Final = Condition(2, (0,), mask=0x3 | 0x40 | 0x200 | 0x400000)
"""openat's flags without O_WRONLY, O_RDWR, O_CREAT, O_TRUNC and O_TMPFILE."""
_THREAD: Final = 0x100 | 0x800 | 0x10000
"""CLONE_VM, CLONE_SIGHAND and CLONE_THREAD."""
_NO_PROCESS: Final = Condition(0, (_THREAD,), mask=_THREAD | 0x2000 | 0x4000 | 0x20000 | 0x7E000000)
"""clone's flags for a thread: none of CLONE_PTRACE, CLONE_VFORK and the CLONE_NEW… of namespaces."""

GUARDS: Final[Mapping[str, Guard]] = {
    "openat": Guard((_NO_WRITING,), EACCES),
    "clone": Guard((_NO_PROCESS,)),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not F_SETOWN and F_SETSIG, which
    # send any signal to any process of the same user.
    "fcntl": Guard((Condition(1, (0, 1, 2, 3, 4, 1030, 1032)),)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": Guard((Condition(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),), ENOTTY),
    "prctl": Guard((Condition(0, (15, 16, 0x53564D41)),)),  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
    # One's own limits may be read.
    "prlimit64": Guard((Condition(0, (0,)), Condition(2, (0,)), Condition(2, (0,), upper=True))),
    "sched_getaffinity": Guard((Condition(0, (0,)),)),
}

_X86_64: Final = {
    # reading and writing what is open
    "read": 0, "write": 1, "readv": 19, "writev": 20, "pread64": 17, "lseek": 8, "close": 3, "close_range": 436,
    "dup": 32, "dup2": 33, "dup3": 292, "pipe": 22, "pipe2": 293, "eventfd2": 290,
    "poll": 7, "ppoll": 271, "select": 23, "pselect6": 270,
    "epoll_create1": 291, "epoll_ctl": 233, "epoll_wait": 232, "epoll_pwait": 281,
    # looking at files
    "fstat": 5, "newfstatat": 262, "stat": 4, "lstat": 6, "statx": 332, "access": 21, "faccessat": 269,
    "faccessat2": 439, "readlink": 89, "readlinkat": 267, "getdents64": 217, "getcwd": 79, "chdir": 80, "fchdir": 81,
    # memory and threads
    "mmap": 9, "mprotect": 10, "munmap": 11, "mremap": 25, "madvise": 28, "brk": 12, "futex": 202,
    "set_robust_list": 273, "rseq": 334, "sched_yield": 24, "getcpu": 309, "gettid": 186,
    "exit": 60, "exit_group": 231,
    # who and where one is
    "getpid": 39, "getppid": 110, "getuid": 102, "geteuid": 107, "getgid": 104, "getegid": 108, "getresuid": 118,
    "getresgid": 120, "getgroups": 115, "sysinfo": 99, "times": 100, "getrusage": 98, "getrlimit": 97,
    # time, own signals, randomness
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "nanosleep": 35, "gettimeofday": 96, "time": 201,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigsuspend": 130, "rt_sigtimedwait": 128,
    "sigaltstack": 131, "restart_syscall": 219, "alarm": 37, "setitimer": 38, "getitimer": 36, "getrandom": 318,
}  # fmt: skip
_AARCH64: Final = {
    "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "lseek": 62, "close": 57, "close_range": 436,
    "dup": 23, "dup3": 24, "pipe2": 59, "eventfd2": 19, "ppoll": 73, "pselect6": 72,
    "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22,
    "fstat": 80, "newfstatat": 79, "statx": 291, "faccessat": 48, "faccessat2": 439, "readlinkat": 78,
    "getdents64": 61, "getcwd": 17, "chdir": 49, "fchdir": 50,
    "mmap": 222, "mprotect": 226, "munmap": 215, "mremap": 216, "madvise": 233, "brk": 214, "futex": 98,
    "set_robust_list": 99, "rseq": 293, "sched_yield": 124, "getcpu": 168, "gettid": 178,
    "exit": 93, "exit_group": 94,
    "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "getresuid": 148,
    "getresgid": 150, "getgroups": 158, "sysinfo": 179, "times": 153, "getrusage": 165, "getrlimit": 163,
    "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "nanosleep": 101, "gettimeofday": 169,
    "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "rt_sigsuspend": 133, "rt_sigtimedwait": 137,
    "sigaltstack": 132, "restart_syscall": 128, "setitimer": 103, "getitimer": 102, "getrandom": 278,
}  # fmt: skip

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "x86_64": Architecture(
        audit=0xC000003E,
        allowed=_X86_64,
        guarded={
            "openat": 257, "clone": 56, "fcntl": 72, "ioctl": 16, "prctl": 157, "prlimit64": 302,
            "sched_getaffinity": 204,
        },
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        allowed=_AARCH64,
        guarded={
            "openat": 56, "clone": 220, "fcntl": 25, "ioctl": 29, "prctl": 167, "prlimit64": 261,
            "sched_getaffinity": 123,
        },
    ),
}  # fmt: skip
"""By what uname calls the machine."""

"""The seccomp filter of both architectures, run by a small machine for classic BPF as the kernel would run it."""

import re
import struct
from pathlib import Path

import pytest

from environments.sandbox.bpf import Assembler, seccomp_filter
from environments.sandbox.syscalls import ARCHITECTURES, EACCES, ENOSYS, ENOTTY, EPERM, GUARDS

ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
X86, ARM = ARCHITECTURES["x86_64"], ARCHITECTURES["aarch64"]
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
MUST_FAIL = {
    "x86_64": {"socket": 41, "connect": 42, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "ptrace": 101, "open": 2,
               "mkdir": 83, "unlink": 87, "chmod": 90, "setuid": 105, "setrlimit": 160, "mount": 165, "unshare": 272,
               "memfd_create": 319, "bpf": 321, "process_vm_readv": 310, "tgkill": 234, "timer_create": 222},
    "aarch64": {"socket": 198, "connect": 203, "execve": 221, "kill": 129, "ptrace": 117, "mkdirat": 34, "unlinkat": 35,
                "fchmodat": 53, "setuid": 146, "setrlimit": 164, "mount": 40, "unshare": 97, "memfd_create": 279,
                "bpf": 280, "process_vm_readv": 270, "tgkill": 131, "timer_create": 107},
}  # fmt: skip
NEWER = {"clone3": 435, "openat2": 437, "pidfd_getfd": 438, "io_uring_setup": 425, "landlock_create_ruleset": 444}


def run(program, number, *arguments, audit):
    """What a filter returns for a call: a small machine for the instructions that seccomp takes."""
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    code = [struct.unpack_from("<HBBI", program, place) for place in range(0, len(program), 8)]
    accumulator = place = 0
    while True:
        operation, then, otherwise, operand = code[place]
        place += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x06:
            return operand
        elif operation in (0x15, 0x35):
            holds = accumulator == operand if operation == 0x15 else accumulator >= operand
            place += then if holds else otherwise
        else:
            raise AssertionError(f"unknown instruction {operation:#x}")


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request):
    return request.param


@pytest.fixture
def judge(machine):
    architecture = ARCHITECTURES[machine]
    program = seccomp_filter(architecture)
    return lambda number, *arguments: run(program, number, *arguments, audit=architecture.audit)


def guarded(machine, name):
    return ARCHITECTURES[machine].guarded[name]


def test_the_program_is_one_that_the_kernel_takes(machine):
    program = seccomp_filter(ARCHITECTURES[machine])
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096


def test_what_programs_need_is_allowed(machine, judge):
    assert {judge(number) for number in ARCHITECTURES[machine].allowed.values()} == {ALLOW}


def test_what_they_must_not_do_fails(machine, judge):
    assert {name: judge(number) for name, number in MUST_FAIL[machine].items()} == dict.fromkeys(
        MUST_FAIL[machine], FAIL | EPERM
    )
    assert {name: judge(number) for name, number in NEWER.items()} == dict.fromkeys(NEWER, FAIL | ENOSYS)


def test_no_call_is_allowed_that_is_not_listed(machine, judge):
    """Attack: a call of a kernel newer than this list."""
    listed = {*ARCHITECTURES[machine].allowed.values(), *ARCHITECTURES[machine].guarded.values()}
    assert [number for number in range(1024) if number not in listed and judge(number) == ALLOW] == []


def test_calls_of_another_architecture_kill(machine):
    """Attack: the 32-bit table of the same processor, whose numbers mean other calls."""
    program = seccomp_filter(ARCHITECTURES[machine])
    assert {run(program, number, audit=0x40000003) for number in range(500)} == {KILL}


def test_x32_numbers_fail(judge):
    """Attack: the x32 table, which marks its numbers with bit 30."""
    assert {judge(0x40000000 + number) for number in range(600)} == {FAIL | ENOSYS}


@pytest.mark.parametrize("flags", [0, 0x80000, 0x10000, 0x4000, 0x800, 0x200000])
def test_files_may_be_opened_for_reading(machine, judge, flags):
    assert judge(guarded(machine, "openat"), 0xFFFFFF9C, 1, flags) == ALLOW


@pytest.mark.parametrize("flags", [1, 2, 3, 0x40, 0x200, 0x80001, 0x410000, 0x400000 | 2, 0x241])
def test_files_may_not_be_opened_for_writing(machine, judge, flags):
    assert judge(guarded(machine, "openat"), 0xFFFFFF9C, 1, flags) == FAIL | EACCES


def test_clone_makes_threads_alone(machine, judge):
    clone = guarded(machine, "clone")
    thread = 0x3D0F00  # what glibc's pthread_create asks for
    assert judge(clone, thread) == ALLOW
    assert judge(clone, 17) == FAIL | EPERM  # fork
    assert judge(clone, 0x4111) == FAIL | EPERM  # vfork
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert judge(clone, thread | namespace) == FAIL | EPERM
        assert judge(clone, namespace | 17) == FAIL | EPERM


def test_descriptors_own_no_process(machine, judge):
    """Attack: F_SETOWN and F_SETSIG let the kernel send any signal to any process of the same user."""
    fcntl = guarded(machine, "fcntl")
    assert {judge(fcntl, 0, command) for command in (0, 1, 2, 3, 4, 1030)} == {ALLOW}
    assert {judge(fcntl, 0, command) for command in (8, 10, 15, 1024, 1026, 1031, 1033)} == {FAIL | EPERM}
    ioctl = guarded(machine, "ioctl")
    assert judge(ioctl, 0, 0x5401) == ALLOW
    assert {judge(ioctl, 0, request) for request in (0x5452, 0x8901, 0x5412, 0x8902)} == {FAIL | ENOTTY}


def test_limits_may_be_read_and_not_set(machine, judge):
    """Attack: a pointer whose lower half is zero."""
    prlimit = guarded(machine, "prlimit64")
    assert judge(prlimit, 0, 7, 0, 12345) == ALLOW
    assert judge(prlimit, 0, 7, 1 << 32, 0) == FAIL | EPERM
    assert judge(prlimit, 0, 7, 4096, 0) == FAIL | EPERM
    assert judge(prlimit, 1, 7, 0, 12345) == FAIL | EPERM


def test_every_guard_has_a_number_on_every_machine(machine):
    assert ARCHITECTURES[machine].guarded.keys() == GUARDS.keys()


def test_numbers_are_those_of_the_kernels_headers(machine):
    if not Path(HEADERS[machine]).exists():
        pytest.skip("the kernel's headers are not installed")
    text = Path(HEADERS[machine]).read_text()
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    ours = {**ARCHITECTURES[machine].allowed, **ARCHITECTURES[machine].guarded}
    renamed = {"newfstatat": "fstatat"} if machine == "aarch64" else {}
    assert {name: numbers.get(renamed.get(name, name)) for name in ours} == ours


def test_a_jump_that_cannot_be_made_is_refused():
    nowhere, far, twice = Assembler(), Assembler(), Assembler()
    nowhere.jump(0x15, 0, then="missing")
    far.jump(0x15, 0, then="end")
    for _ in range(256):
        far.emit(0x06, 0)
    far.label("end")
    twice.label("here")
    for assembler in (nowhere, far):
        with pytest.raises(ValueError, match="cannot be made"):
            assembler.build()
    with pytest.raises(ValueError, match="given twice"):
        twice.label("here")

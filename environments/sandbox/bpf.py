"""A seccomp filter from the tables of allowed calls: classic BPF, assembled here so that no library is needed.

The kernel runs it before each call of a confined process (seccomp(2)): on another architecture than its own the
process is killed, what is allowed passes, and the rest fails with an error number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

from environments.sandbox.syscalls import ENOSYS, EPERM, FIRST_NEW_CALL, GUARDS, Architecture, Condition, Guard

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_FAIL: Final = 0x00050000
# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6], least significant half first
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_ARGUMENTS: Final = 16
_LONGEST_JUMP: Final = 255


@dataclass
class Assembler:
    """Instructions whose jumps go forward, to labels."""

    _code: list[tuple[int, int, str, str]] = field(default_factory=list)
    _labels: dict[str, int] = field(default_factory=dict)

    def emit(self, operation: int, operand: int) -> None:
        """An instruction without a jump."""
        self._code.append((operation, operand, "", ""))

    def jump(self, test: int, operand: int, *, then: str = "", otherwise: str = "") -> None:
        """Go to one of two labels; without a label, to the next instruction."""
        self._code.append((test, operand, then, otherwise))

    def label(self, name: str) -> None:
        """Name the place of the next instruction."""
        if name in self._labels:
            raise ValueError(f"label {name} is given twice")
        self._labels[name] = len(self._code)

    def build(self) -> bytes:
        """An array of `struct sock_filter`. Raises ValueError for a jump that is too long or goes nowhere."""
        return b"".join(
            struct.pack("<HBBI", operation, self._distance(place, then), self._distance(place, otherwise), operand)
            for place, (operation, operand, then, otherwise) in enumerate(self._code)
        )

    def _distance(self, place: int, label: str) -> int:
        if not label:
            return 0
        distance = self._labels.get(label, -1) - place - 1
        if not 0 <= distance <= _LONGEST_JUMP:
            raise ValueError(f"the jump to {label} from instruction {place} cannot be made")
        return distance


def seccomp_filter(architecture: Architecture) -> bytes:
    """The filter of an architecture, 8 bytes an instruction."""
    assembler = Assembler()
    assembler.emit(_LOAD, _ARCHITECTURE)
    assembler.jump(_EQUAL, architecture.audit, then="right machine")
    assembler.emit(_RETURN, _KILL)
    assembler.label("right machine")
    assembler.emit(_LOAD, _NUMBER)
    for name, number in architecture.allowed.items():
        assembler.jump(_EQUAL, number, otherwise=f"not {name}")
        assembler.emit(_RETURN, _ALLOW)
        assembler.label(f"not {name}")
    for name, number in architecture.guarded.items():
        assembler.jump(_EQUAL, number, otherwise=f"not {name}")
        _guard(assembler, name, GUARDS[name])
        assembler.label(f"not {name}")
    assembler.jump(_AT_LEAST, FIRST_NEW_CALL, otherwise="old call")
    assembler.emit(_RETURN, _FAIL | ENOSYS)
    assembler.label("old call")
    assembler.emit(_RETURN, _FAIL | EPERM)
    return assembler.build()


def _guard(assembler: Assembler, name: str, guard: Guard) -> None:
    """Return from the filter: allow if every condition holds, else fail."""
    for number, condition in enumerate(guard.conditions):
        _load(assembler, condition)
        held = f"{name} condition {number}"
        for value in condition.values:
            assembler.jump(_EQUAL, value, then=held)
        assembler.emit(_RETURN, _FAIL | guard.errno)
        assembler.label(held)
    assembler.emit(_RETURN, _ALLOW)


def _load(assembler: Assembler, condition: Condition) -> None:
    assembler.emit(_LOAD, _ARGUMENTS + 8 * condition.argument + (4 if condition.upper else 0))
    if condition.mask != 0xFFFFFFFF:
        assembler.emit(_AND, condition.mask)

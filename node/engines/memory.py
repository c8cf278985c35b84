"""What the memory of a device allows, and what running out of it looks like. All that knows of CUDA is here.

A CPU's limit is this process's resident memory; a device's is what its other users leave.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from protocol.errors import ModelError

_DEVICE_HINT: Final = "start with --device cpu; cuda needs an NVIDIA GPU, its driver, and a torch that is built for it"
_CPU_SHARE: Final = 0.8
_DEVICE_SHARE: Final = 0.9
"""Of the memory that is free at the start."""
_CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_BF16_FLAGS: Final = ("avx512_bf16", "amx_bf16", "bf16")  # the last one is how ARM calls it


def open_device(name: str) -> torch.device:
    """A device by name. Raises ModelError when torch cannot use it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ModelError(f"torch cannot use the device {name[:40]!r}: {reason}", hint=_DEVICE_HINT) from error
    return device


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ModelError for a number format that a device cannot compute in."""
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} does not compute in bfloat16", hint="start with --dtype float32"
        )


def is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a number format is computed without instructions for it: four to five times slower than float32."""
    return dtype == torch.bfloat16 and device.type == "cpu" and not _cpu_has_bf16()


def free_bytes(device: torch.device, *, limit: int) -> int:
    """What may still be allocated: up to a limit for this process in all, or with limit 0 a share of what is free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        idle = reserved - torch.cuda.memory_allocated(device)
        return min(limit - reserved, free) + idle if limit else int(_DEVICE_SHARE * free) + idle
    return (limit - resident_bytes()) if limit else int(_CPU_SHARE * _available_bytes())


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed: torch has a class for it on devices, and words on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def no_room(error: BaseException) -> ModelError:
    """What to say when one sequence alone is too much."""
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return ModelError(
        f"not even one answer fits into memory: {reason}",
        hint="allow more with --max-memory, use a device that has more, or join a run of a smaller model",
    )


def release_memory(device: torch.device) -> None:
    """Give cached memory back after what used it is gone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _available_bytes() -> int:
    """Free memory of this machine, or of the container that this process is in."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    for path in map(Path, _CGROUP_LIMITS):
        text = path.read_text().strip() if path.is_file() else "max"
        if text.isdigit():
            available = min(available, int(text) - resident_bytes())
    return available


def _cpu_has_bf16() -> bool:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return not set(line.split()).isdisjoint(_BF16_FLAGS)

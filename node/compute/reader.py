"""Reads rollout files of strangers in a child with a memory limit (node.compute.read_worker).

A file that makes the child run out of memory, or crash twice, is malformed: honest files do neither.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Final

import trio

from node.compute.process import ComputeProcess
from protocol.errors import ComputeCrashed, MalformedError

READER_MEMORY_BYTES: Final = 1 << 30
_ENV: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
"""Other allocators reserve address space by the gigabyte, which the limit would count."""


class RolloutReader:
    """A supervised reading child. `run` keeps it up; `read` may be called from several tasks."""

    def __init__(
        self,
        *,
        log_path: Path,
        memory_bytes: int = READER_MEMORY_BYTES,
        module: str = "node.compute.read_worker",
    ) -> None:
        self._process = ComputeProcess(
            module, name="rollout reader", log_path=log_path, env=_ENV, memory_bytes=memory_bytes
        )

    @property
    def restarts(self) -> int:
        return self._process.restarts

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the child running until cancelled."""
        await self._process.run(task_status=task_status)

    async def read(self, path: Path, *, timeout_s: float, **limits: Any) -> list[dict[str, Any]]:
        """A file's rollouts as plain values; `limits` are those of `protocol.rollouts.read_rollouts`.

        Raises MalformedError when the file is at fault, ComputeError when this machine is: the child was killed from
        outside, could not start, or did not finish in time.
        """
        found = await self._read_twice(path, timeout_s, limits)
        if "malformed" in found:
            raise MalformedError(found["malformed"])
        rollouts: list[dict[str, Any]] = found["rollouts"]
        return rollouts

    async def _read_twice(self, path: Path, timeout_s: float, limits: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._read(path, timeout_s, limits)
        except ComputeCrashed:
            if not self._file_may_be_at_fault():
                raise
        try:
            return await self._read(path, timeout_s, limits)
        except ComputeCrashed as error:
            if not self._file_may_be_at_fault():
                raise
            return {"malformed": f"reading the file crashes the reader: {error.message}"}

    def _file_may_be_at_fault(self) -> bool:
        """Whether the child died by itself while it read; signal 9 comes from outside, mostly for want of memory."""
        return self._process.crash_exit not in (None, -signal.SIGKILL)

    async def _read(self, path: Path, timeout_s: float, limits: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = await self._process.call("read", timeout_s=timeout_s, path=str(path), limits=limits)
        return found

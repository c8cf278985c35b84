"""The node's side of a compute process: start it, call it, restart it when it dies, end it with the node.

The network process never imports torch; whatever computes runs in such a child (node.compute.serve). A child that
crashes or runs out of memory costs one call, never the node. Children are started from the main thread and end when
their request pipe closes, so that a node killed outright leaves none behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from node.compute.framing import HEADER, decode_body, encode_frame, frame_length
from node.compute.serve import CHANNEL_VARIABLE, EXIT_OUT_OF_MEMORY
from node.logs import BoundedLog
from protocol.errors import ComputeCrashed, ComputeError, DataDirError

_log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 300.0
"""A child that has not announced itself by then is started again; importing torch from a cold disk takes a minute."""
FIRST_STARTS: Final = 2
"""A child that has never come up is given up after so many starts: what is wrong will not mend itself."""
FIRST_DELAY_S: Final = 0.2
LAST_DELAY_S: Final = 30.0
"""Back-off between starts that fail; a child that came up before it died is replaced after FIRST_DELAY_S."""
EXIT_GRACE_S: Final = 5.0
_TAIL_BYTES = 2000
_LAST_READS = 16  # of 64 KiB: as much as a pipe holds


class ChildDiskError(ComputeError):
    """Raised when a call failed by this computer's disk, as the child says: a DataDirError there."""


class NoChildError(ComputeCrashed):
    """Raised when there is no child to call, because the latest one could not be started or never came up."""


class ComputeProcess:
    """One supervised child, `python -m <module> [args]`, and calls into it, one at a time in the order they came."""

    def __init__(
        self,
        module: str,
        *,
        name: str,
        log_path: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        memory_bytes: int | None = None,
        threads: int = 0,
    ) -> None:
        """`memory_bytes` limits the child's address space; `threads` its CPU threads (0: as the libraries choose)."""
        self.name = name
        self.log_path = log_path
        self.restarts = 0
        self.crash_exit: int | None = None
        """Exit code (negative: signal) of the child of the latest ComputeCrashed; None when it never came up."""
        self._command = (sys.executable, "-P", "-m", module, *args)
        self._env = _child_environment(threads, env or {})
        self._memory_bytes = memory_bytes or 0
        self._child: _Child | None = None
        self._start_failure = ""
        self._news = trio.Event()
        self._turn = trio.Lock()
        self._next_id = 1

    @property
    def died_of_memory(self) -> bool:
        """Whether the child of the latest ComputeCrashed ran out of memory, or was killed as the kernel does then."""
        return self.crash_exit in (EXIT_OUT_OF_MEMORY, -signal.SIGKILL)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a child running until cancelled; then it is killed, with whatever it started."""
        task_status.started()
        delay_s = FIRST_DELAY_S
        try:
            while True:
                came_up = await self._run_one_child()
                self.restarts += 1
                delay_s = FIRST_DELAY_S if came_up else min(2 * delay_s, LAST_DELAY_S)
                await trio.sleep(delay_s)
        finally:
            self._tell(None, f"{self.name} was stopped")

    async def wait_first_start(self) -> None:
        """Until the child has come up once. Raises ComputeError with its last words when its first starts all fail."""
        for _ in range(FIRST_STARTS):
            news = self._news
            if self._child is None:
                await news.wait()
            if self._child is not None:
                return
        raise ComputeError(
            f"{self._start_failure} (tried {FIRST_STARTS} times)", hint=f"mend that, or look into {self.log_path}"
        )

    async def call(
        self,
        method: str,
        /,
        *,
        timeout_s: float,
        on_progress: Callable[[Any], None] | None = None,
        **params: Any,
    ) -> Any:
        """Call a method of the child and wait for its result.

        The deadline runs from when the call's turn comes. When it passes, or when the call is cancelled, the child is
        killed and replaced, because nothing else stops a computation. Raises ComputeError with what the child
        reported, ComputeCrashed when it died; ChildDiskError and NoChildError of these are this computer's own fault.
        """
        async with self._turn:
            with trio.move_on_after(timeout_s):
                return await self._exchange(await self._running_child(), method, params, on_progress=on_progress)
        raise ComputeError(
            f"{self.name} did not finish {method!r} within {timeout_s:g} s and was restarted",
            hint=f"look into {self.log_path}",
        )

    async def _exchange(
        self, child: _Child, method: str, params: dict[str, Any], *, on_progress: Callable[[Any], None] | None
    ) -> Any:
        call_id, self._next_id = self._next_id, self._next_id + 1
        answered = False
        try:
            await child.send([call_id, method, params])
            reply = await child.receive()
            while reply[:2] == [call_id, "progress"]:
                if on_progress is not None:
                    on_progress(reply[2])
                reply = await child.receive()
            answered = reply[:1] == [call_id]
        except (EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            raise await self._crash(child, method) from None
        finally:
            if not answered:
                self._child = None
                child.kill()
        if reply[1] == "error":
            kind = ChildDiskError if reply[4] == DataDirError.__name__ else ComputeError
            raise kind(reply[2], hint=reply[3])
        return reply[2]

    async def _running_child(self) -> _Child:
        while self._child is None or self._child.gone.is_set():
            await self._news.wait()
            if self._child is None:
                self.crash_exit = None
                raise NoChildError(self._start_failure, hint=f"look into {self.log_path}")
        return self._child

    async def _crash(self, child: _Child, method: str) -> ComputeCrashed:
        child.kill()
        with trio.move_on_after(EXIT_GRACE_S):
            await child.gone.wait()
        self.crash_exit = child.exit_code
        return ComputeCrashed(
            f"{self.name} {child.death()} during {method!r}{child.last_words()}", hint=f"look into {self.log_path}"
        )

    async def _run_one_child(self) -> bool:
        """Start a child and see it to its end. True when it came up."""
        try:
            child = _Child(self._command, env=self._env, memory_bytes=self._memory_bytes, log=BoundedLog(self.log_path))
        except OSError as error:
            self._tell(None, f"{self.name} cannot be started: {error}")
            return False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child.pump_log)
                nursery.start_soon(self._announce, child)
                await child.wait_exit()
                nursery.cancel_scope.cancel()
        finally:
            self._child = None
            await child.end()
        _log.warning("compute process ended name=%s pid=%d why=%r", self.name, child.pid, child.death())
        if not child.came_up:
            self._tell(None, f"{self.name} {child.death()} before it was ready{child.last_words()}")
        return child.came_up

    async def _announce(self, child: _Child) -> None:
        with trio.move_on_after(START_TIMEOUT_S):
            try:
                child.came_up = (await child.receive())[1] == "ready"
            except EOFError:
                return  # its exit is being waited for and tells more
        if not child.came_up:
            child.kill()
            return
        _log.info("compute process ready name=%s pid=%d", self.name, child.pid)
        self._tell(child, "")

    def _tell(self, child: _Child | None, start_failure: str) -> None:
        self._child, self._start_failure = child, start_failure
        news, self._news = self._news, trio.Event()
        news.set()


class _Child:
    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], memory_bytes: int, log: BoundedLog) -> None:
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(request_read, reply_write),
                env={**env, CHANNEL_VARIABLE: f"{request_read},{reply_write},{memory_bytes}"},
                start_new_session=True,
                bufsize=0,
            )
        except OSError:
            os.close(request_write)
            os.close(reply_read)
            raise
        finally:
            os.close(request_read)
            os.close(reply_write)
        self.pid = self._process.pid
        self.gone = trio.Event()
        self.came_up = False
        self._requests = trio.lowlevel.FdStream(request_write)
        self._replies = trio.lowlevel.FdStream(reply_read)
        self._log = log
        self._tail = b""

    async def send(self, message: list[Any]) -> None:
        await self._requests.send_all(encode_frame(message))

    async def receive(self) -> list[Any]:
        """The next reply. Raises EOFError when the child is gone."""
        header = await self._receive_exactly(HEADER.size)
        reply = decode_body(await self._receive_exactly(frame_length(header)))
        if not isinstance(reply, list) or len(reply) < 3:
            raise ComputeError("a compute process sent something that is no reply")
        return reply

    async def _receive_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = await self._replies.receive_some(min(count - len(data), 1 << 20))
            if not part:
                raise EOFError("the compute process closed its pipe")
            data += part
        return bytes(data)

    async def pump_log(self) -> None:
        """Move what the child prints into its log file, which stays bounded, and remember the end of it."""
        stdout = self._process.stdout
        if stdout is None:
            return
        os.set_blocking(stdout.fileno(), False)
        while self._read_log(stdout.fileno()) != b"":
            await trio.lowlevel.wait_readable(stdout)

    def _read_log(self, fd: int) -> bytes | None:
        """What the child printed: None when there is nothing now, no bytes when there never will be."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return None
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self._log.write(data)
        return data

    async def wait_exit(self) -> None:
        """Wait until the child has ended. It stays unreaped, so its group can still be named safely."""
        await trio.to_thread.run_sync(_wait_unreaped, self.pid, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))

    def kill(self) -> None:
        """Kill the child and its descendants, if it has not been reaped."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill, reap and close, also when cancelled."""
        self.kill()
        with trio.move_on_after(EXIT_GRACE_S, shield=True):
            await self.wait_exit()
        stdout = self._process.stdout
        if stdout is not None:
            os.set_blocking(stdout.fileno(), False)
            for _ in range(_LAST_READS):
                if not self._read_log(stdout.fileno()):
                    break
            stdout.close()
        self._process.poll()
        self.gone.set()
        self._requests.close()
        self._replies.close()
        self._log.close()

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def death(self) -> str:
        """How it ended, as the end of a sentence about it."""
        code = self._process.returncode
        if code is None:
            return "was killed"
        if code == EXIT_OUT_OF_MEMORY:
            return "ran out of memory"
        if code == -signal.SIGKILL:
            return "was killed by signal 9, probably because the machine ran out of memory,"
        if code == -signal.SIGALRM:  # node.compute.watchdog
            return "stopped answering and was ended"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def last_words(self) -> str:
        lines = [line for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return f": {' '.join(line.strip() for line in lines[-2:])[:400]}" if lines else ""


def _wait_unreaped(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return  # already reaped: gone all the same


def _child_environment(threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The node's environment without its settings (a compute process needs no secret), with its import path."""
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("INTELLECT_NODE_")}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env["PYTHONUNBUFFERED"] = "1"
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    return {**env, **extra}

"""The compute process's side: answer the node's calls, one at a time, until the node is gone.

Requests and replies use two private descriptors, so a library that prints cannot break the framing. A thread reads
requests even while a handler works: when the node dies, however it dies, it closes the pipe and this process ends.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import queue
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final, NoReturn

from node.compute.framing import encode_frame, read_frame
from protocol.errors import ComputeError, NodeError

CHANNEL_VARIABLE: Final = "_INTELLECT_COMPUTE"
"""Environment variable by which the node hands over `<request fd>,<reply fd>,<memory bytes or 0>`."""
EXIT_OUT_OF_MEMORY: Final = 71
_MAX_ERROR_CHARS = 4000

_log = logging.getLogger(__name__)

Handler = Callable[..., Any]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer calls until the node closes its end; then the process ends, with whatever it started.

    A handler gets the call's parameters by name, and `progress` (a callable of one value) if it declares that name.
    What it raises is reported to the caller. Running out of memory ends the process: what is left of it is not sound.
    """
    requests, replies = _open_channel()
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, calls), daemon=True, name="requests").start()
    _send(replies, encode_frame([0, "ready", os.getpid()]))
    while True:
        call_id, method, params = calls.get()
        _send(replies, _answer(handlers, method, params, call_id=call_id, progress=_Progress(replies, call_id)))


class _Progress:
    def __init__(self, replies: BinaryIO, call_id: int) -> None:
        self._replies = replies
        self._call_id = call_id

    def __call__(self, value: Any) -> None:
        _send(self._replies, encode_frame([self._call_id, "progress", value]))


def _open_channel() -> tuple[BinaryIO, BinaryIO]:
    text = os.environ.pop(CHANNEL_VARIABLE, "")
    if not text:
        raise ComputeError(
            "this module is a node's compute process and cannot be started by hand",
            hint="start a node: intellect-node --help",
        )
    request_fd, reply_fd, memory_bytes = (int(part) for part in text.split(","))
    for fd in (request_fd, reply_fd):
        os.set_inheritable(fd, False)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    return os.fdopen(request_fd, "rb"), os.fdopen(reply_fd, "wb")


def _read_requests(requests: BinaryIO, calls: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            calls.put(read_frame(requests))
        except (EOFError, OSError):
            _follow_the_node()
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)
        except ComputeError as error:
            _log.error("broken request error=%s", error)
            os._exit(1)


def _answer(
    handlers: Mapping[str, Handler], method: str, params: dict[str, Any], *, call_id: int, progress: _Progress
) -> bytes:
    handler = handlers.get(method)
    if handler is None:
        known = ", ".join(sorted(handlers))
        return _error(call_id, f"the compute process has no method {method!r}; it has: {known}")
    try:
        if "progress" in inspect.signature(handler).parameters:
            params = {**params, "progress": progress}
        return encode_frame([call_id, "result", handler(**params)])
    except NodeError as error:
        kind = type(error).__name__
        return _error(call_id, f"{kind}: {error.message}", hint=error.hint, kind=kind)
    except MemoryError:
        _die_of_memory()
    except Exception as error:
        # The border of the process: whatever a model or a library raises is the caller's to hear.
        if type(error).__name__ == "OutOfMemoryError":  # torch.OutOfMemoryError, without importing torch
            _die_of_memory()
        traceback.print_exc()
        return _error(call_id, f"{type(error).__name__}: {error}")


def _error(call_id: int, text: str, *, hint: str = "", kind: str = "") -> bytes:
    return encode_frame([call_id, "error", text[:_MAX_ERROR_CHARS], hint[:_MAX_ERROR_CHARS], kind])


def _send(replies: BinaryIO, frame: bytes) -> None:
    try:
        replies.write(frame)
        replies.flush()
    except BrokenPipeError:
        _follow_the_node()


def _follow_the_node() -> NoReturn:
    """End at once, and with it what this process started: nobody is left to report to."""
    if os.getpid() == os.getpgrp():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def _die_of_memory() -> NoReturn:
    with contextlib.suppress(MemoryError):
        traceback.print_exc()
    os._exit(EXIT_OUT_OF_MEMORY)

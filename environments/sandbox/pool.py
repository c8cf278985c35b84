"""Boxes that wait, started, for their one use; whoever takes one has it at once, and a new one is started behind it.

A node that is killed leaves no box behind: each ends when its pipe to the node does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from environments.sandbox.box import START_TIMEOUT_S, Box
from environments.sandbox.launch import BoxSpec, Isolation
from environments.sandbox.status import establish
from protocol.errors import BoxError

MAX_SHARED_JOBS: Final = 1000
"""Jobs that a shared box is used for before it is replaced."""
_TRIES: Final = 2

T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger(__name__)


class SandboxPool:
    """`size` boxes ahead, as many as this process may use cores unless said otherwise. For any number of threads."""

    def __init__(self, spec: BoxSpec, *, size: int | None = None, isolation: Isolation | None = None) -> None:
        """With `isolation`, of that kind and no other; it is the caller's to prove."""
        self.spec = spec
        self.size = size or _cores()
        self.broken = 0
        """Boxes that did not start, or broke in use."""
        self._ready: queue.SimpleQueue[Box | BoxError] = queue.SimpleQueue()
        self._alive: dict[Box, int] = {}
        """Boxes that are not killed yet, and the callers they served."""
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None
        self._isolation = isolation
        weakref.finalize(self, _kill_all, self._alive)

    def start(self) -> None:
        """Start the first boxes, once their isolation is proven. Raises SandboxError: then nothing may be run here."""
        with self._lock:
            if self._workers is not None:
                return
            self._isolation = self._isolation or establish(self.spec)
            self._workers = ThreadPoolExecutor(self.size, thread_name_prefix="sandbox")
        for _ in range(self.size):
            self._behind(self._make)

    @contextlib.contextmanager
    def box(self) -> Iterator[Box]:
        """A box of one's own, killed afterwards. Raises BoxError where none starts in time, SandboxError as `start`."""
        self.start()
        box = self._take()
        broken = True
        try:
            yield box
            broken = False
        except BoxError:
            self.broken += 1
            raise
        finally:
            self._give_up(box, broken=broken)

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Apply a function that takes boxes to items, `size` of them at once; results in order."""
        if len(items) < 2:
            return [function(item) for item in items]
        with ThreadPoolExecutor(min(self.size, len(items)), thread_name_prefix="judge") as threads:
            return list(threads.map(function, items))

    def close(self) -> None:
        """Kill every box. The pool may be started again."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)
        _kill_all(self._alive)
        self._ready = queue.SimpleQueue()

    def _take(self) -> Box:
        failure = BoxError(f"no box was ready within {START_TIMEOUT_S:g} s")
        for _ in range(_TRIES):
            try:
                taken = self._ready.get(timeout=START_TIMEOUT_S)
            except queue.Empty:
                raise failure from None
            if isinstance(taken, Box) and taken.process.poll() is not None:  # somebody killed it while it waited
                self.broken += 1
                self._behind(self._end, taken)
                taken = BoxError("a box ended while it waited")
            if isinstance(taken, Box):
                if not self.spec.jobs_share_box:
                    self._behind(self._make)
                return taken
            self._behind(self._make)
            failure = taken
        raise failure

    def _give_up(self, box: Box, *, broken: bool) -> None:
        if self.spec.jobs_share_box:
            served = self._alive.get(box, MAX_SHARED_JOBS) + 1
            if not broken and served < MAX_SHARED_JOBS:
                self._alive[box] = served
                self._ready.put(box)
                return
            self._behind(self._make)
        self._behind(self._end, box)

    def _make(self) -> None:
        if self._isolation is None or self._workers is None:
            return
        try:
            box = Box(self._isolation, self.spec)
            self._alive[box] = 0
            try:
                box.wait_ready()
            except BoxError:
                self._end(box)
                raise
        except BoxError as error:
            self.broken += 1
            _log.warning("box did not start reason=%s", error.message[:200])
            self._ready.put(error)
        else:
            self._ready.put(box)

    def _end(self, box: Box) -> None:
        box.kill()
        self._alive.pop(box, None)

    def _behind(self, work: Callable[..., None], *arguments: Box) -> None:
        with self._lock:
            if self._workers is not None:
                self._workers.submit(work, *arguments)
                return
        if work == self._end:
            work(*arguments)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kill_all(boxes: dict[Box, int]) -> None:
    for box in list(boxes):
        box.kill()
        boxes.pop(box, None)

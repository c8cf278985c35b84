"""The compute process of a light contributor: `python -m simnet.light.compute ENGINE EVERY_S`, started by its node.

Takes its time over each submission, as a computer that generates does, and has it answered by the shared engine.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Client
from typing import Any

import msgspec

from node.compute.serve import serve
from protocol.errors import ComputeError


class LightWorker:
    """Stands in for node.inference.compute.RolloutWorker."""

    def __init__(self, engine: str, *, every_s: float) -> None:
        """`engine` is the path of a socket; a submission is handed over no sooner than `every_s` after the last one."""
        self._engine = Client(engine, family="AF_UNIX")
        self._every_s = every_s
        self._ready_at = time.monotonic() + every_s
        self._directories: dict[bytes, str] = {}

    def load(self, checkpoint_dir: str, checkpoint_id: bytes) -> dict[str, Any]:
        """Remember where a policy lies."""
        self._directories = {checkpoint_id: checkpoint_dir}
        return {"engine": "shared", "dtype": "", "batch": 0, "seconds": 0.0}

    def generate(self, checkpoint: bytes, **work: Any) -> dict[str, Any]:
        """A submission as RolloutWorker.generate makes it. Raises ComputeError when the engine cannot."""
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        self._ready_at = max(self._ready_at, time.monotonic() - self._every_s) + self._every_s
        request = {**work, "checkpoint": checkpoint, "checkpoint_dir": self._directories[checkpoint]}
        self._engine.send_bytes(msgspec.msgpack.encode(request))
        answer: dict[str, Any] = msgspec.msgpack.decode(self._engine.recv_bytes())
        if "error" in answer:
            raise ComputeError(f"the shared engine: {answer['error']}")
        return answer


def main() -> None:
    worker = LightWorker(sys.argv[1], every_s=float(sys.argv[2]))
    serve({"load": worker.load, "generate": worker.generate})


if __name__ == "__main__":
    main()

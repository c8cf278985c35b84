"""One real engine for many light contributors: `python -m simnet.light.shared_compute SOCKET`, until its input ends.

Contributors connect to the socket; each sends what RolloutWorker.generate takes, as msgpack, and where the policy lies.
"""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection, Listener
from typing import Any, Final

import msgspec

from node.engines.registry import engine_from_environment
from node.inference.compute import RolloutWorker
from protocol.errors import NodeError

READY: Final = "ready"
BACKLOG: Final = 256


class SharedEngine:
    """Answers one request at a time, with whatever policy it names."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._loaded = b""

    def serve(self, connection: Connection) -> None:
        """Answer one contributor until it is gone."""
        with connection:
            while True:
                try:
                    request = msgspec.msgpack.decode(connection.recv_bytes())
                    connection.send_bytes(msgspec.msgpack.encode(self.answer(request)))
                except (EOFError, OSError):
                    return

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the worker made, or `{"error": …}`."""
        directory, checkpoint = request.pop("checkpoint_dir"), request["checkpoint"]
        with self._lock:
            try:
                if checkpoint != self._loaded:
                    self._worker.load(directory, checkpoint)
                    self._loaded = checkpoint
                return self._worker.generate(**request)
            except (NodeError, OSError) as error:
                self._loaded = b""
                return {"error": str(error)[:1000]}


def main() -> None:
    engine = SharedEngine(RolloutWorker(engine_from_environment()))
    with Listener(sys.argv[1], family="AF_UNIX", backlog=BACKLOG) as listener:
        threading.Thread(target=_accept, args=(listener, engine), daemon=True).start()
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        sys.stdin.read()  # whoever started this holds the other end


def _accept(listener: Listener, engine: SharedEngine) -> None:
    while True:
        connection = listener.accept()
        threading.Thread(target=engine.serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()

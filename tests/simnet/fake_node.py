"""A program that behaves like a node on the outside: a status page, signals, a child, and an end; it does no work.

`identity DATA_DIR` and `create-run DATA_DIR NAME` stand for the short commands, `node JSON` for a node.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from protocol.identity import Identity

STEP_S = 0.1


def peer_id(name: str) -> str:
    return str(Identity.from_phrase(name).peer_id)


class FakeNode:
    def __init__(self, options: dict) -> None:
        self.options = options
        self.data_dir = Path(options["data_dir"])
        self.started_s = time.monotonic()
        self.started_ms = time.time_ns() // 1_000_000
        self.leaving = threading.Event()
        self.first_step = self.saved_step()

    @property
    def step(self) -> int:
        return min(self.total, self.first_step + int((time.monotonic() - self.started_s) / STEP_S))

    @property
    def total(self) -> int:
        return self.options.get("total_steps", 10**9)

    @property
    def finished(self) -> bool:
        return self.step >= self.total and not self.options.get("stays")

    def saved_step(self) -> int:
        path = self.data_dir / "step"
        return int(path.read_text()) if path.exists() else 0

    def status(self) -> dict:
        state = "finished" if self.finished else "working"
        return {
            "peer_id": peer_id(self.options["name"]),
            "role": self.options["role"],
            "pid": os.getpid(),
            "state": state,
            "activity": self.options.get("activity", "pretending"),
            "since_ms": self.started_ms,
            "step": self.step,
            "accepted": 1,
            "relays": [
                {"peer_id": peer_id(self.options.get("source", "relay-0")), "url": "http://x", "bytes_in": 1000}
            ],
            "timeline": [[self.started_ms + 10, "working", "pretending"]],
            "details": self.details(),
        }

    def details(self) -> dict:
        if self.options["role"] == "relay":
            return {"bytes_in": 2000, "bytes_out": 7000}
        if self.options["role"] != "trainer":
            return {}
        return {
            "total_steps": self.total,
            "steps_trained": self.options.get("steps_trained", self.step),
            "rewards": [[step, min(1.0, step / 10)] for step in range(1, self.step + 1)],
            "wait_s": 1.0,
            "train_s": 3.0,
            "contributors": [
                {**entry, "peer_id": peer_id(entry["name"])} for entry in self.options.get("contributors", [])
            ],
            "verdicts": [],
            "evaluations": self.options.get("evaluations", []),
        }

    def leave(self, *_: object) -> None:
        """Asked once it leaves well, asked twice at once."""
        if self.leaving.is_set():
            os._exit(130)
        self.leaving.set()

    def serve(self) -> None:
        node = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(node.status()).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        server = HTTPServer(("127.0.0.1", 0), Page)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (self.data_dir / "status.url").write_text(f"http://127.0.0.1:{server.server_port}/status\n")

    def live(self) -> int:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        time.sleep(self.options.get("slow_start_s", 0))
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.options.get("stubborn") else self.leave)
        if self.options.get("stubborn"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "exit_code" in self.options:
            print("cannot go on: the disk is on fire", file=sys.stderr)
            return self.options["exit_code"]
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (self.data_dir / "child.pid").write_text(str(child.pid))
        self.serve()
        while not self.finished and not self.leaving.wait(0.02):
            if self.step >= self.options.get("crash_at", 10**9):
                os._exit(9)
        time.sleep(self.options.get("leaves_in_s", 0))
        if not self.options.get("orphans"):
            child.kill()
            child.wait()
        (self.data_dir / "step").write_text(str(self.step))
        (self.data_dir / "status-final.json").write_text(json.dumps(self.status()))
        return 0


def main() -> int:
    command, argument, *rest = sys.argv[1:]
    if command == "identity":
        print("made an identity\n" + peer_id(Path(argument).parent.name))
        return 0
    if command == "create-run":
        print(f"{peer_id(Path(argument).parent.name)}/{rest[0]}")
        return 0
    return FakeNode(json.loads(argument)).live()


if __name__ == "__main__":
    sys.exit(main())

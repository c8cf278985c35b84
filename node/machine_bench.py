"""`intellect-node bench`: what this machine does a second, as a contributor needs it; kept in `bench.json`.

Tokens are generated and checked as calibration does (node.calibrate), for the data directory's run or a recipe. Leaves
out the network, whose speed is the relays' too.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from node.calibrate import Plan, measure_plan
from node.clock import now_ms
from node.datadir import disk_error
from node.logs import printable
from node.version import SOFTWARE
from protocol.atomic import write_atomically

FILE: Final = "bench.json"
_HASH_BYTES: Final = 64 << 20
_DISK_BYTES: Final = 64 << 20
_MAX_FILE_BYTES: Final = 1 << 20
_NAMES: Final = {
    "generate_tokens_per_s": "tokens generated a second",
    "check_tokens_per_s": "tokens checked a second",
    "batch": "answers at a time for that",
    "sha256_mb_per_s": "MB hashed a second",
    "disk_mb_per_s": "MB written a second, to the disk",
}


def measure_machine(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, keep, and give what was found beside what was found before. Raises NodeError."""
    manifest, model_dir, found = measure_plan(plan, say)
    before = _kept(plan.data_dir / FILE)
    best = max(found, key=lambda one: _per_s(one, "generate_s"))
    speeds = {
        "generate_tokens_per_s": _per_s(best, "generate_s"),
        "check_tokens_per_s": max(_per_s(one, "check_s") for one in found),
        "batch": best["batch"],
        "sha256_mb_per_s": _hashing(),
        "disk_mb_per_s": _writing(plan.data_dir),
    }
    measured = {
        "made_at_ms": now_ms(),
        "software": SOFTWARE,
        "run": manifest.name,
        "model": str(model_dir),
        "engine": best["engine"],
        "setting": f"{plan.dtype} on {plan.device}, threads {plan.threads}",
        "speeds": {name: round(value, 1) for name, value in speeds.items()},
    }
    write_atomically(plan.data_dir / FILE, msgspec.json.format(msgspec.json.encode(measured)) + b"\n")
    return {**measured, "before": before}


def _per_s(sample: dict[str, Any], seconds: str) -> float:
    return float(sample["tokens"] / max(sample[seconds], 1e-9))


def _kept(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None


def _hashing() -> float:
    data = bytes(1 << 20)
    digest, started = hashlib.sha256(), time.perf_counter()
    for _ in range(_HASH_BYTES >> 20):
        digest.update(data)
    return _HASH_BYTES / 1e6 / (time.perf_counter() - started)


def _writing(directory: Path) -> float:
    """With the disk's own word that it is there."""
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            started = time.perf_counter()
            for _ in range(_DISK_BYTES >> 20):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, directory) from error
    return _DISK_BYTES / 1e6 / (time.perf_counter() - started)


def print_speeds(found: dict[str, Any]) -> None:
    console = Console()
    before = (found["before"] or {}).get("speeds", {})
    lines = [f"{found['run']}: {found['engine']} {found['setting']}"]
    for name, what in _NAMES.items():
        then = f"  (before: {before[name]:,.0f})" if isinstance(before.get(name), int | float) else ""
        lines.append(f"{found['speeds'][name]:>12,.0f}  {what}{then}")
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)

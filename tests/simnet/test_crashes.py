"""kill −9 of one process in mid-run, for each role, with real processes: the swarm resumes and the books are right."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.ledger_file import LedgerFile
from node.run_show import load_run
from protocol.ledger import LedgerState
from simnet import run_scenario

STEPS = 6
SCENARIO = """
title = "one process is killed"

[run]
recipe = "demo"

[run.overrides]
batch = { total_steps = 6, rollouts_per_step = 64 }

[[fleet]]
role = "trainer"

[[fleet]]
role = "relay"
count = 2

[[fleet]]
role = "validator"

[[fleet]]
role = "inference"
count = 2

[[fault]]
node = "NODE"
action = "kill"
at_step = 2

[[fault]]
node = "NODE"
action = "join"
at_step = 2

[until]
finished = true
timeout_s = 240

[expect]
steps_at_least = 6
honest_rejected = 0
"""


def replay(out: Path) -> LedgerState:
    """The trainer's ledger, from its file alone."""
    data = out / "nodes" / "trainer-0" / "data"
    manifest = load_run(data)
    return LedgerFile(data / "ledger", LedgerState(manifest.id, manifest.record)).state


def accepted_by_verdict(out: Path) -> dict[bytes, int]:
    """What contributors know to be accepted: submission id and step, from their outboxes."""
    found: dict[bytes, int] = {}
    for path in out.glob("nodes/inference-*/data/outbox.sqlite"):
        with sqlite3.connect(path) as database:
            found.update(database.execute("SELECT id, step FROM submissions WHERE state = 'accepted'").fetchall())
        database.close()
    return found


@pytest.mark.parametrize("node", ["trainer-0", "relay-0", "validator-0", "inference-0"])
def test_swarm_survives_a_kill(node: str, tmp_path: Path) -> None:
    """A process dies without any chance to clean up: nothing accepted is lost or trained twice."""
    scenario = tmp_path / "crash.toml"
    scenario.write_text(SCENARIO.replace("NODE", node))
    out = tmp_path / "out"
    assert run_scenario(scenario, out, live=False) == 0

    report: dict[str, Any] = msgspec.json.decode((out / "report.json").read_bytes())
    assert {fault["action"] for fault in report["faults"]} == {"kill", "join"}

    ledger = replay(out)
    assert list(ledger.trained) == list(range(STEPS))
    used = [key for batch in ledger.batches.values() for key in batch]
    assert len(used) == len(set(used)) == 2 * STEPS
    assert all(record.metrics["rollouts"] == 64 for record in ledger.trained.values())
    lost = {key for key, step in accepted_by_verdict(out).items() if step < STEPS - 2} - ledger.submissions.keys()
    assert lost == set()

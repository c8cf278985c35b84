"""kill −9 in mid-run of one real process of each role in turn: the swarm resumes, and the books are right."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.ledger.log import LedgerLog
from node.run_show import load_run
from protocol.ledger import LedgerState
from simnet import run_scenario

STEPS = 14
KILLED = ("inference-0", "relay-0", "validator-0", "trainer-0")
SCENARIO = """
title = "one process of each role is killed"

[run]
recipe = "demo"

[run.overrides]
batch = { total_steps = 14, rollouts_per_step = 64 }

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

[until]
finished = true
timeout_s = 300

[expect]
steps_at_least = 14
honest_rejected = 0
"""
FAULT = """
[[fault]]
node = "{node}"
action = "{action}"
at_step = {step}
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves in which each process of KILLED died without any chance to clean up, and was started again."""
    directory = tmp_path_factory.mktemp("crashes")
    faults = [
        FAULT.format(node=node, action=action, step=2 + 3 * number)
        for number, node in enumerate(KILLED)
        for action in ("kill", "join")
    ]
    (directory / "crash.toml").write_text(SCENARIO + "".join(faults))
    assert run_scenario(directory / "crash.toml", directory / "out", live=False) == 0
    return directory / "out"


@pytest.fixture(scope="module")
def ledger(out: Path) -> LedgerState:
    """The trainer's ledger, from its file alone."""
    data = out / "nodes" / "trainer-0" / "data"
    manifest = load_run(data)
    return LedgerLog(data / "ledger", LedgerState(manifest.id, manifest.record)).state


def accepted_by_verdict(out: Path) -> dict[bytes, int]:
    """What contributors know to be accepted: submission id and step, from their outboxes."""
    found: dict[bytes, int] = {}
    for path in out.glob("nodes/inference-*/data/outbox.sqlite"):
        with sqlite3.connect(path) as database:
            found.update(database.execute("SELECT id, step FROM submissions WHERE state = 'accepted'").fetchall())
        database.close()
    return found


@pytest.mark.parametrize("node", KILLED)
def test_swarm_goes_on_after_a_kill(out: Path, node: str) -> None:
    """The killed process came back by the same command, and the run reached its end with it."""
    report: dict[str, Any] = msgspec.json.decode((out / "report.json").read_bytes())
    faults = [fault["action"] for fault in report["faults"] if fault["node"] == node]
    (summary,) = [one for one in report["nodes"] if one["name"] == node]
    assert faults == ["kill", "join"]
    assert (summary["starts"], summary["state"], summary["exit_code"]) == (2, "finished", 0)


def test_every_step_was_trained_once_on_a_whole_batch(ledger: LedgerState) -> None:
    assert list(ledger.trained) == list(range(STEPS))
    used = [key for batch in ledger.batches.values() for key in batch]
    assert len(used) == len(set(used)) == 2 * STEPS
    assert all(record.metrics["rollouts"] == 64 for record in ledger.trained.values())


def test_no_accepted_rollout_is_lost(out: Path, ledger: LedgerState) -> None:
    """Whatever a contributor was told is accepted is in the ledger, save for what was judged as the run ended."""
    accepted = {key for key, step in accepted_by_verdict(out).items() if step < STEPS - 2}
    assert accepted - ledger.submissions.keys() == set()
    assert accepted

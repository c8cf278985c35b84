"""A fleet of stand-ins for nodes, and a recording of a run that never took place."""

import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol.identity import Identity
from simnet.commands import Launch
from simnet.gather import (
    Contributor,
    Details,
    FaultMark,
    Life,
    NodeRecord,
    Recording,
    RelaySeen,
    Sample,
    Status,
    VerdictRow,
)
from simnet.oracles import Evidence
from simnet.scenario import NodePlan, parse_scenario

FAKE_NODE = Path(__file__).with_name("fake_node.py")

SMALL: dict[str, Any] = {
    "run": {"recipe": "demo"},
    "fleet": [
        {"role": "trainer"},
        {"role": "relay"},
        {"role": "validator"},
        {"role": "inference"},
        {"role": "inference", "cheat": "wrong-model"},
    ],
    "until": {"timeout_s": 30},
}


class FakeCommands:
    """Command lines of the stand-in; `behaviour` is what single nodes do otherwise, by name."""

    def __init__(self, **behaviour: dict[str, Any]) -> None:
        self.behaviour = {name.replace("_", "-"): options for name, options in behaviour.items()}

    def create_identity(self, data_dir: Path) -> list[str]:
        return [sys.executable, str(FAKE_NODE), "identity", str(data_dir)]

    def create_run(self, trainer_dir: Path, recipe: Path, *, name: str, validators: Sequence[str]) -> list[str]:
        return [sys.executable, str(FAKE_NODE), "create-run", str(trainer_dir), name]

    def start(self, plan: NodePlan, launch: Launch) -> list[str]:
        options = {"role": plan.role, "name": plan.name, "data_dir": str(launch.data_dir)}
        options |= self.behaviour.get(plan.name, {})
        return [sys.executable, str(FAKE_NODE), "node", json.dumps(options)]


def without_ledgers(recording: Recording, _out: Path) -> Evidence:
    """In place of `simnet.report.gather_evidence`: stand-ins leave no ledger, as no real node would."""
    return Evidence(recording)


def peer_id(name: str) -> str:
    return str(Identity.from_phrase(name).peer_id)


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 20.0) -> Any:
    """Look again until it holds; what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return value


def make_recording() -> Recording:
    """One honest contributor, one cheat that was evicted, and a relay that was killed and came back."""
    small = copy.deepcopy(SMALL)
    small["title"] = "A small run"
    small["fault"] = [
        {"node": "relay-0", "action": "kill", "at_step": 10},
        {"node": "relay-0", "action": "join", "at_step": 12},
    ]
    small["expect"] = {"reward_at_least": 0.8, "cheats_evicted": True, "cheats_accepted": 0, "honest_rejected": 0}
    scenario = parse_scenario(small, name="small")
    start = 1_700_000_000_000
    end = start + 100_000
    nodes = [NodeRecord(plan.name, plan.role, peer_id(plan.name), plan.cheat) for plan in scenario.nodes()]
    for node in nodes:
        node.lives = [Life(pid=10, started_ms=start, ended_ms=end, exit_code=0, status=status(node.name))]
        node.timeline = [(start + 5000 * i, ("working", "waiting")[i % 2], f"task {i}") for i in range(1, 20)]
    by_name = {node.name: node for node in nodes}
    by_name["trainer-0"].lives[0].status = status("trainer-0", details=trainer_details())
    by_name["relay-0"].lives = [
        Life(10, start, start + 40_000, -9, "kill", status("relay-0", details=Details(bytes_in=10, bytes_out=100))),
        Life(11, start + 50_000, end, 0, "", status("relay-0", details=Details(bytes_in=20, bytes_out=300))),
    ]
    by_name["wrong-model-0"].lives[0].exit_code = 1
    return Recording(
        rewards={step: step / 20 for step in range(1, 21)},
        scenario=scenario,
        run=f"{peer_id('trainer-0')}/simnet",
        seed=0,
        started_ms=start,
        ended_ms=end,
        outcome="finished",
        nodes=nodes,
        faults=[FaultMark(start + 40_000, 10, "relay-0", "kill"), FaultMark(start + 50_000, 12, "relay-0", "join")],
        against=[trainer_details().verdicts[1]],
        samples=[Sample(start + 1000 * i, i // 4, i, i // 20) for i in range(100)],
    )


def status(name: str, *, details: Details | None = None) -> Status:
    relays = [RelaySeen(peer_id=peer_id("relay-0"), url="http://127.0.0.1:1", bytes_in=500)]
    return Status(
        peer_id=peer_id(name),
        pid=10,
        state="working",
        activity="at it",
        step=20,
        relays=relays,
        details=details or Details(),
    )


def trainer_details() -> Details:
    honest, cheat = peer_id("inference-0"), peer_id("wrong-model-0")
    return Details(
        total_steps=20,
        steps_trained=20,
        wait_s=30.0,
        train_s=70.0,
        contributors=[
            Contributor(honest, accepted=40),
            Contributor(cheat, rejected={"toploc: exponent mismatches": 2}, standing="evicted", reason="toploc"),
        ],
        verdicts=[
            VerdictRow("ab" * 32, honest, 1, "accept", mean_reward=0.3),
            VerdictRow("cd" * 32, cheat, 1, "reject", hard=True, reason="toploc: exponent mismatches"),
        ],
    )

"""The demo scenario from start to end: does the policy learn, is the cheat caught, and what does it cost?

Real nodes on this machine, some minutes. `--quick` trains few steps and asks nothing of the reward.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.harness import Result
from protocol.errors import NodeError
from simnet import run_scenario
from simnet.runner import EXIT_INTERRUPTED

QUICK_STEPS = 6
_FIGURES = (
    "steps",
    "wall_s",
    "reward_last_tenth",
    "reward_gain",
    "accepted",
    "honest_rejected",
    "cheats",
    "cheats_evicted",
    "cheats_accepted",
    "trainer_wait_fraction",
)


def bench(*, quick: bool) -> Result:
    """Run the scenario in a directory that is removed afterwards, and take the figures from its report."""
    with tempfile.TemporaryDirectory(prefix="bench-demo-") as directory:
        out = Path(directory) / "out"
        code = run_scenario("demo", out, live=False, overrides=QUICK if quick else None)
        if code == EXIT_INTERRUPTED:
            raise NodeError("the demo was interrupted; there are no figures")
        return judge(msgspec.json.decode((out / "report.json").read_bytes()), quick=quick)


def judge(report: dict[str, Any], *, quick: bool) -> Result:
    """Figures of a report, and the goals of the demo."""
    result = Result({name: report[name] for name in _FIGURES if report[name] is not None})
    result.figures["rejected"] = sum(report["rejected"].values())
    result.figures["relay_bytes_out"] = sum(relay["bytes_out"] for relay in report["bytes_by_relay"].values())
    result.figures["weights_from_relays_only"] = float(bool(report["weights_from_relays_only"]))
    result.figures["finished"] = float(report["outcome"] == "finished")
    result.at_least("finished", 1)
    result.at_least("cheats_evicted", 1)
    result.at_most("cheats_accepted", 0)
    result.at_most("honest_rejected", 0)
    result.at_least("weights_from_relays_only", 1)
    if not quick:
        result.at_least("reward_last_tenth", 0.8)
    return result


QUICK: dict[str, Any] = {
    "run": {"overrides": {"batch": {"total_steps": QUICK_STEPS}}},
    "fault": [
        {"node": "slow-0", "action": "leave", "at_step": 2},
        {"node": "slow-0", "action": "join", "at_step": 4},
    ],
    "expect": {"reward_at_least": None, "steps_at_least": QUICK_STEPS},
    "until": {"timeout_s": 600.0},
}

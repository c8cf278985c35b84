"""Honest rollouts of the demo's policy on every engine setting, checked as validators do: none may be rejected.

float32 and bfloat16, 1, 8 and 64 answers at a time, 1 and 2 threads, generated token by token with a cache and checked
by one float32 pass. Shows how far from the limits of the demo's recipe they stay (1 is the limit). Each setting is also
one node to the test over many submissions, which may suspect none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bench.harness import Result
from node.calibrate import quantity
from node.run_create import model_directory
from node.validator.suspicion import SOFT_RATE
from protocol.records import Manifest, Tolerance
from protocol.sequential import Bets, is_unlikely, observe

DTYPES: Final = ("float32", "bfloat16")
BATCHES: Final = (1, 8, 64)
THREADS: Final = (1, 2)
ROLLOUTS: Final = 2048
"""Of each setting."""
QUICK_ROLLOUTS: Final = 64


def bench(*, quick: bool) -> Result:
    """Generate and check; every figure but the counts is the share of a limit that was used."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two threads on a busy machine must not spin for each other
    import torch

    before = torch.get_num_threads()
    try:
        result = _measure(QUICK_ROLLOUTS if quick else ROLLOUTS)
    finally:
        torch.set_num_threads(before)
    result.at_least("rollouts", 12 * QUICK_ROLLOUTS if quick else 10_000)
    result.at_most("rejected_submissions", 0)
    result.at_most("suspected_nodes", 0)
    return result


def _measure(rollouts: int) -> Result:
    from bench.validator_cost import demo_manifest

    policy = model_directory("sort-digits")
    manifest = demo_manifest(policy)
    result = Result({"rollouts": 0.0, "tokens": 0.0, "rejected_submissions": 0.0, "suspected_nodes": 0.0})
    for dtype in DTYPES:
        samples = [
            _sample(str(policy), manifest, dtype=dtype, batch=batch, threads=threads, rollouts=rollouts)
            for batch in BATCHES
            for threads in THREADS
        ]
        for sample in samples:
            result.figures["rollouts"] += sample["rollouts"]
            result.figures["tokens"] += sample["tokens"]
            result.figures["rejected_submissions"] += len(sample["rejected"])
            result.figures["suspected_nodes"] += _is_suspected(sample, manifest.tolerances[dtype])
        result.figures |= _shares(dtype, samples, manifest.tolerances[dtype])
    return result


def _sample(policy: str, manifest: Manifest, *, dtype: str, batch: int, threads: int, rollouts: int) -> dict[str, Any]:
    import torch

    from node.calibrate_compute import Calibrator

    torch.set_num_threads(threads)
    return Calibrator().measure(
        policy, msgspec.msgpack.encode(manifest), dtype, "cpu", batch, rollouts, first=10_000 * batch + 5000 * threads
    )


def _is_suspected(sample: Mapping[str, Any], tolerance: Tolerance) -> bool:
    margins, mantissas, shifts = zip(*sample["evidence"], strict=True)
    bets = (
        observe(Bets(), margins, bound=tolerance.honest_margin),
        observe(Bets(), mantissas, bound=tolerance.honest_mantissa),
        observe(Bets(), shifts, bound=tolerance.honest_logprob_shift),
    )
    return any(is_unlikely(bet, SOFT_RATE / len(bets)) for bet in bets)


def _shares(dtype: str, samples: list[dict[str, Any]], tolerance: Tolerance) -> dict[str, float]:
    """Of each limit: the largest share used, and the share that 99 in 100 stay under."""
    tokens = sum(sample["tokens"] for sample in samples)
    shares = {f"{dtype}_same_token": sum(sample["match"] * sample["tokens"] for sample in samples) / tokens}
    for name in tolerance.__struct_fields__:
        found = quantity(name, [value for sample in samples for value in sample["values"][name]], tolerance)
        shares[f"{dtype}_{name}"] = found.share
        if found.limit and not name.startswith("honest_"):
            shares[f"{dtype}_{name}_p99"] = found.p99 / found.limit
    return shares

"""Packing against padding, in tokens a CPU-second of forward and backward (section 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean
from typing import Final

from bench.packing import measure
from bench.report import Grid, Section, Statement
from bench.seeds import is_above, named, paired_ratio

SETTING: Final = (
    "`bench/packing.py`: forward and backward of the demo's policy, 256 answers of heavy-tailed length to prompts of 8 "
    "tokens, and 32 groups of 8 short answers to prompts of 40; micro-batches of 2048 places. Tokens of prompts and "
    "answers a CPU-second, each way the best of three rounds in turn with the others. A seed draws the lengths."
)
WORKLOADS: Final = {"heavy_tail": "heavy-tailed answers", "few_shot": "groups of short answers"}
WAYS: Final = {
    "padded": "padded, as they come",
    "padded_sorted": "padded, by length",
    "packed": "packed",
    "shared": "packed, prompts once",
}
CLAIMS: Final = (
    ("packing beats padding", "heavy_tail", "packed", "padded"),
    ("packing beats padding that is sorted by length", "heavy_tail", "packed", "padded_sorted"),
    ("computing a group's prompt once beats packing", "few_shot", "shared", "packed"),
)

Measured = dict[tuple[str, str, str], list[float]]
"""By workload, way, and tokens_per_cpu_s or padding: a figure a seed."""


def run(seeds: Sequence[int], *, quick: bool, report: Callable[[str], None]) -> Section:
    """Every layout of both workloads with every seed."""
    section = Section("packing", f"{SETTING} {named(seeds)}")
    found: Measured = {}
    for seed in seeds:
        figures = measure("demo", quick=quick, seed=seed).figures
        section.figures |= {f"{name}_seed_{seed}": value for name, value in figures.items()}
        for key in product(WORKLOADS, WAYS, ("tokens_per_cpu_s", "padding")):
            found.setdefault(key, []).append(figures["_".join(key)])
        report(f"seed {seed}: packed {figures['heavy_tail_packed_over_padded']:.1f} times padded")
    section.grids = [_grid(load, found) for load in WORKLOADS]
    if not quick:
        section.statements = [_statement(found, *claim) for claim in CLAIMS]
    return section


def _statement(found: Measured, claim: str, load: str, way: str, other: str) -> Statement:
    times = paired_ratio(found[load, way, "tokens_per_cpu_s"], found[load, other, "tokens_per_cpu_s"])
    return Statement(claim, is_above(times.low, times.high, 1.0), times.text())


def _grid(load: str, found: Measured) -> Grid:
    rows = [
        (
            name,
            f"{fmean(found[load, way, 'padding']):.0%}",
            f"{fmean(found[load, way, 'tokens_per_cpu_s']):,.0f}",
            paired_ratio(found[load, way, "tokens_per_cpu_s"], found[load, "padded", "tokens_per_cpu_s"]).text(),
        )
        for way, name in WAYS.items()
    ]
    return Grid(WORKLOADS[load], ("layout", "padding", "tokens a CPU-second", "against padding"), rows)

"""Which bytes of a checkpoint are bf16 weights: from safetensors headers that may say anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.patch import STEPS, Run
from protocol.tensor_runs import cut_runs, file_runs


def header(**tensors: tuple[str, int, int]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    entries |= {name: {"dtype": dtype, "shape": [], "data_offsets": [*at]} for name, (dtype, *at) in tensors.items()}
    return json.dumps(entries).encode()


def test_runs_follow_the_header_and_neighbours_are_one() -> None:
    text = header(b=("BF16", 10, 30), a=("BF16", 0, 10), c=("F32", 30, 70), d=("I64", 70, 86), e=("BOOL", 86, 90))
    start = 8 + len(text)
    assert file_runs(text, start + 90) == [Run(1, start), Run(STEPS, 30), Run(4, 40), Run(8, 16), Run(1, 4)]


def test_a_file_without_a_header_is_bytes() -> None:
    assert file_runs(b"", 300) == [Run(1, 300)]
    assert file_runs(b"", 0) == []


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "BF16"}}',
        b"\xff\xff",
        b"[" * 100_000,
        header(a=("BF16", 0, 1 << 70)),
        header(a=("BF16", -2, 10)),
        header(a=("BF16", 2, 10)),
        header(a=("BF16", 0, 10), b=("BF16", 8, 20)),
        header(a=("BF16", 10, 0)),
        header(a=("BF16", 0, 101)),
    ],
)
def test_a_header_that_is_not_in_order_makes_its_file_bytes(text: bytes) -> None:
    """Attack: overlaps, gaps, offsets outside of the file, nesting without end."""
    size = 8 + len(text) + 100
    assert file_runs(text, size) == [Run(1, size)]


def test_values_that_a_shard_border_splits_become_bytes() -> None:
    runs = [Run(1, 5), Run(STEPS, 20), Run(4, 12)]
    assert cut_runs(runs, range(8)) == [Run(1, 5), Run(STEPS, 2), Run(1, 1)]
    assert cut_runs(runs, range(8, 16)) == [Run(1, 1), Run(STEPS, 6), Run(1, 1)]
    assert cut_runs(runs, range(27, 29)) == [Run(1, 2)]
    assert cut_runs(runs, range(37, 50)) == []


@given(
    runs=st.lists(st.builds(Run, st.sampled_from([1, 2, 4, 8, STEPS]), st.integers(0, 40)), max_size=8),
    start=st.integers(0, 100),
    length=st.integers(1, 100),
)
def test_cut_runs_cover_their_part_in_whole_values(runs: list[Run], start: int, length: int) -> None:
    total = sum(run.length for run in runs)
    cut = cut_runs(runs, range(start, start + length))
    assert sum(run.length for run in cut) == max(0, min(start + length, total) - start)
    for run in cut:
        assert run.length > 0
        assert run.length % (2 if run.kind == STEPS else run.kind) == 0

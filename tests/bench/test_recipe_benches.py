"""The benchmarks of length rewards and filters run, and their figures are what they are called."""

import pytest

from bench.filters import KINDS
from bench.filters import bench as bench_filters
from bench.lengths import bench as bench_lengths


def test_lengths_are_measured_with_and_without_a_penalty():
    figures = bench_lengths(quick=True).figures
    for name in ("penalty", "control"):
        assert 1.0 < figures[f"{name}_tokens_off_first"] < 5.0
        assert 0.1 < figures[f"{name}_task_reward_first"] < 0.6


@pytest.mark.long
def test_filters_are_measured_each_alone_and_together():
    figures = bench_filters(quick=True).figures
    assert 10 < figures["pool_tasks"] < figures["pool_of"] == 100
    for kind, (_, online) in KINDS.items():
        assert 0.1 < figures[f"{kind}_pass_2"] < 0.7
        assert (figures[f"{kind}_rollouts"] > 256) == online

"""The benchmark of a node that has nothing to do."""

import pytest

from bench.idle import bench


@pytest.mark.long
def test_every_figure_is_measured_and_asked_of():
    result = bench(quick=True)
    assert result.figures.keys() == {goal.name for goal in result.goals}
    assert all(value > 0 for name, value in result.figures.items() if name != "idle_cpu_share")

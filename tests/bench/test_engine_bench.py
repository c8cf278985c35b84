"""The benchmark of engines runs, and says what it could not measure."""

import pytest

from bench.engine import bench
from protocol.errors import ModelError


def test_engines_are_measured_beside_transformers():
    result = bench(quick=True)
    assert result.figures["torch_different_tokens_per_cpu_s"] > 0
    assert result.figures["torch_groups_ratio_proved"] > 0
    assert result.figures["transformers_different_tokens_per_cpu_s"] > 0
    assert [goal.name for goal in result.goals] == ["torch_different_ratio"]


def test_an_unknown_model_is_named():
    with pytest.raises(ModelError, match="no 'gpt-9'"):
        bench(quick=True, model="gpt-9")

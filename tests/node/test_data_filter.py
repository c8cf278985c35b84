"""Choosing tasks by how often a policy solves them."""

import pytest
from turns_kit import RowAfterRow

from environments import registry
from environments.sort_digits import SortDigits
from node.data_filter import Plan, filter_tasks, keep_band
from node.data_filter_compute import Solver
from node.engines.torch_engine import TorchEngine
from protocol.errors import ConfigError, EnvironmentUnknown, ModelError
from protocol.pools import decode_pool
from protocol.seeds import candidate_seed
from trainer.recipe import ASSETS_DIR

POLICY = ASSETS_DIR / "sort-digits"


@pytest.fixture(scope="module")
def solver():
    solver = Solver(TorchEngine(max_batch=256))
    subject = {"model_dir": str(POLICY), "samples": 8, "temperature": 1.0, "max_new_tokens": 10, "seed": "test"}
    opened = solver.open({"environment": {"name": "sort-digits"}, **subject})
    assert opened["environment"] == SortDigits().digest
    return solver


def test_tasks_are_those_of_the_seed_and_differ_in_how_hard_they_are(solver):
    found = solver.solve(0, 64)["tasks"]
    assert [seed for seed, _ in found] == [candidate_seed(b"test", number) for number in range(64)]
    solved = [count for _, count in found]
    assert min(solved) == 0
    assert max(solved) >= 4
    assert 0.2 < sum(solved) / (64 * 8) < 0.45


def test_parts_may_be_looked_at_in_any_order(solver):
    assert solver.solve(8, 8)["tasks"] == solver.solve(0, 16)["tasks"][8:]


def test_the_band_is_kept_and_nothing_else(tmp_path):
    """The whole way, as the command line goes it: a process, progress, a pool file."""
    said = []
    plan = Plan(
        out=tmp_path / "pool.bin", prompts=200, environment="sort-digits", model="sort-digits", max_new_tokens=10
    )
    found = filter_tasks(plan, said.append)
    pool = decode_pool((tmp_path / "pool.bin").read_bytes())
    assert (pool.environment, pool.samples, len(pool)) == (SortDigits().digest, 8, found.kept)
    assert set(pool.solved) <= {1, 2, 3, 4}
    assert found.kept == sum(found.solved[1:5]) < found.tasks == sum(found.solved) == 200
    assert len({pool.seed(place) for place in range(len(pool))}) == len(pool)
    assert "200 of 200 tasks" in said[-1]
    assert "tasks/s" in said[-1]


@pytest.mark.parametrize("keep", ["", "1-4", "4..1", "0..9", "1..", "-1..4", "1..4..5", "१..४"])
def test_a_band_that_is_none_is_named(keep):
    with pytest.raises(ConfigError, match="is no band of how many of 8 answers"):
        keep_band(keep, samples=8)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"prompts": 0}, "--prompts 0 is out of bounds"),
        ({"samples": 0}, "--samples 0"),
        ({"samples": 256}, "--samples 256"),
        ({"environment": None}, "which environment and which model"),
        ({"model": None}, "which environment and which model"),
    ],
)
def test_what_cannot_be_filtered_is_named(tmp_path, changes, fault):
    fields = {"out": tmp_path / "pool.bin", "prompts": 8, "environment": "sort-digits", "model": "sort-digits"}
    with pytest.raises(ConfigError, match=fault):
        filter_tasks(Plan(**fields | changes), lambda line: None)


def test_unknown_names_are_refused_before_anything_is_started(tmp_path):
    with pytest.raises(EnvironmentUnknown, match="no environment is called 'nosuch'"):
        filter_tasks(Plan(out=tmp_path / "p", prompts=8, environment="nosuch", model="sort-digits"), print)
    with pytest.raises(ModelError, match="there is no model 'nosuch'"):
        filter_tasks(Plan(out=tmp_path / "p", prompts=8, environment="sort-digits", model="nosuch"), print)
    with pytest.raises(ConfigError, match="there is no directory"):
        filter_tasks(Plan(out=tmp_path / "a" / "p", prompts=8, environment="sort-digits", model="sort-digits"), print)


def test_answers_of_several_turns_are_played_to_their_end(monkeypatch):
    """And each task's answers have noise of their own, whatever other tasks are in the call."""
    monkeypatch.setattr(registry, "BUILT_IN", {**registry.BUILT_IN, "row-after-row": "turns_kit:RowAfterRow"})
    solver = Solver(TorchEngine(max_batch=64))
    subject = {"model_dir": str(POLICY), "samples": 4, "temperature": 1.0, "max_new_tokens": 10, "seed": "test"}
    solver.open({"environment": {"name": "row-after-row"}, **subject})
    played = solver.solve(0, 8)
    assert solver.solve(4, 4)["tasks"] == played["tasks"][4:]
    monkeypatch.setattr(RowAfterRow, "max_turns", 1)
    once = solver.solve(0, 8)
    assert played["tokens"] > 1.5 * once["tokens"]
    assert played["tasks"] != once["tasks"]

"""Cheats before a court in this process: some of each kind are caught by the check that is there for them."""

import pytest
import torch
import trio

from bench import zoo
from bench.harness import Result
from bench.zoo_trials import Finding, Plan, Zoo, tries_needed
from node.run_create import model_directory
from protocol.errors import ConfigError
from simnet.cheats import CHEATS
from trainer.recipe import load_recipe

CAUGHT_BY = {
    "int4-g32": {"judging: toploc", "judging: sampling", "judging: logprob"},  # whichever comes first of a rollout
    "other-seed": {"judging: sampling"},
    "other-prompt": {"screening: prompt"},
    "missing-proofs": {"screening: toploc"},
    "forged-reward": {"judging: reward"},
    "parquet-bomb": {"reader: schema"},
    "replayed-file": {"screening: prompt"},
    "copied-file": {"screening: prompt"},
    "ground-index": {"ledger: not-contiguous"},
    "two-nodes-one-key": {"ledger: duplicate-file", "ledger: not-contiguous"},
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    torch.set_num_threads(1)
    plan = Plan(seeds=1, history=2, honest=1, names=list(CAUGHT_BY))
    directory = tmp_path_factory.mktemp("zoo")
    return trio.run(Zoo(load_recipe("demo"), [model_directory("sort-digits")], plan, directory=directory).run)


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_cheat_is_caught_by_the_check_that_is_there_for_it(name, findings):
    finding = findings[0][name]
    assert finding.per_submission == 1
    assert finding.caught_by in CAUGHT_BY[name]


def test_the_honest_are_accepted(findings):
    assert {trial for finding in findings[1].values() for trial in finding.first if not trial.accepted} == set()


def test_single_rollouts_tell_too(findings):
    assert findings[0]["other-seed"].per_rollout == findings[0]["int4-g32"].per_rollout == 1
    assert findings[0]["int4-g32"].tokens_needed >= findings[0]["int4-g32"].rollouts_needed
    assert findings[0]["parquet-bomb"].per_rollout is None


def test_how_many_tries_are_needed():
    """A rate that was seen in few trials counts less than one that was seen in many."""
    assert tries_needed(10**6, 10**6) == 1
    assert tries_needed(5 * 10**5, 10**6) == 10
    assert tries_needed(30, 30) == 3
    assert tries_needed(1, 30) > tries_needed(15, 30) > tries_needed(29, 30)


def test_what_is_never_caught_is_never_enough():
    assert Finding(singles=[]).tokens_needed is None
    assert Finding(lasted=[None, None]).rollouts_needed is None


def test_goals_name_cheats_that_there_are():
    assert set(zoo.OF_THE_PROTOCOL) | set(zoo.OF_THE_MODEL) | set(zoo.GAPS) | set(zoo.PER_ROLLOUT) <= CHEATS.keys()


def test_tables_and_goals_come_of_findings(findings):
    result = Result(zoo.figures(findings[0]))
    zoo._ask_all(result, findings[0])
    assert {goal.name for goal in result.goals} >= {"protocol_submissions_least", "other_seed_rollouts"}
    assert zoo._table(findings[0], "zoo").row_count == len(CAUGHT_BY)


def test_another_model_is_a_matter_of_usage():
    with pytest.raises(ConfigError, match="no zoo"):
        zoo.bench(quick=True, model="gpt")

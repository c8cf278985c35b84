"""The paper's claims are judged by their figures: made-up runs that hold, fail or say nothing get that verdict."""

import json

import pytest

from bench import paper_asynchrony, paper_clipping, paper_filters
from bench.filters import Curve
from bench.harness import as_json
from bench.paper import PARTS, bench
from bench.paper_clipping import Runs
from protocol.errors import ConfigError

SCATTER = (-0.01, 0.0, 0.01)


def around(mean):
    return [mean + one for one in SCATTER]


def verdicts(statements):
    return [one.verdict for one in statements]


def asynchrony(**means):
    levels = {0: 0.85, 1: 0.85, 2: 0.845, 4: 0.84, 8: 0.8, 16: 0.7}
    levels |= {int(level.removeprefix("at_")): mean for level, mean in means.items()}
    return verdicts(
        paper_asynchrony.statements("way", {level: around(mean) for level, mean in levels.items()}, first=0.3)
    )


def test_levels_within_the_noise_are_as_good_and_do_not_break():
    assert asynchrony() == ["reproduced", "not reproduced"]


def test_a_level_far_below_is_told():
    assert asynchrony(at_2=0.7) == ["not reproduced", "not reproduced"]


def test_learning_breaks_where_less_than_half_is_learned():
    assert asynchrony(at_16=0.35) == ["reproduced", "reproduced"]
    assert asynchrony(at_16=0.57) == ["reproduced", "undecided"]


def test_clipping_is_judged_by_the_largest_gradient_loss_and_reward():
    wild = Runs(loss=[0.5, 0.4, 0.6], gradient=[30.0, 60.0, 45.0], passed=around(0.7))
    tame = Runs(loss=[0.1, 0.1, 0.12], gradient=[6.0, 7.0, 5.0], passed=around(0.7))
    assert verdicts(paper_clipping.statements(wild, tame)) == ["reproduced"] * 3
    assert verdicts(paper_clipping.statements(tame, wild))[:2] == ["not reproduced"] * 2


def test_a_quick_part_has_every_figure_and_judges_nothing():
    result = bench(quick=True, only="clipping")
    assert {
        f"clipping_{one}_{what}_seed_0" for one in paper_clipping.OBJECTIVES for what in ("loss", "gradient")
    } < set(result.figures)
    told = json.loads(as_json("paper", result))
    assert told["statements"] == []
    assert told["figures"]["clipping_cpu_s"] > 0


@pytest.mark.long
@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_runs(part):
    (section,) = bench(quick=True, only=part).sections
    assert section.name == part
    assert all(len(row) == len(grid.columns) for grid in section.grids for row in grid.rows)


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(ConfigError, match="no part 'weather'"):
        bench(quick=True, only="weather")


def test_what_the_offline_filter_saves_is_told_as_it_is_judged():
    curves = {
        "none": [Curve(rollouts=3200.0 + seed) for seed in range(3)],
        "online": [Curve(rollouts=7200.0 + seed) for seed in range(3)],
        "both": [Curve(rollouts=4500.0 + seed) for seed in range(3)],
    }
    told = paper_filters._costs(curves)
    assert told.verdict == "reproduced"
    assert told.evidence.startswith("+2700")

"""The arithmetic of `bench dht`: what a phase comes to, what is asked of it, and what is drawn from it."""

import math

import pytest

from bench.dht import LEAST_CPU_RATIO, SIZES, Phase, extrapolate, judge, note_lookups
from bench.harness import Result


def phase(*, good, bad=0, cpu_s=0.0, messages=0):
    made = Phase(cpu_s=cpu_s, messages=messages)
    for number in range(good + bad):
        made.note({"ok": number < good, "s": (number + 1) / 1000, **({} if number < good else {"error": "lost"})})
    return made


def result(*, puts, gets, ratio=LEAST_CPU_RATIO):
    made = Result({"lookup_cpu_ratio": ratio})
    for name in ("ours_10", "ours_10_dead"):
        note_lookups(made.figures, name, puts, gets)
    judge(made, [10])
    return made


def test_figures_of_each_kind():
    figures = {}
    note_lookups(figures, "x", phase(good=100, cpu_s=4.0, messages=800), phase(good=98, bad=2, cpu_s=1.0, messages=300))
    assert (figures["x_put_success"], figures["x_get_success"]) == (1.0, 0.98)
    assert (figures["x_put_cpu_ms"], figures["x_get_cpu_ms"]) == (40.0, 10.0)
    assert figures["x_lookup_cpu_ms"] == 25.0
    assert (figures["x_put_messages"], figures["x_get_messages"]) == (8.0, 3.0)
    assert (figures["x_get_p50_ms"], figures["x_get_p99_ms"]) == (51.0, 100.0)


def test_gets_that_fail_are_not_made_up_for_by_puts():
    fine, poor = phase(good=100), phase(good=98, bad=2)  # together they are 99 %
    assert result(puts=fine, gets=fine).met
    for made in (result(puts=fine, gets=poor), result(puts=poor, gets=fine)):
        assert [goal.met for goal in made.goals].count(False) == 2
    assert result(puts=fine, gets=phase(good=99, bad=1)).met
    assert not result(puts=fine, gets=fine, ratio=2.9).met


def test_lookups_that_never_ran_are_no_success():
    with pytest.raises(IndexError):
        result(puts=Phase(), gets=Phase())
    made = Result()
    judge(made, [10])
    assert not any(goal.met for goal in made.goals)


def test_growth_is_drawn_on_against_the_logarithm():
    figures = {f"ours_{size}_{what}": float(size) for size in SIZES for what in ("get_messages", "get_p50_ms", "known")}
    figures |= {f"ours_{size}_{what}": 7.0 for size in SIZES for what in ("get_cpu_ms", "join_cpu_ms")}
    for size in SIZES:
        figures[f"ours_{size}_known"] = 3 + 2 * math.log2(size)
    extrapolate(figures)
    assert figures["implied_10000_known"] == pytest.approx(3 + 2 * math.log2(10_000))
    assert figures["implied_10000_get_cpu_ms"] == pytest.approx(7)
    assert figures["implied_10000_get_messages"] > 60

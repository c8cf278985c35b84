from bench import honest, validator_cost


def test_the_quick_honest_bench_rejects_nobody(monkeypatch):
    monkeypatch.setattr(honest, "QUICK_ROLLOUTS", 32)
    monkeypatch.setattr(honest, "THREADS", (1, 1))
    result = honest.bench(quick=True)
    assert result.met
    assert result.figures["rollouts"] == 12 * 32
    assert result.figures["bfloat16_honest_mantissa"] > result.figures["float32_honest_mantissa"]


def test_the_quick_cost_bench_checks_what_it_generates():
    result = validator_cost.bench(quick=True)
    for shape in ("demo", "large_1", "large_4", "large_8"):
        parts = [result.figures[f"{shape}_{part}_ms"] for part in ("generate", "cheap", "full")]
        assert min(parts) > 0
        assert result.figures[f"{shape}_steady_ratio"] < result.figures[f"{shape}_full_ratio"]
    assert {goal.name for goal in result.goals} == {
        f"{shape}_steady_ratio" for shape in ("demo", "large_1", "large_4", "large_8")
    }


def test_the_steady_ratio_is_of_the_floor_and_hides_no_cheap_check():
    figures = {"x_generate_ms": 100.0, "x_cheap_ms": 5.0, "x_full_ms": 40.0}
    validator_cost._add_ratios(figures, "x", floor=0.25)
    assert (figures["x_full_ratio"], figures["x_steady_ratio"]) == (0.45, 0.15)

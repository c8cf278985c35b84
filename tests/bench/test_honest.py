from bench import honest, validator_cost


def test_the_quick_honest_bench_rejects_nobody(monkeypatch):
    monkeypatch.setattr(honest, "QUICK_ROLLOUTS", 32)
    monkeypatch.setattr(honest, "THREADS", (1, 1))
    result = honest.bench(quick=True)
    assert result.met
    assert result.figures["rollouts"] == 12 * 32
    assert result.figures["bfloat16_honest_mantissa"] > result.figures["float32_honest_mantissa"]


def test_the_quick_cost_bench_checks_what_it_generates():
    figures = validator_cost.bench(quick=True).figures
    assert figures["demo_check_ms"] > 0
    assert {"large_1_ratio", "large_4_ratio", "large_8_ratio"} <= figures.keys()

import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from bench import demo, wire
from bench.__main__ import main
from bench.harness import Result, as_json, benchmark_names, load_benchmark, rate
from protocol.errors import ConfigError, SignatureError
from protocol.identity import Identity
from simnet.scenario import load_scenario


def test_goals_are_met_or_not_and_a_missing_figure_never_is():
    result = Result({"fast": 10.0, "slow": 3.0})
    result.at_least("fast", 10)
    result.at_most("slow", 2)
    result.at_least("missing", 0)
    assert [goal.met for goal in result.goals] == [True, False, False]
    assert not result.met
    last = json.loads(as_json("x", result))
    assert last["goals"][2] == {"name": "missing", "goal": "≥ 0", "value": None, "met": False}


def test_benchmarks_are_found_with_their_descriptions_and_without_importing_them():
    code = "import sys; from bench.harness import benchmark_names as n; n(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert {"wire", "demo"} <= benchmark_names().keys()
    assert all(benchmark_names().values())


def test_an_unknown_benchmark_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        load_benchmark("wyre")
    assert "wire" in caught.value.hint
    assert main(["wyre"]) == 2


def test_without_a_name_they_are_listed(capsys):
    assert main([]) == 0
    assert "wire" in capsys.readouterr().out


def test_wire_prints_a_table_and_one_line_of_json(capsys):
    main(["wire", "--quick"])
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])["figures"]
    assert figures["envelope_bytes"] < figures["json_bytes"]
    assert figures["open_ratio"] == pytest.approx(figures["opened_per_s"] / figures["json_opened_per_s"])


def test_the_json_baseline_checks_what_it_opens():
    """Attack: a field is changed after signing."""
    data = wire.seal_json(wire._submission(), Identity.from_phrase("alice"))
    assert wire.open_json(data) == wire._submission()
    with pytest.raises(SignatureError):
        wire.open_json(data.replace(b'"index":7', b'"index":8'))


def test_a_rate_counts_what_was_done():
    calls = []
    assert rate(lambda: calls.append(1), seconds=0.01) > 0
    assert len(calls) >= 2


def report(**changes) -> dict:
    figures = dict.fromkeys(demo._FIGURES, 0)
    relays = {"relay-0": {"bytes_in": 1, "bytes_out": 5}}
    found = {"rejected": {"x": 3}, "bytes_by_relay": relays, "weights_from_relays_only": True, "outcome": "finished"}
    return {**figures, **found, "cheats_evicted": 1, "reward_last_tenth": 0.85, **changes}


def test_the_demos_goals_are_judged_from_its_report():
    assert demo.judge(report(), quick=False).met
    assert demo.judge(report(), quick=False).figures["relay_bytes_out"] == 5
    assert not demo.judge(report(reward_last_tenth=0.7), quick=False).met
    assert demo.judge(report(reward_last_tenth=0.7), quick=True).met
    assert not demo.judge(report(reward_last_tenth=None), quick=False).met
    assert not demo.judge(report(cheats_evicted=0), quick=True).met


def test_the_quick_demo_is_a_sound_scenario():
    scenario = load_scenario("demo", demo.QUICK)
    assert scenario.run.overrides == {"batch": {"total_steps": demo.QUICK_STEPS}}
    assert scenario.expect.reward_at_least is None


@pytest.mark.parametrize("seeds", ["0", "-2", "many"])
def test_so_few_seeds_are_refused(seeds, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["paper", "--seeds", seeds])
    assert caught.value.code == 2
    assert "--seeds" in capsys.readouterr().err


def test_a_benchmark_that_is_ended_puts_its_directory_away(monkeypatch, tmp_path):
    """SIGTERM, as `timeout` and service managers send it."""
    before = signal.getsignal(signal.SIGTERM)

    def ended(*, quick):
        with tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("it was not ended")

    monkeypatch.setattr("bench.__main__.load_benchmark", lambda *_, **__: ended)
    with pytest.raises(SystemExit) as left:
        main(["wire"])
    assert left.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_short_ledgers_say_nothing_of_a_million_entries(monkeypatch):
    from bench import audit

    monkeypatch.setattr(audit, "QUICK_LENGTHS", (20, 40))
    monkeypatch.setattr(audit, "_audited", lambda directory, processes: audit._Measured(*audit._audit(directory, 0)))
    monkeypatch.setattr(audit, "default_processes", lambda _: 0)
    figures = audit.bench(quick=True).figures
    assert figures["entries"] == 40
    assert not [name for name in figures if name.startswith("million") or "an_entry" in name]

import json
import os
import threading

import pytest
from oracle_world import make_evidence
from typer.testing import CliRunner

from cli import app
from protocol.errors import ConfigError
from simnet.compare import compare_reports, load_report, write_comparison
from simnet.gather import as_json
from simnet.report import build_report

HOSTILE = "</td><script>alert(1)</script>\x1b[31m"


@pytest.fixture
def evidence():
    return make_evidence()


@pytest.fixture
def two(tmp_path, evidence):
    """A run and a later one of the same scenario that was faster, waited longer, and lost an oracle."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = build_report(evidence.recording, evidence)
    (tmp_path / "a" / "report.json").write_bytes(as_json(first))
    evidence.recording.left_behind = ["relay-0: pid 7"]
    evidence.recording.trainer.wait_s *= 2
    for step in evidence.books.steps:
        step.trained_ms -= 4000 * step.step
    (tmp_path / "b" / "report.json").write_bytes(as_json(build_report(evidence.recording, evidence)))
    return tmp_path / "a", tmp_path / "b" / "report.json"


def row(comparison, name):
    (found,) = [one for one in comparison.rows if one.name == name]
    return found


def test_a_report_is_read_as_it_was_written(tmp_path, evidence):
    report = build_report(evidence.recording, evidence)
    (tmp_path / "report.json").write_bytes(as_json(report))
    assert load_report(tmp_path / "report.json") == report


def test_figures_are_laid_side_by_side_and_judged_by_what_is_better(two):
    comparison = compare_reports(*two)
    assert comparison.same_scenario
    steps = row(comparison, "steps a minute")
    assert (steps.a, steps.b, steps.change, steps.judged) == ("6.00", "10.00", "+67%", "better")
    waits = row(comparison, "trainer waits, of waiting and training")
    assert (waits.a, waits.b, waits.judged) == ("30.0%", "46.2%", "worse")
    left = row(comparison, "no process left behind")
    assert (left.a, left.b, left.judged) == ("passed", "failed", "worse")
    passed = row(comparison, "passed")
    assert (passed.a, passed.b, passed.judged) == ("yes", "no", "worse")
    assert row(comparison, "judged → trained, p50").judged == "better"
    assert row(comparison, "accepted").change == "="


def test_a_small_change_is_nobodys_gain(two, tmp_path):
    table = json.loads((two[0] / "report.json").read_text())
    table["wall_s"] *= 1.03
    two[1].write_text(json.dumps(table))
    assert row(compare_reports(*two), "time for each step").judged == ""


def changed(two, **fields):
    """The second report is the first one, but for these."""
    table = json.loads((two[0] / "report.json").read_text())
    two[1].write_text(json.dumps(table | fields))
    return compare_reports(*two)


def test_a_run_that_was_cut_short_is_not_better_for_having_taken_less(two):
    comparison = changed(two, wall_s=40.0, steps=2)  # of 100 s and 20
    assert [row(comparison, name).judged for name in ("time", "CPU time", "relays gave out")] == ["", "", ""]
    assert row(comparison, "time for each step").judged == "worse"
    assert row(changed(two, wall_s=40.0), "time for each step").judged == "better"


@pytest.mark.parametrize(
    ("first", "second", "judged"),
    [
        ("failed", "passed", "better"),
        ("failed", "could not tell", ""),
        ("passed", "could not tell", ""),
        ("could not tell", "failed", "worse"),
        ("passed", "failed", "worse"),
    ],
)
def test_what_nobody_can_tell_any_more_is_no_gain(two, first, second, judged):
    table = json.loads((two[0] / "report.json").read_text())
    for outcome, path in ((first, two[0] / "report.json"), (second, two[1])):
        table["oracles"][0]["outcome"] = outcome
        path.write_text(json.dumps(table))
    assert row(compare_reports(*two), table["oracles"][0]["name"]).judged == judged


def test_what_only_one_of_them_has_is_shown_without_a_change(two):
    table = json.loads((two[0] / "report.json").read_text())
    table["hops"], table["bytes_by_relay"] = [], {"relay-9": {"bytes_in": 1, "bytes_out": 2}}
    two[1].write_text(json.dumps(table))
    comparison = compare_reports(*two)
    assert (row(comparison, "made → trained, p50").b, row(comparison, "made → trained, p50").change) == ("–", "")
    assert (row(comparison, "relay-9 gave out").a, row(comparison, "relay-9 gave out").b) == ("–", "2 B")


def test_the_page_is_whole_and_keeps_hostile_text_as_text(two, tmp_path):
    """Attack: a report that was sent by somebody else holds markup and control characters."""
    table = json.loads((two[0] / "report.json").read_text())
    table["title"] = table["scenario"] = table["run"] = table["hops"][0]["name"] = table["oracles"][0]["name"] = HOSTILE
    two[1].write_text(json.dumps(table))
    out = tmp_path / "compare.html"
    write_comparison(compare_reports(*two), out)
    page = out.read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert "two scenarios" in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page


def test_the_command_prints_a_table_and_writes_the_page(two, tmp_path):
    out = tmp_path / "compare.html"
    done = CliRunner().invoke(app, ["simnet", "compare", str(two[0]), str(two[1]), "--out", str(out)])
    assert done.exit_code == 0, done.output
    for text in ("steps a minute", "6.00", "10.00", "+67%", "no process left", "failed", str(two[1])):
        assert text in done.output
    assert "Mean reward by step" in out.read_text()


def test_the_command_prints_json(two):
    done = CliRunner().invoke(app, ["simnet", "compare", str(two[0]), str(two[1]), "--json"])
    found = json.loads(done.output)
    assert found["same_scenario"] is True
    assert [one["change"] for one in found["rows"] if one["name"] == "steps a minute"] == ["+67%"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "format 1"),
        ('{"format": 99}', "format 99"),
        ('{"format": 2}', "not a simulation's report"),
        ("[" * 10_000, "not a simulation's report"),
        ("\xff", "not a simulation's report"),
    ],
)
def test_a_file_that_is_no_report_is_said_to_be_none(tmp_path, text, said):
    (tmp_path / "report.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=said):
        load_report(tmp_path / "report.json")


def test_a_report_that_is_not_there_is_told_with_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_report(tmp_path / "nowhere.json")
    assert "report.json" in caught.value.hint


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "report.json")
    writer = os.fdopen(os.open(tmp_path / "report.json", os.O_RDWR), "wb")
    patience = threading.Timer(5.0, writer.close)  # else whoever does wait would do so for ever
    patience.start()
    try:
        with pytest.raises(ConfigError, match="no file that can be read as a report"):
            load_report(tmp_path / "report.json")
    finally:
        patience.cancel()
        patience.join()
        writer.close()


def test_reports_of_other_kinds_of_values_are_refused(two):
    table = json.loads((two[0] / "report.json").read_text())
    table["reward"] = "high"
    two[1].write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="reward"):
        compare_reports(*two)


def with_cpu_s(table, cpu_s):
    return {"nodes": [node | {"cpu_s": cpu_s} for node in table["nodes"]]}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (lambda t: {"bytes_by_relay": {"r": {"bytes_in": 1, "bytes_out": 10**400}}}, "bytes_by_relay.r.bytes_out"),
        (lambda t: with_cpu_s(t, 1e308), "nodes.cpu_s"),
        (lambda t: with_cpu_s(t, "1e308"), "nodes.cpu_s"),
        (lambda t: {"wall_s": -1e300}, "wall_s"),
    ],
)
def test_figures_beyond_all_bounds_are_refused_by_name(two, fields, where):
    """Attack: a report of somebody else holds numbers whose sums, or whose texts, overflow."""
    table = json.loads((two[0] / "report.json").read_text())
    two[1].write_text(json.dumps(table | fields(table)))
    with pytest.raises(ConfigError, match=f"not a simulation's report: {where} is more than"):
        compare_reports(*two)


def test_the_largest_figures_that_are_taken_can_be_shown(two, tmp_path):
    table = json.loads((two[0] / "report.json").read_text())
    huge = {"r": {"bytes_in": 2**53, "bytes_out": 2**53}}
    comparison = changed(two, bytes_by_relay=huge, wall_s=2.0**53, **with_cpu_s(table, 2.0**53))
    assert row(comparison, "relays gave out").b.endswith(" TB")
    write_comparison(comparison, tmp_path / "compare.html")


def test_a_change_of_a_twentieth_is_somebodys_gain(two):
    table = json.loads((two[0] / "report.json").read_text())
    assert row(changed(two, wall_s=table["wall_s"] * 1.06), "time for each step").judged == "worse"
    assert row(changed(two, wall_s=table["wall_s"] * 0.94), "time for each step").judged == "better"

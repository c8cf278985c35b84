"""The page keeps the rules of Prometheus' text format, whatever is put into it."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exposition import Family, Sample, render
from node.metrics import CATALOGUE, EVERY, names_of, status_metrics
from node.status import StatusBoard

LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'(?:\{(?P<labels>[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"(?:,[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*")*)\})?'
    r" (?P<value>NaN|[+-]Inf|-?[0-9.]+(?:e[+-]?[0-9]+)?)"
)
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')


def read(text):
    """Parse a page as strictly as the format's description: {(name, labels): value}, and the type of each name."""
    values, types = {}, {}
    assert text == "" or text.endswith("\n")
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            assert re.fullmatch(r"# HELP [a-zA-Z_:][a-zA-Z0-9_:]* (?:[^\\\n]|\\[\\n])*", line)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, "one TYPE a name, in front of its samples"
            assert kind in ("counter", "gauge")
            types[name] = kind
        else:
            match = LINE.fullmatch(line)
            assert match, line
            assert match["name"] in types
            labels = tuple((n, unescape(v)) for n, v in LABEL.findall(match["labels"] or ""))
            assert (match["name"], labels) not in values
            values[match["name"], labels] = float(match["value"].replace("Inf", "inf"))
    return values, types


def unescape(text):
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


@given(
    st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**60), 2**60),
    st.text(max_size=40),
    st.text(max_size=40).filter(lambda text: "\r" not in text),
)
def test_every_value_and_text_survives(value, label, text):
    values, _ = read(render([Family("intellect_x", text.replace("\n", " "), [Sample(value, {"who": label})])]))
    ((name, labels), found), *_ = values.items()
    assert (name, labels) == ("intellect_x", (("who", label),))
    assert found == pytest.approx(value) or (math.isnan(found) and math.isnan(value))


def test_a_line_of_help_stays_one_line():
    assert "# HELP intellect_x a\\nb\\\\c\n" in render([Family("intellect_x", "a\nb\\c", [Sample(1)])])


@pytest.mark.parametrize(
    "family",
    [
        Family("no name", "", [Sample(1)]),
        Family("1x", "", [Sample(1)]),
        Family("intellect_x", "", [Sample(1, {"__own": "a"})]),
        Family("intellect_x", "", [Sample(1, {"with space": "a"})]),
        Family("intellect_x", "", [Sample(1), Sample(2)]),
        Family("intellect_x", "", [Sample(1)], "counter"),
        Family("intellect_x_total", "", [Sample(1)]),
    ],
)
def test_what_the_format_forbids_is_refused(family):
    with pytest.raises(ValueError, match=r"name|twice|same labels"):
        render([family])


def test_a_metric_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        render([Family("intellect_x", "", [Sample(1)]), Family("intellect_x", "", [Sample(2, {"a": "b"})])])


def test_a_trainers_page():
    board = StatusBoard(role="trainer", peer_id="peer", run="run")
    board.update(step=3, accepted=5, rejected={"toploc: x": 2, "late": 1})
    scores = [{"k": 1, "value": 0.5, "low": 0.4, "high": 0.6}, {"k": 4, "value": 0.9, "low": 0.8, "high": 0.95}]
    board.details(
        metrics=[{"step": 0, "reward": 0.1}, {"step": 1, "reward": 0.25, "kl": 0.0, "unheard_of": 1.0}],
        evaluations=[{"step": 1, "reward": 0.4, "pass_at": scores}],
        steps_trained=2,
        rewards=[[0, 0.1], [1, 0.25]],
        wait_s=1.5,
        train_s=3.0,
    )
    values, types = read(status_metrics(board.snapshot()))
    assert values["intellect_trainer_reward", ()] == 0.25
    assert values["intellect_trainer_kl", ()] == 0.0
    assert values["intellect_rejected_total", (("check", "toploc"),)] == 2
    assert values["intellect_evaluation_pass_low", (("k", "4"),)] == 0.8
    assert types["intellect_trainer_steps_total"] == "counter"
    assert not any("unheard_of" in name for name, _ in values)


@pytest.mark.parametrize("role", ["inference", "relay", "validator", "trainer"])
def test_every_roles_page_is_well_formed_before_anything_happened(role):
    values, _ = read(status_metrics(StatusBoard(role=role, peer_id="p", run="r").snapshot()))
    assert values["intellect_accepted_total", ()] == 0


def test_the_table_is_sound():
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE:
        assert metric.help.strip().endswith(tuple("abcdefghijklmnopqrstuvwxyz0)")), f"{metric.name}: no full stop"
        assert set(metric.roles) <= set(EVERY)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert "intellect_stored_file_bytes" in names_of("relay")
    assert "intellect_stored_file_bytes" not in names_of("inference")


def test_a_page_has_the_labels_that_the_table_says():
    board = StatusBoard(role="trainer", peer_id="peer", run="run")
    board.details(contributors=[{"standing": "active"}, {"standing": "active"}, {"standing": "evicted"}])
    values, _ = read(status_metrics(board.snapshot()))
    labels = {metric.name: set(metric.labels) for metric in CATALOGUE}
    assert all({label for label, _ in pairs} == labels[name] for name, pairs in values)
    assert values["intellect_trainer_contributors", (("standing", "active"),)] == 2
    assert sum(value for (name, _), value in values.items() if name == "intellect_state") == 1


def test_reasons_that_nobody_knows_are_one_series():
    """Attack: a relay refuses with a new code each time, so that whoever scrapes must keep a series for each."""
    board = StatusBoard(role="inference", peer_id="peer", run="run")
    board.update(rejected={f"code-{number}": 1 for number in range(500)} | {"toploc": 2, "stale-step": 3})
    values, _ = read(status_metrics(board.snapshot()))
    found = {
        dict(pairs)["check"]: value for (name, pairs), value in values.items() if name == "intellect_rejected_total"
    }
    assert found == {"other": 500, "toploc": 2, "stale-step": 3}


def test_details_that_are_not_what_they_should_be_cost_their_metric_alone():
    board = StatusBoard(role="relay", peer_id="peer", run="run")
    board.details(file_bytes="many", checkpoints=7, discovery=[1], dht_peers=3)
    values, _ = read(status_metrics(board.snapshot()))
    assert values["intellect_dht_peers", ()] == 3
    assert ("intellect_stored_file_bytes", ()) not in values

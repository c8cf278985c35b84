"""Calibration: what is measured on this machine, against a run's limits, and what it advises."""

import json

import msgspec
import numpy as np
import pytest
from factories import make_tolerance
from rich.console import Console
from submission_kit import BFLOAT16, FLOAT32, POLICY, make_manifest

from environments import registry
from node.calibrate import FILE, LABELS, Plan, Quantity, calibrate, judge, plot, quantity, show
from node.calibrate_compute import Calibrator
from protocol.errors import ConfigError, DataDirError
from protocol.records import Tolerance


def measure(dtype, *, rollouts=20, batch=8, manifest=None, engine="torch"):
    manifest = msgspec.msgpack.encode(manifest or make_manifest(max_new_tokens=40))
    return Calibrator().measure(str(POLICY), manifest, dtype, "cpu", batch, rollouts, engine=engine)


def test_every_limit_is_measured():
    assert set(LABELS) == set(Tolerance.__struct_fields__)
    found = measure("bfloat16")
    assert set(found["values"]) == set(LABELS)
    assert found["rollouts"] == 20
    assert len(found["evidence"]) == 5  # prompts
    assert len(found["values"]["max_mean_margin"]) == 2
    assert 0.9 < found["match"] <= 1
    assert not found["rejected"]
    assert sum(found["values"]["honest_mantissa"]) > 0


def test_batches_of_one_and_of_many_measure_the_same_answers():
    alone, together = (measure("float32", batch=batch, rollouts=8) for batch in (1, 8))
    assert alone["tokens"] == together["tokens"]
    assert max(alone["values"]["max_logprob_error"]) < 1e-4


def test_another_engine_is_measured_against_the_validators_own():
    found = measure("float32", rollouts=4, engine="transformers")
    assert found["engine"].startswith("transformers")
    assert not found["rejected"]
    with pytest.raises(ConfigError, match="no engine 'vlm'"):
        measure("float32", engine="vlm")


def test_what_validators_would_reject_is_told():
    manifest = msgspec.structs.replace(make_manifest(), tolerances={"bfloat16": FLOAT32})
    assert all(reason.startswith("toploc: ") for reason in measure("bfloat16", manifest=manifest)["rejected"])
    assert measure("float32", manifest=manifest)["rejected"] == ["dtype: not listed"] * 2


def made(name, *, used, tolerance=BFLOAT16):
    limit = getattr(tolerance, name)
    return quantity(name, [0.0, used * limit], tolerance)


@pytest.mark.parametrize(
    ("used", "outcome", "advice"),
    [
        ({}, "safe", "start the node with --dtype bfloat16"),
        ({"max_margin": 0.4}, "safe", "start the node"),
        ({"max_margin": 0.6}, "tight", "token margin near the limit"),
        ({"max_mantissa_mean": 1.5}, "tight", "chunk mantissas"),  # a stray value, which no check rejected
        ({"honest_mantissa": 1.6}, "safe", "start"),  # its mean is 0.8 of the bound
        ({"honest_mantissa": 1.9}, "tight", "long-run mantissa"),
        ({"honest_mantissa": 2.2}, "would be rejected", "history: long-run mantissa"),
    ],
)
def test_outcomes_follow_from_the_shares_of_limits(used, outcome, advice):
    quantities = [made(name, used=used.get(name, 0.0)) for name in LABELS]
    found = judge(quantities, [], dtype="bfloat16", listed=["bfloat16", "float32"])
    assert found[0] == outcome
    assert advice in found[1]


def test_rejections_and_unlisted_formats_say_what_to_do():
    quantities = [made(name, used=0.0) for name in LABELS]
    outcome, advice = judge(quantities, ["toploc: 3 of 4"], dtype="bfloat16", listed=["bfloat16", "float32"])
    assert outcome == "would be rejected"
    assert "toploc: 3 of 4: calibrate again with --dtype float32" in advice
    outcome, advice = judge(quantities, [], dtype="bfloat16", listed=["float32"])
    assert (outcome, "--dtype float32" in advice) == ("would be rejected", True)


def test_a_limit_of_nothing_is_kept_or_not():
    tolerance = make_tolerance(max_mantissa_median=0.0)
    assert quantity("max_mantissa_median", [0.0, 0.0], tolerance).share == 0
    assert quantity("max_mantissa_median", [0.0, 1.0], tolerance).share == float("inf")


def test_histograms_count_what_lies_on_and_beyond_the_limit():
    tolerance = make_tolerance(max_margin=1.0)
    assert quantity("max_margin", [0.0, 0.05, 0.55, 1.0, 1.1, 50.0], tolerance).histogram == [
        2,
        *[0] * 4,
        1,
        *[0] * 3,
        1,
        2,
    ]
    unlimited = quantity("max_margin", [0.0, 3.0], None)
    assert (unlimited.limit, sum(unlimited.histogram)) == (None, 2)


def test_a_single_value_shows_in_the_plot():
    shown = plot([10_000, 0, 1, 0])
    assert (shown[0], shown[1], shown[3:]) == ("█", " ", "│ ")
    assert shown[2] in "▁▂"
    assert plot([0, 0]) == " │ "


def test_calibration_is_stored_and_shown(tmp_path):
    said = []
    plan = Plan(data_dir=tmp_path / "data", recipe="demo", model=POLICY, dtype="bfloat16", rollouts=24)
    found = calibrate(plan, said.append)
    assert found.outcome in ("too few to say", "tight")
    assert found.answers == 24
    assert [sample.batch for sample in found.samples] == [1, 8, 64]
    assert len(said) == 3
    stored = json.loads((tmp_path / "data" / FILE).read_bytes())
    assert msgspec.convert(stored, type(found)) == found
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 -- closed by the console's end
    show(found, console)
    text = console.export_text()
    console.file.close()
    assert found.outcome in text
    assert "rollout mantissas" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_what_cannot_be_calibrated_is_named(tmp_path):
    with pytest.raises(DataDirError, match="knows no run"):
        calibrate(Plan(data_dir=tmp_path), print)
    with pytest.raises(ConfigError, match="too few"):
        calibrate(Plan(data_dir=tmp_path, recipe="demo", rollouts=1), print)


def test_quantities_survive_being_stored():
    found = quantity("max_margin", np.linspace(0, 1, 50).tolist(), make_tolerance())
    assert msgspec.json.decode(msgspec.json.encode(found), type=Quantity) == found


def test_answers_of_several_turns_are_measured_turn_by_turn(monkeypatch):
    """What a validator will check is what is measured: later turns too, with their own noise and proofs."""
    monkeypatch.setattr(registry, "BUILT_IN", {**registry.BUILT_IN, "row-after-row": "turns_kit:RowAfterRow"})
    manifest = make_manifest(max_new_tokens=10)
    manifest = msgspec.structs.replace(
        manifest, environment=registry.specify(registry.get_environment("row-after-row"))
    )
    found = measure("float32", rollouts=8, manifest=manifest)
    assert found["rollouts"] > 8, "turns count one by one"
    assert found["match"] == 1.0
    assert not found["rejected"]

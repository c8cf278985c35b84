"""How large a batch this machine takes: measured once, remembered, lowered when memory ran out."""

import json

import pytest
import torch
from submission_kit import POLICY

from node.engines import capacity, torch_engine
from node.engines.base import GenerationRequest, SamplingParams
from node.engines.capacity import Fitted, fitted_from_environment, measure
from node.engines.torch_engine import TorchEngine
from protocol.errors import ModelError

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=4, stop_ids=(), top_k_proof=0)
MIB = 1 << 20


@pytest.fixture
def engine():
    engine = TorchEngine()
    engine.load(POLICY)
    return engine


@pytest.fixture
def speeds(monkeypatch):
    """Instead of a clock: tokens a second by batch."""
    asked = []

    def set_speeds(table):
        def speed(_, batch):
            if batch not in asked[-1:]:
                asked.append(batch)
            return table.get(batch, 1.0)

        monkeypatch.setattr(capacity, "_speed", speed)
        return asked

    return set_speeds


def stored(path):
    return json.loads(path.read_text())


def test_batches_grow_while_they_bring_something(engine, speeds):
    asked = speeds({8: 100.0, 32: 300.0, 128: 310.0})
    assert measure(engine).batch == 32
    assert asked == [1, 8, 32, 128]
    assert engine.max_batch == 64


def test_a_real_measurement(engine, monkeypatch):
    monkeypatch.setattr(capacity, "BATCHES", (2, 4))
    found = measure(engine)
    assert found.batch in (2, 4)
    assert found.tokens_per_s > 0
    assert found.resident_bytes > 10 * MIB


def test_what_was_measured_is_remembered(engine, speeds, tmp_path):
    asked = speeds({8: 100.0, 32: 50.0})
    path = tmp_path / "capacity.json"
    Fitted(engine, path, setting="threads=1").loaded(POLICY)
    assert engine.max_batch == 8
    (key,) = stored(path)
    assert key.startswith("torch ")
    assert key.endswith(" cpu float32 threads=1")
    measured = len(asked)
    engine.max_batch = 64
    Fitted(engine, path, setting="threads=1").loaded(POLICY)
    assert engine.max_batch == 8
    assert len(asked) == measured
    Fitted(engine, path, setting="threads=2").loaded(POLICY)
    assert len(asked) > measured
    assert len(stored(path)) == 2


def test_running_out_of_memory_is_remembered(engine, speeds, tmp_path):
    speeds({8: 100.0, 32: 300.0})
    path = tmp_path / "capacity.json"
    fitted = Fitted(engine, path)
    fitted.loaded(POLICY)
    with fitted.watched():
        engine.max_batch = 16
    (found,) = stored(path).values()
    assert (found["batch"], found["out_of_memory"]) == (16, 1)
    Fitted(engine, path).loaded(POLICY, ran_out=True)
    (found,) = stored(path).values()
    assert (found["batch"], found["out_of_memory"]) == (8, 2)
    assert engine.max_batch == 8


def test_dying_while_it_is_measured_does_not_repeat_itself(engine, speeds, tmp_path):
    asked = speeds({})
    Fitted(engine, tmp_path / "capacity.json").loaded(POLICY, ran_out=True)
    assert engine.max_batch == capacity.BATCHES[0] // 2
    assert asked == []


def test_running_out_while_it_is_measured_takes_what_fitted(engine, monkeypatch):
    def speed(measured, batch):
        measured.max_batch = min(batch, 20)
        return float(measured.max_batch)

    monkeypatch.setattr(capacity, "_speed", speed)
    assert measure(engine).batch == 8


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"x": {"batch": 0, "tokens_per_s": 1}}', b"\xff"])
def test_a_damaged_file_is_begun_anew(engine, speeds, tmp_path, content):
    speeds({8: 100.0})
    path = tmp_path / "capacity.json"
    path.write_bytes(content)
    Fitted(engine, path).loaded(POLICY)
    assert len(stored(path)) == 1


def test_a_process_is_told_where_to_remember(engine, speeds, tmp_path, monkeypatch):
    speeds({8: 100.0})
    monkeypatch.setenv("INTELLECT_CAPACITY_FILE", str(tmp_path / "c.json"))
    monkeypatch.setenv("INTELLECT_MAX_MEMORY_BYTES", "5")
    fitted_from_environment(engine).loaded(POLICY)
    assert next(iter(stored(tmp_path / "c.json"))).endswith("threads=0 max_memory_bytes=5")
    monkeypatch.delenv("INTELLECT_CAPACITY_FILE")
    engine.max_batch = 64
    fitted_from_environment(engine).loaded(POLICY)
    assert engine.max_batch == 64


def test_rows_keep_within_the_memory(monkeypatch):
    """As many answers at a time as there is room for, whatever the batch may be."""
    monkeypatch.setattr(torch_engine, "free_bytes", lambda device, limit: limit)
    engine = TorchEngine(max_batch=64, max_memory_bytes=3 * MIB)
    engine.load(POLICY)
    most, new_rows = [], engine._model.new_rows

    def counted(rows, columns, **options):
        most.append(rows)
        return new_rows(rows, columns, **options)

    monkeypatch.setattr(engine._model, "new_rows", counted)
    requests = [GenerationRequest([5] * 8, bytes([row]) * 32) for row in range(40)]
    assert len(engine.generate(requests, SAMPLING)) == 40
    assert len(most) == 1
    assert 1 < most[0] < 40


def test_a_model_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ModelError, match="leaves 0 MiB of memory to compute in") as caught:
        TorchEngine(max_memory_bytes=MIB).load(POLICY)
    assert "--max-memory" in caught.value.hint


def test_an_answer_that_does_not_fit_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch_engine, "free_bytes", lambda device, limit: limit)
    monkeypatch.setattr(torch_engine, "_LEAST_PASS_TOKENS", 1)
    engine = TorchEngine(max_memory_bytes=200_000)
    engine.load(POLICY)
    with pytest.raises(ModelError, match=r"an answer of \d+ tokens, prompt included, needs") as caught:
        engine.generate([GenerationRequest([5] * 200, bytes(32))], SAMPLING)
    assert "--max-memory" in caught.value.hint


def test_a_pass_that_is_too_large_is_cut(engine, monkeypatch):
    """Checking runs out of memory with many positions in a pass."""
    sequences = [([5, 6, 7], [8] * 100)] * 20
    whole = {each.index: each.patterns for each in engine.prefill(sequences)}
    compute, asked = engine._model.compute, []

    def scarce(part, *, pass_tokens):
        asked.append(pass_tokens)
        if pass_tokens > 3000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return compute(part, pass_tokens=pass_tokens)

    monkeypatch.setattr(engine._model, "compute", scarce)
    cut = {each.index: each.patterns for each in engine.prefill(sequences)}
    assert asked == [16384, 8192, 4096, 2048]
    assert all((cut[index] == whole[index]).mean() > 0.99 for index in range(20))
    monkeypatch.setattr(engine._model, "compute", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(ModelError, match="not even one answer fits"):
        list(engine.prefill(sequences))


def test_prompts_longer_than_a_pass_are_read_in_pieces(engine, monkeypatch):
    requests = [GenerationRequest([3 + (place * row) % 50 for place in range(100)], bytes(32)) for row in range(1, 4)]
    whole = [answer.output_ids for answer in engine.generate(requests, SAMPLING)]
    sequences = [(request.prompt_ids, output) for request, output in zip(requests, whole, strict=True)]
    states = {each.index: each.patterns for each in engine.prefill(sequences)}
    monkeypatch.setattr(torch_engine, "PASS_TOKENS", 32)
    monkeypatch.setattr(torch_engine, "_LEAST_PASS_TOKENS", 16)
    assert [answer.output_ids for answer in engine.generate(requests, SAMPLING)] == whole
    for each in engine.prefill(sequences):
        assert (abs(each.patterns.astype(int) - states[each.index].astype(int)) <= 1).all()

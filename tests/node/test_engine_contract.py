"""What every engine must keep to (node.engines.base), on each engine that is installed here."""

import gc
import itertools
import json
import shutil
from contextlib import closing
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from engine_contract import ENGINES, LEFT_OUT, SAMPLING, check, make_engine, make_requests, same_up_to_margins
from safetensors.torch import load_file, save_file
from tiny_models import EOS, VOCAB, build_model, write_model

from node.engines.base import GenerationRequest
from node.engines.memory import resident_bytes
from protocol.errors import ModelError
from protocol.patch import Run, apply_patch, make_patch


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Its heads are 32 wide, the least that vLLM's kernels for CPUs take."""
    return write_model(build_model("qwen2-wide"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def next_dir(tmp_path_factory):
    """Another policy of the same architecture."""
    return write_model(build_model("qwen2-wide", seed=7), tmp_path_factory.mktemp("next"))


@pytest.fixture(scope="module")
def made(model_dir):
    """Engines by name, made at first use."""
    engines = {}

    def get(name):
        if name not in engines:
            engines[name] = make_engine(name, model_dir, max_batch=16)
        return engines[name]

    yield get
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=ENGINES)
def name(request):
    return request.param


@pytest.fixture
def engine(name, made, model_dir):
    engine = made(name)
    yield engine
    engine.max_batch = 16
    engine.update(model_dir)


def test_no_engine_is_left_out():
    if LEFT_OUT:
        pytest.skip(LEFT_OUT)


def tokens(answers):
    return [answer.output_ids for answer in answers]


def copied(model_dir, tmp_path):
    return shutil.copytree(model_dir, tmp_path / "copy")


@pytest.mark.parametrize("checker", ENGINES)
def test_each_engine_s_answers_pass_the_other_s_check(engine, checker, made):
    requests = make_requests(12)
    check(made(checker), requests, engine.generate(requests, SAMPLING))


def test_the_same_seeds_give_the_same_tokens_in_every_engine(engine, made):
    requests = make_requests(16, seed=3)
    same_up_to_margins(
        made("torch"), requests, engine.generate(requests, SAMPLING), made("torch").generate(requests, SAMPLING)
    )


def test_seeds_decide(engine):
    request = make_requests(2)[0]
    first, again, other = engine.generate([request, request, replace(request, seed=bytes(32))], SAMPLING)
    assert first == again
    assert first.output_ids != other.output_ids


def test_the_size_of_the_batch_changes_nothing(engine):
    requests = make_requests(20, group=4)
    found = []
    for size in (1, 3, 20):
        engine.max_batch = size
        found.append(tokens(engine.generate(requests, SAMPLING)))
    assert found[0] == found[1] == found[2]


def test_answers_end_at_any_stop_id_or_at_the_limit(engine):
    requests = make_requests(12)
    sampling = replace(SAMPLING, stop_ids=(EOS, 17, 40), max_new_tokens=12)
    answers = engine.generate(requests, sampling)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert len(answer.output_ids) == len(answer.logprobs) <= 12
        assert not set(answer.output_ids[:-1]) & {EOS, 17, 40}
        assert (answer.output_ids[-1] in (EOS, 17, 40)) == (answer.finish_reason == "stop")
        assert answer.finish_reason == "stop" or len(answer.output_ids) == 12


def test_without_stop_ids_every_answer_is_whole(engine):
    answers = engine.generate(make_requests(4), replace(SAMPLING, stop_ids=(), max_new_tokens=5))
    assert [len(answer.output_ids) for answer in answers] == [5] * 4


def test_finished_answers_leave_while_others_are_under_way(engine):
    requests = make_requests(16)
    counts = []
    with closing(engine.stream(requests, SAMPLING, progress=counts.append)) as stream:
        first, answer = next(stream)
        seen = counts[-1]
        rest = dict(stream)
    everything = {first: answer, **rest}
    assert seen < counts[-1] == sum(len(each.output_ids) for each in everything.values())
    assert counts == sorted(counts)
    assert [everything[index] for index in range(16)] == engine.generate(requests, SAMPLING)


def test_what_is_cancelled_never_comes_and_costs_the_others_nothing(engine):
    requests = make_requests(12)
    whole = tokens(engine.generate(requests, SAMPLING))
    engine.max_batch = 4
    stream = engine.stream(requests, SAMPLING)
    stream.cancel(2, 5)
    first, answer = next(stream)
    doomed = next(index for index in range(12) if index not in (2, 5, first))
    stream.cancel(doomed)
    found = {index: each.output_ids for index, each in [(first, answer), *stream]}
    assert found == {index: whole[index] for index in range(12) if index not in (2, 5, doomed)}


def test_what_is_cancelled_when_it_is_finished_never_comes_either(engine):
    stream = engine.stream(make_requests(6), replace(SAMPLING, max_new_tokens=1))
    first, _ = next(stream)
    stream.cancel(*range(6))
    assert list(stream) == []
    assert first in range(6)


def test_a_closed_stream_frees_the_engine(engine):
    requests = make_requests(8)
    whole = engine.generate(requests, SAMPLING)
    stream = engine.stream(requests, SAMPLING)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert engine.generate(requests, SAMPLING) == whole


def test_an_update_equals_a_load(engine, name, next_dir):
    """Prompts that were read before are asked again, so that a cached state would show."""
    requests = make_requests(8)
    before = engine.generate(requests, SAMPLING)
    engine.update(next_dir)
    updated = engine.generate(requests, SAMPLING)
    with closing(make_engine(name, next_dir)) as fresh:
        loaded = fresh.generate(requests, SAMPLING)
    assert updated == loaded != before


def test_an_update_reaches_an_output_projection_that_is_the_embedding(name, tmp_path):
    """An engine may hold a copy of the embedding in another order for it, which is easily left as it was."""
    requests = make_requests(8)
    first, other = (write_model(build_model("qwen2-tied", seed=seed), tmp_path / str(seed)) for seed in (0, 7))
    with closing(make_engine(name, first)) as engine:
        before = engine.generate(requests, SAMPLING)
        engine.update(other)
        updated = engine.generate(requests, SAMPLING)
    with closing(make_engine(name, other)) as fresh:
        assert updated == fresh.generate(requests, SAMPLING) != before


def test_a_patched_checkpoint_equals_the_whole_one(engine, model_dir, tmp_path):
    """As SHARDCAST brings it: the few values that a step changed, put over the weights before."""
    requests = make_requests(8)
    whole, patched = tmp_path / "whole", copied(model_dir, tmp_path)
    shutil.copytree(model_dir, whole)
    weights = load_file(model_dir / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3:9, ::5] += 0.5
    save_file(weights, whole / "model.safetensors")
    base, target = ((each / "model.safetensors").read_bytes() for each in (model_dir, whole))
    hashes = {"base_sha256": sha256(base).digest(), "target_sha256": sha256(target).digest()}
    patch = make_patch(base, target, [Run(1, len(base))], **hashes)
    assert patch is not None
    (patched / "model.safetensors").write_bytes(apply_patch(patch, base, **hashes))
    before = engine.generate(requests, SAMPLING)
    engine.update(whole)
    expected = engine.generate(requests, SAMPLING)
    engine.update(patched)
    assert engine.generate(requests, SAMPLING) == expected != before


def test_a_refused_update_keeps_the_policy(engine, model_dir, tmp_path):
    requests = make_requests(4)
    before = engine.generate(requests, SAMPLING)
    incomplete = copied(model_dir, tmp_path)
    (incomplete / "model.safetensors").unlink()
    other = write_model(build_model("qwen2"), tmp_path / "other")
    for directory in (incomplete, other, tmp_path / "none"):
        with pytest.raises(ModelError):
            engine.update(directory)
    assert engine.generate(requests, SAMPLING) == before


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], "needs a prompt token"),
        ([3, VOCAB], "outside the policy's vocabulary"),
        ([-1], "outside the policy's vocabulary"),
        ([3] * 217, "exceed the policy's 256 positions"),
    ],
)
def test_bad_prompts_are_refused_by_name(engine, prompt_ids, message):
    with pytest.raises(ModelError, match=message):
        engine.generate([*make_requests(1), GenerationRequest(prompt_ids, bytes(32))], SAMPLING)


@pytest.mark.parametrize(
    ("output_ids", "message"), [([], "output token"), ([VOCAB], "vocabulary"), ([3] * 255, "exce")]
)
def test_bad_outputs_are_refused_by_name(engine, output_ids, message):
    with pytest.raises(ModelError, match=message):
        list(engine.prefill([([3, 4], output_ids)]))


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": float("nan")}, {"max_new_tokens": 0}])
def test_sampling_without_sense_is_refused(engine, changes):
    with pytest.raises(ModelError, match="cannot be drawn"):
        engine.generate(make_requests(2), replace(SAMPLING, **changes))


def test_nothing_asked_nothing_answered(engine):
    assert engine.generate([], SAMPLING) == []
    assert list(engine.prefill([])) == []


def test_a_prompt_that_fills_the_context(engine):
    answers = engine.generate([GenerationRequest([3] * 252, bytes(32))], replace(SAMPLING, max_new_tokens=4))
    assert len(answers[0].output_ids) <= 4


def test_a_broken_policy_is_named(engine, model_dir, tmp_path):
    broken = copied(model_dir, tmp_path)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors")
    engine.update(broken)
    with pytest.raises(ModelError, match="not finite"):
        engine.generate(make_requests(2), SAMPLING)


@pytest.fixture
def scarce(name, engine, monkeypatch):
    """Let memory run out in batches of more than so many sequences; `after` steps of them."""
    if name == "vllm":
        pytest.skip("vllm preempts sequences itself when its cache is full")

    def limit(most, *, after=0):
        model, new_rows = engine._model, engine._model.new_rows

        def checked(capacity, columns, **options):
            rows = new_rows(capacity, columns, **options)
            left, step = itertools.count(after, -1), rows.step

            def scarce_step(tokens):
                if capacity > most and next(left) <= 0:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return step(tokens)

            rows.step = scarce_step
            return rows

        monkeypatch.setattr(model, "new_rows", checked)

    return limit


def test_running_out_of_memory_halves_the_batch_and_loses_nothing(engine, scarce):
    requests = make_requests(16)
    whole = tokens(engine.generate(requests, SAMPLING))
    scarce(5, after=3)
    counts = []
    assert tokens(engine.generate(requests, SAMPLING, progress=counts.append)) == whole
    assert engine.max_batch == 4
    assert counts[-1] == sum(map(len, whole))


def test_where_not_even_one_answer_fits_it_is_said(engine, scarce):
    scarce(0)
    with pytest.raises(ModelError, match="not even one answer fits into memory: CUDA out of memory") as caught:
        engine.generate(make_requests(4), SAMPLING)
    assert "--max-memory" in caught.value.hint


def test_memory_stays_flat_over_updates(engine, name, model_dir, next_dir):
    swap_and_measure(engine, (model_dir, next_dir), warm=8, swaps=30 if name == "torch" else 8)


@pytest.mark.long
def test_memory_stays_flat_over_a_thousand_updates(engine, model_dir, next_dir):
    swap_and_measure(engine, (model_dir, next_dir), warm=50, swaps=1000)


def swap_and_measure(engine, directories, *, warm, swaps):
    """Swap checkpoints and generate with each; after a warm-up, memory may grow by a thirtieth of the process."""
    requests, sampling = make_requests(8), replace(SAMPLING, max_new_tokens=8)
    before = 0
    for swap in range(warm + swaps):
        if swap == warm:
            gc.collect()
            before = resident_bytes()
        engine.update(directories[swap % 2])
        engine.generate(requests, sampling)
    gc.collect()
    assert resident_bytes() - before < min(16 << 20, before // 30)


def test_a_model_of_another_kind_says_what_it_is(engine, model_dir, tmp_path):
    """A directory asks for code of its own to be run."""
    hostile = copied(model_dir, tmp_path)
    config = json.loads((hostile / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    (hostile / "config.json").write_text(json.dumps(config))
    (hostile / "modeling.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ModelError, match="wants to run code"):
        engine.load(hostile)

"""The vLLM engine where it differs from others: its cache, its weights in place, what it refuses, and when it sticks.

Run by `make test-vllm`; without vLLM nothing of it can be.
"""

import importlib.util
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import trio
from engine_contract import SAMPLING, check, make_engine, make_requests, same_up_to_margins
from safetensors.torch import load_file, save_file
from submission_kit import POLICY, make_manifest
from tiny_models import build_model, write_model

from node.compute.process import ComputeProcess
from node.engines.base import GenerationRequest
from protocol.errors import ComputeCrashed, ModelError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here", allow_module_level=True)

from node.engines import vllm_core, vllm_engine, vllm_private, vllm_settings

ROOT = str(Path(__file__).parents[2])
LONG = replace(SAMPLING, max_new_tokens=70, stop_ids=())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(build_model("qwen2-wide"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def torch_engine(model_dir):
    return make_engine("torch", model_dir)


@pytest.fixture(scope="module")
def vllm(model_dir):
    engine = make_engine("vllm", model_dir)
    yield engine
    engine.close()


def long_requests(count):
    """Prompts of 60 to 180 tokens, which share their first hundred."""
    head = [3 + place % 60 for place in range(120)]
    lengths = [60 + 37 * number % 121 for number in range(count)]
    prompts = [
        [*head[: length - 10], *(4 + (number + place) % 60 for place in range(10))]
        for number, length in enumerate(lengths)
    ]
    return [GenerationRequest(prompt, bytes([number]) * 32) for number, prompt in enumerate(prompts)]


@pytest.fixture
def cramped(model_dir, monkeypatch):
    """An engine whose cache holds three answers at most, and whose passes read 48 tokens."""
    arguments = vllm_settings.engine_arguments

    def less(*given):
        found = arguments(*given)
        blocks = 3 * 256 // 32
        found["kv_cache_memory_bytes"] = blocks * 32 * given[2].token_bytes
        return found | {"max_num_batched_tokens": 48, "max_num_seqs": 32}

    monkeypatch.setattr(vllm_core, "engine_arguments", less)
    with closing(make_engine("vllm", model_dir, max_batch=32)) as engine:
        yield engine


def test_preemption_prompts_in_pieces_and_shared_beginnings_change_nothing(cramped, torch_engine, monkeypatch):
    """Thirty-two answers in a cache for a few: they are put off and computed again, and read over several steps."""
    requests = long_requests(32)
    partial, cached, again = set(), set(), set()
    read, seen = vllm_private.Runner._read, {}

    def noting(self, state):
        step = read(self, state)
        for row, tag in enumerate(step.tags):
            request, end = tag.get("request"), int(step.first[row] + step.counts[row])
            if step.partial[row]:
                partial.add(request)
            if request not in seen and step.first[row] > 0:
                cached.add(request)
            if step.first[row] < seen.get(request, 0):
                again.add(request)
            seen[request] = end
        return step

    monkeypatch.setattr(vllm_private.Runner, "_read", noting)
    answers = cramped.generate(requests, LONG)
    assert partial
    assert cached
    assert again
    check(torch_engine, requests, answers, LONG)
    same_up_to_margins(torch_engine, requests, answers, torch_engine.generate(requests, LONG))


def test_a_check_reads_nothing_from_the_cache_and_prompts_in_pieces(cramped, torch_engine):
    """States of positions that vLLM did not compute would be missing."""
    requests = long_requests(8)
    answers = cramped.generate(requests, LONG)
    check(cramped, requests, answers, LONG)
    check(cramped, requests, torch_engine.generate(requests, LONG), LONG)


def test_an_old_cache_is_not_read_after_an_update(vllm, torch_engine, model_dir, tmp_path):
    """Prompts long enough to be shared: before the update their beginnings lie in the cache."""
    requests = long_requests(6)
    other = write_model(build_model("qwen2-wide", seed=5), tmp_path / "other")
    vllm.generate(requests, SAMPLING)
    vllm.update(other)
    try:
        answers = vllm.generate(requests, SAMPLING)
        with closing(make_engine("torch", other)) as checker:
            check(checker, requests, answers)
    finally:
        vllm.update(model_dir)


def test_weights_that_do_not_arrive_are_noticed(vllm, model_dir, tmp_path, monkeypatch):
    """vLLM only warns of weights that stayed as they were; work with them would be rejected."""
    other = write_model(build_model("qwen2-wide", seed=5), tmp_path / "other")
    held = vllm._core._llm.model_executor.driver_worker.worker.model_runner.get_model()
    load = type(held).load_weights

    def without_norms(self, weights):
        return load(self, ((name, weight) for name, weight in weights if "input_layernorm" not in name))

    monkeypatch.setattr(type(held), "load_weights", without_norms)
    with pytest.raises(
        ModelError, match=r"kept 2 old weights at an update, the first is model\.layers\.0\.input_layernorm"
    ):
        vllm.update(other)
    monkeypatch.undo()
    with pytest.raises(ModelError, match="holds no policy"):
        vllm.generate(make_requests(1), SAMPLING)
    vllm.update(model_dir)
    assert vllm.generate(make_requests(1), SAMPLING)


def test_weights_that_arrive_changed_are_noticed(vllm, model_dir, tmp_path, monkeypatch):
    other = write_model(build_model("qwen2-wide", seed=5), tmp_path / "other")
    held = vllm._core._llm.model_executor.driver_worker.worker.model_runner.get_model()
    load = type(held).load_weights

    def shifted(self, weights):
        return load(self, ((name, weight + ("norm" in name)) for name, weight in weights))

    monkeypatch.setattr(type(held), "load_weights", shifted)
    with pytest.raises(ModelError, match="holds another model"):
        vllm.update(other)
    monkeypatch.undo()
    vllm.update(model_dir)


def test_a_file_that_breaks_half_way_leaves_no_policy(vllm, model_dir, tmp_path, monkeypatch):
    other = write_model(build_model("qwen2-wide", seed=5), tmp_path / "other")

    def truncate(self, path):
        os.truncate(path / "model.safetensors", 4096)
        return reload(self, path)

    reload = vllm_private.Runner.reload
    monkeypatch.setattr(vllm_private.Runner, "reload", truncate)
    with pytest.raises(ModelError, match="could not take the weights"):
        vllm.update(other)
    monkeypatch.undo()
    with pytest.raises(ModelError, match="holds no policy"):
        vllm.generate(make_requests(1), SAMPLING)
    vllm.update(model_dir)


def test_an_error_in_a_step_is_said_and_the_next_load_begins_anew(vllm, model_dir, monkeypatch):
    requests = make_requests(4)
    whole = vllm.generate(requests, SAMPLING)

    def fail(self, state):
        raise RuntimeError("kernel says no")

    with monkeypatch.context() as patch:
        patch.setattr(vllm_private.Runner, "_read", fail)
        with pytest.raises(ModelError, match="vLLM failed in a step: RuntimeError: kernel says no"):
            vllm.generate(requests, SAMPLING)
    vllm.update(model_dir)
    assert vllm.generate(requests, SAMPLING) == whole


def test_out_of_memory_is_the_process_s_end(vllm, model_dir, monkeypatch):
    """As MemoryError it makes a compute process end, and its successor take a smaller batch."""

    def fail(self, state):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(vllm_private.Runner, "_read", fail)
        with pytest.raises(MemoryError, match="out of memory"):
            vllm.generate(make_requests(2), SAMPLING)
    vllm.update(model_dir)


def test_a_model_that_its_kernels_cannot_do_is_named_at_the_load(tmp_path):
    """Heads of 16: vLLM starts with them, and fails at the first token."""
    narrow = write_model(build_model("qwen2-grouped"), tmp_path / "narrow")
    with pytest.raises(ModelError, match="vLLM cannot run the policy") as caught:
        make_engine("vllm", narrow)
    assert "--engine torch" in caught.value.hint


def test_an_architecture_that_it_does_not_have_is_named(model_dir, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    config = msgspec.json.decode((model_dir / "config.json").read_bytes())
    config |= {"architectures": ["NobodysForCausalLM"], "model_type": "bloom"}
    (other / "config.json").write_bytes(msgspec.json.encode(config))
    save_file(load_file(model_dir / "model.safetensors"), other / "model.safetensors")
    with pytest.raises(ModelError, match="cannot"):
        make_engine("vllm", other)


def test_another_release_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(ModelError, match=r"vLLM 0\.33\.0 is installed; 0\.32\.0 is needed"):
        vllm_engine.VllmEngine()


def test_a_private_name_that_is_gone_is_named(model_dir, monkeypatch):
    monkeypatch.setattr(vllm_private, "_RUNNER", (*vllm_private._RUNNER, "sample_with_noise"))
    with pytest.raises(ModelError, match=r"model runner \(V1\) has no sample_with_noise"):
        make_engine("vllm", model_dir)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "computes on cpu, not on cuda"),
        ({"dtype": "float16"}, "no dtype 'float16'"),
        ({"max_batch": 513}, "513 sequences"),
    ],
)
def test_what_it_cannot_be_asked_for(options, message):
    with pytest.raises(ModelError, match=message):
        vllm_engine.VllmEngine(**options)


def test_too_little_memory_is_named_before_anything_is_loaded(model_dir):
    with pytest.raises(ModelError, match="MiB of memory to compute in") as caught:
        make_engine("vllm", model_dir, max_memory_bytes=1 << 20)
    assert "--max-memory" in caught.value.hint


WORKER = """
import ctypes, os, pathlib
from node.engines import vllm_private
from node.engines.vllm_engine import VllmEngine
from node.inference.compute import RolloutWorker, run_worker

read, mark = vllm_private.Runner._read, pathlib.Path(os.environ["MARK"])
steps = 0
def wedging(self, state):
    global steps
    steps += 1
    if steps == 4 and not mark.exists():
        mark.touch()
        ctypes.PyDLL(None).sleep(600)
    return read(self, state)
vllm_private.Runner._read = wedging
if __name__ == "__main__":
    run_worker(RolloutWorker(VllmEngine(stall_s=20.0)))
"""


async def test_a_wedged_engine_is_replaced_and_asked_again(tmp_path, nursery):
    """Native code inside a step never returns: the process ends, another one gives the answers."""
    (tmp_path / "wedged_worker.py").write_text(WORKER)
    path = os.pathsep.join([str(tmp_path), ROOT, *filter(None, sys.path)])
    env = {"PYTHONPATH": path, "MARK": str(tmp_path / "mark")}
    process = ComputeProcess("wedged_worker", name="worker", log_path=tmp_path / "w.log", env=env, threads=1)
    await nursery.start(process.run)
    manifest = msgspec.msgpack.encode(make_manifest())
    given = {"run_id": bytes(32), "step": 0, "checkpoint": bytes(32), "contributor": bytes(32), "index": 0}

    async def work():
        await process.call("load", timeout_s=300, checkpoint_dir=str(POLICY), checkpoint_id=bytes(32))
        return await process.call(
            "generate", timeout_s=300, path=str(tmp_path / "rollouts.parquet"), manifest=manifest, **given
        )

    with trio.fail_after(600):
        with pytest.raises(ComputeCrashed, match="stopped answering"):
            await work()
        made = await work()
    assert made["engine"] == "vllm 0.32.0"
    assert process.restarts == 1
    assert (tmp_path / "rollouts.parquet").stat().st_size == made["size"]

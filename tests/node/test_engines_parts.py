"""Parts of the torch engine: products, noise on a device, proofs in a thread, the registry, checks of a model."""

import shutil
import sys

import msgspec
import numpy as np
import pytest
import torch
from submission_kit import POLICY, make_manifest
from tiny_models import build_model, write_model

from node.engines import registry
from node.engines.base import GenerationRequest, SamplingParams
from node.engines.decoding import Decoding
from node.engines.draws import device_noise
from node.engines.linear import Linear, packs
from node.engines.memory import is_slow
from node.engines.model_check import check_model
from node.engines.proofs import ProofRecorder, proofs_of
from node.engines.tokenizer import Tokenizer
from node.engines.torch_engine import TorchEngine
from protocol.errors import ConfigError, ModelError
from protocol.sampling import gumbel_rows
from protocol.toploc import bf16_patterns, build_proofs


@pytest.mark.parametrize("bias", [False, True])
def test_reordered_weights_give_the_plain_product(bias):
    torch.manual_seed(0)
    weight, x = torch.randn(384, 200), torch.randn(7, 3, 200)
    offset = torch.randn(384) if bias else None
    assert packs(weight) or not torch.backends.mkldnn.is_available()
    torch.testing.assert_close(Linear(weight, offset)(x), torch.nn.functional.linear(x, weight, offset))
    assert not packs(weight[:2])
    assert not packs(weight.bfloat16())


def test_noise_of_a_device_is_the_protocol_s():
    keys = np.random.default_rng(0).integers(0, 2**32, (50, 2), dtype=np.uint32)
    keys[:2] = [[0, 0], [2**32 - 1, 2**32 - 1]]
    ours = device_noise(keys, 300, device=torch.device("cpu")).numpy()
    np.testing.assert_array_max_ulp(ours, gumbel_rows(keys, 300), maxulp=1)


@pytest.mark.parametrize("threaded", [False, True])
def test_chunks_are_proved_as_they_fill(threaded):
    """Two answers of unlike length in one batch, the second one begun later."""
    hidden = torch.randn(90, 16)
    recorder = ProofRecorder(3, 16, top_k=8, threaded=threaded)
    for step in range(70):
        rows = [(2, step, step == 69)] + ([(0, step - 30, step == 64)] if 30 <= step < 65 else [])
        slots, steps, ends = (np.array(each) for each in zip(*rows, strict=True))
        recorder.add(hidden[[step, step - 10][: len(rows)]], slots, steps, ends=ends)
    patterns = bf16_patterns(hidden.numpy())
    assert proofs_of(recorder.take(2)) == build_proofs(patterns[:70], 8)
    assert proofs_of(recorder.take(0)) == build_proofs(patterns[20:55], 8)
    assert recorder.take(0) == []
    recorder.close()


def test_proofs_in_a_thread_change_nothing():
    engine = TorchEngine()
    engine.load(POLICY)
    requests = [GenerationRequest([1, 5 + row, 7], bytes([row]) * 32) for row in range(9)]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=40, stop_ids=(2,), top_k_proof=16)
    stream = engine.stream(requests, sampling)
    threaded = Decoding(stream._runner, requests, sampling, threaded_proofs=True)
    assert dict(threaded) == dict(stream)


def test_an_unknown_engine_is_named():
    with pytest.raises(ConfigError, match="no engine 'abacus'") as caught:
        registry.engine_factory("abacus")
    assert "torch, transformers, vllm" in caught.value.hint


def test_an_engine_that_is_not_installed_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelError, match="vLLM is not installed") as caught:
        registry.engine_factory("vllm")()
    assert "pip install 'intellect-node[vllm]'" in caught.value.hint
    assert "--engine torch" in caught.value.hint


def test_only_vllm_shares_a_policy_between_devices(monkeypatch):
    monkeypatch.setenv("INTELLECT_TENSOR_PARALLEL", "2")
    with pytest.raises(ConfigError, match="runs on one device, not on 2"):
        registry.engine_from_environment(engine="torch")


def test_a_model_is_the_run_s():
    spec = make_manifest().model
    check_model(Tokenizer(POLICY), spec)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not the one"):
        check_model(Tokenizer(POLICY), msgspec.structs.replace(spec, tokenizer=bytes(32)))


def test_another_architecture_than_the_run_s_is_refused(tmp_path):
    other = write_model(build_model("llama"), tmp_path)
    shutil.copy(POLICY / "tokenizer.json", other)
    tokenizer = Tokenizer(other)
    with pytest.raises(ModelError, match=r"config\.json is not the one .*another architecture") as caught:
        check_model(tokenizer, make_manifest().model)
    assert "fetch it again" in caught.value.hint
    (other / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_model(Tokenizer(other), make_manifest().model)


def test_a_policy_that_is_held_needs_its_directory_no_more(tmp_path):
    """A node removes old policies from its disk while their last submissions are still being made or judged."""
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(POLICY / name, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    shutil.rmtree(tmp_path)
    check_model(tokenizer, make_manifest().model)


def test_other_weight_formats_are_named(tmp_path):
    model_dir = write_model(build_model("qwen2"), tmp_path)
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors file, but pytorch_model\.bin") as caught:
        TorchEngine().load(model_dir)
    assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize(("flags", "slow"), [("fpu avx2", True), ("fpu avx512_bf16", False)])
def test_a_cpu_without_bf16_instructions_is_known(flags, slow, monkeypatch):
    monkeypatch.setattr("node.engines.memory.Path.read_text", lambda _: f"processor : 0\nflags : {flags}\n")
    assert is_slow(torch.bfloat16, torch.device("cpu")) == slow
    assert not is_slow(torch.float32, torch.device("cpu"))
    assert not is_slow(torch.bfloat16, torch.device("cuda"))

"""Model directories: what is read, and by which name everything else is refused."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import build_model, write_model

from node.engines.model_config import read_config
from node.engines.weights import expected_tensors, read_weights
from protocol.errors import ModelError


@pytest.fixture
def model_dir(tmp_path):
    return write_model(build_model("qwen2-grouped"), tmp_path / "model")


def read(model_dir, dtype=torch.float32):
    return read_weights(model_dir, read_config(model_dir), dtype=dtype)


def rewrite_config(model_dir, **changes):
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_weights(model_dir, change):
    path = model_dir / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def rewrite_header(model_dir, change):
    path = model_dir / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def test_weights_are_those_of_the_file(model_dir):
    theirs = load_file(model_dir / "model.safetensors")
    ours = read(model_dir)
    assert ours.keys() == theirs.keys() == expected_tensors(read_config(model_dir)).keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_may_lie_in_several_files(model_dir):
    weights = load_file(model_dir / "model.safetensors")
    names = sorted(weights)
    (model_dir / "model.safetensors").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in part}, model_dir / f"model-{number}.safetensors")
    assert read(model_dir).keys() == weights.keys()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(model_dir, stored):
    rewrite_weights(model_dir, lambda w: w.update({name: tensor.to(stored) for name, tensor in list(w.items())}))
    theirs = load_file(model_dir / "model.safetensors")
    ours = read(model_dir)
    assert all(torch.equal(ours[name], theirs[name].float()) for name in theirs)


def test_redundant_tensors_are_passed_over(tmp_path):
    model_dir = write_model(build_model("qwen2"), tmp_path)
    rewrite_weights(model_dir, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in read(model_dir)


def test_a_missing_tensor_is_named(model_dir):
    rewrite_weights(model_dir, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 tensors, the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        read(model_dir)


def test_a_foreign_tensor_is_named(model_dir):
    rewrite_weights(model_dir, lambda w: w.update({"model.layers.0.adapter.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"does not have: model\.layers\.0\.adapter\.weight"):
        read(model_dir)


def test_a_misshapen_tensor_is_named(model_dir):
    rewrite_weights(model_dir, lambda w: w.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[63\], config\.json calls for \[64\]"):
        read(model_dir)


def test_another_element_type_is_refused(model_dir):
    rewrite_weights(model_dir, lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}))
    with pytest.raises(ModelError, match="'I64'"):
        read(model_dir)


def test_a_tensor_in_two_files_is_refused(model_dir):
    (model_dir / "copy.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="stands in two files"):
        read(model_dir)


def test_a_truncated_file_is_refused(model_dir):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="its header speaks of"):
        read(model_dir)


def test_overlapping_tensors_are_refused(model_dir):
    """A header lets one tensor read another's bytes."""

    def overlap(header):
        header["model.norm.weight"]["data_offsets"] = [0, 256]

    rewrite_header(model_dir, overlap)
    with pytest.raises(ModelError, match="overlaps another or leaves a gap"):
        read(model_dir)


def test_a_size_that_is_not_the_shape_is_refused(model_dir):
    """A header gives a tensor more bytes than its shape has."""

    def grow(header):
        last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
        last["shape"] = [last["shape"][0] + 1, *last["shape"][1:]]

    rewrite_header(model_dir, grow)
    with pytest.raises(ModelError, match="calls for"):
        read(model_dir)


def test_a_giant_header_is_refused_before_it_is_read(model_dir):
    """Eight bytes ask for a header of exabytes."""
    (model_dir / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ModelError, match="not a safetensors file"):
        read(model_dir)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), framed=st.booleans())
def test_any_bytes_are_refused_by_name(model_dir, data, framed):
    """A weights file holds anything at all."""
    (model_dir / "model.safetensors").write_bytes((struct.pack("<Q", len(data)) if framed else b"") + data)
    with pytest.raises(ModelError):
        read(model_dir)


def test_no_weights_at_all(model_dir):
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        read(model_dir)


def test_no_configuration_at_all(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_config(tmp_path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_any_configuration_is_refused_by_name(tmp_path, data):
    """A configuration holds anything at all."""
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelError):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba'; the built-in engine has llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"num_attention_heads": 3}, "cannot share"),
        ({"head_dim": 15}, "even head_dim"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_the_engine_would_compute_wrongly_is_refused(model_dir, changes, message):
    rewrite_config(model_dir, **changes)
    with pytest.raises(ModelError, match=message):
        read_config(model_dir)


def test_theta_of_older_configurations_is_read(model_dir):
    rewrite_config(model_dir, rope_parameters=None, rope_theta=500000.0)
    assert read_config(model_dir).rope.rope_theta == 500000.0

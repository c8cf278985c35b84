"""What a model directory's config.json says of a Llama-family decoder.

Reads only what the built-in decoder computes with, and refuses by name whatever it would compute wrongly: an unknown
architecture, a rope scaling or an activation that it does not have, sliding windows. Never imports transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from protocol.errors import ModelError

SUPPORTED: Final = ("llama", "qwen2", "qwen3")
MAX_CONFIG_BYTES: Final = 1 << 20

T = TypeVar("T")
_Size = Annotated[int, Meta(ge=1, le=1 << 22)]
_Factor = Annotated[float, Meta(gt=0, le=1e9)]


class RopeConfig(Struct, frozen=True, kw_only=True):
    """Rotary position embedding: plain, or stretched as Llama 3 does it."""

    rope_type: str = "default"
    rope_theta: _Factor = 10000.0
    factor: _Factor = 1.0
    low_freq_factor: _Factor = 1.0
    high_freq_factor: _Factor = 4.0
    original_max_position_embeddings: _Size = 8192
    partial_rotary_factor: _Factor = 1.0


class _OldScaling(Struct, frozen=True, kw_only=True):
    """`rope_scaling` of transformers 4, whose theta stands at the top level."""

    rope_type: str = ""
    type: str = ""
    factor: _Factor = 1.0
    low_freq_factor: _Factor = 1.0
    high_freq_factor: _Factor = 4.0
    original_max_position_embeddings: _Size = 8192


class _TypeOnly(Struct, frozen=True):
    model_type: str


class _ConfigFile(Struct, frozen=True, kw_only=True):
    model_type: str
    vocab_size: _Size
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    num_attention_heads: Annotated[int, Meta(ge=1, le=1024)]
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    head_dim: Annotated[int, Meta(ge=2, le=4096)] | None = None
    intermediate_size: _Size
    max_position_embeddings: _Size
    rms_norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    rope_theta: _Factor | None = None
    rope_parameters: RopeConfig | None = None
    rope_scaling: _OldScaling | None = None
    quantization_config: dict[str, Any] | None = None


class UnsupportedArchitecture(ModelError):
    """Raised when the built-in decoder does not have what a model asks for."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Shapes and switches of one decoder."""

    model_type: Literal["llama", "qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    """Queries and keys are normalised a head (qwen3)."""


def read_config(model_dir: Path) -> ModelConfig:
    """Read and check `model_dir`/config.json. Raises ModelError naming what is missing or unsupported."""
    path = model_dir / "config.json"
    data = _read_bounded(path)
    _refuse_other_types(path, data)
    raw = _decode(path, data, _ConfigFile)
    _refuse_unsupported(path, raw)
    qwen2, qwen3 = raw.model_type == "qwen2", raw.model_type == "qwen3"
    config = ModelConfig(
        model_type="qwen2" if qwen2 else "qwen3" if qwen3 else "llama",
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or (128 if qwen3 else raw.hidden_size // raw.num_attention_heads),
        intermediate_size=raw.intermediate_size,
        max_model_len=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        rope=_rope(raw),
        tied=raw.tie_word_embeddings,
        qkv_bias=qwen2 or raw.attention_bias,
        output_bias=not qwen2 and raw.attention_bias,
        mlp_bias=raw.model_type == "llama" and raw.mlp_bias,
        head_norm=qwen3,
    )
    _check_heads(path, config)
    return config


def _read_bounded(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelError(
            f"cannot read {path}: {error.strerror}",
            hint="give a model directory with config.json, tokenizer.json and *.safetensors",
        ) from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ModelError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes; it is not a model's configuration")
    return data


def _decode(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be used: {str(error)[:200]}", hint="download the model again") from error


def _refuse_other_types(path: Path, data: bytes) -> None:
    """First of all, for the fields of other architectures have other names."""
    model_type = _decode(path, data, _TypeOnly).model_type
    if model_type not in SUPPORTED:
        raise UnsupportedArchitecture(
            f"{path} asks for architecture {model_type[:40]!r}; the built-in engine has {', '.join(SUPPORTED)}"
        )


def _refuse_unsupported(path: Path, raw: _ConfigFile) -> None:
    reason = ""
    if raw.hidden_act != "silu":
        reason = f"activation {raw.hidden_act[:40]!r}; the built-in engine has silu"
    elif raw.use_sliding_window:
        reason = "sliding-window attention, which the built-in engine does not have"
    elif raw.quantization_config is not None:
        reason = "quantised weights; the built-in engine reads float32, bfloat16 and float16"
    elif raw.rope_parameters is not None and raw.rope_parameters.partial_rotary_factor != 1.0:
        reason = "partial rotary embeddings, which the built-in engine does not have"
    if reason:
        raise UnsupportedArchitecture(f"{path} asks for {reason}")


def _rope(raw: _ConfigFile) -> RopeConfig:
    rope = raw.rope_parameters or _old_rope(raw)
    if rope.rope_type not in ("default", "llama3"):
        raise UnsupportedArchitecture(
            f"the model asks for rope scaling {rope.rope_type[:40]!r}; the built-in engine has 'default' and 'llama3'"
        )
    if rope.rope_type == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError("the model's llama3 rope scaling has high_freq_factor at or below low_freq_factor")
    return rope


def _old_rope(raw: _ConfigFile) -> RopeConfig:
    theta = raw.rope_theta or 10000.0
    old = raw.rope_scaling
    if old is None:
        return RopeConfig(rope_theta=theta)
    return RopeConfig(
        rope_type=old.rope_type or old.type,
        rope_theta=theta,
        factor=old.factor,
        low_freq_factor=old.low_freq_factor,
        high_freq_factor=old.high_freq_factor,
        original_max_position_embeddings=old.original_max_position_embeddings,
    )


def _check_heads(path: Path, config: ModelConfig) -> None:
    if config.heads % config.kv_heads:
        raise ModelError(f"{path}: {config.heads} attention heads cannot share {config.kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ModelError(f"{path}: rotary embeddings need an even head_dim, not {config.head_dim}")

"""Reading the weights of a Llama-family model from *.safetensors files.

A checkpoint's bytes are checked before they are used: the header is bounded, every tensor must have the name and the
shape that config.json calls for and lie inside its file, and nothing may be missing or left over. Tensors are read one
at a time into the wanted dtype; nothing that a file holds is ever run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import torch
from msgspec import Meta, Struct

from node.engines.model_config import ModelConfig
from protocol.errors import ModelError

MAX_HEADER_BYTES: Final = 16 << 20
_AGAIN: Final = "download the model again"
_OF_ANOTHER: Final = "config.json and weights are not of one model: download all of it into an empty directory"
MAX_FILES: Final = 1024

_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SIZES: Final = {"F32": 4, "BF16": 2, "F16": 2}

Shape = tuple[int, ...]


class _TensorEntry(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 40)], ...], Meta(max_length=8)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


class _Place(NamedTuple):
    """Where a tensor lies."""

    path: Path
    offset: int
    size: int
    dtype: torch.dtype
    shape: Shape


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of every tensor that a model of this configuration has."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_tensors(config).items()})
    return shapes


class WeightFiles(Mapping[str, torch.Tensor]):
    """The tensors of a model directory by name, checked at once by the files' headers and read when they are asked for.

    Each look-up reads anew, so that nothing but what the caller keeps takes memory.
    """

    def __init__(self, model_dir: Path, config: ModelConfig, *, dtype: torch.dtype) -> None:
        """Raises ModelError naming the file and what is missing, left over, misshapen or truncated."""
        self._dtype = dtype
        self._places: dict[str, _Place] = {}
        expected = expected_tensors(config)
        for path in weight_files(model_dir):
            for name, place in _places(path, expected):
                if name in self._places:
                    raise ModelError(f"tensor {name} stands in two files of {model_dir}", hint=_OF_ANOTHER)
                self._places[name] = place
        missing = sorted(expected.keys() - self._places.keys())
        if missing:
            raise ModelError(
                f"{model_dir} lacks {len(missing)} tensors, the first is {missing[0]}",
                hint="the directory is incomplete: download the model again",
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor on the CPU. Raises ModelError when its file cannot be read any more."""
        return _read_tensor(self._places[name]).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_weights(model_dir: Path, config: ModelConfig, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read every tensor of the model as `dtype` on the CPU. Raises as `WeightFiles`."""
    return dict(WeightFiles(model_dir, config, dtype=dtype))


def tensor_shapes(model_dir: Path) -> dict[str, Shape]:
    """Shapes of all tensors of a model of any architecture, by name, from the files' headers. Raises ModelError."""
    shapes: dict[str, Shape] = {}
    for path in weight_files(model_dir):
        try:
            with path.open("rb") as file:
                entries, _ = _read_header(file, path)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        shapes |= {name: entry.shape for name, entry in entries.items()}
    return shapes


def _layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {f"self_attn.{part}_proj.bias": (queries if part == "q" else keys,) for part in "qkv"}
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    if config.head_norm:
        shapes |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
    return shapes


def weight_files(model_dir: Path) -> list[Path]:
    """The files that hold a model's weights. Raises ModelError where there are none, or too many."""
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        other = sorted(path.name for path in model_dir.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise ModelError(
            f"{model_dir} holds no *.safetensors file{f', but {other[0]}' if other else ''}",
            hint="convert it: load it with transformers and write it with save_pretrained(directory)"
            if other
            else "the directory is incomplete: download the model again",
        )
    if len(paths) > MAX_FILES:
        raise ModelError(f"{model_dir} holds {len(paths)} *.safetensors files; at most {MAX_FILES} are read")
    return paths


def _places(path: Path, expected: Mapping[str, Shape]) -> Iterator[tuple[str, _Place]]:
    try:
        with path.open("rb") as file:
            entries, data_start = _read_header(file, path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    for name, entry in entries.items():
        if name in expected:
            _check_shape(path, name, entry, shape=expected[name])
            start, stop = entry.data_offsets
            yield name, _Place(path, data_start + start, stop - start, _DTYPES[entry.dtype], entry.shape)
        elif not _is_redundant(name):
            raise ModelError(
                f"{path} holds a tensor that the model's architecture does not have: {name[:80]}", hint=_OF_ANOTHER
            )


def _is_redundant(name: str) -> bool:
    """Tensors that some writers keep although the model computes them: tied output weights, rotary frequencies."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _read_header(file: BufferedReader, path: Path) -> tuple[dict[str, _TensorEntry], int]:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ModelError(
            f"{path} is not a safetensors file, or its header is larger than {MAX_HEADER_BYTES} bytes", hint=_AGAIN
        )
    entries = _decode_header(file.read(length), path)
    data_start = 8 + length
    _check_layout(path, entries, data_bytes=os.fstat(file.fileno()).st_size - data_start)
    return entries, data_start


def _decode_header(header: bytes, path: Path) -> dict[str, _TensorEntry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(value, type=_TensorEntry) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"the header of {path} does not decode: {str(error)[:200]}", hint=_AGAIN) from error


def _check_layout(path: Path, entries: Mapping[str, _TensorEntry], *, data_bytes: int) -> None:
    """Tensors must tile the data exactly, as the format demands: no overlap, no gap, no truncation."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != end or stop < start:
            raise ModelError(f"{path}: tensor {name[:80]} overlaps another or leaves a gap", hint=_AGAIN)
        end = stop
    if end != data_bytes:
        raise ModelError(f"{path} has {data_bytes} bytes of tensors, its header speaks of {end}", hint=_AGAIN)


def _check_shape(path: Path, name: str, entry: _TensorEntry, *, shape: Shape) -> None:
    if entry.dtype not in _DTYPES:
        raise ModelError(
            f"{path}: tensor {name} is {entry.dtype[:16]!r}; supported are {', '.join(_DTYPES)}",
            hint="load it with transformers in float32 or bfloat16 and write it with save_pretrained(directory)",
        )
    if entry.shape != shape:
        raise ModelError(
            f"{path}: tensor {name} is {list(entry.shape)}, config.json calls for {list(shape)}", hint=_OF_ANOTHER
        )
    size = _SIZES[entry.dtype]
    for side in shape:
        size *= side
    if entry.data_offsets[1] - entry.data_offsets[0] != size:
        raise ModelError(f"{path}: tensor {name} does not fill its bytes", hint=_AGAIN)


def _read_tensor(place: _Place) -> torch.Tensor:
    buffer = bytearray(place.size)
    try:
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.offset)
            read = file.readinto(buffer)
            while read and read < len(buffer):  # one read gives 2 GiB at most
                more = file.readinto(memoryview(buffer)[read:])
                read = read + more if more else 0
    except OSError as error:
        raise ModelError(f"cannot read {place.path}: {error.strerror}") from error
    if read != len(buffer):
        raise ModelError(f"{place.path} was cut short while it was read", hint=_AGAIN)
    return torch.frombuffer(buffer, dtype=place.dtype).view(place.shape)

"""The head of a safetensors file, checked before anyone sizes memory by it.

Bounds and layout only: names are plain, shapes and offsets agree, tensors tile the data with no gap. Whether these are
the tensors that a model needs is the engine's to say (node.engines.weights). Works on bytes; reading is the caller's.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from protocol.errors import MalformedError

SUFFIX: Final = ".safetensors"
PREFIX_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 16 << 20
MAX_TENSORS: Final = 1 << 16

_BITS: Final = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,255}")


class _Tensor(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 40)], ...], Meta(max_length=8)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def header_length(prefix: bytes, file_bytes: int) -> int:
    """How long the header is, given a file's first 8 bytes and its size. Raises MalformedError."""
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == PREFIX_BYTES else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, max(file_bytes - PREFIX_BYTES, 0)):
        raise MalformedError(
            f"a safetensors header of {length} bytes in a file of {file_bytes}; at most {MAX_HEADER_BYTES} are allowed"
        )
    return length


def check_header(header: bytes, data_bytes: int) -> None:
    """Raise MalformedError unless the header is a table of tensors that fill `data_bytes` exactly."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        if len(raw) > MAX_TENSORS:
            raise MalformedError(f"a safetensors header with {len(raw)} tensors; at most {MAX_TENSORS} are allowed")
        tensors = {name: msgspec.json.decode(value, type=_Tensor) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"a safetensors header does not decode: {str(error)[:200]}") from error
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    _check_tiling(tensors, data_bytes)


def _check_tensor(name: str, tensor: _Tensor) -> None:
    if not _NAME.fullmatch(name):
        raise MalformedError(f"unsafe tensor name in a safetensors header: {name[:80]!r}")
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        raise MalformedError(f"tensor {name} has the unknown type {tensor.dtype[:16]!r}")
    size = bits // 8
    for side in tensor.shape:
        size *= side
    start, stop = tensor.data_offsets
    if stop - start != size:
        raise MalformedError(f"tensor {name} takes {stop - start} bytes; its shape and type make {size}")


def _check_tiling(tensors: Mapping[str, _Tensor], data_bytes: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.data_offsets[0] != end:
            raise MalformedError(f"tensor {name} overlaps another or leaves a gap")
        end = tensor.data_offsets[1]
    if end != data_bytes:
        raise MalformedError(f"{data_bytes} bytes of tensors in a file whose header speaks of {end}")

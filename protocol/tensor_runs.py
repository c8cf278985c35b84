"""What the bytes of a checkpoint are, as far as patches care: which are bf16 weights, which are wider, which neither.

Read from safetensors headers. A header that is not in order makes its file plain bytes: runs decide about the size of a
patch, never about its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from protocol.patch import STEPS, Run
from protocol.tensorfile import PREFIX_BYTES

_KINDS: Final[Mapping[str, int]] = {
    "BF16": STEPS,
    **dict.fromkeys(("F16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}


class _Tensor(msgspec.Struct):
    dtype: str
    data_offsets: tuple[int, int]


def file_runs(header: bytes, file_size: int) -> list[Run]:
    """The runs of a safetensors file with this header (the JSON, without its length); all bytes if it has none."""
    if not header:
        return _merged([Run(1, file_size)])
    start = PREFIX_BYTES + len(header)
    try:
        tensors = _tensors(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        tensors = []
    runs = [Run(1, start)]
    at = 0
    for tensor in tensors:
        low, high = tensor.data_offsets
        if low != at or not low <= high <= file_size - start:
            return _merged([Run(1, file_size)])
        runs.append(Run(_KINDS.get(tensor.dtype, 1), high - low))
        at = high
    return _merged([*runs, Run(1, file_size - start - at)])


def _tensors(header: bytes) -> list[_Tensor]:
    entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    entries.pop("__metadata__", None)
    tensors = [msgspec.json.decode(entry, type=_Tensor) for entry in entries.values()]
    return sorted(tensors, key=lambda tensor: tensor.data_offsets)


def cut_runs(runs: Iterable[Run], part: range) -> list[Run]:
    """The runs inside a part of the byte stream. Values that its borders split become plain bytes."""
    return _merged(piece for run, start in _placed(runs) for piece in _cut(run, start, part))


def _placed(runs: Iterable[Run]) -> Iterator[tuple[Run, int]]:
    start = 0
    for run in runs:
        yield run, start
        start += run.length


def _cut(run: Run, start: int, part: range) -> Iterator[Run]:
    low, high = max(start, part.start), min(start + run.length, part.stop)
    if low >= high:
        return
    width = 2 if run.kind == STEPS else run.kind
    first = min(high, low + (start - low) % width)
    last = max(first, high - (high - start) % width)
    yield Run(1, first - low)
    yield Run(run.kind, last - first)
    yield Run(1, high - last)


def _merged(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for run in runs:
        if not run.length:
            continue
        if merged and merged[-1].kind == run.kind:
            run = Run(run.kind, merged.pop().length + run.length)
        merged.append(run)
    return merged

"""The rollout file: what a submission carries, one Parquet row per rollout (INTELLECT-2's formatting check).

Everything that training and checking use is a column here, so the file's hash covers it. Parquet expands: a few hundred
bytes can ask for gigabytes, and a footer's own counts can lie. So files of others are read only in a child process with
a memory limit, and only when the schema is exactly this one. Leaves out what needs the run: groups, seeds, rewards,
the inside of proofs. pyarrow is imported where it is used.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.atomic import write_atomically
from protocol.constants import PROOF_CHUNK_TOKENS
from protocol.errors import DataDirError, MalformedError, ModelError

FinishReason = Literal["stop", "length"]

ROLLOUT_SCHEMA: Final = (
    ("prompt_index", "int32"),
    ("member", "int32"),
    ("prompt_ids", "list<int32>"),
    ("output_ids", "list<int32>"),
    ("logprobs", "list<float>"),
    ("reward", "double"),
    ("finish_reason", "string"),
    ("proofs", "list<binary>"),
    ("turns", "list<int32>"),
)
"""Columns in order; none is nullable, nor is a list's element. A change here needs a new PROTOCOL_VERSION."""

MAX_TOKEN_ID: Final = 2**31 - 1
MAX_PROOF_BYTES: Final = 2 + 2 * 4096
"""A proof of the most points that a manifest can ask for."""

_FINISH_REASONS: Final = get_args(FinishReason)
_SPLIT_COLUMNS: Final = ("prompt_ids", "output_ids", "logprobs")  # byte-stream split: 20 % smaller than a dictionary
_MAX_THRIFT_BYTES: Final = 1 << 16  # an honest footer has some 2 KiB
_MAX_THRIFT_ITEMS: Final = 1024  # an honest schema has 20 nodes


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One answer to one prompt. `logprobs` are float32, of `output_ids`, under the sampling temperature.

    `reward` is NaN where the environment could not tell. `turns` is empty where the policy emitted all of `output_ids`;
    else it holds where each of its turns begins and ends, the environment's replies lying between them: these have
    log-probabilities of 0 and no proofs (`split_turns`).
    """

    prompt_index: int
    member: int
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    reward: float
    finish_reason: FinishReason
    proofs: list[bytes]
    turns: list[int] = []


def emitted_spans(output_tokens: int, turns: Sequence[int]) -> list[tuple[int, int]]:
    """Where the policy's own tokens lie in an answer. Raises MalformedError unless turns rise, apart, to its end."""
    if not turns:
        return [(0, output_tokens)]
    inner = turns[1:-1]
    if len(turns) < 4 or len(turns) % 2 or turns[0] != 0 or turns[-1] != output_tokens:
        raise MalformedError("turns that do not reach from an answer's first token to its last")
    if any(low >= high for low, high in pairwise((0, *inner, output_tokens))):
        raise MalformedError("turns, or replies between them, without a token")
    return list(zip(turns[::2], turns[1::2], strict=True))


def split_turns(rollout: Rollout, group_size: int) -> list[Rollout]:
    """A rollout's turns as answers of their own: what came before a turn is its prompt.

    Turn t counts as member `member` + t · `group_size`, whose sampling noise it has. Raises MalformedError.
    """
    spans = emitted_spans(len(rollout.output_ids), rollout.turns)
    if len(spans) == 1:
        return [rollout]
    found, used = [], 0
    for turn, (start, stop) in enumerate(spans):
        proofs = -(-(stop - start) // PROOF_CHUNK_TOKENS)
        is_last = turn == len(spans) - 1
        found.append(
            msgspec.structs.replace(
                rollout,
                member=rollout.member + turn * group_size,
                prompt_ids=rollout.prompt_ids + rollout.output_ids[:start],
                output_ids=rollout.output_ids[start:stop],
                logprobs=rollout.logprobs[start:stop],
                proofs=rollout.proofs[used:] if is_last else rollout.proofs[used : used + proofs],
                finish_reason=rollout.finish_reason if is_last else "stop",
                turns=[],
            )
        )
        used += proofs
    return found


def told_rewards(rollouts: Sequence[Rollout]) -> list[float]:
    """The rewards of those whose environment could tell."""
    return [rollout.reward for rollout in rollouts if not math.isnan(rollout.reward)]


def mean_reward(rollouts: Sequence[Rollout]) -> float:
    """Mean of the rewards that could be told; 0 where none could."""
    told = told_rewards(rollouts)
    return sum(told) / len(told) if told else 0.0


def write_rollouts(path: Path, rollouts: Sequence[Rollout]) -> tuple[bytes, int]:
    """Write a rollout file durably and at once (temporary file, fsync, rename); returns its SHA-256 and size in bytes.

    Raises ModelError if a reader would refuse the rollouts (an engine's NaN, for one), DataDirError if the disk does.
    """
    data = _encode(rollouts)
    write_atomically(path, data)
    return hashlib.sha256(data).digest(), len(data)


def read_rollouts(
    path: Path, *, max_rollouts: int, max_tokens: int, vocab_size: int = MAX_TOKEN_ID + 1
) -> list[Rollout]:
    """Read a rollout file. Any content gives rollouts within the bounds, or MalformedError.

    `max_tokens` bounds each of a rollout's two token lists (the run's max_model_len does), `vocab_size` its token ids.
    A file of another node must be read in a process with a memory limit, which alone stops a Parquet bomb; what the
    limit stops is a MalformedError too. Raises DataDirError if the file itself cannot be read, and lets a MemoryError
    through once the content has passed: then the limit is too small for the run's bounds, which is nobody's lie.
    """
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            table = _read_table(file, max_rollouts)
            columns = _check_table(table, max_rollouts=max_rollouts, max_tokens=max_tokens, vocab_size=vocab_size)
    except MemoryError as error:
        raise MalformedError(
            f"the rollout file asks for more memory than its reader may use: {_short(error)}"
        ) from error
    except OSError as error:
        if error.errno is None:  # pyarrow's own, for bad pages and footers; the system's have a number
            raise MalformedError(f"not a readable rollout file: {_short(error)}") from error
        raise DataDirError(f"cannot read {path}: {error.strerror}", hint=f"look at it with `ls -l {path}`") from error
    except (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError) as error:
        raise MalformedError(f"not a readable rollout file: {_short(error)}") from error
    return _rows(columns)


def _short(value: object) -> str:
    return " ".join(str(value).split())[:200]


@cache
def _schema() -> Any:
    import pyarrow as pa

    scalars = {"int32": pa.int32(), "float": pa.float32(), "double": pa.float64(), "string": pa.string()}
    scalars["binary"] = pa.binary()
    fields = []
    for name, kind in ROLLOUT_SCHEMA:
        element = kind.removeprefix("list<").removesuffix(">")
        listed = pa.list_(pa.field("element", scalars[element], nullable=False))
        fields.append(pa.field(name, listed if element != kind else scalars[kind], nullable=False))
    return pa.schema(fields)


def _encode(rollouts: Sequence[Rollout]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [name for name, _ in ROLLOUT_SCHEMA]
    try:
        columns = {name: [getattr(rollout, name) for rollout in rollouts] for name in names}
        table = pa.table(columns, schema=_schema())
        _check_table(table, max_rollouts=len(rollouts), max_tokens=MAX_TOKEN_ID, vocab_size=MAX_TOKEN_ID + 1)
    except (MalformedError, pa.ArrowException, TypeError, OverflowError) as error:
        raise ModelError(
            f"these rollouts cannot be handed in: {_short(error)}",
            hint="the engine produced them; check its model and dtype",
        ) from error
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        row_group_size=max(1, len(rollouts)),
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        column_encoding={f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _SPLIT_COLUMNS},
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    )
    return sink.getvalue()


def _read_table(file: Any, max_rollouts: int) -> Any:
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(
        file,
        pre_buffer=False,
        thrift_string_size_limit=_MAX_THRIFT_BYTES,
        thrift_container_size_limit=_MAX_THRIFT_ITEMS,
        page_checksum_verification=True,
    )
    # Without metadata there is no embedded Arrow schema, which could turn columns into other types on reading.
    if parquet.metadata.metadata or not parquet.schema_arrow.equals(_schema(), check_metadata=False):
        raise MalformedError(f"another schema than a rollout file's: {_short(parquet.schema_arrow)}")
    if parquet.num_row_groups != 1:
        raise MalformedError(f"{parquet.num_row_groups} row groups; a rollout file has one")
    _check_row_count(parquet.metadata.num_rows, max_rollouts)
    return parquet.read_row_group(0, use_threads=False)


def _check_row_count(rows: int, max_rollouts: int) -> None:
    if not 1 <= rows <= max_rollouts:
        raise MalformedError(f"{rows} rollouts in a file; 1 to {max_rollouts} are allowed")


def _check_table(table: Any, *, max_rollouts: int, max_tokens: int, vocab_size: int) -> dict[str, Any]:
    """The columns of a table that is within the bounds."""
    _check_row_count(table.num_rows, max_rollouts)  # again: what the footer said need not be so
    columns = {name: _column(table, name) for name, _ in ROLLOUT_SCHEMA}
    lengths = {name: _lengths(columns[name]) for name, kind in ROLLOUT_SCHEMA if kind.startswith("list<")}
    outputs = lengths["output_ids"]
    _require(_within(outputs, 1, max_tokens), f"an output has no token or more than {max_tokens}")
    _require(_within(lengths["prompt_ids"], 1, max_tokens), f"a prompt has no token or more than {max_tokens}")
    _require(bool((lengths["logprobs"] == outputs).all()), "as many log-probabilities as output tokens are due")
    for name in ("prompt_ids", "output_ids"):
        tokens = _elements(columns, name)
        _require(_within(tokens, 0, vocab_size - 1), f"{name} outside the vocabulary of {vocab_size}")
    for turns in _turns(columns["turns"], lengths["turns"], outputs):
        emitted_spans(*turns)
    for name in ("prompt_index", "member"):
        _require(_within(_scalars(columns, name), 0, MAX_TOKEN_ID), f"a negative {name}")
    _require(bool(np.isfinite(_elements(columns, "logprobs")).all()), "a log-probability that is not finite")
    _require(not bool(np.isinf(_scalars(columns, "reward")).any()), "a reward that is infinite")
    _check_proofs(columns, lengths)
    _check_finish_reasons(columns["finish_reason"])
    return columns


def _check_proofs(columns: dict[str, Any], lengths: dict[str, NDArray[np.int64]]) -> None:
    most = -(-lengths["output_ids"] // PROOF_CHUNK_TOKENS) + lengths["turns"] // 2  # each turn has a last chunk
    _require(bool((lengths["proofs"] <= most).all()), "more proofs than chunks of output tokens")
    sizes = np.diff(_offsets(_flattened(columns, "proofs")))
    _require(_within(sizes, 0, MAX_PROOF_BYTES), f"a proof of more than {MAX_PROOF_BYTES} bytes")


def _turns(column: Any, lengths: NDArray[np.int64], outputs: NDArray[np.int64]) -> Iterator[tuple[int, list[int]]]:
    """Output tokens and turns of the rollouts that have several; few lists become Python's."""
    _require(bool((lengths <= outputs + 1).all()), "more turns than output tokens")
    for row in np.flatnonzero(lengths).tolist():
        yield int(outputs[row]), column[row].as_py()


def _check_finish_reasons(column: Any) -> None:
    longest = max(map(len, _FINISH_REASONS))
    # Lengths first: a reason of megabytes must not become a Python string, nor appear in the message.
    known = _within(np.diff(_offsets(column)), 0, longest) and set(column.to_pylist()) <= set(_FINISH_REASONS)
    _require(known, f"a finish reason that is none of {', '.join(_FINISH_REASONS)}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise MalformedError(f"a rollout file with {otherwise}")


def _within(values: NDArray[Any], low: int, high: int) -> bool:
    return not values.size or bool(low <= values.min() and values.max() <= high)


def _column(table: Any, name: str) -> Any:
    """A column as one array; a single row group gives a single chunk, which is not copied."""
    column = table.column(name)
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if chunk.null_count:
        raise MalformedError(f"a rollout file with a null {name}")
    return chunk


def _flattened(columns: dict[str, Any], name: str) -> Any:
    elements = columns[name].flatten()
    if elements.null_count:
        raise MalformedError(f"a rollout file with a null in {name}")
    return elements


def _offsets(array: Any) -> NDArray[np.int64]:
    """Where each variable-length element of a binary or string array begins and ends."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _lengths(column: Any) -> NDArray[np.int64]:
    return np.diff(column.offsets.to_numpy().astype(np.int64))


def _elements(columns: dict[str, Any], name: str) -> NDArray[Any]:
    return np.asarray(_flattened(columns, name).to_numpy())


def _scalars(columns: dict[str, Any], name: str) -> NDArray[Any]:
    return np.asarray(columns[name].to_numpy())


def _rows(columns: dict[str, Any]) -> list[Rollout]:
    values = [column.to_pylist() for column in columns.values()]
    return [Rollout(**dict(zip(columns, row, strict=True))) for row in zip(*values, strict=True)]

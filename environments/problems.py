"""Data sets of problems and answers: read from what is published, written as one plain form that travels.

JSON lines or Parquet with the columns of NuminaMath (problem, answer or a boxed answer in solution), DeepScaleR
(problem, answer), SYNTHETIC-1 and INTELLECT-2 (prompt, verification_info) or GSM8K (question, answer after ####). What
travels is JSON lines of {"answer", "problem"}. Leaves out what an answer means.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from environments.maths_text import last_box
from protocol.errors import ConfigError

MAX_PROBLEMS: Final = 1 << 20
MAX_FILE_BYTES: Final = 256 << 20
MAX_LINE_BYTES: Final = 1 << 20
_PROBLEM_COLUMNS: Final = ("problem", "question", "prompt")
_PARQUET_COLUMNS: Final = (*_PROBLEM_COLUMNS, "answer", "solution", "verification_info", "task_type", "problem_type")
_PARQUET_MEMORY_BYTES: Final = 4 << 30
_MAX_LINES_BYTES: Final = 4 * MAX_FILE_BYTES
_PARQUET_S: Final = 600
_PARQUET_MAGIC: Final = b"PAR1"


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question and the answer that is right."""

    answer: Annotated[str, Meta(min_length=1, max_length=4096)]
    problem: Annotated[str, Meta(min_length=1, max_length=65536)]


def encode_problems(problems: Sequence[Problem]) -> bytes:
    """The form that travels: a line of JSON each, keys in order."""
    return b"".join(msgspec.json.encode(problem) + b"\n" for problem in problems)


def decode_problems(data: bytes) -> list[Problem]:
    """What `encode_problems` wrote. Raises ConfigError that names the line at fault."""
    decoder = msgspec.json.Decoder(Problem)
    problems: list[Problem] = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            problems.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"the environment's data, line {number}: {str(error)[:200]}") from error
    if not 1 <= len(problems) <= MAX_PROBLEMS:
        raise ConfigError(f"the environment's data hold {len(problems)} problems; 1 to {MAX_PROBLEMS} are allowed")
    return problems


def read_problems(source: Path) -> list[tuple[int, Problem]]:
    """Problems of an operator's file with their line (or row) numbers, from 1. Raises ConfigError that names them."""
    problems = [(number, _problem(source, number, row)) for number, row in _rows(source)]
    if not 1 <= len(problems) <= MAX_PROBLEMS:
        raise ConfigError(f"{source} holds {len(problems)} problems; 1 to {MAX_PROBLEMS} are allowed")
    return problems


def _rows(source: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        size = source.stat().st_size
        with source.open("rb") as file:
            is_parquet = file.read(4) == _PARQUET_MAGIC
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    if size > MAX_FILE_BYTES:
        raise ConfigError(f"{source} has {size} bytes; {MAX_FILE_BYTES} are allowed", hint="take a part of it")
    if not is_parquet:
        yield from _json_rows(source, source)
        return
    with tempfile.TemporaryDirectory(prefix="problems-") as directory:
        lines = Path(directory) / "rows.jsonl"
        _convert_parquet(source, lines)
        yield from _json_rows(lines, source)


def _json_rows(path: Path, source: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number in range(1, MAX_PROBLEMS + 2):
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if line.strip():
                yield number, _object(line, f"{source}, line {number}")


def _object(line: bytes, place: str) -> Mapping[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{place}: longer than {MAX_LINE_BYTES} bytes")
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{place}: not a JSON object: {str(error)[:200]}", hint="a data file is JSON lines or Parquet"
        ) from error


def _problem(source: Path, number: int, row: Mapping[str, Any]) -> Problem:
    problem = next((row[name] for name in _PROBLEM_COLUMNS if isinstance(row.get(name), str)), None)
    if problem is None:
        raise ConfigError(
            f"{source}, line {number}: no problem; its columns are {', '.join(sorted(row))[:200]}",
            hint=f"name the column one of {', '.join(_PROBLEM_COLUMNS)}",
        )
    answer = _answer(row)
    if not answer:
        raise ConfigError(
            f"{source}, line {number}: no answer in any of answer, verification_info and solution",
            hint="remove the line, or give its answer",
        )
    try:
        return msgspec.convert({"problem": problem, "answer": answer}, Problem)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}, line {number}: {error}") from error


def _answer(row: Mapping[str, Any]) -> str:
    """The right answer, wherever a data set keeps it; empty where there is none."""
    given = row.get("answer")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return str(given)
    if isinstance(given, str) and given.strip():
        return given.rpartition("####")[2].strip()
    checked = row.get("verification_info")
    if isinstance(checked, str) and checked:
        checked = _object_or_none(checked)
    if isinstance(checked, Mapping):
        truth = checked.get("ground_truth")
        return str(truth).strip() if isinstance(truth, (str, int, float)) else ""
    solution = row.get("solution")
    return (last_box(solution) or "") if isinstance(solution, str) else ""


def _object_or_none(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None


def _convert_parquet(source: Path, target: Path) -> None:
    """Parquet to JSON lines in a child with a memory limit: a few hundred bytes can ask for gigabytes."""
    command = [sys.executable, "-P", "-c", _PARQUET_CODE, str(source), str(target), ",".join(_PARQUET_COLUMNS)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PARQUET_S,
            check=False,
            preexec_fn=_limit_memory,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{source} is not read within {_PARQUET_S} s") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(f"{source} is not a readable Parquet file: {lines[-1][:200] if lines else 'it crashed'}")


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_PARQUET_MEMORY_BYTES, _PARQUET_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_LINES_BYTES, _MAX_LINES_BYTES))


_PARQUET_CODE: Final = """
import json, sys
import pyarrow.parquet as pq
source, target, columns = sys.argv[1:]
parquet = pq.ParquetFile(source)
wanted = [name for name in columns.split(",") if name in parquet.schema_arrow.names]
with open(target, "w", encoding="utf-8") as file:
    for batch in parquet.iter_batches(batch_size=256, columns=wanted, use_threads=False):
        for row in batch.to_pylist():
            file.write(json.dumps(row, default=str) + "\\n")
"""

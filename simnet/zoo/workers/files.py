"""Cheats with whole files: other groups or counts than are due, files of before, and files that attack their reader.

pyarrow is imported where it is used.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from node.engines.assignment import Work
from node.engines.base import Generation
from protocol.rollouts import Rollout
from simnet.zoo.workers.base import Cheat

BOMB_TEXT_BYTES: Final = 64 << 20
"""Of one text that every row of the bomb repeats: 32 rows unpack to 2 GB."""
NOISE_BYTES: Final = 4096


class FlippedLength(Cheat):
    """Credits are output tokens: it signs for twice as many."""

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        made = super().generate(*args, **kwargs)
        return made | {"output_tokens": 2 * made["output_tokens"]}


class MissingMembers(Cheat):
    """Groups look better without their worst answer."""

    def rollouts(self, work: Work, generations: Sequence[Generation]) -> list[Rollout]:
        rows = super().rollouts(work, generations)
        return [row for group in _groups(rows, work.group_size) for row in group if row is not _worst(group)]


class RepeatedMembers(Cheat):
    """The best answer stands in the worst one's place too, under that one's number."""

    def rollouts(self, work: Work, generations: Sequence[Generation]) -> list[Rollout]:
        rows = super().rollouts(work, generations)
        return [_stand_in(row, group) for group in _groups(rows, work.group_size) for row in group]


class ChangedFile(Cheat):
    """The file is changed after it was written; what is signed for is what it then is."""

    def __init__(self, *args: object, change: Callable[[Path], None], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._change = change

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        made = super().generate(*args, **kwargs)
        self._change(Path(kwargs["path"]))
        return made | _signed(Path(kwargs["path"]))


class ReplayedFile(Cheat):
    """Works once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first: dict[str, Any] = {}

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        kept, path = self.directory / "first.parquet", Path(kwargs["path"])
        if not self._first:
            self._first = super().generate(*args, **kwargs)
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept)
        else:
            shutil.copyfile(kept, path)
        return dict(self._first)


def bomb(path: Path) -> None:
    """One long text as every row's finish reason, kept once and referred to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    place = table.schema.get_field_index("finish_reason")
    texts = pa.DictionaryArray.from_arrays(np.zeros(table.num_rows, np.int32), ["a" * BOMB_TEXT_BYTES])
    table = table.set_column(place, pa.field("finish_reason", texts.type, nullable=False), texts)
    pq.write_table(
        table,
        path,
        compression="zstd",
        write_statistics=False,
        store_schema=False,
        dictionary_pagesize_limit=2 * BOMB_TEXT_BYTES,
    )


def noise(path: Path) -> None:
    draws = np.random.default_rng(path.stat().st_size)
    path.write_bytes(b"PAR1" + draws.bytes(NOISE_BYTES) + b"PAR1")


def hostile_tokens(path: Path, *, token: int) -> None:
    """The first token of every answer replaced, past the honest writer, which would not do it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    place = table.schema.get_field_index("output_ids")
    field, column = table.schema.field(place), table.column(place).combine_chunks()
    values = column.flatten().to_numpy(zero_copy_only=False).copy()
    values[column.offsets.to_numpy()[:-1]] = token
    changed = pa.ListArray.from_arrays(column.offsets, pa.array(values, pa.int32()), type=field.type)
    pq.write_table(table.set_column(place, field, changed), path, compression="zstd", store_schema=False)


def _groups(rows: Sequence[Rollout], size: int) -> list[Sequence[Rollout]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _worst(group: Sequence[Rollout]) -> Rollout:
    return min(group, key=lambda row: row.reward)


def _stand_in(row: Rollout, group: Sequence[Rollout]) -> Rollout:
    best = max(group, key=lambda one: one.reward)
    return msgspec.structs.replace(best, member=row.member) if row is _worst(group) else row


def _signed(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"sha256": hashlib.sha256(data).digest(), "size": len(data)}


WORKERS: Final[dict[str, Callable[..., Cheat]]] = {
    "flipped-length": FlippedLength,
    "missing-members": MissingMembers,
    "repeated-members": RepeatedMembers,
    "replayed-file": ReplayedFile,
    "parquet-bomb": partial(ChangedFile, change=bomb),
    "malformed-parquet": partial(ChangedFile, change=noise),
    "hostile-tokens-negative": partial(ChangedFile, change=partial(hostile_tokens, token=-1)),
    "hostile-tokens-large": partial(ChangedFile, change=partial(hostile_tokens, token=2**31 - 1)),
}

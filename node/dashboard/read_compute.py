"""The child that opens a stranger's rollout file for the dashboard and turns token ids into text.

It runs under a limit on its address space, as node.compute.read_worker does, and answers with a page of bounded texts:
characters that do not print are spelled out, so that nothing in an answer can reorder or hide what is around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from node.compute.serve import serve
from node.engines.tokenizer import Tokenizer
from protocol.errors import ModelError, ProtocolError
from protocol.rollouts import Rollout, read_rollouts

MAX_TEXT_CHARS: Final = 20_000
"""Of one prompt or answer; the rest is cut, and said to be."""
MAX_PAGE: Final = 64
MAX_IDS: Final = 2000
"""Token ids that are shown where there is no tokenizer."""


def read(
    path: str, tokenizer_dir: str, first: int, count: int, stop_ids: list[int], limits: dict[str, Any]
) -> dict[str, Any]:
    """A page of a file's rollouts, by group, or what is wrong with the file.

    A reward is None where the contributor's environment could not tell. Without a `tokenizer_dir` that works, texts are
    token ids.
    """
    try:
        rollouts = read_rollouts(Path(path), **limits)
    except ProtocolError as error:
        return {"malformed": error.message}
    texts = _Texts(_tokenizer(tokenizer_dir), stop_ids)
    page = rollouts[max(0, first) : max(0, first) + min(count, MAX_PAGE)]
    groups = groupby(page, key=lambda one: one.prompt_index)
    return {
        "total": len(rollouts),
        "first": max(0, first),
        "decoded": texts.decoded,
        "groups": [_group(index, list(members), texts) for index, members in groups],
    }


class _Texts:
    """Token ids as text that is safe to show."""

    def __init__(self, tokenizer: Tokenizer | None, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self.decoded = tokenizer is not None

    def of(self, ids: Sequence[int], *, answer: bool) -> dict[str, Any]:
        if self._tokenizer is None:
            return {"text": " ".join(map(str, ids[:MAX_IDS])), "cut": len(ids) > MAX_IDS, "tokens": len(ids)}
        text = self._tokenizer.decode(ids, stop_ids=self._stop_ids if answer else ())
        return {"text": visible(text[:MAX_TEXT_CHARS]), "cut": len(text) > MAX_TEXT_CHARS, "tokens": len(ids)}


def visible(text: str) -> str:
    """A text with line breaks and tabs kept, and everything else that does not print spelled out."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def _group(index: int, members: Sequence[Rollout], texts: _Texts) -> dict[str, Any]:
    return {
        "prompt_index": index,
        "prompt": texts.of(members[0].prompt_ids, answer=False),
        "answers": [_answer(one, texts) for one in members],
    }


def _answer(rollout: Rollout, texts: _Texts) -> dict[str, Any]:
    return {
        "member": rollout.member,
        "reward": rollout.reward if math.isfinite(rollout.reward) else None,
        "finish_reason": rollout.finish_reason,
        "turns": len(rollout.turns) // 2 or 1,
        **texts.of(rollout.output_ids, answer=True),
    }


@lru_cache(maxsize=2)
def _tokenizer(directory: str) -> Tokenizer | None:
    """The tokenizer of a policy's directory; None where there is none that works."""
    try:
        return Tokenizer(Path(directory)) if directory else None
    except ModelError:
        return None


def main() -> None:
    # Imported before the limit is set: threads and pools of a library count against it.
    import pyarrow as pa
    import pyarrow.parquet

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    serve({"read": read})


if __name__ == "__main__":
    main()

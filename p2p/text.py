"""Texts from outside in log lines."""

from __future__ import annotations

from typing import Final

MAX_LOG_CHARACTERS: Final = 2048


def cut(text: str) -> str:
    """Shorten what a log line quotes from outside."""
    return text if len(text) <= MAX_LOG_CHARACTERS else text[: MAX_LOG_CHARACTERS - 1] + "…"

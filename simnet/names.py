"""Names that somebody wrote against those that there are: unknown ones are refused with the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from protocol.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, as the end of a sentence; empty where none is near."""
    close = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_keys(part: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse keys of a table that nobody knows. Raises ConfigError."""
    names = list(known)
    for key in part:
        if key not in names:
            raise ConfigError(
                f"{where}: unknown name {str(key)[:80]!r}{nearest(str(key), names)}", hint=f"known: {', '.join(names)}"
            )


def check_choice(value: object, known: Iterable[str], what: str, where: str) -> None:
    """Refuse a text that is none of those known; whether it is a text is not looked at here. Raises ConfigError."""
    names = list(known)
    if isinstance(value, str) and value not in names:
        raise ConfigError(
            f"{where}: unknown {what} {value[:80]!r}{nearest(value, names)}", hint=f"known: {', '.join(names)}"
        )

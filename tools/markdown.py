"""Markdown as the generated pages use it: tables whose cells cannot break out, and parts of a page between markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from protocol.errors import ConfigError


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; `|` and line breaks in cells are escaped."""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def _cell(text: str) -> str:
    """`<word>` outside of code would be taken for HTML, and not shown."""
    pieces = re.split(r"(`[^`]*`)", re.sub(r"\s+", " ", text).replace("|", r"\|").strip())
    return "".join(piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces)


def code(text: str) -> str:
    """A text as code; nothing for nothing."""
    return f"`{text}`" if text else ""


def replace_part(page: str, name: str, content: str) -> str:
    """Put `content` between a page's markers `<!-- name -->` and `<!-- end name -->`. Raises ConfigError."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL)
    made, count = pattern.subn(lambda found: found[1] + content + found[2], page)
    if count != 1:
        raise ConfigError(f"the page has the markers of {name!r} {count} times", hint=f"write <!-- {name} --> once")
    return made

"""docs/troubleshooting.md: what people wrote about each error stays, the exact texts come from the code.

Each public error has a section `## Name` with a cause and a fix, and markers between which its texts are listed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tools.markdown import replace_part
from tools.messages import Message, error_classes, messages

PAGE: Final = Path(__file__).parents[1] / "docs" / "troubleshooting.md"


def page() -> str:
    """The page as it is, its lists made anew. Raises ConfigError where a section lacks its markers."""
    text = PAGE.read_text(encoding="utf-8")
    found = messages()
    for name in error_classes():
        of_class = [message for message in found if message.error == name]
        text = replace_part(text, f"texts of {name}", _listed(of_class))
    return text


def _listed(of_class: list[Message]) -> str:
    if not of_class:
        return ""
    lines = [f"- {_one_line(each.text)}{_next(each.hint)}" for each in of_class]
    return f"\n<details><summary>{len(lines)} texts</summary>\n\n" + "\n".join(lines) + "\n\n</details>\n\n"


def _next(hint: str) -> str:
    return f"<br>next: {_one_line(hint)}" if hint.strip("… ") else ""


def _one_line(text: str) -> str:
    """As code, so that nothing in it is markup."""
    text = " ".join(text.split())
    fence = "``" if "`" in text else "`"
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"

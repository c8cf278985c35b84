"""`python -m tools.docs`: write the pages that are made from the code; with `--check`, only say which are out of date.

docs/configuration.md      every setting
docs/cli.md                every command
docs/metrics.md            every metric
docs/troubleshooting.md    the exact texts of errors, in a page that people write
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tools import reference, troubleshooting

DOCS: Final = Path(__file__).parents[1] / "docs"
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "configuration.md": reference.configuration,
    "cli.md": reference.commands,
    "metrics.md": reference.metric_page,
    "troubleshooting.md": troubleshooting.page,
}


def stale_pages() -> dict[str, str]:
    """The pages that differ from what the code says, with what they should be."""
    made = {name: make() for name, make in PAGES.items()}
    return {name: text for name, text in made.items() if _read(DOCS / name) != text}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(arguments: list[str]) -> int:
    """Exit code 1 where a page is, or was, out of date under `--check`."""
    check = "--check" in arguments
    stale = stale_pages()
    for name, text in stale.items():
        if not check:
            (DOCS / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/{name} {'is out of date' if check else 'written'}\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

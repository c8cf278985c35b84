"""Every text that the program may say when it fails, found in the code: calls of the error classes, and their hints.

Read from the syntax tree, so nothing is run. What is put in at run time is shown as `…`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import protocol.errors
from protocol.errors import NodeError

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("environments", "node", "p2p", "protocol", "simnet", "trainer")
GAP: Final = "…"
_NO_WORDS: Final = re.compile(rf"[{GAP}\s\W]*")


@dataclass(frozen=True, order=True)
class Message:
    """One place that makes an error: its class, its text with gaps, and what it says to do next."""

    error: str
    text: str
    hint: str


def error_classes() -> dict[str, type[NodeError]]:
    """The public errors by name, in the order of the tree."""
    found = {name: each for name, each in vars(protocol.errors).items() if isinstance(each, type)}
    return {name: each for name, each in found.items() if issubclass(each, NodeError)}


def sources() -> list[Path]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [ROOT / "cli.py", *paths]


@cache
def messages() -> tuple[Message, ...]:
    """Every message of every error class, sorted; each text once."""
    private = _private_classes()
    found = {message for path in sources() for message in _in_module(path, private)}
    return tuple(sorted(message for message in found if not _NO_WORDS.fullmatch(message.text)))


@cache
def _private_classes() -> Mapping[str, str]:
    """Errors that a module derives for itself, such as node.inference.role.Evicted, by their public base."""
    known = set(error_classes())
    classes = (node for path in sources() for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef))
    return {
        node.name: base.id
        for node in classes
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in known and node.name not in known
    }


def _in_module(path: Path, private: Mapping[str, str]) -> Iterator[Message]:
    names = {*error_classes(), *private}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
            error = private.get(node.func.id, node.func.id)
            hint = next((word.value for word in node.keywords if word.arg == "hint"), None)
            yield Message(error, _text(node.args[0]), _text(hint) if hint is not None else "")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _text(node: ast.expr) -> str:
    """What an expression says, with a gap for each part that is only known when it runs."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            said = "".join(_text(part) if isinstance(part, ast.Constant) else GAP for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            said = _text(left) + _text(right)
        case ast.IfExp(body=body, orelse=other):
            return f"{_text(body)} / {_text(other)}"
        case ast.Subscript(value=value):
            return _text(value)
        case _:
            return GAP
    return re.sub(rf"{GAP}(\s*{GAP})+", GAP, said)

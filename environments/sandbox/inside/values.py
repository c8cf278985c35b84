"""Plain Python values as JSON and back, types kept apart: how arguments enter a box and results leave it.

None, booleans, integers, finite floats, texts and lists are themselves. What JSON lacks is an object with one key:
{"tuple": […]}, {"set": […]}, {"dict": [[key, value], …]}, {"bytes": hex}, {"float": "nan", "inf" or "-inf"}.

A node never builds what a program gives: numbers can be chosen so that a set of them takes minutes. `parse` checks the
encoded form and leaves it encoded; `loads` and `decode` are for boxes, where a limit ends them, and trusted programs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

MAX_DEPTH: Final = 64


def dumps(value: Any) -> str:
    """A value as ASCII JSON. Raises TypeError for what is not plain, ValueError for nesting without end."""
    return json.dumps(encode(value), allow_nan=False)


def loads(text: bytes | str) -> Any:
    """The value of a JSON text, whoever wrote it. Raises ValueError, also for nesting deeper than MAX_DEPTH."""
    try:
        return decode(json.loads(text, parse_constant=_refuse_constant))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse(text: bytes | str) -> Any:
    """The encoded value of a JSON text, whoever wrote it, checked in time that is linear in its length.

    Raises ValueError for what no value encodes to.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_only_pair)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return checked(found)


def checked(value: Any) -> Any:
    """An encoded value, once it is sure to be one. Raises ValueError."""
    _check(value, 0, hashable=False)
    return value


def encode(value: Any, depth: int = 0) -> Any:
    """What JSON can hold of a value. Subclasses count as the type that they extend."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if value is None or value is True or value is False:
        return value
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in value]
    if isinstance(value, tuple | set | frozenset):
        name = "tuple" if isinstance(value, tuple) else "set"
        return {name: [encode(item, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]}
    raise TypeError(f"a value of type {type(value).__name__[:64]} is not plain data")


def decode(value: Any, depth: int = 0) -> Any:
    """The inverse of `encode`, strictly. Raises ValueError for anything that `encode` does not give."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError("an object with other than one key")
    name, content = next(iter(value.items()))
    if name not in _DECODERS:
        raise ValueError("an object of an unknown kind")
    try:
        return _DECODERS[name](content, depth)
    except TypeError as error:
        raise ValueError(f"not the content of a {name}") from error


def _only_pair(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Before a dict is made of them."""
    if len(pairs) != 1:
        raise ValueError("an object with other than one key")
    return dict(pairs)


def _check(value: Any, depth: int, *, hashable: bool) -> None:
    """`hashable`: it is a key, or an item of a set."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, list):
        if hashable:
            raise ValueError("a list cannot be a key")
        for item in value:
            _check(item, depth + 1, hashable=False)
    elif isinstance(value, dict):
        _check_object(value, depth, hashable=hashable)


def _check_object(value: dict[str, Any], depth: int, *, hashable: bool) -> None:
    if len(value) != 1:
        raise ValueError("an object with other than one key")
    name, content = next(iter(value.items()))
    if name in ("bytes", "float"):
        try:
            _DECODERS[name](content, depth)
        except TypeError as error:
            raise ValueError(f"not the content of a {name}") from error
        return
    if name not in _DECODERS or not isinstance(content, list):
        raise ValueError("an object of an unknown kind")
    if hashable and name != "tuple":
        raise ValueError(f"a {name} cannot be a key")
    for item in content:
        if name != "dict":
            _check(item, depth + 1, hashable=hashable or name == "set")
            continue
        if not isinstance(item, list) or len(item) != 2:
            raise ValueError("not the pairs of a dict")
        _check(item[0], depth + 1, hashable=True)
        _check(item[1], depth + 1, hashable=False)


def _float(value: float) -> Any:
    plain = float.__float__(value)
    return plain if math.isfinite(plain) else {"float": repr(plain)}


_PLAIN: Final[Mapping[type, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    float: _float,
    bytes: lambda value: {"bytes": value.hex()},
}


def _decode_list(content: Any, depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("not a list")
    return [decode(item, depth + 1) for item in content]


def _decode_dict(content: Any, depth: int) -> dict[Any, Any]:
    pairs = _decode_list(content, depth)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("not the pairs of a dict")
    return dict(pairs)


def _decode_bytes(content: Any, _depth: int) -> bytes:
    return bytes.fromhex(content)


def _decode_float(content: Any, _depth: int) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError("not a float that JSON lacks")
    return float(content)


_DECODERS: Final[Mapping[str, Callable[[Any, int], Any]]] = {
    "tuple": lambda content, depth: tuple(_decode_list(content, depth)),
    "set": lambda content, depth: set(_decode_list(content, depth)),
    "dict": _decode_dict,
    "bytes": _decode_bytes,
    "float": _decode_float,
}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

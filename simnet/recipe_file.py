"""The recipe of a simulated run: a shipped one or a file's, with the scenario's overrides.

Written beside the report, so that the same run can be created again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol.errors import ConfigError
from simnet.scenario import RunPlan, merge_tables
from trainer.recipe import load_recipe, parse_recipe, recipe_path

MAX_SEED: Final = 2**53
"""Of a recipe's counts."""


def write_recipe(run: RunPlan, path: Path, *, seed: int) -> None:
    """Write the recipe that the run is created from. `seed` becomes the optimiser's. Raises ConfigError."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(
            f"--seed is {seed}, which is not between 0 and 2^53", hint="give another one, such as --seed 0"
        )
    load_recipe(run.recipe)
    base = tomllib.loads(recipe_path(run.recipe).read_text(encoding="utf-8"))
    table = merge_tables(merge_tables(base, {"optimiser": {"seed": seed}}), run.overrides)
    data = "".join(f"{line}\n" for line in to_toml(table)).encode()
    parse_recipe(data, origin=f"recipe {run.recipe} with the scenario's overrides")
    path.write_bytes(data)


def to_toml(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Lines of TOML for nested tables of texts, numbers, truths and lists of these or of tables."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if prefix:
        yield f"[{prefix}]"
    for key, value in table.items():
        if key not in inner:
            yield f"{_json(key)} = {_inline(value)}"
    for key, value in inner.items():
        yield from to_toml(value, f"{prefix}.{_json(key)}" if prefix else _json(key))


def _inline(value: Any) -> str:
    """A value on one line; tables in lists have no line of their own."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_json(key)} = {_inline(inner)}" for key, inner in value.items()) + "}"
    return f"[{', '.join(map(_inline, value))}]" if isinstance(value, list | tuple) else _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

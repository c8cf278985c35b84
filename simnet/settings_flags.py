"""The settings of a node as flags of commands of simnet that start one with something replaced."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final, Literal

from node.config import NodeConfig, describe, resolve

_REPEATED: Final = ("bootstrap", "listen")
_NOT_FLAGS: Final = ("role", "passphrase", "stay")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Give a parser `--config` and a flag for each setting."""
    parser.add_argument("--config", type=Path, default=None, help="TOML file of settings.")
    for name in NodeConfig.__struct_fields__:
        if name not in _NOT_FLAGS:
            action = "append" if name in _REPEATED else "store"
            parser.add_argument(_flag(name), dest=name, action=action, default=None, help=describe(name))


def take_settings(given: dict[str, Any], role: Literal["inference", "validator"] = "inference") -> NodeConfig:
    """A node's settings from what such a parser found, which may hold nothing else. Raises ConfigError."""
    file = given.pop("config")
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return resolve({**settings, "role": role}, file=file).config


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

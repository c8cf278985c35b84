"""Flags made from the types of the settings (node.config): name, kind, description, default and part of the help.

A command that takes settings is a function `(ctx, **given)`; `with_settings` gives it the flags as typer expects them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from node.config import (
    NodeConfig,
    Resolved,
    Secret,
    default_text,
    describe,
    flag,
    group,
    kind_of,
    resolve,
    unit,
)
from node.homes import about, named_home
from protocol.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
OWN = ("ctx", "config", "gpu")
"""Parameters of such a command that are no settings."""
_KINDS: Mapping[type, Any] = {str: str | None, int: int | None, float: float | None, bool: bool | None}
_MASKED = ("passphrase", "webhook_secret")
RARE = "Limits of"
"""How the names of groups begin that `config show --help` alone lists."""


def setting_names() -> list[str]:
    """Every setting that has a flag: all but secrets, which a process list would show."""
    return [name for name in NodeConfig.__struct_fields__ if name not in _MASKED]


def with_settings(function: F) -> F:
    """Give a command `(ctx, …, **given)` a flag for every setting, `--config`, and `--gpu`.

    Its help leaves out the groups in RARE, but where it is `config show`: there, every flag is listed.
    """
    brief = function.__name__ != "show_config"
    own = [
        parameter
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    parameters = [*own, *(_parameter(name, brief=brief) for name in setting_names()), *_EXTRA]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    return function


def given_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a command's parameters that were given. Raises ConfigError for --gpu beside --device."""
    found = {name: given[name] for name in setting_names() if _was_given(given.get(name))}
    if (gpu := given.get("gpu")) is not None:
        if "device" in found:
            raise ConfigError("--gpu and --device both say where to compute", hint="give one of them")
        found["device"] = f"cuda:{gpu}"
    return found


def resolved_settings(given: Mapping[str, Any]) -> Resolved:
    """The settings that flags, file, environment and defaults come to.

    In a data directory where a node ran, its role and run need not be said again. Raises ConfigError.
    """
    settings = given_settings(given)
    data_dir = settings.get("data_dir")
    return resolve(settings, file=given.get("config"), remembered=remembered(Path(data_dir) if data_dir else None))


def remembered(data_dir: Path | None) -> dict[str, str]:
    """Role and run of the directory that a flag or a variable names, as far as it knows."""
    path = named_home(data_dir, os.environ)
    home = about(path) if path else None
    return {name: said for name in ("role", "run") if home and (said := getattr(home, name))}


def _parameter(name: str, *, brief: bool) -> inspect.Parameter:
    kind = kind_of(name)
    annotation = list[str] | None if kind is tuple else _KINDS[kind]
    names = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    option = typer.Option(
        names,
        help=help_text(name),
        metavar=unit(name).upper() or None,
        show_default=False,
        rich_help_panel=group(name),
        hidden=brief and group(name).startswith(RARE),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
    )


def help_text(name: str) -> str:
    """What a person reads about a setting: its meaning and default. Brackets are no markup."""
    default = default_text(name)
    text = f"{describe(name)} Default: {default}." if default else describe(name)
    return text.replace("[", "\\[")


_EXTRA = [
    inspect.Parameter(
        "gpu",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            int | None,
            typer.Option(
                "--gpu", min=0, max=999, help="Short for --device cuda:NUMBER.", rich_help_panel=group("device")
            ),
        ],
    ),
    inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, typer.Option("--config", help="TOML file of settings, one per line.")],
    ),
]


def _was_given(value: Any) -> bool:
    return value is not None and value not in ([], ())


def masked(value: Any) -> Any:
    """A setting's value for JSON: secrets do not show."""
    if isinstance(value, Secret):
        return "***" if value.text else ""
    return str(value) if isinstance(value, Path) else value

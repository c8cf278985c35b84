"""`intellect-node env …`: which environments are installed, what one is, a task of it, and the reward of an answer."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from environments.base import Environment, Reward, Task
from environments.registry import get_environment, parameter_types, providers
from node.run_environment import import_data
from protocol.errors import ConfigError, EnvironmentUnknown

_BOUNDS: Final = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_LENGTHS: Final = {"min_length": "at least {} long", "max_length": "at most {} long"}


def describe_environments() -> list[dict[str, Any]]:
    """Every installed environment: name, package, version and the first line of what it says of itself."""
    return [_summary(name) for name in sorted(providers())]


def _summary(name: str) -> dict[str, Any]:
    provider = providers()[name]
    try:
        kind = provider.load()
        return {"name": name, "package": provider.origin, "version": kind.version, "about": about(kind)}
    except EnvironmentUnknown as error:
        return {"name": name, "package": provider.origin, "version": None, "about": error.message}


def about(kind: type[Environment]) -> str:
    """The first paragraph of its module's description, or of the class's."""
    module = inspect.getmodule(kind)
    text = inspect.getdoc(module) or inspect.getdoc(kind) or ""
    return " ".join(text.partition("\n\n")[0].split())


def describe_environment(name: str) -> dict[str, Any]:
    """What a recipe's author wants to know. Raises EnvironmentUnknown."""
    found = providers()
    if name not in found:
        get_environment(name)  # which raises, and lists the others
    kind = found[name].load()
    return {
        "name": name,
        "package": found[name].origin,
        "version": kind.version,
        "about": about(kind),
        "requires": _requires(kind),
        "stop_texts": list(kind.stop_texts),
        "takes_data": kind.use_data is not Environment.use_data,
        "parameters": [_parameter(kind, parameter, hint) for parameter, hint in parameter_types(kind).items()],
        "digest": _digest(kind),
    }


def _requires(kind: type[Environment]) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in kind.requires:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _digest(kind: type[Environment]) -> str | None:
    """With default parameters; None where it needs some, or lacks a package."""
    try:
        return kind().digest.hex()
    except (EnvironmentUnknown, ConfigError, TypeError, ValueError):
        return None


def _parameter(kind: type[Environment], name: str, hint: Any) -> dict[str, Any]:
    default = next(each.default for each in dataclasses.fields(kind) if each.name == name)  # type: ignore[arg-type]
    plain, limits = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    bounds = [text for limit in limits if isinstance(limit, msgspec.Meta) for text in _bounds(limit)]
    shown = None if default is dataclasses.MISSING else default
    return {"name": name, "type": getattr(plain, "__name__", str(plain)), "default": shown, "bounds": ", ".join(bounds)}


def _bounds(meta: msgspec.Meta) -> list[str]:
    found = [f"{sign} {value}" for key, sign in _BOUNDS.items() if (value := getattr(meta, key)) is not None]
    lengths = [text.format(value) for key, text in _LENGTHS.items() if (value := getattr(meta, key)) is not None]
    return found + lengths


def parse_parameters(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts; a value is JSON, or else a text. Raises ConfigError."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text[:80]!r} is no parameter", hint="write --parameter KEY=VALUE, as in max_terms=3")
        try:
            found[key.strip()] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[key.strip()] = value
    return found


@dataclasses.dataclass(frozen=True)
class Trial:
    """One task, and what an answer to it earned if there was one."""

    environment: str
    digest: str
    seed: str
    task: Task
    reward: Reward | None


def try_environment(
    name: str, *, seed: int, parameters: Sequence[str] = (), data: Path | None = None, answer: str | None = None
) -> Trial:
    """Draw the task of a small seed, and judge an answer. Raises ConfigError, EnvironmentUnknown."""
    chosen = parse_parameters(parameters)
    environment = get_environment(name, parameters=chosen)
    if data is not None:
        environment = get_environment(name, parameters=chosen, data=import_data(environment, data))
    key = hashlib.sha256(b"intellect-node env try\0" + seed.to_bytes(8, "big")).digest()
    try:
        task = environment.task(key)
        reward = None if answer is None else environment.reward(task, answer)
        return Trial(name, environment.digest.hex(), key.hex(), task, reward)
    finally:
        environment.close()


def show_environments(found: Sequence[dict[str, Any]], console: Console) -> None:
    """A table for people."""
    table = Table(box=None, pad_edge=False)
    for column in ("name", "version", "from", "what it is"):
        table.add_column(column)
    for one in found:
        cells = (one["name"], one["version"] or "-", one["package"], one["about"])
        table.add_row(*(Text(str(cell)) for cell in cells))
    console.print(table)


def show_environment(found: dict[str, Any], console: Console) -> None:
    """The same of one, with its parameters."""
    for key in ("name", "package", "version", "about", "digest"):
        _say(console, f"{key:10} {found[key]}")
    for name, version in found["requires"].items():
        _say(console, f"{'requires':10} {name} {version}")
    if found["takes_data"]:
        _say(console, f"{'data':10} takes a data file (environment.data in a recipe)")
    for one in found["parameters"]:
        bounds = f" ({one['bounds']})" if one["bounds"] else ""
        _say(console, f"{'parameter':10} {one['name']} = {one['default']!r}  {one['type']}{bounds}")


def show_trial(trial: Trial, console: Console) -> None:
    """Prompt, what is known about the right answer, and the reward."""
    for message in trial.task.prompt:
        _say(console, f"[{message['role']}] {message['content']}")
    _say(console, f"[task] {trial.task.data}")
    if trial.reward is not None:
        value = "could not tell" if trial.reward.value is None else f"{trial.reward.value:g}"
        _say(console, f"[reward] {value}: {trial.reward.reason}")


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)

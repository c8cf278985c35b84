"""The reference pages: every setting (from node.config's types), every command (from typer), every metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer.main

import cli
from node import metrics
from node.commands.settings import setting_names
from node.config import GROUPS, OTHER_GROUP, NodeConfig, default_text, describe, flag, group, kind_of, unit, variable
from tools.markdown import code, table

_MADE: Final = "<!-- Made by `python -m tools.docs` from the code; do not edit. -->\n"


def configuration() -> str:
    """docs/configuration.md."""
    parts = [_MADE, _CONFIGURATION]
    for title in (*GROUPS, OTHER_GROUP):
        names = [name for name in NodeConfig.__struct_fields__ if group(name) == title]
        if names:
            parts += [f"\n## {title}\n\n", table(("setting", "default", "meaning"), map(_setting, names))]
    parts += ["\n## Names in the environment and on the command line\n\n"]
    parts += [table(("setting", "variable", "flag"), map(_names, NodeConfig.__struct_fields__))]
    return "".join(parts)


def _setting(name: str) -> tuple[str, str, str]:
    known = unit(name) and not name.endswith("_port") and unit(name).split()[0] not in describe(name).lower()
    counted = f" In {unit(name)}." if known else ""
    return code(name), code(default_text(name)) or _plain_default(name), describe(name) + counted


def _plain_default(name: str) -> str:
    if kind_of(name) is bool:
        return code("false")
    return "must be given" if name in ("role", "run") else "none"


def _names(name: str) -> tuple[str, str, str]:
    return code(name), code(variable(name)), code(flag(name)) if name in setting_names() else "none: it is a secret"


_CONFIGURATION: Final = """
# Configuration

A node takes its settings from, weakest first: its defaults, a TOML file (`--config FILE`), environment variables
`INTELLECT_NODE_…`, and flags. A name that is not in this table is refused, with the nearest that is. `intellect-node
config show` prints what results and where each value came from; `config check FILE` checks a file.

```toml
role = "relay"
run = "12D3KooW…/name"
public_url = "https://relay.example:8470"
bytes_per_day = 500_000_000_000
webhooks = ["https://hooks.example/T0/B1"]
```

In the environment, lists are separated by commas. Secrets come from the environment alone. Protocol constants are no
settings, nor is what a run's manifest fixes.
"""


def commands() -> str:
    """docs/cli.md."""
    program = typer.main.get_command(cli.app)
    return "".join([_MADE, _COMMANDS, *_of_group("intellect-node", program)])


_COMMANDS: Final = """
# Commands

`intellect-node COMMAND --help` says the same. Without a command, a node is started: its flags are the settings of
[configuration](configuration.md). Exit codes: 0 done, 1 failed, 2 wrong use, 3 a newer protocol is needed.
"""


def _of_group(name: str, found: Any) -> Iterator[str]:
    for word, command in sorted(getattr(found, "commands", {}).items()):
        whole = f"{name} {word}"
        if getattr(command, "commands", None):
            yield from _of_group(whole, command)
        elif not command.hidden:
            yield from _of_command(whole, command)


def _of_command(name: str, command: Any) -> Iterator[str]:
    own = [each for each in command.params if not getattr(each, "hidden", False)]
    shown = _without_settings(own, {each.name for each in command.params})
    arguments = "".join(f" {_argument(each)}" for each in own if not each.opts[0].startswith("-"))
    yield f"\n## `{name}{arguments}`\n\n{_paragraph(command.help)}\n"
    rows = [(code(_usage(each)), _meaning(each)) for each in shown if each.name != "help"]
    if rows:
        yield "\n" + table(("", "meaning"), rows)
    if len(shown) < len(own):
        yield "\nTakes every setting of [configuration](configuration.md) too.\n"


def _without_settings(parameters: list[Any], names: set[str]) -> list[Any]:
    """Where a command takes every setting, they are not listed again."""
    if not names.issuperset(setting_names()):
        return parameters
    settings = {*setting_names(), "gpu", "config"}
    return [each for each in parameters if each.name not in settings]


def _argument(parameter: Any) -> str:
    word = (parameter.metavar or parameter.name).upper()
    return word if parameter.required else f"[{word}]"


def _usage(parameter: Any) -> str:
    if not parameter.opts[0].startswith("-"):
        return _argument(parameter)
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.opts[0].strip('-').upper()}"


def _meaning(parameter: Any) -> str:
    default = parameter.default
    said = parameter.show_default
    shown = said if isinstance(said, str) else default if said and isinstance(default, str | int | float) else ""
    quiet = shown == "" or isinstance(shown, bool)
    return (parameter.help or "") + ("" if quiet else f" Default: {shown}.")


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split())


def metric_page() -> str:
    """docs/metrics.md."""
    parts = [_MADE, _METRICS]
    for title, roles in _ROLE_GROUPS.items():
        rows = [
            (code(each.name), each.kind, ", ".join(map(code, each.labels)), each.help)
            for each in metrics.CATALOGUE
            if each.roles == roles
        ]
        parts += [f"\n## {title}\n\n", table(("metric", "kind", "labels", "meaning"), rows)]
    return "".join(parts)


_ROLE_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Every role": metrics.EVERY,
    "Relays": ("relay",),
    "Relays, contributors and validators": metrics.CARRIERS,
    "Contributors and validators": metrics.DOWNLOADERS,
    "Contributors": ("inference",),
    "Validators": ("validator",),
    "Trainers": ("trainer",),
}

_METRICS: Final = """
# Metrics

Every node answers `GET /metrics` (Prometheus' text format 0.0.4) and `GET /health` on its status server, which listens
on 127.0.0.1; with [`metrics_listen`](configuration.md#watching) they can be had from other machines too. `/health` is
200 while a node is live and ready, else 503, with the reasons as JSON; `/health/live` and `/health/ready` are its
halves: restart a node that is not live, and wait for one that is not ready.

[`deploy/grafana.json`](../deploy/grafana.json) draws these, [`deploy/alerts.yml`](../deploy/alerts.yml) watches them.
Counters of a contributor's work go on across restarts, those of traffic begin anew. A metric without a value is left
out.
"""

"""Settings of one node: every field, its meaning and its default, in one place.

Sources, weakest first: defaults, a TOML file (`--config`), environment variables `INTELLECT_NODE_<FIELD>`, the command
line. A key that no source may set is refused with the nearest known name. Protocol constants are not settings
(protocol.constants), nor is what a run's manifest fixes. The command line's flags are made from the types here
(node.commands.settings), and so is the page that lists them.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from node.config_checks import check_addresses, check_run
from node.homes import default_home, expand
from p2p.shardcast.fan_out import FAN_OUT
from protocol.errors import ConfigError
from protocol.run import RunAddress

ENV_PREFIX: Final = "INTELLECT_NODE_"
_OLD_PREFIX: Final = "INTELLECT_"
MAX_FILE_BYTES: Final = 1 << 20

Role = Literal["trainer", "relay", "inference", "validator", "watch"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]


class Secret:
    """A text that never shows: not in a log, a traceback or `--dry-run`."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return "Secret(***)" if self.text else "Secret()"


class NodeConfig(Struct, frozen=True, kw_only=True):
    """Everything that may differ between nodes of one run. Built by `resolve`, once."""

    role: Annotated[
        Role, Meta(description="What this node does: trainer, relay, inference, validator; watch only looks on.")
    ]
    run: Annotated[
        str,
        Meta(
            description="Address of the run, <operator peer id>/<name>, alone or with peers to find it through: "
            "<address>@<multiaddr>[,<multiaddr>…]."
        ),
    ]
    bootstrap: Annotated[
        tuple[str, ...],
        Meta(
            description="More peers to find the run through: multiaddrs that end in /p2p/<peer id>, /dnsaddr/<name>, "
            "or @<file> with one a line. The first relay of a run needs none."
        ),
    ] = ()
    data_dir: Annotated[
        Path, Meta(description="Directory of this node's key and state; one node at a time uses it.")
    ] = Path("~/.local/share/intellect-node/<role>-<run>")
    invite: Annotated[
        str, Meta(description="File of an invite, for a run that takes only who was invited; needed once.")
    ] = ""
    listen: Annotated[
        tuple[str, ...], Meta(description="Multiaddrs that a relay listens on for other peers (DHT).")
    ] = ("/ip4/0.0.0.0/tcp/8471",)
    announce: Annotated[
        tuple[str, ...],
        Meta(description="Multiaddrs that a relay tells others instead, where its own address is not the public one."),
    ] = ()
    http_host: Annotated[
        Host, Meta(description="Address that a relay serves HTTPS on, and a trainer its origin for the relays.")
    ] = "0.0.0.0"
    http_port: Annotated[Port, Meta(description="TCP port of that HTTPS server; 0 takes any free one.")] = 8470
    public_url: Annotated[
        str,
        Meta(
            max_length=256,
            pattern=r"^(https://[^/\s]+/?)?\Z",
            description="URL under which others reach that HTTPS server; empty: https://<address>:<http_port>.",
        ),
    ] = ""
    status_port: Annotated[
        Port, Meta(description="TCP port of the status page on 127.0.0.1; 0 takes any free one.")
    ] = 0
    join_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a node that was never in this run gives up finding it; 0: never. "
            "A node that was waits for ever.",
        ),
    ] = 90.0
    threads: Annotated[
        int, Meta(ge=0, le=4096, description="CPU threads of the compute process; 0: as many as it likes.")
    ] = 0
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="Number format that the policy is run in.")] = (
        "float32"
    )
    device: Annotated[
        str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)\Z", description="Where the policy is run: cpu, cuda or cuda:<n>.")
    ] = "cpu"
    engine: Annotated[
        Literal["torch", "transformers", "vllm"],
        Meta(
            description="What generates: torch (built in; transformers' own models where it must), transformers "
            "(always those), or vllm (pip install 'intellect-node[vllm]')."
        ),
    ] = "torch"
    tensor_parallel: Annotated[
        int,
        Meta(ge=1, le=64, description="GPUs, from the device on, that share the policy; more than 1 with vllm only."),
    ] = 1
    max_memory: Annotated[
        str,
        Meta(
            pattern=r"^([0-9]{1,6}(\.[0-9]{1,3})?(MB|GB|MiB|GiB))?\Z",
            description="Memory that the compute process may take for policy and answers, for example 8GiB: the "
            "device's, or this machine's on a CPU. Empty: most of what is free.",
        ),
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least important messages that are logged.")
    ] = "info"
    leave_deadline_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds that a node takes to finish and hand in what is under way, when it is asked to leave.",
        ),
    ] = 30.0
    stay: Annotated[bool, Meta(description="Whether a relay keeps serving after its run has finished.")] = False
    disk_quota_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Bytes of rollout files that a relay stores; more is refused: disk-full.")
    ] = 64 << 30
    node_quota_bytes: Annotated[
        int, Meta(ge=0, description="Of these, bytes of one contributor; 0: no such limit. Refused: node-quota.")
    ] = 16 << 30
    step_quota_bytes: Annotated[
        int, Meta(ge=0, description="Of these, bytes for one step; 0: no such limit. Refused: step-quota.")
    ] = 32 << 30
    requests_per_s: Annotated[
        float, Meta(ge=0, description="Requests a second that a relay takes from one identity; 0: no limit.")
    ] = 100.0
    bytes_per_s: Annotated[
        int,
        Meta(ge=0, description="Bytes a second that a relay sends to one identity in the long run; 0: no limit."),
    ] = 128 << 20
    upload_bytes_per_s: Annotated[
        int,
        Meta(ge=0, description="Bytes a second that a relay takes from one identity in the long run; 0: no limit."),
    ] = 32 << 20
    relay_requests_per_s: Annotated[
        float,
        Meta(ge=0, description="Requests a second that a relay takes from another relay of its run; 0: no limit."),
    ] = 400.0
    relay_bytes_per_s: Annotated[
        int,
        Meta(ge=0, description="Bytes a second that a relay sends to another relay of its run; 0: no limit."),
    ] = 512 << 20
    address_requests_per_s: Annotated[
        float, Meta(ge=0, description="Requests a second that a relay takes from one IP address; 0: no limit.")
    ] = 1000.0
    address_bytes_per_s: Annotated[
        int,
        Meta(ge=0, description="Bytes a second that a relay sends to one IP address in the long run; 0: no limit."),
    ] = 512 << 20
    connections_per_address: Annotated[
        int, Meta(ge=1, le=2048, description="Connections that a relay holds with one IP address, of 2048 in all.")
    ] = 1024
    bytes_per_day: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes a day (UTC) after which a relay sends no more checkpoints and files, until midnight; "
            "0: no limit.",
        ),
    ] = 0
    fan_out: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Relays that get a shard from the trainer itself; the others get it from them. Its upload for "
            "each checkpoint is at most so many times the checkpoint.",
        ),
    ] = FAN_OUT
    allow: Annotated[
        tuple[str, ...],
        Meta(description="Peer ids that a relay lets in beside the run's trainer and validators; empty: everyone."),
    ] = ()
    download_bytes_per_s: Annotated[
        int, Meta(ge=0, description="Bytes a second that a contributor or validator downloads; 0: no limit.")
    ] = 0
    download_bytes_per_day: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes a day (UTC) after which it begins no other checkpoint until midnight; the one under way "
            "is finished. 0: no limit.",
        ),
    ] = 0
    policies_quota_bytes: Annotated[
        int,
        Meta(ge=0, description="Bytes of checkpoints that it keeps on its disk, the newest one always; 0: no limit."),
    ] = 0
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="How log lines are written to stderr: text, or json with one object a line."),
    ] = "text"
    metrics_listen: Annotated[
        str,
        Meta(
            max_length=100,
            pattern=r"^(\S+:[0-9]{1,5})?\Z",
            description="Address and port at which /metrics and /health are served to other machines too, for example "
            "0.0.0.0:9464. Empty: on the status port of 127.0.0.1 alone.",
        ),
    ] = ""
    stall_after_s: Annotated[
        float,
        Meta(ge=0, description="Seconds without any change after which a node says that it is stalled; 0: never."),
    ] = 1800.0
    webhooks: Annotated[
        tuple[str, ...],
        Meta(
            description="URLs that are told when this node is evicted, stalls, recovers, or has a new checkpoint: "
            "https, or http on this computer."
        ),
    ] = ()
    webhook_secret: Annotated[
        Secret, Meta(description="Key of the signature on webhook calls, from the environment only; empty: unsigned.")
    ] = Secret()
    passphrase: Annotated[
        Secret, Meta(description="Passphrase of the key file, from the environment only; empty: not encrypted.")
    ] = Secret()

    @property
    def max_memory_bytes(self) -> int:
        """`max_memory` as a number; 0: not limited."""
        match = re.fullmatch(r"([0-9.]+)(.*)", self.max_memory)
        return int(float(match[1]) * _UNITS[match[2]]) if match else 0

    @property
    def engine_settings(self) -> dict[str, str]:
        """What a compute process is told, as its environment (node.engines.registry)."""
        return {
            "INTELLECT_THREADS": str(self.threads),
            "INTELLECT_DTYPE": self.dtype,
            "INTELLECT_DEVICE": self.device,
            "INTELLECT_ENGINE": self.engine,
            "INTELLECT_MAX_MEMORY_BYTES": str(self.max_memory_bytes),
            "INTELLECT_TENSOR_PARALLEL": str(self.tensor_parallel),
        }

    @property
    def run_address(self) -> RunAddress:
        return RunAddress.parse(self.run)


GROUPS: Final = {
    "Joining": (
        "role",
        "run",
        "bootstrap",
        "data_dir",
        "invite",
        "join_timeout_s",
        "leave_deadline_s",
        "log_level",
        "status_port",
    ),
    "Computing": ("threads", "dtype", "device", "engine", "tensor_parallel", "max_memory"),
    "Serving (relays; the trainer's origin)": (
        *("listen", "announce", "http_host", "http_port", "public_url", "stay", "allow", "fan_out"),
    ),
    "Limits of contributors and validators": ("download_bytes_per_s", "download_bytes_per_day", "policies_quota_bytes"),
    "Watching": ("log_format", "metrics_listen", "stall_after_s", "webhooks"),
    "Limits of a relay": (
        *("disk_quota_bytes", "node_quota_bytes", "step_quota_bytes", "requests_per_s", "bytes_per_s"),
        *("upload_bytes_per_s", "relay_requests_per_s", "relay_bytes_per_s", "address_requests_per_s"),
        *("address_bytes_per_s", "connections_per_address", "bytes_per_day"),
    ),
}
"""What belongs together, for people; a setting that is in none is shown under OTHER_GROUP."""
OTHER_GROUP: Final = "Other settings"
_COUNTED_IN: Final = {
    "requests_per_s": "requests a second",
    "bytes_per_s": "bytes a second",
    "bytes_per_day": "bytes a day",
    "_bytes": "bytes",
    "_s": "seconds",
    "_port": "TCP port",
    "threads": "threads",
}
_UNITS: Final = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}
_LISTS: Final = ("bootstrap", "listen", "announce", "allow", "webhooks")
_ENV_ONLY: Final = ("passphrase", "webhook_secret")


@dataclass(frozen=True)
class Resolved:
    """The settings a node runs with, and where each came from."""

    config: NodeConfig
    sources: Mapping[str, str]

    def to_toml(self) -> str:
        """As a file for `--config`, each line with its source; secrets are masked and commented out."""
        return "".join(self._line(field.name) for field in msgspec.structs.fields(NodeConfig))

    def _line(self, name: str) -> str:
        value = getattr(self.config, name)
        comment = f"  # {self.sources[name]}\n"
        if isinstance(value, Secret):
            return f"# {name} = {_toml('***' if value.text else '')}{comment}"
        return f"{name} = {_toml(value)}{comment}"


def resolve(
    command_line: Mapping[str, Any],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    remembered: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge all sources and check every value. `command_line` holds the flags that were given. Raises ConfigError.

    `remembered` is what a data directory says of itself, weaker than what anybody says now.
    """
    values, sources = _defaults()
    for source, layer in (
        ("the data directory", remembered or {}),
        *_file_layer(file),
        *_environment_layer(os.environ if environ is None else environ),
        *((flag(name), {name: value}) for name, value in command_line.items()),
    ):
        for name, value in layer.items():
            values[name] = _convert(name, value, source)
            sources[name] = source
    for name in ("role", "run"):
        if name not in values:
            raise ConfigError(f"no {name} is given", hint=_MISSING[name])
    _take_peers(values, sources)
    return Resolved(_built(values, sources, os.environ if environ is None else environ), sources)


def _built(values: Mapping[str, Any], sources: Mapping[str, str], environ: Mapping[str, str]) -> NodeConfig:
    address = RunAddress.parse(values["run"])
    chosen = sources["data_dir"] != "default"
    path = expand(values["data_dir"]) if chosen else default_home(values["role"], address, environ)
    config = NodeConfig(**{**values, "data_dir": path})
    check_addresses(config, sources)
    return config


def _take_peers(values: dict[str, Any], sources: dict[str, str]) -> None:
    """The peers that came with the run's address are bootstrap peers, before those that were given as such."""
    link = check_run(values["run"], sources["run"])
    values["run"] = str(link.address)
    if link.peers:
        also = "" if sources["bootstrap"] == "default" else f" and {sources['bootstrap']}"
        values["bootstrap"] = tuple(dict.fromkeys([*link.peers, *values["bootstrap"]]))
        sources["bootstrap"] = f"{sources['run']}{also}"


def passphrase_from(environ: Mapping[str, str]) -> str:
    """The passphrase of the key file, for commands that need nothing else; empty when there is none."""
    return environ.get(variable("passphrase"), "")


def file_settings(file: Path) -> dict[str, Any]:
    """What a file sets, not yet checked against types. Raises ConfigError for an unreadable one or unknown keys."""
    return _file_layer(file)[0][1]


_MISSING: Final = {
    "role": "give --role trainer, relay, inference or validator; see `intellect-node --help`",
    "run": "give --run <operator peer id>/<name>@<multiaddr of a relay>, as the run's operator hands it on",
}


def _defaults() -> tuple[dict[str, Any], dict[str, str]]:
    fields = [field for field in msgspec.structs.fields(NodeConfig) if not field.required]
    return {field.name: field.default for field in fields}, dict.fromkeys((field.name for field in fields), "default")


def _file_layer(file: Path | None) -> list[tuple[str, dict[str, Any]]]:
    if file is None:
        return []
    source = str(file)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{source} has more than {MAX_FILE_BYTES} bytes; it is no configuration file")
        layer = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {source}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    for name in layer:
        if name in _ENV_ONLY:
            raise ConfigError(
                f"{name} may not stand in {source}, where others could read it",
                hint=f"set the environment variable {variable(name)}",
            )
        _require_known(name, name, source, _field_types().keys() - set(_ENV_ONLY))
    return [(source, layer)]


def _environment_layer(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    layers = []
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX):
            _refuse_old_name(key)
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        _require_known(name, key, "the environment", {variable(field) for field in _field_types()})
        value = [part.strip() for part in text.split(",") if part.strip()] if name in _LISTS else text
        layers.append((key, {name: value}))
    return layers


def _refuse_old_name(key: str) -> None:
    """A setting without the whole prefix would be passed over in silence."""
    name = key.removeprefix(_OLD_PREFIX).lower()
    if key.startswith(_OLD_PREFIX) and name in _field_types():
        raise ConfigError(
            f"{key} in the environment is no setting; did you mean {variable(name)}?",
            hint=f"unset {key}, or rename it to {variable(name)}",
        )


def _require_known(name: str, shown: str, source: str, known: set[str]) -> None:
    if name in _field_types():
        return
    near = difflib.get_close_matches(shown, known, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"unknown setting {shown[:80]!r} in {source}{meant}", hint=f"known are {', '.join(sorted(known))}"
    )


def _convert(name: str, value: Any, source: str) -> Any:
    try:
        return msgspec.convert(value, _field_types()[name], strict=False, dec_hook=_from_text)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{name} from {source}: {_misfit(name, value, str(error))}", hint=describe(name)) from error


def _misfit(name: str, value: Any, problem: str) -> str:
    """What is wrong with a value, in words: neither a pattern nor a bare "invalid"."""
    if allowed := choices(name):
        return f"{str(value)[:80]!r} is none of {', '.join(allowed)}"
    if "matching regex" in problem:
        return f"{str(value)[:80]!r} is not how it is written"
    return problem


def choices(name: str) -> tuple[str, ...]:
    """The values that a setting may have, where they are a fixed few."""
    plain = _field_types()[name].__origin__
    return get_args(plain) if get_origin(plain) is Literal else ()


def _from_text(kind: type, value: Any) -> Any:
    if not isinstance(value, str | Path):
        raise ValueError(f"expected a text, got {type(value).__name__}")
    return Secret(str(value)) if kind is Secret else Path(value)


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(NodeConfig, include_extras=True)


def describe(name: str) -> str:
    """What a person should know about a setting."""
    kind = _field_types()[name]
    return next(meta.description for meta in kind.__metadata__ if isinstance(meta, Meta) and meta.description)


def default_text(name: str) -> str:
    """A setting's default as people write it; empty when there is none or it says nothing."""
    default = _defaults()[0].get(name)
    if isinstance(default, tuple):
        return " ".join(default)
    return "" if default is None or isinstance(default, bool | Secret) else str(default)


def kind_of(name: str) -> type:
    """How a setting is written: str (texts, names and paths), int, float, bool or tuple (of texts)."""
    plain = _field_types()[name].__origin__
    known = next((kind for kind in (bool, int, float) if plain is kind), str)
    return tuple if get_origin(plain) is tuple else known


def unit(name: str) -> str:
    """What a number is counted in, which its name ends with; empty for other settings."""
    return next((said for ending, said in _COUNTED_IN.items() if name.endswith(ending)), "")


def group(name: str) -> str:
    """The part of the settings that one belongs to, for help and documentation."""
    return next((title for title, names in GROUPS.items() if name in names), OTHER_GROUP)


def flag(name: str) -> str:
    """A setting on the command line."""
    return f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """A setting in the environment."""
    return ENV_PREFIX + name.upper()


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return msgspec.json.encode(str(value)).decode()

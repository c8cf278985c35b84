"""Settings of one node: every field, its meaning and its default, in one place.

Sources, weakest first: defaults, a TOML file (`--config`), environment variables `INTELLECT_<FIELD>`, the command
line. A key that no source may set is refused with the nearest known name. Protocol constants are not settings
(protocol.constants), nor is what a run's manifest fixes.
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
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct

from p2p.shardcast.fan_out import FAN_OUT
from protocol.errors import ConfigError, MalformedError
from protocol.identity import PeerId
from protocol.run import RunAddress

ENV_PREFIX: Final = "INTELLECT_"
MAX_FILE_BYTES: Final = 1 << 20

Role = Literal["trainer", "relay", "inference", "validator"]
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

    role: Annotated[Role, Meta(description="What this node does: trainer, relay, inference or validator.")]
    run: Annotated[str, Meta(description="Address of the run, <operator peer id>/<name>.")]
    bootstrap: Annotated[
        tuple[str, ...],
        Meta(
            description="Peers to find the run through: multiaddrs that end in /p2p/<peer id>, /dnsaddr/<name>, or "
            "@<file> with one a line. The first relay of a run needs none."
        ),
    ] = ()
    data_dir: Annotated[
        Path, Meta(description="Directory of this node's key and state; one node at a time uses it.")
    ] = Path("~/.intellect-node")
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
            pattern=r"^(https://[^/\s]+/?)?$",
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
        str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$", description="Where the policy is run: cpu, cuda or cuda:<n>.")
    ] = "cpu"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least important messages that are logged.")
    ] = "info"
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
            description="Relays that fetch one checkpoint from a trainer; the others get it from them. Its upload for "
            "each checkpoint is at most so many times the checkpoint.",
        ),
    ] = FAN_OUT
    allow: Annotated[
        tuple[str, ...],
        Meta(description="Peer ids that a relay lets in beside the run's trainer and validators; empty: everyone."),
    ] = ()
    passphrase: Annotated[
        Secret, Meta(description="Passphrase of the key file, from the environment only; empty: not encrypted.")
    ] = Secret()

    @property
    def run_address(self) -> RunAddress:
        return RunAddress.parse(self.run)


_LISTS: Final = ("bootstrap", "listen", "announce", "allow")
_ENV_ONLY: Final = ("passphrase",)


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
    command_line: Mapping[str, Any], *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Resolved:
    """Merge all sources and check every value. `command_line` holds the flags that were given. Raises ConfigError."""
    values, sources = _defaults()
    for source, layer in (
        *_file_layer(file),
        *_environment_layer(os.environ if environ is None else environ),
        *((f"--{name.replace('_', '-')}", {name: value}) for name, value in command_line.items()),
    ):
        for name, value in layer.items():
            values[name] = _convert(name, value, source)
            sources[name] = source
    for name in ("role", "run"):
        if name not in values:
            raise ConfigError(f"no {name} is given", hint=_MISSING[name])
    return Resolved(_checked(values, sources), sources)


def passphrase_from(environ: Mapping[str, str]) -> str:
    """The passphrase of the key file, for commands that need nothing else; empty when there is none."""
    return environ.get(ENV_PREFIX + "PASSPHRASE", "")


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """The data directory of commands that need no other setting."""
    default = environ.get(ENV_PREFIX + "DATA_DIR") or str(_defaults()[0]["data_dir"])
    return Path(default).expanduser()


_MISSING: Final = {
    "role": "give --role trainer, relay, inference or validator; see `intellect-node --help`",
    "run": "give --run <operator peer id>/<name>, as `intellect-node run create` printed it to the run's operator",
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
                hint=f"set the environment variable {ENV_PREFIX}{name.upper()}",
            )
        _require_known(name, name, source, _field_types().keys() - set(_ENV_ONLY))
    return [(source, layer)]


def _environment_layer(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    layers = []
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        known = {ENV_PREFIX + field.upper() for field in _field_types()}
        _require_known(name, variable, "the environment", known)
        value = [part.strip() for part in text.split(",") if part.strip()] if name in _LISTS else text
        layers.append((variable, {name: value}))
    return layers


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
        raise ConfigError(f"{name} from {source}: {error}", hint=describe(name)) from error


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


def _checked(values: dict[str, Any], sources: Mapping[str, str]) -> NodeConfig:
    """What a type cannot say."""
    config = NodeConfig(**{**values, "data_dir": values["data_dir"].expanduser().absolute()})
    try:
        RunAddress.parse(config.run)
    except MalformedError as error:
        raise ConfigError(f"run from {sources['run']}: {error.message}", hint=error.hint) from error
    for text in config.allow:
        _check_peer_id(text, sources["allow"])
    for address in config.bootstrap:
        _check_bootstrap(address, sources["bootstrap"])
    for address in config.listen:
        if not re.match(r"^/(ip4|ip6|dns4|dns6)/[^/]+/tcp/[0-9]+$", address):
            raise ConfigError(
                f"listen from {sources['listen']}: {address[:120]!r} is no TCP multiaddr",
                hint="write /ip4/<address>/tcp/<port>, for example /ip4/0.0.0.0/tcp/8471",
            )
    for address in config.announce:
        _check_announce(address, sources["announce"])
    return config


def _check_announce(address: str, source: str) -> None:
    match = re.match(r"^/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([0-9]+)$", address)
    if match is None or match[2] in ("0.0.0.0", "::") or int(match[3]) == 0:
        raise ConfigError(
            f"announce from {source}: nobody can dial {address[:120]!r}",
            hint="write the address and port that others reach this relay at, for example /ip4/203.0.113.7/tcp/8471",
        )


def _check_peer_id(text: str, source: str) -> None:
    try:
        PeerId.parse(text)
    except MalformedError as error:
        raise ConfigError(
            f"allow from {source}: {error.message}", hint="write peer ids, as `intellect-node id` prints them"
        ) from error


def _check_bootstrap(address: str, source: str) -> None:
    if address.startswith("@") or re.match(r"^/dnsaddr/[A-Za-z0-9_.-]{1,253}(/p2p/[1-9A-HJ-NP-Za-km-z]+)?$", address):
        return  # what stands there is looked at when the node starts
    transport, found, peer = address.rpartition("/p2p/")
    try:
        if not found or not re.match(r"^/(ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/[0-9]+$", transport):
            raise MalformedError("it has no /tcp/<port> or no /p2p/<peer id>")
        PeerId.parse(peer)
    except MalformedError as error:
        raise ConfigError(
            f"bootstrap from {source}: {address[:120]!r} is no address of a peer: {error.message}",
            hint="write /ip4/<address>/tcp/<port>/p2p/<peer id>, as a relay prints it when it starts, "
            "or /dnsaddr/<name>, or @<file>",
        ) from error


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return msgspec.json.encode(str(value)).decode()

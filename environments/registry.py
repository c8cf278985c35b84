"""The environments that this installation knows, by the name that a run's manifest gives.

Built-in ones come with the program; others are found by the entry points of installed packages in the group
`intellect_node.environments` (docs/environments.md). A package cannot replace a built-in environment.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from environments.base import Environment
from protocol.errors import ConfigError, EnvironmentUnknown, ModelError
from protocol.records import EnvironmentSpec

GROUP: Final = "intellect_node.environments"
OWN_PACKAGE: Final = "intellect-node"
DATA_FILE: Final = "environment-data"
"""Name of the data file among a policy's files."""
MAX_DATA_BYTES: Final = 256 << 20
BUILT_IN: Final[Mapping[str, str]] = {
    "addition": "environments.addition:Addition",
    "calculator": "environments.calculator:Calculator",
    "chain-sums": "environments.chain_sums:ChainSums",
    "code": "environments.code:CodeProblems",
    "countdown": "environments.countdown:Countdown",
    "maths": "environments.maths:Maths",
    "reasoning-gym": "environments.reasoning_gym:ReasoningGym",
    "sort-digits": "environments.sort_digits:SortDigits",
    "think-sort": "environments.think_sort:ThinkSort",
    "verifiers": "environments.verifiers:Verifiers",
}


@dataclass(frozen=True)
class Provider:
    """An environment that may be imported, and the package that it came with."""

    name: str
    location: str
    """`module:class`."""
    package: str
    package_version: str

    @property
    def origin(self) -> str:
        return f"{self.package} {self.package_version}"

    def load(self) -> type[Environment]:
        """Import the class. Raises EnvironmentUnknown if there is none there."""
        module, _, attribute = self.location.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # another's package runs its own code when it is imported
            raise EnvironmentUnknown(
                f"the environment {self.name} of {self.origin} cannot be imported: {_brief(error)}",
                hint=f"install what it needs, or another release: pip install --upgrade {self.package}",
            ) from error
        if not (isinstance(found, type) and issubclass(found, Environment)):
            raise EnvironmentUnknown(f"{self.location} of {self.origin} is no environment")
        return found


def providers() -> dict[str, Provider]:
    """Everything installed, by name."""
    found: dict[str, Provider] = {}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.dist is not None:
            found.setdefault(entry.name, Provider(entry.name, entry.value, entry.dist.name, entry.dist.version))
    own = _own_version()
    return found | {name: Provider(name, location, OWN_PACKAGE, own) for name, location in BUILT_IN.items()}


def environment_names() -> list[str]:
    """Names that `get_environment` knows."""
    return sorted(providers())


def get_environment(
    name: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    data: bytes | None = None,
    digest: bytes | None = None,
) -> Environment:
    """The environment of a name, with parameters and data; with `digest`, only if it is the very one that is meant.

    Raises EnvironmentUnknown, or ConfigError for parameters or data that it does not take.
    """
    provider = _provider(name)
    environment = construct(provider.load(), parameters or {})
    if data is not None:
        environment.use_data(data)
        environment.data_sha256 = hashlib.sha256(data).digest()
    if digest is not None and environment.digest != digest:
        raise EnvironmentUnknown(
            f"the environment {name!r} installed here (version {environment.version}, {provider.origin}) is not the "
            f"one this run uses: digest {environment.digest.hex()[:16]} against the manifest's {digest.hex()[:16]}",
            hint="install the release that the run's operator uses",
        )
    return environment


def construct(kind: type[Environment], parameters: Mapping[str, Any]) -> Environment:
    """An instance with these parameters, each checked against its field's type and bounds. Raises ConfigError."""
    known = parameter_types(kind)
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(
                f"the environment {kind.name} has no parameter {name[:64]!r}", hint=f"its parameters: {listed}"
            )
        try:
            values[name] = msgspec.convert(value, known[name])
        except msgspec.ValidationError as error:
            raise ConfigError(f"parameter {name} of the environment {kind.name}: {error}") from error
    missing = [name for name in required_parameters(kind) if name not in values]
    if missing:
        raise ConfigError(
            f"the environment {kind.name} needs the parameter {missing[0]}",
            hint=f"give it: {missing[0]} in the recipe's environment.parameters, or --parameter {missing[0]}=…",
        )
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"parameters of the environment {kind.name}: {str(error)[:240]}") from error


def parameter_types(kind: type[Environment]) -> dict[str, Any]:
    """The type of every parameter that an environment takes, bounds included."""
    if not is_dataclass(kind):
        return {}
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind) if not each.name.startswith("_")}


def required_parameters(kind: type[Environment]) -> list[str]:
    """Parameters that have no default."""
    if not is_dataclass(kind):
        return []
    return [each.name for each in fields(kind) if each.init and each.default is each.default_factory is MISSING]


def specify(environment: Environment) -> EnvironmentSpec:
    """What a run's manifest says of an environment. Raises ConfigError for parameters that a manifest cannot hold."""
    provider = _provider(environment.name)
    fields_of_spec = {
        "name": environment.name,
        "digest": environment.digest,
        "version": environment.version,
        "package": provider.package,
        "package_version": provider.package_version,
        "parameters": environment.parameters,
        "requires": environment.required_versions,
        "data": environment.data_sha256 or None,
    }
    try:
        return msgspec.convert(fields_of_spec, EnvironmentSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the environment {environment.name} cannot be described in a manifest: {error}",
            hint="parameters are numbers, texts, booleans and lists of them",
        ) from error


def open_environment(spec: EnvironmentSpec, policy_dir: Path) -> Environment:
    """The very environment that a manifest means, its data read from a policy's directory.

    Raises EnvironmentUnknown that says what is installed here and what the run uses, ModelError for wrong data.
    """
    provider = providers().get(spec.name)
    if provider is None:
        raise EnvironmentUnknown(
            f"this run's environment {spec.name!r} (version {spec.version}, of {_origin(spec)}) is not installed here; "
            f"installed are: {', '.join(environment_names())}",
            hint=_install_hint(spec),
        )
    data = None if spec.data is None else read_data(policy_dir, spec.data)
    try:
        environment = get_environment(spec.name, parameters=spec.parameters, data=data)
        found = environment.digest
    except EnvironmentUnknown as error:
        raise EnvironmentUnknown(
            error.message, hint=f"{error.hint}; the run's operator has: {_install_hint(spec)}"
        ) from error
    except ConfigError as error:
        raise EnvironmentUnknown(
            f"the environment {spec.name!r} of {provider.origin} does not take what the run's manifest says "
            f"({_origin(spec)} does): {error.message}",
            hint=_install_hint(spec),
        ) from error
    if found != spec.digest:
        raise EnvironmentUnknown(_other(environment, provider, spec), hint=_install_hint(spec))
    return environment


def read_data(policy_dir: Path, sha256: bytes) -> bytes:
    """The data file among a policy's files. Raises ModelError unless it has this hash."""
    path = policy_dir / DATA_FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DATA_BYTES + 1)
    except OSError as error:
        raise ModelError(
            f"the environment's data cannot be read from {path}: {error.strerror}", hint="download the checkpoint again"
        ) from error
    if len(data) > MAX_DATA_BYTES or hashlib.sha256(data).digest() != sha256:
        raise ModelError(
            f"{path} is not the data that the run's manifest names",
            hint="remove the checkpoint from the data directory and let the node fetch it again",
        )
    return data


def _provider(name: str) -> Provider:
    found = providers()
    if name not in found:
        raise EnvironmentUnknown(
            f"no environment is called {name[:64]!r}; installed are: {', '.join(sorted(found))}",
            hint="name one of these in the recipe, or install the package that brings it",
        )
    return found[name]


def _other(environment: Environment, provider: Provider, spec: EnvironmentSpec) -> str:
    here, there = environment.required_versions, spec.requires
    differing = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    because = ", ".join(
        f"{name} {here.get(name, 'missing')} here, {there.get(name, 'none')} there" for name in differing
    )
    return (
        f"the environment {spec.name!r} installed here (version {environment.version}, of {provider.origin}) is not "
        f"the one this run uses (version {spec.version}, of {_origin(spec)}): digest {environment.digest.hex()[:16]} "
        f"against the manifest's {spec.digest.hex()[:16]}{'; ' + because if because else ''}"
    )


def _origin(spec: EnvironmentSpec) -> str:
    return f"{spec.package} {spec.package_version}" if spec.package else "an unknown package"


def _install_hint(spec: EnvironmentSpec) -> str:
    if not spec.package:
        return "install the release that the run's operator uses"
    pins = [f"{spec.package}=={spec.package_version}", *(f"{name}=={pin}" for name, pin in spec.requires.items())]
    return f"pip install {' '.join(pins)}"


def _own_version() -> str:
    try:
        return metadata.version(OWN_PACKAGE)
    except metadata.PackageNotFoundError:  # run from a clone that was never installed
        return "0.0.0"


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

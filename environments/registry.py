"""The environments that this installation knows, by the name that a run's manifest gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from environments.base import Environment
from environments.sort_digits import SortDigits
from protocol.errors import EnvironmentUnknown

_ENVIRONMENTS: Final[Mapping[str, Callable[[], Environment]]] = {"sort-digits": SortDigits}


def environment_names() -> list[str]:
    """Names that `get_environment` knows."""
    return sorted(_ENVIRONMENTS)


def get_environment(name: str, *, digest: bytes | None = None) -> Environment:
    """The environment of a name; with `digest`, only if it is the very one that a manifest means.

    Raises EnvironmentUnknown.
    """
    if name not in _ENVIRONMENTS:
        raise EnvironmentUnknown(
            f"no environment is called {name[:64]!r}; installed are: {', '.join(environment_names())}",
            hint="name one of these in the recipe, or install the intellect-node release that the run's operator uses",
        )
    environment = _ENVIRONMENTS[name]()
    if digest is not None and environment.digest != digest:
        raise EnvironmentUnknown(
            f"the environment {name!r} installed here (version {environment.version}) is not the one this run uses: "
            f"digest {environment.digest.hex()[:16]} against the manifest's {digest.hex()[:16]}",
            hint="install the intellect-node release that the run's operator uses",
        )
    return environment

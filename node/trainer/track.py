"""The process that speaks to a tracking service: `python -m node.trainer.track SERVICE PROJECT RUN`.

The services' libraries start threads, install exit handlers and may hang: they are kept out of every other process.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import logging
from collections.abc import Mapping
from typing import Any

from node.compute.serve import serve
from protocol.errors import ConfigError


class Service:
    """One run at a service. Raises ConfigError where its library is not installed."""

    def __init__(self, service: str, *, project: str, run: str) -> None:
        # A run of the same name goes on after the trainer's restart; W&B knows runs by an id.
        self._settings = {"project": project, "name": run, "resume": "allow"}
        if service == "wandb":
            self._settings["id"] = hashlib.sha256(run.encode()).hexdigest()[:16]
        self._service = service
        self._module: Any = None

    def log(self, row: Mapping[str, Any]) -> None:
        """Hand on a row's numbers; the first one opens the run."""
        if self._module is None:
            self._module = self._open()
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
        self._module.log(numbers, step=row["step"])

    def finish(self) -> None:
        """Let the service write what it still holds."""
        if self._module is not None:
            self._module.finish()

    def _open(self) -> Any:
        try:
            module = importlib.import_module(self._service)
        except ImportError as error:
            raise ConfigError(
                f"tracking.service = {self._service!r}, but {self._service} is not installed",
                hint=f"install it: pip install {self._service}",
            ) from error
        module.init(**self._settings)
        return module


def main() -> None:
    """Entry point of the process that the trainer's node starts."""
    parser = argparse.ArgumentParser(prog="python -m node.trainer.track")
    parser.add_argument("service", choices=("wandb", "trackio"))
    parser.add_argument("project")
    parser.add_argument("run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    service = Service(arguments.service, project=arguments.project, run=arguments.run)
    serve({"log": service.log, "finish": service.finish})


if __name__ == "__main__":
    main()

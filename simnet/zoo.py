"""`python -m simnet.zoo CHEAT [settings of an inference node]`: a contributor that is honest in all but one thing.

It is the ordinary inference role; only the module of its compute process is another (`simnet.zoo_compute`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.config import NodeConfig, describe, resolve
from node.logs import printable, set_up_logging
from protocol.errors import NodeError
from simnet.cheats import CHEATS

COMPUTE_MODULE = "simnet.zoo_compute"
_REPEATED = ("bootstrap", "listen")
_NOT_FLAGS = ("role", "passphrase", "stay")


def parse(arguments: Sequence[str]) -> tuple[NodeConfig, list[str]]:
    """The node's settings, and the arguments of its compute module. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m simnet.zoo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "cheat", choices=sorted(CHEATS), help="; ".join(f"{name}: {what}" for name, what in CHEATS.items())
    )
    parser.add_argument("--cheat-seed", type=int, default=0, help="Seed of what the cheat draws.")
    parser.add_argument("--config", type=Path, default=None, help="TOML file of settings.")
    for name in NodeConfig.__struct_fields__:
        if name not in _NOT_FLAGS:
            action = "append" if name in _REPEATED else "store"
            parser.add_argument(_flag(name), dest=name, action=action, default=None, help=describe(name))
    given = vars(parser.parse_args(arguments))
    cheat, cheat_seed, file = given.pop("cheat"), given.pop("cheat_seed"), given.pop("config")
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    config = resolve({**settings, "role": "inference"}, file=file).config
    return config, [cheat, str(cheat_seed), str(config.data_dir / "cheat")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cheat until it is caught or the run is finished; the exit code."""
    try:
        config, compute_args = parse(sys.argv[1:] if arguments is None else arguments)
        set_up_logging(config.log_level)
        from node.app import run_node

        return run_node(config, compute_module=COMPUTE_MODULE, compute_args=compute_args)
    except NodeError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return error.exit_code


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    sys.exit(main())

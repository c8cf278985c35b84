"""`python -m simnet.zoo CHEAT [settings of an inference node]`: a contributor that is honest in all but one thing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.config import NodeConfig, describe, resolve
from node.logs import printable, set_up_logging
from protocol.errors import NodeError
from simnet.cheats import CHEATS

if TYPE_CHECKING:
    from node.assembly import InferenceKind

COMPUTE_MODULE = "simnet.zoo.compute"
_REPEATED = ("bootstrap", "listen")
_NOT_FLAGS = ("role", "passphrase", "stay")


def parse(arguments: Sequence[str]) -> tuple[NodeConfig, list[str]]:
    """The node's settings, and the arguments of its compute module. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="python -m simnet.zoo",
        description=__doc__,
        epilog="cheats:\n" + "\n".join(f"  {name:28} {what}" for name, what in CHEATS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cheat", choices=sorted(CHEATS), metavar="CHEAT", help="What it lies about; listed below.")
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
        from node.start import start_node

        return start_node(config, kind=kind_of(compute_args[0], compute_args))
    except NodeError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return error.exit_code


def kind_of(cheat: str, compute_args: Sequence[str]) -> InferenceKind:
    """An inference node with another role, or another compute process, by what the cheat lies to."""
    from node.assembly import InferenceKind
    from simnet.zoo.roles import ROLES

    if cheat in ROLES:
        return InferenceKind(new_role=ROLES[cheat])
    return InferenceKind(module=COMPUTE_MODULE, args=compute_args)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    sys.exit(main())

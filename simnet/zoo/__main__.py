"""`python -m simnet.zoo CHEAT [settings of a node]`: a contributor or validator, honest in all but one thing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.logs import printable, set_up_logging
from protocol.errors import NodeError
from simnet.cheats import CHEATS, VALIDATORS
from simnet.settings_flags import add_settings, take_settings

if TYPE_CHECKING:
    from node.assembly import Kind

COMPUTE_MODULE = "simnet.zoo.compute"


def parse(arguments: Sequence[str]) -> tuple[NodeConfig, list[str]]:
    """The node's settings, and the arguments of its compute module. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="python -m simnet.zoo",
        description=__doc__,
        epilog=f"contributors:\n{_listed(CHEATS)}\n\nvalidators:\n{_listed(VALIDATORS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = sorted(CHEATS | VALIDATORS)
    parser.add_argument("cheat", choices=names, metavar="CHEAT", help="What it lies about; listed below.")
    parser.add_argument("--cheat-seed", type=int, default=0, help="Seed of what the cheat draws.")
    add_settings(parser)
    given = vars(parser.parse_args(arguments))
    cheat, cheat_seed = given.pop("cheat"), given.pop("cheat_seed")
    config = take_settings(given, "validator" if cheat in VALIDATORS else "inference")
    return config, [cheat, str(cheat_seed), str(config.data_dir / "cheat")]


def _listed(cheats: Mapping[str, str]) -> str:
    return "\n".join(f"  {name:28} {what}" for name, what in cheats.items())


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


def kind_of(cheat: str, compute_args: Sequence[str]) -> Kind:
    """A node with another role, or another compute process, by what the cheat lies to."""
    from node.assembly import InferenceKind, ValidatorKind
    from simnet.zoo import validators
    from simnet.zoo.roles import ROLES

    if cheat in VALIDATORS:
        return ValidatorKind(validators.ROLES[cheat])
    if cheat in ROLES:
        return InferenceKind(new_role=ROLES[cheat])
    return InferenceKind(module=COMPUTE_MODULE, args=compute_args)


if __name__ == "__main__":
    sys.exit(main())

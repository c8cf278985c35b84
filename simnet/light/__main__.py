"""`python -m simnet.light ENGINE EVERY_S [settings of an inference node]`: a contributor whose engine is elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from node.config import NodeConfig
from node.logs import printable, set_up_logging
from protocol.errors import NodeError
from simnet.settings_flags import add_settings, take_settings

COMPUTE_MODULE = "simnet.light.compute"


def parse(arguments: Sequence[str]) -> tuple[NodeConfig, list[str]]:
    """The node's settings, and the arguments of its compute module. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m simnet.light", description=__doc__)
    parser.add_argument("engine", metavar="ENGINE", help="Socket of the engine, python -m simnet.light.shared_compute.")
    parser.add_argument("every_s", metavar="EVERY_S", type=float, help="Seconds that one submission takes it.")
    add_settings(parser)
    given = vars(parser.parse_args(arguments))
    compute_args = [given.pop("engine"), str(given.pop("every_s"))]
    return take_settings(given), compute_args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the node until the run is finished; the exit code."""
    try:
        config, compute_args = parse(sys.argv[1:] if arguments is None else arguments)
        set_up_logging(config.log_level)
        from node.assembly import InferenceKind
        from node.start import start_node

        return start_node(config, kind=InferenceKind(module=COMPUTE_MODULE, args=compute_args))
    except NodeError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

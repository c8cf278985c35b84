"""The compute process of a cheat: `python -m simnet.zoo.compute NAME SEED DIRECTORY`, started by `simnet.zoo`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.engines.registry import engine_from_environment
from node.inference.compute import run_worker
from protocol.errors import ConfigError
from simnet.zoo.workers.base import Cheat
from simnet.zoo.workers.files import WORKERS as FILES
from simnet.zoo.workers.proofs import WORKERS as PROOFS
from simnet.zoo.workers.rows import WORKERS as ROWS
from simnet.zoo.workers.sampling import WORKERS as SAMPLING
from simnet.zoo.workers.weights import WORKERS as WEIGHTS

WORKERS: Final[dict[str, Callable[..., Cheat]]] = WEIGHTS | SAMPLING | PROOFS | ROWS | FILES
"""By the names of simnet.cheats; each takes (engine, *, seed, directory)."""


def main() -> None:
    name, seed, directory = sys.argv[1:4]
    if name not in WORKERS:
        raise ConfigError(f"there is no cheat {name[:80]!r}", hint=f"known: {', '.join(sorted(WORKERS))}")
    run_worker(WORKERS[name](engine_from_environment(), seed=int(seed), directory=Path(directory)))


if __name__ == "__main__":
    main()

"""Compute processes that cheat: each changes one step of the honest worker and leaves all others as they are.

Started by `simnet.zoo` with three arguments: the cheat's name, its seed, and a directory of its own. A new cheat is a
worker here and an entry in `simnet.cheats`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from node.engines.base import Engine
from node.engines.torch_engine import engine_from_environment
from node.inference.compute import RolloutWorker, run_worker
from protocol.errors import ConfigError

PERTURBATION: Final = 0.5
"""Noise that is added to each weight tensor, in units of its own standard deviation."""


class Cheat(RolloutWorker):
    """An honest worker with a seed and a directory for what its subclasses do instead."""

    def __init__(self, engine: Engine, *, seed: int, directory: Path) -> None:
        super().__init__(engine)
        self.seed = seed
        self.directory = directory


class WrongModel(Cheat):
    """Names the run's checkpoint, and generates and proves with another model of the same shape."""

    def policy_dir(self, checkpoint_dir: Path) -> Path:
        """A copy of the checkpoint whose weights are all perturbed; one is kept at a time."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        for path in checkpoint_dir.iterdir():
            if path.suffix == ".safetensors":
                perturb(path, self.directory / path.name, seed=self.seed)
            elif path.is_file():
                shutil.copyfile(path, self.directory / path.name)
        return self.directory


WORKERS: Final[dict[str, type[Cheat]]] = {"wrong-model": WrongModel}


def perturb(source: Path, target: Path, *, seed: int) -> None:
    """Copy a safetensors file with noise on every tensor; names, shapes and types stay."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    with safe_open(str(source), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 -- no mapping, though it looks like one
            tensor = file.get_tensor(name)
            scale = PERTURBATION * tensor.float().std(correction=0)
            noise = torch.randn(tensor.shape, generator=generator) * scale
            changed[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(changed, str(target), metadata={"format": "pt"})


def main() -> None:
    name, seed, directory = sys.argv[1:4]
    if name not in WORKERS:
        raise ConfigError(f"there is no cheat {name[:80]!r}", hint=f"known: {', '.join(sorted(WORKERS))}")
    run_worker(WORKERS[name](engine_from_environment(), seed=int(seed), directory=Path(directory)))


if __name__ == "__main__":
    main()

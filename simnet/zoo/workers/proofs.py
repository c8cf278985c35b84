"""Cheats that compute honest answers and hand in other proofs, as one who has no right model to make them with."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from node.engines.assignment import Work
from node.engines.base import Generation
from protocol.constants import PROOF_FIELD
from protocol.rollouts import Rollout
from simnet.zoo.workers.base import Cheat

ONE_BF16: Final = 0x3F80

Forge = Callable[[Sequence[Rollout], int, int], list[bytes]]
"""(rollouts, number of the one, the cheat's seed) to the proofs to hand in."""


class ForgedProofs(Cheat):
    """Honest in all but the proofs' bytes."""

    def __init__(self, *args: object, forge: Forge, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._forge = forge

    def rollouts(self, work: Work, generations: Sequence[Generation]) -> list[Rollout]:
        honest = super().rollouts(work, generations)
        return [
            msgspec.structs.replace(rollout, proofs=self._forge(honest, number, self.seed))
            for number, rollout in enumerate(honest)
        ]


def zeros(rollouts: Sequence[Rollout], number: int, _: int) -> list[bytes]:
    return [bytes(len(proof)) for proof in rollouts[number].proofs]


def constant(rollouts: Sequence[Rollout], number: int, _: int) -> list[bytes]:
    """The polynomial that is 1.0 everywhere, with a modulus that is allowed."""
    return [_packed([ONE_BF16] + [0] * (len(proof) // 2 - 2)) for proof in rollouts[number].proofs]


def random(rollouts: Sequence[Rollout], number: int, seed: int) -> list[bytes]:
    label = f"{seed} {rollouts[number].output_ids} {number}".encode()
    draws = np.random.default_rng(list(hashlib.sha256(label).digest()))
    proofs = rollouts[number].proofs
    return [_packed(draws.integers(0, PROOF_FIELD, len(proof) // 2 - 1).tolist()) for proof in proofs]


def swapped(rollouts: Sequence[Rollout], number: int, _: int) -> list[bytes]:
    """Those of the next rollout with another answer and proofs of the same sizes; its own where there is none."""
    own = rollouts[number]
    others = [*rollouts[number + 1 :], *rollouts[:number]]
    fitting = [other for other in others if _sizes(other) == _sizes(own) and other.proofs != own.proofs]
    return (fitting[0] if fitting else own).proofs


def short(rollouts: Sequence[Rollout], number: int, _: int) -> list[bytes]:
    return [proof[: len(proof) // 2] for proof in rollouts[number].proofs]


def missing(rollouts: Sequence[Rollout], number: int, _: int) -> list[bytes]:
    return rollouts[number].proofs[:-1]


def _sizes(rollout: Rollout) -> list[int]:
    return [len(proof) for proof in rollout.proofs]


def _packed(coefficients: Sequence[int]) -> bytes:
    return struct.pack(f">{len(coefficients) + 1}H", PROOF_FIELD, *coefficients)


WORKERS: Final[dict[str, Callable[..., Cheat]]] = {
    f"{name}-proofs": partial(ForgedProofs, forge=forge)
    for name, forge in {
        "zero": zeros,
        "constant": constant,
        "random": random,
        "swapped": swapped,
        "short": short,
        "missing": missing,
    }.items()
}

"""The cheats that a scenario can name, and what each does. What they compute is in `simnet.zoo_compute`.

A new cheat is an entry here and a worker of the same name there.
"""

from __future__ import annotations

from typing import Final

CHEATS: Final[dict[str, str]] = {
    "wrong-model": "generates with other weights of the same shape than the checkpoint it names",
}

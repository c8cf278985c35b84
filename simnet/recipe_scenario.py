"""A bare recipe as a scenario: a small honest fleet around it, so that a run can be tried before it is offered.

Who wants other nodes, links or faults writes a scenario that names the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainer.recipe import Recipe, load_recipe

TIMEOUT_S: Final = 7 * 86400.0
SHORT_STEPS: Final = 5
SHORT_TIMEOUT_S: Final = 3600.0
RELAYS: Final = 2
CONTRIBUTORS: Final = 2


def is_recipe(table: Mapping[str, Any]) -> bool:
    """Whether a file's tables are a recipe's: it has a policy and problems, and no fleet."""
    return "fleet" not in table and "model" in table and "environment" in table


def around(recipe_file: Path) -> dict[str, Any]:
    """The tables of a scenario that runs a recipe as it is. Raises ConfigError where the recipe is none."""
    recipe = load_recipe(recipe_file)
    run: dict[str, Any] = {"recipe": str(recipe_file), "name": recipe.name, "overrides": _opened(recipe)}
    steps, short_steps = recipe.batch.total_steps, min(SHORT_STEPS, recipe.batch.total_steps)
    judges = "1 validator" if recipe.quorum == 1 else f"{recipe.quorum} validators"
    return {
        "title": f"The recipe {recipe.name} by itself, with the usual small fleet: "
        f"1 trainer, {RELAYS} relays, {judges}, {CONTRIBUTORS} inference nodes",
        "run": run,
        "fleet": [
            {"role": "trainer"},
            {"role": "relay", "count": RELAYS},
            {"role": "validator", "count": recipe.quorum},
            {"role": "inference", "count": CONTRIBUTORS},
        ],
        "until": {"timeout_s": TIMEOUT_S},
        "expect": {"steps_at_least": steps, "honest_rejected": 0, "unexpected_exits": 0},
        "short": {
            "run": {"overrides": {"batch": {"total_steps": short_steps}}},
            "until": {"timeout_s": SHORT_TIMEOUT_S},
            "expect": {"steps_at_least": short_steps},
        },
    }


def _opened(recipe: Recipe) -> dict[str, Any]:
    """Whom a run lets in is nothing that this fleet's new keys could be among."""
    return {} if recipe.admission.kind == "open" else {"admission": {"kind": "open", "allowed": []}}

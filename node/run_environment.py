"""The environment that a recipe asks for, as a run's operator sets it up: parameters, data file, end tokens.

The operator's data file is checked and brought into the form that travels; as a file of the policy it reaches every
contributor with the weights, and the manifest names its hash. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path

from environments.base import Environment
from environments.registry import DATA_FILE, MAX_DATA_BYTES, get_environment
from protocol.atomic import write_atomically
from protocol.errors import ConfigError
from trainer.recipe import Recipe


def recipe_environment(recipe: Recipe, policy_dir: Path) -> Environment:
    """The environment of a recipe, with the data that lies beside the policy, or else the operator's file.

    Raises ConfigError, EnvironmentUnknown.
    """
    choice = recipe.environment
    environment = get_environment(choice.name, parameters=choice.parameters)
    if choice.data is not None:
        travelling = policy_dir / DATA_FILE
        data = travelling.read_bytes() if travelling.exists() else import_data(environment, Path(choice.data))
        environment = get_environment(choice.name, parameters=choice.parameters, data=data)
    try:
        environment.task(bytes(32))  # what cannot draw a task must not become a run
    finally:
        environment.close()
    return environment


def lay_out_data(recipe: Recipe, policy_dir: Path) -> None:
    """Put a recipe's data file, if it has one, among the files of the first policy. Raises ConfigError."""
    choice = recipe.environment
    if choice.data is None:
        return
    environment = get_environment(choice.name, parameters=choice.parameters)
    write_atomically(policy_dir / DATA_FILE, import_data(environment, Path(choice.data)))


def import_data(environment: Environment, source: Path) -> bytes:
    """What travels of an operator's file. Raises ConfigError that names the file, and the line at fault."""
    if not source.is_file():
        raise ConfigError(
            f"there is no data file {source}", hint="set environment.data in the recipe to an existing file's path"
        )
    try:
        data = environment.import_data(source)
    finally:
        environment.close()
    if len(data) > MAX_DATA_BYTES:
        raise ConfigError(f"{source} makes {len(data)} bytes of data; {MAX_DATA_BYTES} are allowed")
    return data


def extra_stop_ids(environment: Environment, policy_dir: Path) -> tuple[int, ...]:
    """Token ids of the texts that end an answer of this environment. Raises ConfigError, ModelError."""
    if not environment.stop_texts:
        return ()
    from node.engines.tokenizer import Tokenizer

    tokenizer = Tokenizer(policy_dir)
    found = {text: tokenizer.single_id(text) for text in environment.stop_texts}
    missing = [text for text, token in found.items() if token is None]
    if missing:
        raise ConfigError(
            f"the environment {environment.name} ends answers at {missing[0]!r}, for which the model's tokenizer has "
            "no token of its own",
            hint="choose another model, or another environment",
        )
    return tuple(sorted(token for token in found.values() if token is not None))

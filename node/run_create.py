"""Make a run: the initial policy on disk and the manifest that the operator signs.

    <data_dir>/run/policy-0/     the policy that the run starts from
    <data_dir>/run/recipe.toml   the recipe as given, byte for byte
    <data_dir>/run/manifest      the manifest's envelope, written last: where it is, the run is whole

Leaves out the announcement of the run, which the trainer does. Never imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from environments.registry import specify
from node.datadir import disk_error, make_directory
from node.run_environment import extra_stop_ids, lay_out_data, recipe_environment
from node.run_membership import admission_spec, credit_spec
from node.run_pools import check_targets, lay_out_pools, load_pools
from protocol.atomic import write_atomically
from protocol.envelope import Signed, open_envelope, seal
from protocol.errors import ConfigError, DataDirError, MalformedError, ModelError
from protocol.identity import Identity, PeerId
from protocol.records import Manifest, ModelSpec
from protocol.run import RunAddress
from trainer.positions import most_positions
from trainer.recipe import ASSETS_DIR, MAX_RECIPE_BYTES, Recipe, parse_recipe, recipe_path
from trainer.smollm2 import smollm2_directory

POLICY_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
"""What belongs to a policy beside its *.safetensors; nothing else of a model directory is published."""
SMOLLM2: Final = "smollm2-135m"
"""A model's name for which its directory is made (trainer.smollm2) instead of downloaded."""
MAX_JSON_BYTES: Final = 1 << 20
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class CreatedRun:
    """A run that exists on the operator's disk."""

    address: RunAddress
    manifest: Signed[Manifest]
    policy_dir: Path


def create_run(
    recipe_source: str,
    data_dir: Path,
    *,
    identity: Identity,
    validators: Sequence[PeerId],
    issued_at_ms: int,
    name: str | None = None,
    keep_key: Callable[[], object] = lambda: None,
) -> CreatedRun:
    """Make a run whose operator and trainer is `identity`. Raises ConfigError, ModelError or DataDirError.

    `keep_key` makes that identity durable: it is called once everything is checked, just before the run is there.
    """
    run_dir = data_dir / "run"
    if (run_dir / "manifest").exists():
        raise DataDirError(
            f"{data_dir} holds a run already",
            hint="start its trainer with --role trainer, or give another --data-dir for a new run",
        )
    source = recipe_path(recipe_source)
    recipe_bytes = _read(source, MAX_RECIPE_BYTES, "recipe")
    recipe = parse_recipe(recipe_bytes, origin=str(source))
    _check_validators(validators, recipe)
    policy_dir = run_dir / "policy-0"
    _lay_out_policy(model_directory(recipe.model.source), policy_dir)
    lay_out_data(recipe, policy_dir)
    manifest = manifest_from_recipe(
        recipe,
        policy_dir,
        trainer=identity.peer_id,
        validators=validators,
        name=name or recipe.name,
        issued_at_ms=issued_at_ms,
        recipe_digest=hashlib.sha256(recipe_bytes).digest(),
    )
    lay_out_pools(recipe, manifest.environment, policy_dir)
    signed = _sealed(manifest, identity)
    write_atomically(run_dir / "recipe.toml", recipe_bytes)
    keep_key()
    write_atomically(run_dir / "manifest", signed.data)
    return CreatedRun(RunAddress(identity.peer_id, manifest.name), signed, policy_dir)


def manifest_from_recipe(
    recipe: Recipe,
    model_dir: Path,
    *,
    trainer: PeerId,
    validators: Sequence[PeerId],
    name: str,
    issued_at_ms: int,
    recipe_digest: bytes,
) -> Manifest:
    """What all nodes of the run must agree on. Raises ModelError or EnvironmentUnknown."""
    environment = recipe_environment(recipe, model_dir)
    check_targets(recipe.rollout.length, environment)
    model = model_spec(model_dir)
    stop_ids = {*model.stop_ids, *extra_stop_ids(environment, model_dir)}
    model = msgspec.structs.replace(model, stop_ids=tuple(sorted(stop_ids)))
    if recipe.rollout.max_new_tokens >= model.max_model_len:
        raise ConfigError(
            f"rollout.max_new_tokens = {recipe.rollout.max_new_tokens} leaves no room for a prompt: the model in "
            f"{model_dir} takes {model.max_model_len} tokens in all"
        )
    return Manifest(
        name=name,
        issued_at_ms=issued_at_ms,
        trainer=trainer.public_key,
        validators=tuple(validator.public_key for validator in validators),
        quorum=recipe.quorum,
        admission=admission_spec(recipe),
        credits=credit_spec(recipe, model_dir),
        model=model,
        environment=msgspec.structs.replace(specify(environment), pools=load_pools(recipe, environment)),
        rollout=recipe.rollout,
        batch=recipe.batch,
        toploc=recipe.toploc,
        tolerances=recipe.tolerance,
        checks=recipe.checks,
        shard_bytes=recipe.shard_bytes,
        recipe=recipe_digest,
    )


def model_directory(source: str) -> Path:
    """Where a recipe's model lies: a shipped policy's name, `smollm2-135m`, a directory, or a Hugging Face id.

    Makes or downloads what is not here yet. Raises ModelError.
    """
    shipped = shipped_model(source)
    if shipped is not None:
        return shipped
    path = Path(source)
    if path.is_dir():
        return path
    if source == SMOLLM2:
        return smollm2_directory()
    if not _HUB_ID.fullmatch(source):
        known = ", ".join(sorted(asset.name for asset in ASSETS_DIR.iterdir()))
        raise ModelError(
            f"there is no model {source[:200]!r}: neither a directory nor a shipped policy ({known}, {SMOLLM2})",
            hint="set model.source in the recipe to one of these, or to a Hugging Face id such as Qwen/Qwen3-0.6B",
        )
    return _download(source)


def shipped_model(source: str) -> Path | None:
    """The directory of a policy that comes with the program."""
    shipped = ASSETS_DIR / source
    return shipped if "/" not in source and shipped.is_dir() else None


def hub_file(hub_id: str, name: str) -> Path:
    """One file of a model on Hugging Face. Raises ModelError."""
    return _download(hub_id, [name]) / name


def _download(hub_id: str, patterns: Sequence[str] = (*POLICY_FILES, "*.safetensors")) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"the model {hub_id} cannot be downloaded from Hugging Face: {str(error).splitlines()[0][:200]}",
            hint="check the id and the connection, or download it elsewhere and set model.source to its directory",
        ) from error


def model_spec(model_dir: Path) -> ModelSpec:
    """Check that a directory is a whole model and describe it for the manifest. Raises ModelError."""
    config = read_json_object(model_dir / "config.json")
    tokenizer = _read(model_dir / "tokenizer.json", 1 << 28, "tokenizer")
    if not any(model_dir.glob("*.safetensors")):
        raise ModelError(
            f"{model_dir} has no *.safetensors file; other weight formats can run code and are never loaded",
            hint="convert the weights with save_pretrained(…) of transformers, which writes safetensors",
        )
    _check_shards(model_dir)
    return ModelSpec(
        architecture=hashlib.sha256((model_dir / "config.json").read_bytes()).digest(),
        tokenizer=hashlib.sha256(tokenizer).digest(),
        vocab_size=_whole_number(config, "vocab_size", model_dir),
        max_model_len=most_positions(config, origin=f"config.json in {model_dir}"),
        stop_ids=_stop_ids(config, model_dir),
    )


def require_model(model_dir: Path, spec: ModelSpec) -> None:
    """Raise ModelError unless a directory holds the model and the tokenizer that a manifest names."""
    for name, digest in (("config.json", spec.architecture), ("tokenizer.json", spec.tokenizer)):
        if hashlib.sha256(_read(model_dir / name, 1 << 28, "model")).digest() != digest:
            raise ModelError(
                f"{model_dir / name} is not the one that the run's manifest names: it was changed since "
                "`run create`, or the directory is of another run",
                hint=f"restore {model_dir} from a back-up, or create a new run",
            )


def _check_shards(model_dir: Path) -> None:
    index = model_dir / "model.safetensors.index.json"
    if not index.exists():
        return
    weights = read_json_object(index, max_bytes=1 << 26).get("weight_map")
    names = set(weights.values()) if isinstance(weights, dict) else set()
    missing = sorted(str(name) for name in names if not (model_dir / str(name)).is_file())
    if missing or not names:
        raise ModelError(
            f"{model_dir} is incomplete: {', '.join(missing[:3]) or 'its weight index is empty'}"
            f"{' is missing' if missing else ''}",
            hint="download the model again",
        )


def _stop_ids(config: dict[str, Any], model_dir: Path) -> tuple[int, ...]:
    generation = model_dir / "generation_config.json"
    found = read_json_object(generation).get("eos_token_id") if generation.exists() else None
    found = config.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [found]
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"neither generation_config.json nor config.json in {model_dir} says which token ends a text",
            hint='add "eos_token_id" to generation_config.json',
        )
    return tuple(sorted(set(ids)))


def _whole_number(config: dict[str, Any], key: str, model_dir: Path) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json in {model_dir} has no usable {key!r}: this is no text-only causal model")
    return value


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON file of a model directory. Raises ModelError."""
    try:
        value = json.loads(_read(path, max_bytes, "model"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _read(path: Path, max_bytes: int, part_of: str) -> bytes:
    kind = ConfigError if part_of == "recipe" else ModelError
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise kind(f"the {part_of} lacks {path.name}: there is no {path}") from error
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise kind(f"{path} is larger than {max_bytes} bytes")
    return data


def require_validators(validators: Sequence[PeerId]) -> None:
    """Raise ConfigError where no validator is named."""
    if not validators:
        raise ConfigError(
            "a run needs a validator: without one no rollout is ever accepted",
            hint="run `intellect-node id --data-dir DIR` on the validator and give its peer id with --validator",
        )


def _check_validators(validators: Sequence[PeerId], recipe: Recipe) -> None:
    require_validators(validators)
    if len(set(validators)) != len(validators):
        raise ConfigError("the same validator is named twice")
    if recipe.quorum > len(validators):
        raise ConfigError(
            f"the recipe's quorum of {recipe.quorum} validators cannot be reached by {len(validators)}",
            hint="name more with --validator, or lower quorum in the recipe",
        )


def _lay_out_policy(source: Path, target: Path) -> None:
    model_spec(source)  # nothing is copied from an incomplete directory
    names = sorted(path.name for path in source.iterdir() if path.name in POLICY_FILES or path.suffix == ".safetensors")
    unusable = [name for name in names if not _FILE_NAME.fullmatch(name)]
    if unusable:
        raise ModelError(f"{source} has a file whose name cannot be published: {unusable[0]!r}")
    make_directory(target.parent)
    if target.exists():
        shutil.rmtree(target)  # left by an attempt that never reached its manifest
    try:
        target.mkdir()
        for name in names:
            shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise disk_error(error, target) from error


def _sealed(manifest: Manifest, identity: Identity) -> Signed[Manifest]:
    try:
        return open_envelope(seal(manifest, identity), Manifest)
    except MalformedError as error:
        raise ConfigError(f"the run cannot be described: {error.message}") from error

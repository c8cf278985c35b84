"""Export a policy: a training checkpoint becomes a directory that transformers loads (`intellect-node policy export`).

Weights are safetensors only; config, generation config, tokenizer and chat template go with them. The directory appears
whole or not at all. Leaves out pushing it anywhere. Never imports torch unless the number format is changed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from protocol.atomic import sync_directory
from protocol.errors import ConfigError, DataDirError, ModelError
from trainer.state_dir import find_saved

DTYPES: Final = ("float32", "bfloat16")
_TRAINING: Final = "training"
_TRANSFORMERS_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)


def policy_directory(source: Path, *, step: int | None = None) -> Path:
    """The policy in a trainer's data directory, in a training checkpoint, or in a directory that is one itself.

    Checkpoints are checked against the hashes they were written with. Raises ModelError.
    """
    if (source / "config.json").is_file():
        if step is not None:
            raise ConfigError(f"{source} is a model, not a trainer's directory: it has no steps to choose from")
        return source
    if (source / "policy").is_dir() and source.name.startswith("step-"):
        source, step = source.parent, int(source.name.removeprefix("step-"))
    state_dir = source / _TRAINING if (source / _TRAINING).is_dir() else source
    saved = find_saved(state_dir, step)
    if saved is None:
        which = "a usable checkpoint" if step is None else f"a usable checkpoint of step {step}"
        raise ModelError(
            f"{source} holds neither a model nor {which}",
            hint="give a trainer's --data-dir, one of its training/step-… directories, or a model directory",
        )
    return saved.policy_dir


def export_policy(policy_dir: Path, out: Path, *, dtype: str | None = None) -> Path:
    """Write a policy as a Hugging Face directory; with `dtype`, one of DTYPES, its weights in that format.

    Raises ConfigError where `out` exists, ModelError for what is no whole model, DataDirError for a disk that refuses.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", hint="give --out a new directory")
    work = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        work.mkdir(parents=True)
        for path in _files(policy_dir):
            shutil.copyfile(path, work / path.name)
        _say_which_tokenizer(work)
        if dtype is not None:
            _convert(work, dtype)
        for path in work.iterdir():
            _sync(path)
        sync_directory(work)
        work.rename(out)
        sync_directory(out.parent)
    except OSError as error:
        raise DataDirError(
            f"the policy cannot be written to {out}: {error.strerror or error}",
            hint=f"free some space (df -h {out.parent}), or give another --out",
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _files(policy_dir: Path) -> Iterator[Path]:
    weights = sorted(policy_dir.glob("*.safetensors"))
    if not weights or not (policy_dir / "config.json").is_file():
        raise ModelError(f"{policy_dir} is no whole model: it needs config.json and *.safetensors")
    yield from weights
    yield from (policy_dir / name for name in _TRANSFORMERS_FILES if (policy_dir / name).is_file())


def _say_which_tokenizer(directory: Path) -> None:
    """Without a tokenizer_config.json transformers guesses by the architecture, and may add tokens of its own."""
    tokenizer, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if settings.exists() or not tokenizer.exists():
        return
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens(directory)}
    settings.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def special_tokens(directory: Path) -> dict[str, str]:
    """Texts of the special tokens that config.json and tokenizer.json name, for tokenizer_config.json.

    Raises ModelError.
    """
    try:
        config = json.loads((directory / "config.json").read_bytes())
        tokenizer = json.loads((directory / "tokenizer.json").read_bytes())
        texts = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
        named = {name: texts.get(config.get(f"{name}_id")) for name in ("bos_token", "eos_token", "pad_token")}
        named["unk_token"] = tokenizer.get("model", {}).get("unk_token")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"config.json or tokenizer.json in {directory} cannot be read: {error}") from error
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _convert(directory: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target = getattr(torch, dtype)
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(target) if tensor.is_floating_point() else tensor
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

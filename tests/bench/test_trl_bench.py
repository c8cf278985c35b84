"""The comparison with TRL: what is handed over fits what the other side reads, and its failures are told."""

import re
from pathlib import Path

import pytest

import bench.trl_peer
from bench.trainer import _job, recipe
from bench.trainer import bench as bench_trainer
from bench.trl_peer import ENVIRONMENT, TrlPeer, find_python
from protocol.errors import ConfigError

WORKER = Path(bench.trl_peer.__file__).with_name("trl_worker.py").read_text()


def test_a_job_has_every_setting_that_the_worker_reads():
    job = _job("updates", recipe(3), Path("model"), Path("out"), seed=0)
    read = set(re.findall(r'settings\["(\w+)"\]', WORKER))
    assert {"updates", "delta", "betas"} < read
    assert read <= job["settings"].keys()
    assert set(re.findall(r'job\["(\w+)"\]', WORKER)) <= job.keys() | {"rows"}


def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no interpreter"):
        find_python(tmp_path / "python")


def test_a_worker_that_dies_is_told_with_its_last_words(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'trl'\" >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="No module named 'trl'"):
        TrlPeer(find_python(python), tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not ENVIRONMENT.exists(), reason="python -m bench trainer has not made .venv-trl")
def test_both_sides_train_on_the_same_samples():
    figures = bench_trainer(quick=True).figures
    assert figures["ours_gradient_seed_0"] == pytest.approx(figures["trl_gradient_seed_0"], rel=0.5)
    assert figures["update_times_trl"] > 1.0


def test_an_installation_that_was_interrupted_is_made_again(tmp_path, monkeypatch):
    """The interpreter is there early, the packages late: only the file that is written last tells."""
    made = []

    def install(python):
        made.append(python)
        python.parent.mkdir(parents=True)
        python.touch()
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench.trl_peer, "ENVIRONMENT", tmp_path / "venv")
    monkeypatch.setattr(bench.trl_peer, "_install", install)
    with pytest.raises(KeyboardInterrupt):
        find_python(None)
    assert find_python(None) == find_python(None) == tmp_path / "venv" / "bin" / "python"
    assert len(made) == 2

import json
import subprocess
import sys

import numpy as np
import pytest

from bench import toploc
from bench.__main__ import main

WIDTH = toploc.WIDTHS[0]


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def figures(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]


def test_without_the_public_package_its_rows_are_left_out(no_cache, capsys):
    assert main(["toploc", "--quick"]) == 0
    found = figures(capsys)
    assert found[f"h{WIDTH}_own_build_us"] > 0
    assert not [name for name in found if "public" in name or "ratio" in name]
    assert not list(no_cache.iterdir())


def test_a_public_package_that_cannot_be_built_is_one_line(no_cache, monkeypatch, capsys):
    failed = subprocess.CompletedProcess((), 1, "", "much\nERROR: no compiler\n")
    monkeypatch.setattr(toploc.subprocess, "run", lambda *args, **kwargs: failed)
    assert toploc.public_package(build=True) is None
    assert capsys.readouterr().err.splitlines()[-1] == "the public toploc package is left out: ERROR: no compiler"


def test_a_public_package_that_does_not_load_is_one_line(no_cache, monkeypatch, capsys):
    package = toploc.cache_directory() / "toploc"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('undefined symbol')")
    path = list(sys.path)
    assert toploc.public_package(build=False) is None
    assert capsys.readouterr().err.rstrip().endswith("does not load: undefined symbol")
    assert sys.path == path


def test_states_are_full_of_different_chunks():
    chunks = toploc.hidden_states(64, tokens=96).reshape(3, -1)
    assert len(np.unique(chunks, axis=0)) == 3


def test_the_proof_path_is_timed_within_the_generation(capsys):
    assert main(["proof_cost", "--quick"]) == 0
    found = figures(capsys)
    for policy in ("llama", "demo"):
        assert 0 < found[f"{policy}_proof_share"] < 1
        assert 0 < found[f"{policy}_noise_share"] < 1

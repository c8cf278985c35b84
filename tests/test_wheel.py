"""The wheel, as someone installs it: it starts, it is complete, and asking for help does not load torch."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
TOP_LEVEL = sorted({package.split(".")[0] for package in PACKAGES})


def run(*command, cwd, **env):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INTELLECT_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in TOP_LEVEL:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("cli.py", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=out)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel, that sees the libraries of this one."""
    home = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "outer.pth").write_text("".join(f"{path}\n" for path in outer))
    return home


def test_every_package_of_the_source_is_listed():
    shipped = [name for name in TOP_LEVEL if name != "bench"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for name in shipped for path in (ROOT / name).rglob("__init__.py")
    }
    assert found == set(PACKAGES)


def test_the_wheel_holds_every_file_of_its_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for name in TOP_LEVEL
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert sorted(wanted - held) == []
    assert "cli.py" in held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert not [name for name in held if name.startswith(("tests/", "bench/"))]


def test_assets_are_among_them(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
    assert "trainer/recipes/demo.toml" in held
    assert "simnet/scenarios/demo.toml" in held
    assert [name for name in held if name.startswith("trainer/assets/") and name.endswith(".safetensors")]


def test_the_installed_wheel_has_compiled_proofs(installed):
    if not shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]):
        pytest.skip("there is no C compiler here")
    code = "from protocol.toploc import backend; print(backend())"
    assert run(installed / "venv" / "bin" / "python", "-c", code, cwd=installed).strip() == "native"


def test_without_a_compiler_the_wheel_is_built_all_the_same(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    options = ("--wheel", "--no-isolation", "--outdir", tmp_path)
    run(sys.executable, "-m", "build", *options, copy, cwd=tmp_path, CC=str(tmp_path / "no-compiler"))
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        assert "protocol/toploc_numpy.py" in archive.namelist()
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_the_installed_program_starts(installed):
    program = installed / "venv" / "bin" / "intellect-node"
    assert "--role" in run(program, "--help", cwd=installed, COLUMNS="200")
    assert run(program, "--version", cwd=installed).strip() == f"intellect-node/{PROJECT['project']['version']}"


def test_the_installed_program_finds_its_assets_and_loads_no_torch(installed):
    code = (
        "import sys; from trainer.recipe import recipe_names; from simnet.scenario import scenario_names; import cli\n"
        "print(cli.__file__, 'demo' in recipe_names(), 'demo' in scenario_names(), 'torch' in sys.modules)"
    )
    file, *facts = run(installed / "venv" / "bin" / "python", "-c", code, cwd=installed).split()
    assert str(installed) in file
    assert facts == ["True", "True", "False"]

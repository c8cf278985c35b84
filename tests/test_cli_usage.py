"""What a new user gets wrong on the command line, command by command: a sentence, a next step, an exit code."""

import inspect
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command

import cli
from node.commands.settings import RARE, setting_names
from node.config import NodeConfig, describe, flag, group, kind_of, resolve, unit, variable
from node.homes import homes_root
from protocol.identity import Identity

ROOT = Path(__file__).parents[1]
ALICE = str(Identity.from_phrase("alice").peer_id)
RUN = f"{ALICE}/demo"

NEED_A_NODE = [
    *(["status"], ["status", "--watch"], ["peers"], ["logs"], ["leave"], ["run", "show"], ["run", "publish"]),
    *(["id", "export", "--out", "x"], ["id", "rotate", "--yes"], ["policy", "export", "--out", "x"]),
]
WRONG_FLAGS = [
    (["--rule", "relay"], "--rule"),
    (["--role", "boss", "--run", RUN], "role from --role"),
    (["--role", "relay", "--run", RUN, "--threads", "many"], "threads"),
    (["--role", "relay", "--run", RUN, "--http-port", "70000"], "http_port from --http-port"),
    (["--role", "relay", "--run", RUN, "--device", "cuda:0", "--gpu", "1"], "--gpu and --device"),
    (["--role", "relay", "--run", RUN, "--bootstrap", "1.2.3.4:5"], "no address of a peer"),
    (["--role", "relay", "--run", "demo"], "not a run address"),
    (["--config", "none.toml"], "cannot read the configuration file none.toml"),
    (["--threads", "1", "status"], "--threads before `status` has no effect"),
    (["--config", "x.toml", "id"], "--config before `id` has no effect"),
    (["status", "--json", "--watch"], "--watch and --json"),
    (["logs", "--level", "loud"], "there is no level 'loud'"),
    (["logs", "--since", "yesterday"], "not a time: 'yesterday'"),
    (["logs", "--of", "../../etc/passwd"], "no name of a log"),
    (["id", "--new", "--data-dir", "x"], "--new and --data-dir"),
    (["id", "--new", "show"], "after `id show`"),
    (["id", "import", "x"], "--data-dir"),
    (["config", "check", "none.toml"], "none.toml"),
    (["config", "show"], "no role is given"),
    (["run", "create", "--recipe", "demo"], "a run needs a validator"),
    (["run", "create", "--recipe", "demo", "--validator", "bob"], "--validator: not an Ed25519 peer id"),
    (["run", "create", "--recipe", "none", "--validator", ALICE], "there is no recipe 'none'"),
    (["run", "create", "--recipe", "demo", "--validator", ALICE, "--name", "UP"], "'UP' is no name for a run"),
    (["dht", "get", "nonsense", "--run", RUN, "--bootstrap", f"/ip4/127.0.0.1/tcp/9/p2p/{ALICE}"], "not a key"),
    (["verdict", "show", "zz"], "neither a file nor"),
    (["calibrate", "--rollouts", "1"], "--rollouts"),
    (["bench", "--recipe", "none"], "there is no recipe 'none'"),
    (["validate", "--self", "none.parquet", "--data-dir", "."], "there is no rollout file"),
    (["version", "--bootstrap", "x"], "--bootstrap is for --check"),
    (["doctor", "--role", "boss"], "role from --role"),
    (["eval", "--model", "."], "either --tasks or --environment"),
    (["simnet", "run", "none"], "none"),
    (["--role", "relay", "--run", RUN, "--dtype", "fp8"], "'fp8' is none of float32, bfloat16"),
    (
        ["--role", "relay", "--run", RUN, "--max-memory", "8"],
        "max_memory from --max-memory: '8' is not how it is written",
    ),
    (["calibrate", "--dtype", "fp8"], "'fp8' is none of float32, bfloat16"),
    (["bench", "--engine", "fp8"], "'fp8' is none of torch, transformers, vllm"),
    (["data", "filter", "--prompts", "1", "--out", "x", "--dtype", "fp8"], "is none of float32, bfloat16"),
    (["nonsense"], "nonsense"),
]


@pytest.mark.parametrize(("args", "text"), WRONG_FLAGS, ids=str)
def test_wrong_flags_are_usage_errors(run_cli, args, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    needs_directory = args[0] in ("status", "logs") and "--data-dir" not in args
    done = run_cli(*args, *(["--data-dir", "d"] if needs_directory else []))
    assert done.code == 2, done.err
    assert text in done.err
    assert "Traceback" not in done.err
    assert not homes_root(os.environ).exists(), "nothing is made for a command that cannot succeed"


@pytest.mark.parametrize("args", NEED_A_NODE, ids=" ".join)
def test_without_a_node_each_command_says_how_to_start_one(run_cli, args, tmp_path):
    done = run_cli(*args)
    assert done.code == 1
    assert "no node has been started on this computer" in done.err
    assert "next: start one: intellect-node --role inference" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [["status"], ["peers"], ["logs"], ["leave"], ["run", "show"]], ids=" ".join)
def test_a_missing_data_directory_is_named(run_cli, args, tmp_path):
    done = run_cli(*args, "--data-dir", tmp_path / "gone")
    assert done.code == 1
    assert str(tmp_path / "gone") in done.err
    assert "  next: " in done.err
    assert not (tmp_path / "gone").exists()


def test_half_a_config_says_what_is_missing(run_cli, tmp_path):
    path = tmp_path / "node.toml"
    path.write_text('role = "inference"\n')
    done = run_cli("--config", path)
    assert (done.code, "no run is given" in done.err, "--run <operator peer id>" in done.err) == (2, True, True)
    path.write_text('role = "inference"\nrun =\n')
    assert "is not valid TOML" in run_cli("--config", path).err
    path.write_text("thread = 1\n")
    assert "did you mean threads?" in run_cli("config", "check", path).err


def test_a_good_config_is_checked_and_shown_with_its_sources(run_cli, tmp_path):
    path = tmp_path / "node.toml"
    path.write_text("threads = 3\n")
    assert "1 settings, all known and within bounds" in run_cli("config", "check", path).out
    given = ("config", "show", "--config", path, "--role", "relay", "--run", RUN, "--json")
    shown = json.loads(run_cli(*given, INTELLECT_NODE_DTYPE="bfloat16", INTELLECT_NODE_PASSPHRASE="hunter2").out)
    assert (shown["threads"]["value"], shown["threads"]["from"]) == (3, str(path))
    assert shown["dtype"]["from"] == "INTELLECT_NODE_DTYPE"
    assert (shown["http_port"]["from"], shown["join_timeout_s"]["unit"]) == ("default", "seconds")
    assert shown["passphrase"]["value"] == "***"
    assert "hunter2" not in json.dumps(shown)


def test_an_old_name_of_a_variable_is_not_passed_over(run_cli):
    done = run_cli("--role", "relay", "--run", RUN, "--dry-run", INTELLECT_THREADS="4")
    assert done.code == 2
    assert "did you mean INTELLECT_NODE_THREADS?" in done.err


def test_several_nodes_are_told_apart(run_cli, tmp_path):
    for name in ("relay-demo-1", "inference-demo-1"):
        home = homes_root(os.environ) / name
        home.mkdir(parents=True)
        (home / "identity.key").touch()
    done = run_cli("status")
    assert done.code == 2
    assert "inference-demo-1, relay-demo-1" in done.err
    assert "next: say which one with --data-dir" in done.err


SAMPLES = {
    "role": "relay",
    "run": RUN,
    "bootstrap": "/dnsaddr/swarm.example",
    "data_dir": "d",
    "announce": "/ip4/203.0.113.7/tcp/1",
    "allow": ALICE,
    "webhooks": "https://hooks.example/x",
}


def test_every_setting_is_a_flag_of_its_type(run_cli):
    """Flags follow from the types: all of them at once, each with a value of its kind, and each is taken."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(NodeConfig)}
    args = []
    for name in setting_names():
        value = SAMPLES.get(name, defaults[name][0] if defaults[name] and kind_of(name) is tuple else defaults[name])
        args += [flag(name)] if kind_of(name) is bool else [flag(name), value]
    done = run_cli(*args, "--dry-run")
    assert done.code == 0, done.err
    for name in setting_names():
        assert f"  # {flag(name)}\n" in next(line for line in done.out.splitlines(True) if line.startswith(f"{name} ="))


def test_help_names_every_flag_with_its_meaning(run_cli):
    everything, brief = (run_cli(*args, COLUMNS="300").out for args in (["config", "show", "--help"], ["--help"]))
    for name in setting_names():
        assert flag(name) in everything
        assert describe(name)[:20] in everything
        assert (flag(name) in brief) == (not group(name).startswith(RARE)), name
    assert "intellect-node[vllm]" in brief


def test_no_flag_is_without_a_setting():
    others = {"ctx", "config", "gpu", "dry_run", "version"}
    assert inspect.signature(cli.start).parameters.keys() - others == set(setting_names())
    assert set(NodeConfig.__struct_fields__) - set(setting_names()) == {"passphrase", "webhook_secret"}


def test_settings_have_a_meaning_a_unit_and_a_variable():
    resolved = resolve({"role": "relay", "run": RUN}, environ={})
    for name in NodeConfig.__struct_fields__:
        assert describe(name)
        assert group(name)
        assert variable(name) == f"INTELLECT_NODE_{name.upper()}"
        if isinstance(getattr(resolved.config, name), float):
            assert unit(name), name


def commands(command, path=()):
    for name, found in sorted(getattr(command, "commands", {}).items()):
        yield from commands(found, (*path, name)) if getattr(found, "commands", None) else [(*path, name)]


@pytest.mark.parametrize("path", list(commands(get_command(cli.app))), ids=" ".join)
def test_every_command_has_help_that_fits_forty_columns(run_cli, path):
    done = run_cli(*path, "--help", COLUMNS="40", TERMINAL_WIDTH="40")
    assert done.code == 0
    assert max(len(line) for line in done.out.splitlines()) <= 40


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_our_characters_shows_question_marks_instead_of_failing(run_cli, encoding):
    done = run_cli("run", "create", "--recipe", "demo", "--dry-run", encoding=encoding)
    assert done.code == 0, done.err
    done = run_cli("logs", "--of", "ü…", "--data-dir", ".", encoding=encoding)
    assert done.code == 2
    assert "no name of a log" in done.err


def process(*args, shell="", cwd, **env):
    command = [sys.executable, "-m", "cli", *args]
    inherited = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_DATA_HOME")}
    return subprocess.run(
        f"{' '.join(command)} {shell}" if shell else command,
        shell=bool(shell),
        executable="/bin/bash" if shell else None,
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    done = process("config", "show", "--help", shell="| head -1 >/dev/null; echo ${PIPESTATUS[0]}", cwd=tmp_path)
    assert done.stdout.strip() in ("0", "1")
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [["id", "--data-dir", "d"], ["run", "create", "--recipe", "demo", "--validator", ALICE, "--data-dir", "d"]],
)
def test_a_full_disk(tmp_path, command):
    """Files cannot grow beyond some bytes, as on a disk that is full."""
    limited = f"ulimit -f 0; exec {sys.executable} -m cli {' '.join(command)}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["bash", "-c", limited], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "cannot be written: File too large" in done.stderr
    assert "next: " in done.stderr
    assert "Traceback" not in done.stderr
    left = [path for path in (tmp_path / "d").rglob("*") if path.is_file() and path.stat().st_size]
    assert left == [], "neither a key nor half a run"


def test_a_c_locale_and_no_home_variable(tmp_path):
    done = process("status", cwd=tmp_path, LC_ALL="C", XDG_DATA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"there is none under {tmp_path}/intellect-node" in done.stderr


def test_a_user_without_any_home_is_told_what_to_set(run_cli, monkeypatch):
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    done = run_cli("status")
    assert done.code == 2
    assert "next: give --data-dir DIR, or set HOME or XDG_DATA_HOME" in done.err


def test_a_home_that_cannot_be_written(run_cli, tmp_path):
    (tmp_path / ".local").write_text("a file stands in the way")
    done = run_cli("id")
    assert done.code == 1
    assert "is not a directory" in done.err
    assert "next: give another --data-dir" in done.err


def test_help_in_a_terminal_of_forty_columns(tmp_path):
    """A real terminal, narrow, in a locale of 8 bits."""
    master, slave = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "40", "TERM": "xterm", "PYTHONIOENCODING": "latin-1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "cli", "version"], stdout=slave, stderr=slave, env=env, cwd=tmp_path
    )
    os.close(slave)
    assert child.wait(60) == 0
    assert os.read(master, 4096).startswith(b"intellect-node/")
    os.close(master)


def test_light_commands_load_nothing_heavy(tmp_path):
    light = ["--help", "status", "config check /dev/null", "logs", "leave", "version", "run list", "id", "peers"]
    script = (
        f"import sys, cli\nfor line in {light!r}:\n    sys.argv = ['intellect-node', *line.split()]\n"
        "    try:\n        cli.main()\n    except SystemExit:\n        pass\n"
        "print('LOADED', sorted({'torch', 'libp2p', 'pyarrow', 'transformers', 'trio', 'aiohttp'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rsplit("LOADED", 1)[1].strip() == "[]"


def typed(args, output, **options):
    """A real process: what standard output says when it cannot be written shows only at the very end."""
    command = [sys.executable, "-c", "import cli; cli.main()", *args]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("args", [["--version"], ["config", "show", "--role", "relay", "--run", RUN]], ids=len)
def test_output_onto_a_full_disk_is_a_sentence(args):
    with open("/dev/full", "w") as full:
        done = typed(args, full)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: no space is left for what the command prints"
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads_ends_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    done = typed(["config", "show", "--role", "relay", "--run", RUN], writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("args", "instead"),
    [(["id", "rotate"], "--yes"), (["id", "export", "--out", "copy"], "--passphrase-file")],
    ids=lambda each: each[1] if isinstance(each, list) else None,
)
def test_questions_without_a_terminal_name_the_flag(tmp_path, run_cli, args, instead, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_cli("id", "--data-dir", tmp_path / "d")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    done = run_cli(*args, "--data-dir", tmp_path / "d")
    assert done.code == 2
    assert f"next: give {instead}" in done.err
    assert "Aborted" not in done.err


def test_a_wrong_passphrase_of_a_copy_is_blamed_on_where_it_came_from(tmp_path, run_cli):
    right, wrong, copy = (tmp_path / name for name in ("right", "wrong", "copy"))
    right.write_text("long words")
    wrong.write_text("other words")
    run_cli("id", "--data-dir", tmp_path / "d")
    run_cli("id", "export", "--data-dir", tmp_path / "d", "--out", copy, "--passphrase-file", right)
    done = run_cli("id", "import", copy, "--data-dir", tmp_path / "e", "--passphrase-file", wrong)
    assert done.code == 1
    assert "--passphrase-file" in done.err
    assert "INTELLECT_NODE_PASSPHRASE" not in done.err

"""The command line as a person or a script meets it: in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.identity import Identity, PeerId
from trainer.recipe import RECIPES_DIR

ROOT = Path(__file__).parents[1]
ALICE = str(Identity.from_phrase("alice").peer_id)
BOB = str(Identity.from_phrase("bob").peer_id)
HEAVY = ("torch", "transformers", "libp2p", "trio", "aiohttp", "pyarrow")


def environment(**extra):
    env = {name: value for name, value in os.environ.items() if not name.startswith("INTELLECT_")}
    return {**env, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "COLUMNS": "200", **extra}


@pytest.fixture
def cli(tmp_path):
    def run(*args, **env):
        return subprocess.run(
            [sys.executable, "-m", "cli", *map(str, args)],
            cwd=tmp_path,
            env=environment(HOME=str(tmp_path), **env),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def imported(code):
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
    script += f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.rsplit("LOADED", 1)[1].strip()


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(argument):
    assert imported(f"import cli; sys.argv = ['intellect-node', {argument!r}]; cli.main()") == "[]"


def test_id_and_status_import_nothing_heavy(tmp_path):
    assert imported(f"import cli; sys.argv = ['x', 'id', '--data-dir', {str(tmp_path)!r}]; cli.main()") == "[]"
    assert imported(f"import cli; sys.argv = ['x', 'status', '--data-dir', {str(tmp_path)!r}]; cli.main()") == "[]"


def test_help_names_every_setting_and_command(cli):
    done = cli("--help")
    assert done.returncode == 0
    for word in ("--role", "--bootstrap", "--http-port", "--dry-run", "status", "demo", "simnet", "run", "id"):
        assert word in done.stdout


def test_nothing_given_shows_help(cli):
    done = cli()
    assert done.returncode == 2
    assert "--role" in done.stdout


def test_version(cli):
    assert cli("--version").stdout.startswith("intellect-node/")


def test_id_creates_a_key_once_and_prints_it_alone(cli, tmp_path):
    first = cli("id", "--data-dir", tmp_path / "a")
    assert first.returncode == 0
    assert str(PeerId.parse(first.stdout.strip())) == first.stdout.strip()
    assert "back it up" in first.stderr
    again = cli("id", "--data-dir", tmp_path / "a", "--json")
    assert json.loads(again.stdout)["peer_id"] == first.stdout.strip()
    assert again.stderr == ""


def test_the_data_directory_can_come_from_the_environment(cli, tmp_path):
    cli("id", INTELLECT_NODE_DATA_DIR=str(tmp_path / "e"))
    assert (tmp_path / "e" / "identity.key").exists()


def test_an_encrypted_key_needs_its_passphrase(cli, tmp_path):
    made = cli("id", "--data-dir", tmp_path / "a", INTELLECT_NODE_PASSPHRASE="hunter2")
    assert cli("id", "--data-dir", tmp_path / "a", INTELLECT_NODE_PASSPHRASE="hunter2").stdout == made.stdout
    refused = cli("id", "--data-dir", tmp_path / "a")
    assert refused.returncode == 1
    assert "error: the key file" in refused.stderr
    assert "next: set INTELLECT_NODE_PASSPHRASE" in refused.stderr


def test_errors_have_a_message_a_hint_and_an_exit_code(cli, tmp_path):
    failed = cli("status", "--data-dir", tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"error: no node runs in {tmp_path}")
    assert "  next: start one" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--role", "boss", "--run", f"{ALICE}/demo"], "role from --role"),
        (["--role", "relay"], "no run is given"),
        (["--run", f"{ALICE}/demo"], "no role is given"),
        (["--role", "relay", "--run", "demo"], "not a run address"),
        (["--rule", "relay"], "--rule"),
        (["--threads", "1", "id"], "--threads before `id` has no effect"),
        (["run", "create", "--recipe", "demo"], "--validator"),
        (["nonsense"], "nonsense"),
        (["eval", "--model", "."], "either --tasks or --environment"),
        (["policy", "export", "--out", "x", "--dtype", "int3"], "no such number format: 'int3'"),
        (["run", "create", "--recipe", "no-such-recipe", "--dry-run"], "there is no recipe 'no-such-recipe'"),
    ],
)
def test_usage_errors_exit_with_2(cli, args, text):
    failed = cli(*args)
    assert failed.returncode == 2
    assert text in failed.stderr
    assert "Traceback" not in failed.stderr


def test_an_unknown_variable_is_refused(cli):
    failed = cli("--role", "relay", "--run", f"{ALICE}/demo", "--dry-run", INTELLECT_NODE_TREADS="4")
    assert failed.returncode == 2
    assert "did you mean INTELLECT_NODE_THREADS?" in failed.stderr


def test_dry_run_prints_settings_and_sources_and_starts_nothing(cli, tmp_path):
    (tmp_path / "node.toml").write_text("threads = 7\n")
    peers = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{BOB}" for port in (1, 2)]
    done = cli(
        *("--role", "relay", "--run", f"{ALICE}/demo", "--config", tmp_path / "node.toml", "--http-port", "0"),
        *("--bootstrap", peers[0], "--bootstrap", peers[1], "--stay", "--dry-run"),
        INTELLECT_NODE_PASSPHRASE="hunter2",
    )
    assert done.returncode == 0, done.stderr
    assert 'role = "relay"  # --role' in done.stdout
    assert "http_port = 0  # --http-port" in done.stdout
    assert f"threads = 7  # {tmp_path / 'node.toml'}" in done.stdout
    assert "stay = true  # --stay" in done.stdout
    assert all(peer in done.stdout for peer in peers)
    assert "hunter2" not in done.stdout
    assert not (tmp_path / ".intellect-node").exists()


def test_create_and_show_a_run(cli, tmp_path):
    made = cli("run", "create", "--recipe", "demo", "--data-dir", tmp_path / "t", "--validator", BOB, "--name", "first")
    assert made.returncode == 0, made.stderr
    operator = cli("id", "--data-dir", tmp_path / "t").stdout.strip()
    assert made.stdout.splitlines()[-1] == f"{operator}/first"
    shown = json.loads(cli("run", "show", "--data-dir", tmp_path / "t", "--json").stdout)
    assert shown["run"] == f"{operator}/first"
    assert shown["validators"] == [BOB]
    assert shown["trainer"] == operator
    assert len(shown["run_id"]) == 64
    assert f"run = {operator}/first" in cli("run", "show", "--data-dir", tmp_path / "t").stdout


def test_a_run_that_new_keys_enter_for_nothing_is_made_with_a_warning(cli, tmp_path):
    free = tmp_path / "free.toml"
    free.write_text(re.sub(r"(?m)^work_bits = .*$", "work_bits = 0", (RECIPES_DIR / "demo.toml").read_text()))
    made = cli("run", "create", "--recipe", free, "--data-dir", tmp_path / "t", "--validator", BOB)
    assert made.returncode == 0, made.stderr
    assert "admission.work_bits = 0: a new key costs nothing" in made.stderr
    assert "Leave work_bits out (it is 8 then" in made.stderr
    assert "admission" not in made.stdout


def test_a_run_without_a_validator_makes_nothing(cli, tmp_path):
    assert cli("run", "create", "--recipe", "demo", "--data-dir", tmp_path / "t").returncode == 2
    assert not (tmp_path / "t").exists()


def test_dry_run_of_a_run_says_what_it_would_need_and_makes_nothing(cli, tmp_path):
    done = cli("run", "create", "--recipe", "target-short", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "Qwen/QwQ-32B, 32,763,876,352 parameters" in done.stdout
    plan = json.loads(cli("run", "create", "--recipe", "target-short", "--dry-run", "--json").stdout)
    assert plan["policy_bytes"] == 65_527_752_704
    assert list(tmp_path.iterdir()) == []


def test_a_policy_is_exported(cli, tmp_path):
    cli("run", "create", "--recipe", "demo", "--data-dir", tmp_path / "t", "--validator", BOB)
    done = cli("policy", "export", "--from", tmp_path / "t" / "run" / "policy-0", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    failed = cli("policy", "export", "--data-dir", tmp_path / "t", "--out", tmp_path / "other")
    assert "neither a model nor a usable checkpoint" in failed.stderr


def test_show_without_a_run_tells_how_to_create_one(cli, tmp_path):
    failed = cli("run", "show", "--data-dir", tmp_path)
    assert failed.returncode == 1
    assert "next: create one: intellect-node run create" in failed.stderr


def test_an_unknown_scenario_is_named(cli, tmp_path):
    failed = cli("simnet", "run", "no-such-scenario", "--out", tmp_path / "out")
    assert failed.returncode == 2
    assert "no-such-scenario" in failed.stderr


def report_of(code):
    script = f"import cli\nfrom protocol.errors import *\ndef app(**_): {code}\ncli.app = app\ncli.main()"
    return subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_an_unexpected_error_is_one_line_and_a_hint():
    done = report_of("raise RuntimeError('odd')")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: unexpected RuntimeError: odd",
        "  next: run it again with --log-level debug and report what it prints",
    ]


def test_a_nurserys_group_is_unwrapped():
    done = report_of("raise ExceptionGroup('g', [ExceptionGroup('h', [VersionError('newer', hint='upgrade')])])")
    assert done.returncode == 3
    assert done.stderr == "error: newer\n  next: upgrade\n"


def test_a_peers_text_cannot_drive_the_terminal():
    """Attack: a relay's refusal holds terminal codes."""
    done = report_of(r"raise RefusedError('no\x1b[2J\r\nerror: forged', code='x')")
    assert done.stderr == "error: no\\x1b[2J\\r\\nerror: forged\n"


def test_a_gpu_is_a_device(cli):
    given = ("--role", "inference", "--run", f"{ALICE}/demo", "--dry-run", "--gpu", "1", "--max-memory", "8GiB")
    done = cli(*given)
    assert 'device = "cuda:1"' in done.stdout
    assert 'max_memory = "8GiB"' in done.stdout
    both = cli(*given, "--device", "cpu")
    assert both.returncode == 2
    assert "--gpu and --device both say where to compute" in both.stderr


def test_a_shipped_policy_is_evaluated_by_its_name(run_cli):
    """As `data filter` and recipes name it."""
    options = ["--environment", "sort-digits", "--prompts", "4", "--samples", "1", "--max-new-tokens", "4", "--json"]
    done = run_cli("eval", "--model", "sort-digits", *options)
    assert done.code == 0, done.err
    assert json.loads(done.out)["prompts"] == 4
    unknown = run_cli("eval", "--model", "no-such-policy", *options)
    assert "there is no model 'no-such-policy'" in unknown.err

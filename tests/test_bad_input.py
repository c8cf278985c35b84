"""What a person can get wrong when starting a node: a named error, a next step, an exit code. Real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from node.identity import load_or_create_identity
from node.leaving import leave
from node.run_create import create_run
from protocol import envelope
from protocol.identity import Identity

ROOT = Path(__file__).parent.parent
ALICE = Identity.from_phrase("alice").peer_id
RUN = f"{Identity.from_phrase('operator').peer_id}/nowhere"


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "cli", *flags]


def node(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*flags), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def relay(data_dir: Path, run: str) -> Iterator[str]:
    """A real relay; its bootstrap address."""
    port = free_port()
    flags = ["--role", "relay", "--run", run, "--data-dir", str(data_dir), "--listen", f"/ip4/127.0.0.1/tcp/{port}"]
    flags += ["--http-host", "127.0.0.1", "--http-port", "0"]
    peer_id = load_or_create_identity(data_dir).peer_id
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command(*flags), cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (data_dir / "status.url").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}"
    finally:
        said: list[str] = []
        leave(data_dir, now=False, timeout_s=30, say=said.append)
        assert process.wait(30) == 0, "a relay leaves gracefully when it is asked to"
        assert said[-1].startswith("it has left")


@pytest.mark.parametrize("flag", ["--listen", "--http-port", "--status-port"])
def test_taken_port_is_named(tmp_path: Path, flag: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        taken = int(other.getsockname()[1])
        ports = {"--listen": free_port(), "--http-port": free_port(), "--status-port": 0} | {flag: taken}
        flags = [
            f"{name}={f'/ip4/127.0.0.1/tcp/{port}' if name == '--listen' else port}" for name, port in ports.items()
        ]
        ended = node("--role", "relay", "--run", RUN, "--data-dir", str(tmp_path), "--http-host", "127.0.0.1", *flags)
    assert ended.returncode == 1
    assert str(taken) in ended.stderr
    assert any(f"next: {step}" in ended.stderr for step in ("see who has it", "give another --status-port"))


def test_unreachable_bootstrap_is_named(tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{ALICE}"
    flags = ["--role", "inference", "--run", RUN, "--data-dir", str(tmp_path), "--join-timeout-s", "1"]
    ended = node(*flags, "--bootstrap", address)
    assert ended.returncode == 1
    assert "no bootstrap peer could be reached within 1 s" in ended.stderr
    assert "next: check the addresses" in ended.stderr


def test_missing_bootstrap_is_named(tmp_path: Path) -> None:
    ended = node("--role", "validator", "--run", RUN, "--data-dir", str(tmp_path / "new"))
    assert ended.returncode == 1
    assert "no bootstrap address is given" in ended.stderr
    assert "next: ask the run's operator" in ended.stderr
    assert "--run <address>@/ip4/" in ended.stderr
    assert "--bootstrap /ip4/" in ended.stderr
    assert not (tmp_path / "new").exists(), "neither a key nor a directory for a node that could not start"


def test_unknown_run_is_named_and_a_used_directory_too(tmp_path: Path) -> None:
    with relay(tmp_path / "relay", RUN) as bootstrap:
        second = node("--role", "relay", "--run", RUN, "--data-dir", str(tmp_path / "relay"))
        other_run = f"{ALICE}/elsewhere"
        flags = ["--role", "inference", "--run", other_run, "--data-dir", str(tmp_path / "node")]
        ended = node(*flags, "--bootstrap", bootstrap, "--join-timeout-s", "6")
    assert second.returncode == 1
    assert "in use by another node (process" in second.stderr
    assert ended.returncode == 1
    assert f"nobody knows the run {other_run}" in ended.stderr
    assert "next: check --run letter by letter" in ended.stderr


@pytest.mark.parametrize("run", ["nonsense", "abc/name", f"{ALICE}/UPPER", f"{ALICE}"])
def test_run_address_that_names_no_operator_is_a_usage_error(tmp_path: Path, run: str) -> None:
    ended = node("--role", "inference", "--run", run, "--data-dir", str(tmp_path))
    assert ended.returncode == 2
    assert "not a run address" in ended.stderr
    assert "next: write --run <operator peer id>/<name>" in ended.stderr


def make_run(data_dir: Path) -> str:
    identity = load_or_create_identity(data_dir)
    return str(create_run("demo", data_dir, identity=identity, validators=[ALICE], issued_at_ms=1).address)


def test_manifest_of_another_protocol_version_asks_for_another_release(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = tmp_path / "run" / "manifest"
    fields = msgspec.msgpack.decode(path.read_bytes()) | {"domain": "intellect-node/2"}
    signed = envelope._signed_bytes(fields["domain"], fields["kind"], fields["author"], fields["payload"])
    fields["signature"] = load_or_create_identity(tmp_path).sign(signed)
    path.write_bytes(msgspec.msgpack.encode(fields))
    ended = node(
        "--role",
        "trainer",
        "--run",
        run,
        "--data-dir",
        str(tmp_path),
        "--bootstrap",
        f"/ip4/127.0.0.1/tcp/9/p2p/{ALICE}",
    )
    assert ended.returncode == 3
    assert "'intellect-node/2'" in ended.stderr
    assert "next: install the intellect-node release" in ended.stderr


def test_forged_manifest_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = tmp_path / "run" / "manifest"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ended = node(
        "--role",
        "trainer",
        "--run",
        run,
        "--data-dir",
        str(tmp_path),
        "--bootstrap",
        f"/ip4/127.0.0.1/tcp/9/p2p/{ALICE}",
    )
    assert ended.returncode == 1
    assert "signature" in ended.stderr

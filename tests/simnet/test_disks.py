import errno
import json
import os
import resource
import subprocess
import sys

import pytest
from simnet_world import FakeCommands, wait_for, without_ledgers

from simnet import disks, run_scenario, runner
from simnet.disks import Disks
from simnet.tools import run_tool


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_refuses_and_takes_again_and_what_was_written_stays(tmp_path):
    directory = tmp_path / "data"
    made = Disks({"relay-0": (directory, 8)})
    made.start()
    try:
        assert os.path.ismount(directory)
        (directory / "key").write_bytes(b"k")
        made.fill("relay-0", [])
        with pytest.raises(OSError, match="No space left"):
            (directory / "more").write_bytes(bytes(10_000))
        made.free("relay-0", [])
        (directory / "more").write_bytes(bytes(10_000))
    finally:
        made.close()
    assert not os.path.ismount(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["key", "more"]
    assert not (tmp_path / "data.kept").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_cannot_be_copied_back_is_noted(tmp_path, monkeypatch):
    """What a relay wrote is gone then; whoever judges by it must not take that for nothing having been there."""
    directory = tmp_path / "data"
    made = Disks({"relay-0": (directory, 8)})
    made.start()
    (directory / "key").write_bytes(b"k")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disks.shutil, "copytree", full)
    made.close()
    assert not os.path.ismount(directory)
    (note,) = made.notes
    assert "relay-0" in note
    assert "No space left" in note


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_report_tells_of_a_disk_that_was_lost_as_the_simulation_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("simnet.report.gather_evidence", without_ledgers)
    monkeypatch.setattr("simnet.disks._put_away", lambda directory: run_tool(["umount", str(directory)]) or "no room")
    monkeypatch.setattr(runner, "ROUND_S", 0.1)
    monkeypatch.setattr(runner, "FINISH_GRACE_S", 0.1)
    scenario = tmp_path / "small.toml"
    fleet = '[[fleet]]\nrole = "relay"\ndisk_mb = 1024\n' + "".join(
        f'[[fleet]]\nrole = "{role}"\n' for role in ("trainer", "validator", "inference")
    )
    scenario.write_text(f'[run]\nrecipe = "demo"\n{fleet}[until]\nfinished = false\ntimeout_s = 1\n')
    run_scenario(scenario, tmp_path / "out", live=False, commands=FakeCommands())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert any("relay-0" in note and "no room" in note for note in report["notes"])


WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "wb", 0) as file: file.write(bytes(10))
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


def test_without_root_files_of_running_processes_may_not_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(disks.os, "geteuid", lambda: 1000)
    made = Disks({"relay-0": (tmp_path / "data", 8)})
    made.start()
    assert "this is not root" in made.notes[0]
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as child:

        def write():
            child.stdin.write("\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        assert write() == "written"
        made.fill("relay-0", [child.pid, 2**22 + 1])
        assert write() == str(errno.EFBIG)
        with subprocess.Popen(["sleep", "60"]) as later:
            made.begun("relay-0", [later.pid])
            assert resource.prlimit(later.pid, resource.RLIMIT_FSIZE)[0] == 0
            made.free("relay-0", [child.pid, later.pid])
            made.begun("relay-0", [later.pid])
            assert resource.prlimit(later.pid, resource.RLIMIT_FSIZE)[0] != 0
            later.kill()
        assert write() == "written"
        assert resource.prlimit(child.pid, resource.RLIMIT_FSIZE)[0] == resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        child.stdin.close()
    made.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_what_a_killed_simulation_mounted_is_unmounted(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    subprocess.run(["mount", "-t", "tmpfs", f"simnet-{ended.pid}-1-x", str(tmp_path)], check=True)
    disks.sweep()
    wait_for(lambda: not os.path.ismount(tmp_path))

import errno
import os
import resource
import subprocess
import sys

import pytest
from simnet_world import wait_for

from simnet import disks
from simnet.disks import Disks


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

"""The reading child: honest files, hostile files, and whose fault a crash is."""

import errno
import os
import sys

import pytest
import trio

from node.compute import read_worker
from node.compute.process import ChildDiskError
from node.compute.reader import RolloutReader
from protocol.errors import ComputeCrashed, ComputeError, DataDirError, MalformedError
from protocol.rollouts import Rollout, write_rollouts

LIMITS = {"max_rollouts": 64, "max_tokens": 256}


@pytest.fixture
async def reader(tmp_path, nursery):
    made = RolloutReader(log_path=tmp_path / "reader.log")
    await nursery.start(made.run)
    return made


@pytest.fixture
def rollouts():
    return [
        Rollout(
            prompt_index=0,
            member=member,
            prompt_ids=[1, 5],
            output_ids=[3, 4, 2],
            logprobs=[-0.5, -0.25, -1.0],
            reward=1.0,
            finish_reason="stop",
            proofs=[b"\x01\x02" * 129],
        )
        for member in range(4)
    ]


async def test_an_honest_file_is_read(reader, rollouts, tmp_path):
    path = tmp_path / "file.parquet"
    write_rollouts(path, rollouts)
    with trio.fail_after(60):
        read = await reader.read(path, timeout_s=50, **LIMITS)
    assert len(read) == 4
    assert read[0]["output_ids"] == [3, 4, 2]
    assert read[0]["proofs"] == [b"\x01\x02" * 129]
    assert reader.restarts == 0


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + os.urandom(200) + b"PAR1", b"x" * 10_000])
async def test_rubbish_is_malformed(reader, tmp_path, content):
    path = tmp_path / "file.parquet"
    path.write_bytes(content)
    with trio.fail_after(60), pytest.raises(MalformedError):
        await reader.read(path, timeout_s=50, **LIMITS)
    assert reader.restarts == 0


async def test_a_bomb_is_malformed_and_the_reader_serves_on(reader, rollouts, tmp_path):
    """Attack: a small Parquet file of the right schema that unpacks into gigabytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    honest = tmp_path / "honest.parquet"
    write_rollouts(honest, rollouts)
    schema = pq.read_schema(honest)
    row = {name: pq.read_table(honest).to_pylist()[0][name] for name in schema.names}
    row["output_ids"] = [7] * 4_000_000
    bomb = tmp_path / "bomb.parquet"
    pq.write_table(pa.Table.from_pylist([row], schema=schema), bomb, compression="zstd")
    assert bomb.stat().st_size < 1 << 20
    with trio.fail_after(120):
        with pytest.raises(MalformedError):
            await reader.read(bomb, timeout_s=50, **LIMITS)
        assert len(await reader.read(honest, timeout_s=50, **LIMITS)) == 4


DYING_READER = """
import os, signal, sys
from node.compute.serve import serve

def read(path, limits):
    if path.endswith("bomb"):
        raise MemoryError
    if path.endswith("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    os.kill(os.getpid(), signal.SIGKILL)

serve({"read": read})
"""


@pytest.fixture
async def dying_reader(tmp_path, nursery, monkeypatch):
    (tmp_path / "dying_reader.py").write_text(DYING_READER)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = RolloutReader(log_path=tmp_path / "reader.log", module="dying_reader")
    await nursery.start(made.run)
    return made


@pytest.mark.parametrize("name", ["bomb", "crash"])
async def test_a_file_that_crashes_the_reader_twice_is_malformed(dying_reader, tmp_path, name):
    """Attack: a file that kills the parser, so that its contributor is never judged."""
    with trio.fail_after(60), pytest.raises(MalformedError, match="crashes the reader"):
        await dying_reader.read(tmp_path / name, timeout_s=30)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOVERFLOW])
def test_a_file_that_points_to_where_nothing_can_be_is_malformed(monkeypatch, tmp_path, number):
    """Attack: the system's own error, so that a validator believes its disk to be broken and judges nobody."""

    def seek_nowhere(path, **limits):
        raise DataDirError("cannot read it") from OSError(number, "Invalid argument")

    monkeypatch.setattr(read_worker, "read_rollouts", seek_nowhere)
    assert "malformed" in read_worker.read(str(tmp_path / "file"), LIMITS)


async def test_a_file_that_is_gone_is_this_machines_fault(reader, tmp_path):
    with trio.fail_after(60), pytest.raises(ChildDiskError, match="No such file"):
        await reader.read(tmp_path / "gone", timeout_s=50, **LIMITS)


async def test_being_killed_from_outside_is_nobodys_file(dying_reader, tmp_path):
    """An honest contributor must not be blamed because the validator's machine ran out of memory."""
    with trio.fail_after(60), pytest.raises(ComputeCrashed, match="signal 9"):
        await dying_reader.read(tmp_path / "honest", timeout_s=30)


async def test_a_reader_that_cannot_start_is_nobodys_file(tmp_path, nursery):
    made = RolloutReader(log_path=tmp_path / "reader.log", module="no_such_module_here")
    await nursery.start(made.run)
    with trio.fail_after(60), pytest.raises(ComputeError, match="before it was ready"):
        await made.read(tmp_path / "honest", timeout_s=30)

import hashlib
import subprocess
import sys
import textwrap

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import DataDirError, MalformedError, ModelError
from protocol.rollouts import MAX_PROOF_BYTES, ROLLOUT_SCHEMA, Rollout, read_rollouts, write_rollouts

BOUNDS = {"max_rollouts": 16, "max_tokens": 64, "vocab_size": 1000}


def rollout(**changes):
    tokens = changes.pop("tokens", 40)
    values = {
        "prompt_index": 0,
        "member": 0,
        "prompt_ids": [1, 17, 999],
        "output_ids": [7 * n % 1000 for n in range(tokens)],
        "logprobs": [float(np.float32(-n / 7)) for n in range(tokens)],
        "reward": 0.1,
        "finish_reason": "stop",
        "proofs": [bytes([n]) * 258 for n in range(-(-tokens // 32))],
    }
    return Rollout(**(values | changes))


GROUP = [rollout(member=n, tokens=n + 1, finish_reason=("stop", "length")[n % 2], reward=n / 3) for n in range(8)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollouts.parquet"


def foreign(path, rollouts, **columns):
    """A file that another program wrote, without any of this writer's checks."""
    write_rollouts(path, GROUP)
    schema = pq.ParquetFile(path).schema_arrow
    rows = {name: [getattr(item, name) for item in rollouts] for name, _ in ROLLOUT_SCHEMA} | columns
    pq.write_table(pa.table(rows, schema=schema), path, store_schema=False)
    return path


def test_what_is_written_is_read(path):
    digest, size = write_rollouts(path, GROUP)
    assert read_rollouts(path, **BOUNDS) == GROUP
    assert (digest, size) == (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_size)
    assert [entry.name for entry in path.parent.iterdir()] == ["rollouts.parquet"]


def test_the_same_rollouts_give_the_same_file(path):
    assert write_rollouts(path, GROUP) == write_rollouts(path, GROUP)


def test_a_row_survives_the_way_between_processes(path):
    write_rollouts(path, GROUP)
    rows = [msgspec.structs.asdict(row) for row in read_rollouts(path, **BOUNDS)]
    assert msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(rows)), list[Rollout]) == GROUP


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(
            rollout,
            tokens=st.integers(1, 64),
            prompt_index=st.integers(0, 2**31 - 1),
            member=st.integers(0, 255),
            prompt_ids=st.lists(st.integers(0, 999), min_size=1, max_size=64),
            reward=st.floats(allow_nan=False, allow_infinity=False),
            proofs=st.lists(st.binary(max_size=300), max_size=1),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_rollouts_survive(path, rollouts):
    write_rollouts(path, rollouts)
    assert read_rollouts(path, **BOUNDS) == rollouts


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [0.0]},
        {"logprobs": [float("nan")] * 40},
        {"logprobs": [1e300] * 40},
        {"reward": float("inf")},
        {"output_ids": [2**31] * 40},
        {"output_ids": []},
        {"finish_reason": "bored"},
        {"member": None},
    ],
    ids=str,
)
def test_an_engines_nonsense_is_not_written(path, changes):
    """An honest contributor must not be evicted because its engine produced NaN."""
    with pytest.raises(ModelError, match="cannot be handed in"):
        write_rollouts(path, [rollout(**changes)])
    assert not path.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": [1] * 65}, "a prompt has no token or more than 64"),
        ({"prompt_ids": []}, "a prompt has no token"),
        ({"tokens": 65}, "an output has no token or more than 64"),
        ({"tokens": 0}, "an output has no token"),
        ({"prompt_ids": [-1]}, "prompt_ids outside the vocabulary of 1000"),
        ({"output_ids": [-5] * 40}, "output_ids outside"),
        ({"output_ids": [1000] * 40}, "output_ids outside"),
        ({"logprobs": [-1.0] * 39}, "as many log-probabilities"),
        ({"logprobs": [-1.0] * 39 + [float("nan")]}, "log-probability that is not finite"),
        ({"logprobs": [float("-inf")] * 40}, "log-probability that is not finite"),
        ({"reward": float("inf")}, "reward that is infinite"),
        ({"finish_reason": "bored"}, "finish reason that is none of stop, length"),
        ({"finish_reason": "cut"}, "finish reason"),
        ({"finish_reason": "x" * 10000}, "finish reason"),
        ({"prompt_index": -1}, "a negative prompt_index"),
        ({"member": -1}, "a negative member"),
        ({"proofs": [b""] * 3}, "more proofs than chunks"),
        ({"proofs": [bytes(MAX_PROOF_BYTES + 1)]}, "a proof of more than"),
    ],
)
def test_rows_out_of_bounds_are_refused(path, changes, reason):
    foreign(path, [rollout(), rollout(**changes), rollout()])
    with pytest.raises(MalformedError, match=reason) as caught:
        read_rollouts(path, **BOUNDS)
    assert len(str(caught.value)) < 300


def test_a_foreign_writer_is_welcome(path):
    assert read_rollouts(foreign(path, GROUP), **BOUNDS) == GROUP


@pytest.mark.parametrize("count", [0, 17])
def test_too_many_rows_or_none_are_refused(path, count):
    foreign(path, [rollout()] * count)
    with pytest.raises(MalformedError, match=r"row groups|rollouts in a file; 1 to 16"):
        read_rollouts(path, **BOUNDS)


def test_several_row_groups_are_refused(path):
    write_rollouts(path, GROUP)
    pq.write_table(pq.read_table(path), path, store_schema=False, row_group_size=2)
    with pytest.raises(MalformedError, match="4 row groups"):
        read_rollouts(path, **BOUNDS)


def renamed(table):
    return table.rename_columns(["prompt", *table.column_names[1:]])


def widened(table):
    return table.set_column(0, "prompt_index", table.column(0).cast(pa.int64()))


def nullable(table):
    return table.cast(pa.schema([field.with_nullable(True) for field in table.schema]))


@pytest.mark.parametrize(
    "change",
    [
        renamed,
        widened,
        nullable,
        lambda table: table.select(table.column_names[::-1]),
        lambda table: table.drop_columns(["proofs"]),
        lambda table: table.append_column("extra", pa.array([1] * len(table))),
        lambda table: table.set_column(3, "output_ids", pa.array([[None]] * len(table), pa.list_(pa.int32()))),
    ],
    ids=["renamed", "widened", "nullable", "reordered", "missing", "extra", "nulls"],
)
def test_another_schema_is_refused(path, change):
    write_rollouts(path, GROUP)
    pq.write_table(change(pq.read_table(path)), path, store_schema=False)
    with pytest.raises(MalformedError, match="schema"):
        read_rollouts(path, **BOUNDS)


def test_embedded_metadata_is_refused(path):
    """An embedded Arrow schema makes the reader cast columns to types of the writer's choice."""
    write_rollouts(path, GROUP)
    pq.write_table(pq.read_table(path), path, store_schema=True)
    with pytest.raises(MalformedError, match="schema"):
        read_rollouts(path, **BOUNDS)


def test_a_reason_that_is_no_text_is_refused(path):
    """Strings that are not UTF-8 reach Python only at the very end."""
    write_rollouts(path, GROUP)
    table = pq.read_table(path)
    raw = pa.array([b"\xff\xfe\xfd\xfc"] * len(table), pa.binary())
    broken = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2])
    pq.write_table(table.set_column(6, table.schema.field(6), broken), path, store_schema=False)
    with pytest.raises(MalformedError):
        read_rollouts(path, **BOUNDS)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_refused(path, data, framed):
    path.write_bytes(b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1" if framed else data)
    with pytest.raises(MalformedError):
        read_rollouts(path, **BOUNDS)


def outcome(path, data):
    path.write_bytes(data)
    try:
        return read_rollouts(path, **BOUNDS)
    except MalformedError:
        return None


def test_truncated_files_are_refused(path):
    write_rollouts(path, GROUP)
    data = path.read_bytes()
    assert all(outcome(path, data[:size]) is None for size in range(0, len(data), 13))


@pytest.mark.parametrize("bit", [0, 5, 7])
def test_a_flipped_bit_is_refused_or_changes_the_hash(path, bit):
    """Damage in a page's data meets its checksum; damage in headers and footer may read, and is the hash's to catch."""
    digest, _ = write_rollouts(path, GROUP)
    data = path.read_bytes()
    unnoticed = 0
    for position in range(bit, len(data), 5):
        flipped = bytearray(data)
        flipped[position] ^= 1 << bit
        result = outcome(path, bytes(flipped))
        unnoticed += result is not None and result != GROUP
        assert hashlib.sha256(flipped).digest() != digest
    assert unnoticed < len(data) / 5 / 50


def test_flipped_page_data_meets_the_checksum(path):
    write_rollouts(path, GROUP)
    data = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(4)
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(MalformedError, match=r"(?i)crc|checksum"):
        read_rollouts(path, **BOUNDS)


@pytest.fixture
def bomb(path):
    """A few hundred bytes that unpack to one output of thirty million zeros."""
    zeros = pa.array(np.zeros(30_000_000, np.int32))
    element = pa.list_(pa.field("element", pa.int32(), nullable=False))
    tokens = pa.Array.from_buffers(
        element, 1, [None, pa.array([0, len(zeros)], pa.int32()).buffers()[1]], 0, 0, [zeros]
    )
    write_rollouts(path, [rollout()])
    table = pq.read_table(path)
    pq.write_table(table.set_column(3, table.schema.field(3), tokens), path, store_schema=False, compression="zstd")
    assert path.stat().st_size < 20_000
    return path


def test_a_bomb_breaks_its_bound(bomb):
    with pytest.raises(MalformedError, match="an output has no token or more than 64"):
        read_rollouts(bomb, **BOUNDS)


def test_a_bomb_meets_the_memory_limit(bomb):
    """A small file asks for far more memory than the reader may use; the reader survives and says so."""
    program = """
        import resource, sys
        from pathlib import Path
        import pyarrow.parquet
        from protocol.errors import MalformedError
        from protocol.rollouts import read_rollouts
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (80 << 20),) * 2)
        try:
            read_rollouts(Path(sys.argv[1]), max_rollouts=16, max_tokens=64)
        except MalformedError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(bomb)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "more memory than its reader may use" in child.stdout


def test_local_faults_are_not_the_files(path, tmp_path):
    with pytest.raises(DataDirError, match="No such file"):
        read_rollouts(path, **BOUNDS)
    with pytest.raises(DataDirError, match="cannot write"):
        write_rollouts(tmp_path / "missing" / "file.parquet", GROUP)


def test_a_failed_write_leaves_nothing(path):
    path.mkdir()
    with pytest.raises(DataDirError, match="cannot write"):
        write_rollouts(path, GROUP)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]

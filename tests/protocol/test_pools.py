"""Pool files: golden bytes, draws by seed, and whatever else a file may hold."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.constants import MAX_POOL_TASKS
from protocol.errors import ChecksumError, MalformedError, ProtocolError
from protocol.pools import (
    MAX_POOL_BYTES,
    active_pool,
    check_pool,
    decode_pool,
    encode_pool,
    pool_file_name,
    read_pool_file,
)
from protocol.records import EnvironmentSpec, PoolSpec
from protocol.seeds import pool_seed

SORTING, OTHER = b"s" * 32, b"o" * 32
TASKS = [(bytes([number]) * 32, number % 5) for number in range(10)]
DATA = encode_pool(SORTING, samples=8, tasks=TASKS)


def spec_of(data, *, from_step=0):
    return PoolSpec(sha256=hashlib.sha256(data).digest(), count=10, from_step=from_step)


def test_golden_file():
    assert DATA.startswith(b"IPP1\x08\x00\x00\x00\x0a" + SORTING)
    assert len(DATA) == 41 + 33 * 10
    assert hashlib.sha256(DATA).hexdigest() == "f51ece84517f3daf891e8a3fa4afc503daa084b70aec3c0dcfdc1ca0cfb406c9"


def test_what_was_written_is_read():
    pool = decode_pool(DATA)
    assert (pool.environment, pool.samples, len(pool)) == (SORTING, 8, 10)
    assert [(pool.seed(place), pool.solved[place]) for place in range(10)] == TASKS


def test_golden_draws():
    pool = decode_pool(DATA)
    prompts = [bytes([number]) * 32 for number in range(8)]
    assert pool_seed(prompts[0]).hex() == "9a8dd45be9f1a0398353303f641233fc2d258eef6e6dbf835edea1467e43bac6"
    assert [pool.draw(prompt)[0] for prompt in prompts] == [7, 0, 9, 9, 7, 4, 7, 1]


def test_every_task_is_drawn():
    pool = decode_pool(DATA)
    drawn = {pool.draw(number.to_bytes(32, "big")) for number in range(200)}
    assert drawn == {seed for seed, _ in TASKS}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "not a pool file"),
        (b"PK\x03\x04 a zip", "not a pool file"),
        (DATA[:20], "truncated: 20 bytes, less than its header"),
        (DATA[:-1], "truncated: 370 bytes, and 10 tasks take 371"),
        (DATA + b"x", "too long"),
        (DATA[:5] + bytes(4) + DATA[9:41], "a pool of 0 tasks"),
        (DATA[:5] + b"\xff\xff\xff\xff" + DATA[9:], "a pool of 4294967295 tasks"),
        (DATA[:4] + b"\0" + DATA[5:], "0 samples"),
        (DATA[:-1] + b"\x09", "solved 9 times in 8"),
    ],
)
def test_foreign_and_damaged_files_are_named(data, fault):
    with pytest.raises(MalformedError, match=fault):
        decode_pool(data)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: DATA[:41] + rest))
def test_any_bytes_give_a_pool_or_an_error(data):
    try:
        pool = decode_pool(data)
    except ProtocolError:
        return
    assert 1 <= len(pool) <= MAX_POOL_TASKS


def test_what_no_pool_can_hold_is_not_written():
    for tasks, samples in (([], 8), ([(b"s" * 31, 1)], 8), ([(b"s" * 32, 9)], 8), ([(b"s" * 32, 1)], 300)):
        with pytest.raises(MalformedError):
            encode_pool(SORTING, samples=samples, tasks=tasks)


def test_a_huge_file_is_not_read_to_its_end(tmp_path):
    """Attack on memory: a sparse file of a terabyte in the place of a pool."""
    with (tmp_path / "pool").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(MalformedError, match=f"larger than {MAX_POOL_BYTES} bytes"):
        read_pool_file(tmp_path / "pool")


def test_only_the_pool_that_the_manifest_means_is_taken():
    assert len(check_pool(DATA, spec_of(DATA), environment=SORTING)) == 10
    other = encode_pool(SORTING, samples=8, tasks=TASKS[::-1])
    with pytest.raises(ChecksumError, match="does not have the hash"):
        check_pool(other, spec_of(DATA), environment=SORTING)
    foreign = encode_pool(OTHER, samples=8, tasks=TASKS)
    with pytest.raises(MalformedError, match=r"of the environment 6f6f.*, not of 7373"):
        check_pool(foreign, spec_of(foreign), environment=SORTING)
    short = encode_pool(SORTING, samples=8, tasks=TASKS[:9])
    with pytest.raises(MalformedError, match="has 9 tasks; the manifest says 10"):
        check_pool(short, spec_of(short), environment=SORTING)


def test_a_pool_holds_from_its_step_until_the_next():
    easy, hard = spec_of(DATA, from_step=2), spec_of(DATA, from_step=5)
    environment = EnvironmentSpec(name="sort-digits", digest=SORTING, pools=(easy, hard))
    assert [active_pool(environment, step) for step in range(7)] == [None, None, easy, easy, easy, hard, hard]
    assert pool_file_name(easy) == pool_file_name(hard), "the same file travels once"

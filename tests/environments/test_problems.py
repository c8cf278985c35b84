"""Data sets of problems: the published shapes, and files that are none."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from environments import problems
from environments.problems import Problem, decode_problems, encode_problems, read_problems
from protocol.errors import ConfigError

SHAPES = {
    "plain": {"problem": "2+2?", "answer": "4"},
    "NuminaMath-1.5": {"problem": "2+2?", "solution": "It is four.", "answer": "4", "problem_type": "Algebra"},
    "NuminaMath-CoT": {
        "source": "x",
        "problem": "2+2?",
        "solution": "So \\boxed{3}, no, $\\boxed{4}$.",
        "messages": [],
    },
    "DeepScaleR": {"problem": "2+2?", "answer": "4", "solution": ""},
    "SYNTHETIC-1": {
        "prompt": "2+2?",
        "verification_info": json.dumps({"ground_truth": "4"}),
        "task_type": "verifiable_math",
        "metadata": {"difficulty": 1},
    },
    "GSM8K": {"question": "2+2?", "answer": "Two and two <<2+2=4>>\n#### 4"},
    "numbers": {"question": "2+2?", "answer": 4},
}
EXPECTED = [(1, Problem(problem="2+2?", answer="4"))]


@pytest.mark.parametrize("shape", SHAPES)
def test_published_shapes_are_recognised(tmp_path, shape):
    source = tmp_path / "data.jsonl"
    source.write_text(json.dumps(SHAPES[shape]) + "\n")
    assert read_problems(source) == EXPECTED


def test_parquet_is_read_too(tmp_path):
    source = tmp_path / "data.parquet"
    first = SHAPES["SYNTHETIC-1"] | {"metadata": "x"}
    rows = [first, first | {"prompt": "3+1?"}]
    pq.write_table(pa.Table.from_pylist(rows), source)
    assert read_problems(source) == [*EXPECTED, (2, Problem(problem="3+1?", answer="4"))]


def test_what_travels_reads_back():
    data = encode_problems([Problem(problem="ä \\frac", answer="4"), Problem(problem="b\n", answer="5")])
    assert data.splitlines()[0] == '{"answer":"4","problem":"ä \\\\frac"}'.encode()
    assert encode_problems(decode_problems(data)) == data


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"problem": "x"}', "line 2: no answer in any of"),
        ('{"answer": "4"}', "line 2: no problem; its columns are answer"),
        ('{"problem": 5, "answer": "4"}', "line 2: no problem"),
        ('{"problem": "x", "answer": " "}', "line 2: no answer"),
        ('{"problem": "x", "verification_info": "{}"}', "line 2: no answer"),
        ('{"problem": "x", "solution": "no box"}', "line 2: no answer"),
        ('{"problem": "x", "answer": "' + "9" * 5000 + '"}', "line 2: .*<= 4096"),
        ("[1]", "line 2: not a JSON object"),
        ("{", "line 2: not a JSON object"),
        ("[" * 100_000, "line 2: not a JSON object"),
        ('{"problem": "\\ud800"', "line 2: not a JSON object"),
        ("x" * 2_000_000, "line 2: longer than"),
    ],
)
def test_a_line_at_fault_is_named(tmp_path, line, message):
    source = tmp_path / "data.jsonl"
    source.write_text('{"problem": "2+2?", "answer": "4"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_problems(source)


def test_files_without_problems_are_refused(tmp_path):
    source = tmp_path / "data.jsonl"
    source.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds 0 problems"):
        read_problems(source)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_problems(tmp_path / "missing")


@pytest.mark.parametrize(
    "data", [b"", b"{}\n", b'{"answer":"4","problem":"x","more":1}\n', b"\xff\n", b'{"answer":"","problem":"x"}']
)
def test_other_data_than_what_travels_are_refused(data):
    with pytest.raises(ConfigError, match="the environment's data"):
        decode_problems(data)


@pytest.mark.parametrize("data", [b"PAR1", b"PAR1" + b"x" * 100 + b"PAR1", b"PAR1" * 50])
def test_a_broken_parquet_file_is_named(tmp_path, data):
    source = tmp_path / "data.parquet"
    source.write_bytes(data)
    with pytest.raises(ConfigError, match="is not a readable Parquet file"):
        read_problems(source)


def test_a_parquet_bomb_is_refused(tmp_path, monkeypatch):
    """Attack: a file of a few kilobytes that holds gigabytes of text."""
    source = tmp_path / "data.parquet"
    text = pa.array(["x" * (1 << 20)] * 64)
    table = pa.table({"problem": text, "answer": pa.array(["4"] * 64)})
    pq.write_table(table, source, compression="zstd", use_dictionary=["problem"])
    assert source.stat().st_size < 1 << 20
    monkeypatch.setattr(problems, "_MAX_LINES_BYTES", 8 << 20)
    with pytest.raises(ConfigError, match="is not a readable Parquet file"):
        read_problems(source)

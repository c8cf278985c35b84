"""Benchmarks through lm-eval: what is asked of it, how its answers are read, and what is said of what cannot be run."""

import json
import subprocess
import sys

import pytest

from node.benchmarks import Harness, data_is_here, lacking_lines, load_table, run_tasks, split_table, table_names
from node.eval_show import parse_parameters
from protocol.errors import ConfigError, ModelError, NodeError
from trainer.recipe import ASSETS_DIR

MODEL = ASSETS_DIR / "sort-digits"
RESULTS = {
    "results": {
        "aime24": {"alias": "aime24", "exact_match,none": 0.3, "exact_match_stderr,none": 0.1, "sample_len": 30},
        "gpqa": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A"},
    }
}


@pytest.fixture
def lm_eval(monkeypatch):
    """Stands for the installed program at its border: a process with arguments, an exit code and files."""
    calls = []

    def install(*, code=0, output="", results=RESULTS):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

        def run(command, **settings):
            calls.append((command, settings["env"]))
            if not code:
                out = command[command.index("--output_path") + 1]
                with open(f"{out}/results_1.json", "w") as file:
                    json.dump(results, file)
            return subprocess.CompletedProcess(command, code, "", output)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return install


def test_scores_with_their_intervals(lm_eval):
    calls = lm_eval()
    scores = run_tasks(["aime24", "gpqa"], Harness(model=MODEL, limit=5, chat=True))
    assert [(one.task, one.metric, one.value) for one in scores] == [
        ("aime24", "exact_match", 0.3),
        ("gpqa", "exact_match (strict-match)", 0.5),
    ]
    assert scores[0].low == pytest.approx(0.104, abs=1e-3)
    assert scores[1].low is None
    command, environ = calls[0]
    assert command[:4] == [sys.executable, "-m", "lm_eval", "run"]
    assert {"--limit", "5", "--apply_chat_template", "aime24,gpqa"} <= set(command)
    assert environ["HF_HUB_OFFLINE"] == "1"


def test_data_is_fetched_only_on_request(lm_eval):
    calls = lm_eval()
    run_tasks(["aime24"], Harness(model=MODEL, download=True))
    assert "HF_HUB_OFFLINE" not in calls[0][1]


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        ("ValueError: Tasks not found: nope", ConfigError, "does not know all of these tasks: nope"),
        ("ConnectionError: Couldn't reach 'x' on the Hub", ConfigError, "the data of nope is not on this computer"),
        ("Traceback\nRuntimeError: \x1b[31mboom", NodeError, r"failed \(exit code 1\): .*RuntimeError: \\x1b\[31mboom"),
    ],
)
def test_what_lm_eval_says_becomes_a_named_error(lm_eval, output, error, message):
    lm_eval(code=1, output=output)
    with pytest.raises(error, match=message):
        run_tasks(["nope"], Harness(model=MODEL))


def test_without_lm_eval_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="lm-eval, which is not installed here") as caught:
        run_tasks(["aime24"], Harness(model=MODEL))
    assert "pip install 'intellect-node[eval]'" in caught.value.hint


@pytest.mark.parametrize("task", ["", "../x", "a b", "--output_path", "a,b"])
def test_a_task_is_a_name_and_nothing_else(lm_eval, task):
    """Attack: an argument in a task's place."""
    lm_eval()
    with pytest.raises(ConfigError, match="no name of a task"):
        run_tasks([task], Harness(model=MODEL))


def test_no_model_is_named(lm_eval, tmp_path):
    lm_eval()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        run_tasks(["aime24"], Harness(model=tmp_path))


def test_the_papers_table_says_what_it_lacks(tmp_path):
    table = load_table("table-1")
    assert [one.name for one in table] == ["AIME 24", "AIME 25", "LiveCodeBench (v5)", "GPQA-Diamond", "IFEval"]
    here, lacking = split_table(table, {"HF_HOME": str(tmp_path)})
    assert (here, lacking) == ([], table)
    text = "\n".join(lacking_lines(lacking))
    assert "AIME 24: not run: its data, Maxwell-Jia/AIME_2024, is not on this computer" in text
    assert "LiveCodeBench (v5): not run: lm-eval has no such task" in text
    assert text.count("get it: ") == 5


def test_data_in_the_cache_is_found(tmp_path):
    snapshot = tmp_path / "hub" / "datasets--math-ai--aime25" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert not data_is_here("math-ai/aime25", {"HF_HOME": str(tmp_path)})  # an empty snapshot is none
    (snapshot / "test.jsonl").write_text("{}")
    assert data_is_here("math-ai/aime25", {"HF_HOME": str(tmp_path)})
    assert data_is_here("math-ai/aime25", {"HF_HUB_CACHE": str(tmp_path / "hub")})


def test_an_unknown_table_is_named():
    assert table_names() == ["table-1"]
    with pytest.raises(ConfigError, match="no table 'table-2'"):
        load_table("table-2")


def test_parameters_of_an_environment():
    assert parse_parameters(["largest=30", 'name="x=y"']) == {"largest": 30, "name": "x=y"}
    with pytest.raises(ConfigError, match="not NAME=JSON"):
        parse_parameters(["largest"])


@pytest.mark.long
def test_lm_eval_itself_on_a_task_of_ones_own(tmp_path):
    """The real program, where it is installed: greedy answers of the demo's policy to rows of four digits."""
    pytest.importorskip("lm_eval")
    rows = [f"{number:04d}" for number in range(1000, 9999, 271)]
    questions = [{"question": f"s{row}=", "answer": "".join(sorted(row))} for row in rows]
    (tmp_path / "sort.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "sort.yaml").write_text(
        "task: own_sort\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/sort.jsonl}}}}\n"
        "output_type: generate_until\ntest_split: test\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["<eos>"], do_sample: false, max_gen_toks: 10}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
        "metadata: {version: 1.0}\n"
    )
    from trainer.export import export_policy

    exported = export_policy(MODEL, tmp_path / "model")
    (score,) = run_tasks(["own_sort"], Harness(model=exported, task_dir=tmp_path))
    assert (score.task, score.metric) == ("own_sort", "exact_match")
    assert score.value > 0.6
    with pytest.raises(ConfigError, match="does not know all of these tasks: nothing_such"):
        run_tasks(["nothing_such"], Harness(model=exported))

"""Making a run: the manifest, the initial policy, and models that cannot be used."""

import hashlib
import json
import shutil

import pytest

from environments.sort_digits import SortDigits
from node.run_create import create_run, model_directory, model_spec
from node.run_membership import admission_warning
from protocol.errors import ConfigError, DataDirError, EnvironmentUnknown, ModelError
from protocol.identity import Identity
from protocol.run import RunAddress
from trainer.recipe import ASSETS_DIR, OPEN_WORK_BITS, RECIPES_DIR

DEMO_POLICY = ASSETS_DIR / "sort-digits"
DEMO = (RECIPES_DIR / "demo.toml").read_text()
ALICE, BOB, CAROL = (Identity.from_phrase(name) for name in ("alice", "bob", "carol"))


def create(data_dir, recipe="demo", **changes):
    settings = {"identity": ALICE, "validators": [BOB.peer_id], "issued_at_ms": 1_700_000_000_000}
    return create_run(str(recipe), data_dir, **(settings | changes))


def recipe_file(tmp_path, *edits):
    text = DEMO
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(DEMO_POLICY, tmp_path / "model")


def test_a_run_is_named_by_its_operator_and_opens_under_that_name(tmp_path):
    run = create(tmp_path, name="my-run")
    assert str(run.address) == f"{ALICE.peer_id}/my-run"
    data = (tmp_path / "run" / "manifest").read_bytes()
    signed = RunAddress.parse(str(run.address)).open_manifest(data)
    assert signed.id == run.manifest.id
    assert signed.record.trainer_id == ALICE.peer_id
    assert signed.record.validator_ids == (BOB.peer_id,)


def test_the_manifest_says_what_the_recipe_and_the_model_say(tmp_path):
    manifest = create(tmp_path).manifest.record
    assert manifest.name == "demo"
    assert manifest.model.vocab_size == 64
    assert manifest.model.max_model_len == 256
    assert manifest.model.stop_ids == (2,)
    assert manifest.model.architecture == hashlib.sha256((DEMO_POLICY / "config.json").read_bytes()).digest()
    assert manifest.model.tokenizer == hashlib.sha256((DEMO_POLICY / "tokenizer.json").read_bytes()).digest()
    assert manifest.environment.digest == SortDigits().digest
    assert manifest.rollouts_per_submission == 32
    assert manifest.recipe == hashlib.sha256((tmp_path / "run" / "recipe.toml").read_bytes()).digest()
    assert (tmp_path / "run" / "recipe.toml").read_text() == DEMO


@pytest.mark.parametrize(
    ("said", "bits", "warned"),
    [
        ("", OPEN_WORK_BITS, False),
        ("work_bits = 0", 0, True),
        ("work_bits = 1", 1, False),
        ('kind = "invite"', 0, False),
        ('kind = "invite"\nwork_bits = 2', 2, False),
        (f'kind = "allow-list"\nallowed = ["{BOB.peer_id}"]', 0, False),
    ],
)
def test_new_keys_cost_something_unless_the_operator_says_otherwise(tmp_path, said, bits, warned):
    """Free identities: whoever was evicted comes back at once under another key."""
    asked = next(line for line in DEMO.splitlines() if line.startswith("work_bits"))
    admission = create(tmp_path, recipe_file(tmp_path, (asked, said))).manifest.record.admission
    assert admission.work_bits == bits
    assert bool(admission_warning(admission)) == warned


def test_the_initial_policy_is_laid_out_whole_and_without_strangers(tmp_path, model):
    (model / "notes.txt").write_text("mine")
    (model / "pytorch_model.bin").write_text("pickle")
    run = create(tmp_path, recipe_file(tmp_path, ('source = "sort-digits"', f'source = "{model}"')))
    names = {path.name for path in run.policy_dir.iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert run.policy_dir == tmp_path / "run" / "policy-0"


def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    create(tmp_path)
    before = (tmp_path / "run" / "manifest").read_bytes()
    with pytest.raises(DataDirError, match="holds a run already"):
        create(tmp_path)
    assert (tmp_path / "run" / "manifest").read_bytes() == before


def test_an_attempt_that_died_half_way_is_made_again(tmp_path):
    create(tmp_path)
    (tmp_path / "run" / "manifest").unlink()
    (tmp_path / "run" / "policy-0" / "model.safetensors").write_bytes(b"half")
    run = create(tmp_path)
    assert (run.policy_dir / "model.safetensors").read_bytes() == (DEMO_POLICY / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("validators", "edit", "message"),
    [
        ([], None, "needs a validator"),
        ([BOB.peer_id, BOB.peer_id], None, "named twice"),
        ([BOB.peer_id, CAROL.peer_id], ("quorum = 1", "quorum = 3"), "quorum of 3"),
    ],
)
def test_validators_that_cannot_judge_are_refused(tmp_path, validators, edit, message):
    recipe = recipe_file(tmp_path, *([edit] if edit else []))
    with pytest.raises(ConfigError, match=message):
        create(tmp_path, recipe, validators=validators)
    assert not (tmp_path / "run" / "manifest").exists()


def test_an_unknown_environment_is_refused(tmp_path):
    recipe = recipe_file(tmp_path, ('[environment]\nname = "sort-digits"', '[environment]\nname = "sort"'))
    with pytest.raises(EnvironmentUnknown):
        create(tmp_path, recipe)


def test_a_run_name_that_no_address_can_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="name"):
        create(tmp_path, name="My Run!")


def test_answers_must_fit_into_the_model(tmp_path):
    with pytest.raises(ConfigError, match="no room for a prompt"):
        create(tmp_path, recipe_file(tmp_path, ("max_new_tokens = 10", "max_new_tokens = 256")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "lacks config.json"),
        ("tokenizer.json", None, "lacks tokenizer.json"),
        ("model.safetensors", None, r"no \*.safetensors"),
        ("config.json", "[]", "JSON object"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[" * 100_000, "not valid JSON"),
        ("config.json", " " * (2 << 20), "larger than"),
        ("config.json", '{"eos_token_id": 2}', "vocab_size"),
        ("config.json", '{"vocab_size": true}', "vocab_size"),
        ("config.json", '{"vocab_size": 9}', "does not say how many tokens the model takes.*max_position_embeddings"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "which token ends"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "other.safetensors"}}', "other.safetensors is missing"),
        ("model.safetensors.index.json", "{}", "index is empty"),
    ],
)
def test_an_incomplete_model_is_named(model, name, content, message):
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        model_spec(model)


def test_stop_ids_come_from_the_generation_config_or_else_the_config(model):
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 5, 7]}')
    assert model_spec(model).stop_ids == (5, 7)
    (model / "generation_config.json").unlink()
    assert model_spec(model).stop_ids == (2,)
    config = json.loads((model / "config.json").read_text())
    del config["eos_token_id"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="which token ends"):
        model_spec(model)


@pytest.mark.parametrize("source", ["no-such-model", "/no/such/dir", "../etc"])
def test_a_model_that_is_nowhere_lists_the_shipped_ones(source):
    with pytest.raises(ModelError, match="sort-digits"):
        model_directory(source)


def test_without_a_connection_the_hub_is_a_model_error(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="cannot be downloaded from Hugging Face") as caught:
        model_directory("example/no-such-model")
    assert "model.source" in caught.value.hint


@pytest.mark.parametrize("field", ["n_positions", "max_seq_len", "seq_length"])
def test_how_many_tokens_a_model_takes_is_read_whatever_it_is_called(model, field):
    """GPT-2, MPT and BLOOM have names of their own for it."""
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(config | {field: 77}))
    assert model_spec(model).max_model_len == 77

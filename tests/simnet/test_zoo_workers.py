"""Each cheat does what its name says, and nothing else: a caught cheat must be caught for its own lie."""

import shutil
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from node.engines.torch_engine import TorchEngine
from node.inference.compute import RolloutWorker
from node.run_create import manifest_from_recipe, model_directory
from protocol.errors import MalformedError
from protocol.identity import Identity
from protocol.rollouts import read_rollouts
from simnet.zoo.compute import WORKERS
from simnet.zoo.workers.weights import quantise
from trainer.recipe import load_recipe

MODEL = model_directory("sort-digits")
ALICE = Identity.from_phrase("alice").peer_id
POLICY = b"p" * 32


@pytest.fixture(scope="module")
def manifest():
    recipe = load_recipe("demo")
    return manifest_from_recipe(
        recipe, MODEL, trainer=ALICE, validators=[ALICE], name="zoo", issued_at_ms=0, recipe_digest=bytes(32)
    )


@pytest.fixture(scope="module")
def generate(manifest, tmp_path_factory):
    """A worker's claims about a submission, and its file."""

    def run(worker, *, index=0):
        path = tmp_path_factory.mktemp("files") / "0.parquet"
        made = worker.generate(
            run_id=b"r" * 32,
            step=0,
            checkpoint=POLICY,
            contributor=ALICE.public_key,
            index=index,
            manifest=msgspec.msgpack.encode(manifest),
            path=str(path),
        )
        return made, path

    return run


@pytest.fixture(scope="module")
def cheat(tmp_path_factory):
    def make(name, model=MODEL):
        worker = WORKERS[name](TorchEngine(), seed=1, directory=tmp_path_factory.mktemp("cheat"))
        worker.load(str(model), POLICY)
        return worker

    return make


def rows_of(path):
    return read_rollouts(path, max_rollouts=32, max_tokens=256)


@pytest.fixture(scope="module")
def honest(generate):
    worker = RolloutWorker(TorchEngine())
    worker.load(str(MODEL), POLICY)
    made, path = generate(worker)
    return made, rows_of(path)


def differing(rows, others):
    """Names of the fields in which two files differ anywhere."""
    names = rows[0].__struct_fields__
    pairs = list(zip(rows, others, strict=True))
    return {name for name in names if any(getattr(a, name) != getattr(b, name) for a, b in pairs)}


@pytest.mark.parametrize("name", ["wrong-model", "int8", "int4-g32", "int4-g64", "fine-tuned", "fine-tuned-slightly"])
def test_other_weights_have_the_same_shapes_and_files(name, tmp_path):
    worker = WORKERS[name](TorchEngine(), seed=1, directory=tmp_path)
    changed = worker.policy_dir(MODEL)
    assert {path.name for path in changed.iterdir()} == {path.name for path in MODEL.iterdir()}
    before, after = load_file(MODEL / "model.safetensors"), load_file(changed / "model.safetensors")
    shapes = [{key: tensor.shape for key, tensor in tensors.items()} for tensors in (before, after)]
    assert shapes[0] == shapes[1]
    matrices = [key for key in before if before[key].dim() == 2 and ".layers." in key]
    assert matrices
    assert not [key for key in matrices if torch.equal(before[key], after[key])]


def test_a_seed_gives_the_same_wrong_model_again_and_one_is_kept(tmp_path):
    first, second = (
        (WORKERS["wrong-model"](TorchEngine(), seed=1, directory=tmp_path).policy_dir(MODEL)) for _ in range(2)
    )
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize(("bits", "group", "levels"), [(8, 0, 256), (4, 32, 16), (4, 64, 16)])
def test_quantised_rows_have_few_levels_and_stay_near(bits, group, levels):
    matrix = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    rounded = quantise("model.layers.0.mlp.up_proj.weight", matrix, bits=bits, group=group)
    parts = rounded.reshape(8, -1, group or 128)
    assert max(len(part.unique()) for row in parts for part in row) <= levels
    assert (rounded - matrix).abs().max() <= matrix.abs().max() / (2 ** (bits - 1) - 1)
    assert quantise("model.embed_tokens.weight", matrix, bits=bits, group=group) is matrix


def test_a_stale_contributor_uses_the_checkpoint_before(tmp_path, cheat):
    newer = Path(shutil.copytree(MODEL, tmp_path / "newer"))
    (newer / "generation_config.json").write_text("{}")
    worker = cheat("stale-checkpoint")
    assert (worker.policy_dir(newer) / "generation_config.json").read_text() != "{}"
    assert (worker.policy_dir(MODEL) / "generation_config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("zero-proofs", {"proofs"}),
        ("constant-proofs", {"proofs"}),
        ("random-proofs", {"proofs"}),
        ("swapped-proofs", {"proofs"}),
        ("short-proofs", {"proofs"}),
        ("missing-proofs", {"proofs"}),
        ("flipped-ending", {"finish_reason"}),
        ("forged-reward", {"reward"}),
        ("flattered-logprobs", {"logprobs"}),
        ("noised-logprobs", {"logprobs"}),
        ("shifted-logprobs-as-bfloat16", {"logprobs"}),
        ("truncated", {"output_ids", "logprobs", "proofs", "finish_reason", "reward"}),
        ("edited-prompt", {"output_ids", "logprobs", "proofs", "reward"}),
        ("repeated-members", {"output_ids", "logprobs", "proofs", "reward"}),
    ],
)
def test_a_cheat_changes_what_it_lies_about_and_nothing_else(name, fields, cheat, generate, honest):
    _, path = generate(cheat(name))
    changed = differing(rows_of(path), honest[1])
    assert changed
    assert changed <= fields | {"finish_reason"} if "output_ids" in fields else changed == fields


@pytest.mark.parametrize("name", ["other-temperature", "other-seed", "best-of-n", "draft-model"])
def test_other_draws_answer_the_prompts_that_were_due(name, cheat, generate, honest):
    made, path = generate(cheat(name))
    rows = rows_of(path)
    assert "output_ids" in differing(rows, honest[1])
    assert "prompt_ids" not in differing(rows, honest[1])
    assert made["prompts"] == honest[0]["prompts"]


def test_the_best_of_several_draws_is_never_worse(cheat, generate, honest):
    rows = rows_of(generate(cheat("best-of-n"))[1])
    assert all(row.reward >= due.reward for row, due in zip(rows, honest[1], strict=True))
    assert sum(row.reward for row in rows) > sum(row.reward for row in honest[1])


def test_prompts_of_its_own_choice_are_short(cheat, generate, honest):
    rows = rows_of(generate(cheat("other-prompt"))[1])
    longest = max(len(row.prompt_ids) for row in rows)
    assert longest <= min(len(row.prompt_ids) for row in honest[1])


def test_counts_are_lied_about_in_the_claim_alone(cheat, generate, honest):
    made, path = generate(cheat("flipped-length"))
    assert made["output_tokens"] == 2 * honest[0]["output_tokens"]
    assert rows_of(path) == honest[1]


def test_a_claimed_number_format_is_what_is_signed_for(cheat, generate):
    assert generate(cheat("int8-as-bfloat16"))[0]["dtype"] == "bfloat16"


def test_missing_members_leave_one_out_of_every_group(cheat, generate, manifest, honest):
    made, path = generate(cheat("missing-members"))
    rows = rows_of(path)
    assert made["rollouts"] == len(rows) == len(honest[1]) - manifest.rollout.prompts_per_submission


def test_a_replayed_file_is_the_first_one(cheat, generate):
    worker = cheat("replayed-file")
    first, again = (generate(worker, index=index) for index in range(2))
    assert again[1].read_bytes() == first[1].read_bytes()
    assert again[0] == first[0]


@pytest.mark.parametrize("token", ["negative", "large"])
def test_hostile_tokens_are_written_past_the_honest_writer(token, cheat, generate):
    made, path = generate(cheat(f"hostile-tokens-{token}"))
    tokens = [token for row in pq.read_table(path)["output_ids"].to_pylist() for token in row]
    assert (min(tokens) == -1) if token == "negative" else (max(tokens) == 2**31 - 1)
    assert made["size"] == path.stat().st_size


def test_a_bomb_is_small_and_names_gigabytes(cheat, generate):
    made, path = generate(cheat("parquet-bomb"))
    assert made["size"] == path.stat().st_size < 1 << 18
    text = pq.ParquetFile(path).metadata.row_group(0)
    assert text.num_rows == 32


def test_noise_is_no_parquet(cheat, generate):
    with pytest.raises(MalformedError):
        rows_of(generate(cheat("malformed-parquet"))[1])

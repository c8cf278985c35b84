"""Pools and length rewards from a recipe to a verdict: what contributors answer, what validators hold them to."""

from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file
from submission_kit import (
    ALICE,
    CHECKPOINT,
    RUN_ID,
    HandedIn,
    generate,
    judge_rollouts,
    make_judge,
    make_worker,
    numbers,
)

from environments.think_sort import ThinkSort
from node.engines.assignment import derive_work
from node.engines.tokenizer import Tokenizer
from node.run_create import create_run
from node.trainer.compute import TrainerCompute
from protocol.errors import ConfigError, ModelError
from protocol.identity import Identity
from protocol.pools import decode_pool, encode_pool, pool_file_name
from protocol.records import Submission
from protocol.rollouts import read_rollouts
from protocol.seeds import candidate_seed, submission_seed
from trainer.recipe import RECIPES_DIR, load_recipe

OPERATOR, VALIDATOR = Identity.from_phrase("operator"), Identity.from_phrase("validator")
RECIPE = (RECIPES_DIR / "think-sort.toml").read_text()
TASKS = [(candidate_seed(b"test", number), 1) for number in range(3)]
EASY = encode_pool(ThinkSort().digest, samples=8, tasks=TASKS[:2])
HARD = encode_pool(ThinkSort().digest, samples=8, tasks=TASKS[2:])
SEED = submission_seed(RUN_ID, 3, checkpoint=CHECKPOINT, contributor_key=ALICE, index=0)


def create(directory, *, easy=EASY, hard=HARD, recipe=RECIPE):
    """A run whose prompts come from one pool from step 1 on, and from another from step 4 on."""
    (directory / "easy.bin").write_bytes(easy)
    (directory / "hard.bin").write_bytes(hard)
    pools = f'[{{file = "{directory}/easy.bin", from_step = 1}}, {{file = "{directory}/hard.bin", from_step = 4}}]'
    path = directory / "recipe.toml"
    path.write_text(recipe.replace("[environment]", f"[environment]\npools = {pools}"))
    who = {"identity": OPERATOR, "validators": [VALIDATOR.peer_id], "issued_at_ms": 1}
    return create_run(str(path), directory / "data", **who)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return create(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def manifest(run):
    return run.manifest.record


@pytest.fixture(scope="module")
def worker(run):
    return make_worker(run.policy_dir)


@pytest.fixture(scope="module")
def judge(run):
    return make_judge(run.policy_dir)


def hand_in(worker, manifest, path):
    made = generate(worker, manifest, path)
    rollouts = read_rollouts(path, max_rollouts=manifest.rollouts_per_submission, max_tokens=256)
    fields = {
        name: made[name] for name in ("sha256", "size", "rollouts", "output_tokens", "prompts", "engine", "dtype")
    }
    place = {"run_id": RUN_ID, "step": 3, "index": 0, "checkpoint_step": 3, "checkpoint": CHECKPOINT}
    return HandedIn(Submission(**place, **fields, software="test", issued_at_ms=1), rollouts)


@pytest.fixture(scope="module")
def honest(worker, manifest, tmp_path_factory):
    return hand_in(worker, manifest, tmp_path_factory.mktemp("file") / "honest.parquet")


def answers_of(run, step, policy_dir=None):
    manifest = run.manifest.record
    work = derive_work(manifest, Tokenizer(policy_dir or run.policy_dir), seed=SEED, step=step)
    return {assignment.task.data["answer"] for assignment in work.assignments}


def test_prompts_are_drawn_from_the_pool_of_the_step(run):
    expected = [ThinkSort().task(seed).data["answer"] for seed, _ in TASKS]
    assert answers_of(run, 3) == set(expected[:2])
    assert answers_of(run, 4) == {expected[2]}
    whole = answers_of(run, 0)
    assert not whole & set(expected)
    assert whole == answers_of(run, None), "held-out prompts come from the whole environment"


def test_pools_travel_with_every_policy(run, tmp_path):
    """A step that is left out gives the same policy again; its pools lie beside it."""
    compute = TrainerCompute(load_recipe("think-sort"), state_dir=tmp_path / "state", policy_dir=run.policy_dir)
    compute.open()
    trained = compute.train(0, [], skip=True)
    for spec, data in zip(run.manifest.record.environment.pools, (EASY, HARD), strict=True):
        assert len(decode_pool(data)) == spec.count
        for directory in (run.policy_dir, tmp_path / "state" / "step-00000001" / "policy"):
            assert (directory / pool_file_name(spec)).read_bytes() == data
    weights = [
        load_file(directory / "model.safetensors") for directory in (run.policy_dir, Path(trained["policy_dir"]))
    ]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert trained["step"] == 1


def test_a_checkpoint_without_its_pool_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr("node.engines.pools._held", {})
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((run.policy_dir / name).read_bytes())
    with pytest.raises(ModelError, match=r"the pool .* cannot be used: .*No such file"):
        answers_of(run, 3, tmp_path)
    (tmp_path / pool_file_name(run.manifest.record.environment.pools[0])).write_bytes(HARD)
    with pytest.raises(ModelError, match="does not have the hash"):
        answers_of(run, 3, tmp_path)


@pytest.mark.parametrize(
    ("pool", "fault"),
    [
        (b"", "not a pool file"),
        (EASY[:-1], "truncated"),
        (encode_pool(b"o" * 32, samples=8, tasks=TASKS), "made for another environment"),
    ],
)
def test_a_run_is_not_made_with_a_pool_that_cannot_be_used(tmp_path, pool, fault):
    with pytest.raises(ConfigError, match=fault) as caught:
        create(tmp_path, easy=pool)
    assert "data filter --env think-sort" in caught.value.hint
    assert not (tmp_path / "data" / "run" / "manifest").exists()


def test_a_missing_pool_is_named(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("[environment]", '[environment]\npools = [{file = "nowhere.bin"}]'))
    with pytest.raises(ConfigError, match=r"the pool nowhere.bin cannot be read: No such file"):
        create_run(str(path), tmp_path / "data", identity=OPERATOR, validators=[VALIDATOR.peer_id], issued_at_ms=1)


def test_a_target_that_the_environment_cannot_say_is_refused(tmp_path):
    recipe = RECIPE.replace("[10, 14, 18]", "[10, 27]").replace("max_new_tokens = 24", "max_new_tokens = 30")
    with pytest.raises(ConfigError, match="think-sort has no letter for 27 tokens"):
        create(tmp_path, recipe=recipe)


def test_honest_work_passes_and_its_reward_is_the_task_s_less_what_its_length_costs(honest, judge, manifest, run):
    work = derive_work(manifest, Tokenizer(run.policy_dir), seed=SEED, step=3)
    assert {assignment.length_target for assignment in work.assignments} <= {10, 14, 18}
    for rollout in honest.rollouts:
        penalty = 0.05 * abs(len(rollout.output_ids) - work.assignments[rollout.prompt_index].length_target)
        assert rollout.reward + penalty in (pytest.approx(0.0), pytest.approx(1.0))
    judgement = judge_rollouts(judge, manifest, honest)
    assert (judgement["outcome"], judgement["reason"]) == ("accept", "every check passed")
    assert numbers(judgement, "reward")["mean_length_penalty"] > 0


def test_a_reward_without_its_penalty_is_a_lie(honest, judge, manifest):
    """A contributor who keeps the reward of the task and forgets what the length costs."""
    rollouts = [msgspec.structs.replace(rollout, reward=max(0.0, rollout.reward)) for rollout in honest.rollouts]
    assert rollouts != honest.rollouts
    judgement = judge_rollouts(judge, manifest, honest, rollouts)
    assert (judgement["outcome"], judgement["hard"]) == ("reject", True)
    assert judgement["reason"].startswith("reward:")


def test_a_task_that_could_not_be_judged_there_is_no_lie(honest, judge, manifest):
    """A contributor whose environment could not tell records nothing but the penalty, which everybody can tell."""
    right = next(number for number, rollout in enumerate(honest.rollouts) if rollout.reward > 0)
    rollouts = list(honest.rollouts)
    rollouts[right] = msgspec.structs.replace(rollouts[right], reward=rollouts[right].reward - 1.0)
    judgement = judge_rollouts(judge, manifest, honest, rollouts)
    assert (judgement["outcome"], judgement["hard"]) == ("reject", False)


def test_prompts_from_outside_the_pool_are_refused(worker, judge, manifest, tmp_path):
    """A contributor that answers easy tasks of its own choosing instead of the step's pool."""
    environment = msgspec.structs.replace(manifest.environment, pools=())
    cheat = hand_in(worker, msgspec.structs.replace(manifest, environment=environment), tmp_path / "cheat.parquet")
    judgement = judge_rollouts(judge, manifest, cheat)
    assert (judgement["outcome"], judgement["hard"]) == ("reject", True)
    assert judgement["reason"].startswith("prompt:")


def test_another_target_than_the_seed_s_is_refused(worker, judge, manifest, tmp_path):
    """A contributor that has every prompt ask for the length that its policy likes best."""
    length = msgspec.structs.replace(manifest.rollout.length, targets=(10,))
    rollout = msgspec.structs.replace(manifest.rollout, length=length)
    cheat = hand_in(worker, msgspec.structs.replace(manifest, rollout=rollout), tmp_path / "cheat.parquet")
    assert judge_rollouts(judge, manifest, cheat)["reason"].startswith("prompt:")

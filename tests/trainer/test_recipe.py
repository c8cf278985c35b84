"""Recipes: what is unknown, missing or contradictory is refused by name."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from trainer.recipe import RECIPES_DIR, load_recipe, parse_recipe, recipe_names

DEMO = (RECIPES_DIR / "demo.toml").read_text()


def demo_with(old: str, new: str) -> bytes:
    assert old in DEMO
    return DEMO.replace(old, new, 1).encode()


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load(name):
    recipe = load_recipe(name)
    assert recipe.rollouts_per_submission * recipe.rollout.max_submissions_per_step >= recipe.rollouts_per_submission
    assert recipe.keep_checkpoints > recipe.batch.max_staleness


def test_a_recipe_is_loaded_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(demo_with("total_steps = 50", "total_steps = 7"))
    assert load_recipe(path).batch.total_steps == 7


@pytest.mark.parametrize(
    ("old", "new", "key", "nearest"),
    [
        ("learning_rate", "learnng_rate", "optimiser.learnng_rate", "optimiser.learning_rate"),
        ("[loss]", "[los]", "los", "loss"),
        ("group_size", "groupsize", "rollout.groupsize", "rollout.group_size"),
        ("quorum", "quorums", "quorums", "quorum"),
        ("epsilon", "zzz", "loss.zzz", "loss.epsilon"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(old, new, key, nearest):
    with pytest.raises(ConfigError) as caught:
        parse_recipe(demo_with(old, new), origin="mine.toml")
    assert caught.value.message == f"mine.toml: unknown key {key!r}"
    assert nearest in caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("group_size = 8", "group_size = 1", "rollout.group_size"),
        ("temperature = 1.0", 'temperature = "hot"', "rollout.temperature"),
        ("total_steps = 50", "", "missing required field `total_steps` at `batch`"),
        ("delta = 4.0", "delta = 0.5", "loss.delta"),
        ("delta = 4.0", "delta = nan", "loss.delta = nan is not a finite number"),
        ("delta = 4.0", "delta = inf", "loss.delta = inf is not a finite number"),
        (
            "delta = 4.0",
            "delta = 1.2",
            r"must be larger than 1 \+ epsilon = 1.2 with two_sided: .* at `loss`",
        ),
        ("kl_coefficient = 0.0", "kl_coefficient = inf", "loss.kl_coefficient = inf is not a finite number"),
        ("delta = 4.0", "entropy_coefficient = inf", "loss.entropy_coefficient = inf"),
        ("weight_decay = 0.0", "weight_decay = inf", "optimiser.weight_decay = inf is not a finite number"),
        ("max_grad_norm = 1.0", "max_grad_norm = inf", "optimiser.max_grad_norm = inf is not a finite number"),
        ("betas = [0.9, 0.95]", "betas = [0.9, nan]", r"optimiser.betas\[1\] = nan is not a finite number"),
        ('old_logprobs = "worker"', 'old_logprobs = "mine"', "loss.old_logprobs"),
        ('old_logprobs = "worker"', "importance_cap = 2.0", "importance_cap needs"),
        ("rollouts_per_step = 256", "rollouts_per_step = 250", "not a multiple of the 32 rollouts"),
        ("rollouts_per_step = 256", "rollouts_per_step = 0", "batch.rollouts_per_step"),
        ("updates_per_step = 2", "updates_per_step = 300", "updates_per_step is larger"),
        ("[loss]", "[loss", "not valid TOML"),
        ("rollouts_per_step = 256", f"rollouts_per_step = {'9' * 5000}", "not valid TOML: Exceeds the limit"),
        ("[loss]", f"[environment.parameters.{'a.' * 3000}a]\n[loss]", "lie too deep within one another"),
        ('dtype = "bfloat16"', 'dtype = "float16"', "policy.dtype"),
        ('dtype = "bfloat16"', 'dtype = "float32"\ncompute = "bfloat16"', "other weights than it publishes"),
        ('dtype = "bfloat16"', "processes = 0", "policy.processes"),
        ('dtype = "bfloat16"', 'layout = "tight"', "policy.layout"),
        ("[tolerance.bfloat16]", "[tolerance.float16]", "policy.dtype = 'bfloat16' is no format of"),
        ("delta = 4.0", 'objective = "reinforce"', "loss.objective"),
        ("[optimiser]", "optimiser = 3\n[rollouts]", "unknown key|optimiser"),
    ],
)
def test_values_that_cannot_work_are_refused(old, new, message):
    with pytest.raises(ConfigError, match=message):
        parse_recipe(demo_with(old, new), origin="mine.toml")


@pytest.mark.parametrize("source", ["dem", "no/such/file.toml", ""])
def test_a_missing_recipe_lists_the_shipped_ones(source):
    with pytest.raises(ConfigError, match="demo"):
        load_recipe(source)


@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(lambda text: text.encode("utf-8", "replace"))))
def test_any_bytes_give_a_recipe_or_a_config_error(data):
    with pytest.raises(ConfigError):
        parse_recipe(data)


@pytest.mark.parametrize("data", [b"x" * 100_000, b"a=" + b"[" * 16_000, b"a" + b".a" * 50_000 + b"=1"])
def test_huge_and_deep_files_are_config_errors(data):
    """Attack: a file that exhausts the parser's stack or memory."""
    with pytest.raises(ConfigError):
        parse_recipe(data)


def test_reading_a_recipe_does_not_import_torch():
    code = "import sys; from trainer.recipe import load_recipe; load_recipe('demo'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_tolerances_are_tables_by_number_format():
    recipe = load_recipe("demo")
    assert set(recipe.tolerance) == {"float32", "bfloat16"}
    with pytest.raises(ConfigError) as caught:
        parse_recipe(demo_with("max_margin", "max_margn"), origin="mine.toml")
    assert caught.value.message == "mine.toml: unknown key 'tolerance.float32.max_margn'"
    assert "tolerance.float32.max_margin" in caught.value.hint
    with pytest.raises(ConfigError, match="tolerance"):
        parse_recipe(demo_with("[tolerance.float32]", '[tolerance."float 32"]'))


@pytest.mark.parametrize("setting", ["top_p = 0.9", "top_k = 50", "min_p = 0.1"])
def test_sampling_cannot_be_truncated(setting):
    """Which tokens a mask keeps drifts between machines: a manifest cannot ask for one."""
    with pytest.raises(ConfigError, match=setting.split(" ")[0]):
        parse_recipe(demo_with("temperature = 1.0", f"temperature = 1.0\n{setting}"), origin="mine.toml")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("group_size = 8", "group_size = 1", r"`int` >= 2 at `rollout.group_size`"),
        ("[rollout]", "[rollout]\nlength = { targets = [], alpha = 0.1 }", r"length >= 1 at `rollout.length.targets`"),
        ("[rollout]", "[rollout]\nlength = { targets = [4, 11], alpha = 0.1 }", "11 tokens cannot be reached with"),
        ("[rollout]", "[rollout]\nlength = { targets = [4], alpha = -1.0 }", r">= 0.0 at `rollout.length.alpha`"),
        (
            "[rollout]",
            "[rollout]\nlength = { targets = [4], alpha = nan }",
            "rollout.length.alpha = nan is not a finite",
        ),
        ("[rollout]", "[rollout]\nlength = { targets = [4], alfa = 0.1 }", "did you mean 'rollout.length.alpha'"),
        ("[batch]", "[batch]\ndeadline_s = 0.0", r"> 0.0 at `batch.deadline_s`"),
        ("[batch]", "[batch]\nminimum_share = 2.0", r"<= 1.0 at `batch.minimum_share`"),
        ("[environment]", "[environment]\npools = [{ fil = 'a' }]", "did you mean 'environment.pools.file'"),
        (
            "[environment]",
            "[environment]\npools = [{ file = 'a', from_step = 2 }, { file = 'b' }]",
            "from_step must rise from pool to pool, and is 2, 0",
        ),
        (
            "prompts_per_submission = 4",
            "prompts_per_submission = 1",
            "a batch may hold 8192 submissions and 1048576 groups, and this one takes 16384",
        ),
    ],
)
def test_filters_and_lengths_that_cannot_be_are_named(old, new, fault):
    text = demo_with(old, new).decode()
    if "8192" in fault:
        text = text.replace("rollouts_per_step = 256", "rollouts_per_step = 131072")
    with pytest.raises(ConfigError, match=fault) as caught:
        parse_recipe(text.encode())
    assert caught.value.exit_code == 2


def test_a_curriculum_and_an_online_filter_are_read():
    text = demo_with("[environment]", "[environment]\npools = [{ file = 'a.bin' }, { file = 'b.bin', from_step = 9 }]")
    recipe = parse_recipe(text.replace(b"[batch]", b"[batch]\nsignal_only = true\ndeadline_s = 60"))
    assert [(pool.file, pool.from_step) for pool in recipe.environment.pools] == [("a.bin", 0), ("b.bin", 9)]
    assert (recipe.batch.signal_only, recipe.batch.max_tries, recipe.batch.deadline_s) == (True, 4, 60.0)


def test_an_infinite_learning_rate_is_refused():
    text = re.sub(rb"(?m)^learning_rate = .*$", b"learning_rate = inf", demo_with("[optimiser]", "[optimiser]"))
    with pytest.raises(ConfigError, match=r"optimiser\.learning_rate = inf is not a finite number"):
        parse_recipe(text)


def test_other_objectives_need_no_bound_above_the_clipping():
    assert parse_recipe(demo_with("delta = 4.0", 'delta = 1.1\nobjective = "one_sided"')).loss.delta == 1.1


def test_a_guess_names_a_setting_of_the_recipe():
    guesses = "\n[guesses]\n" + '"batch.{}" = "count them"\n'
    assert parse_recipe(demo_with("[loss]", "[loss]") + guesses.format("total_steps").encode()).guesses
    with pytest.raises(ConfigError, match=r"'batch.steps', which is no setting"):
        parse_recipe(demo_with("[loss]", "[loss]") + guesses.format("steps").encode())

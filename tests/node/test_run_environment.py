"""A run's environment as its operator sets it up: parameters, a data file that travels, end tokens."""

import hashlib

import msgspec
import pytest

from environments.registry import DATA_FILE, open_environment
from node.engines.assignment import derive_work, held_environment
from node.engines.tokenizer import Tokenizer
from node.run_create import create_run
from protocol.errors import ConfigError, EnvironmentUnknown, ModelError
from protocol.identity import Identity
from trainer.checkpoint import Checkpoints
from trainer.recipe import RECIPES_DIR

OPERATOR = Identity.from_phrase("operator")
VALIDATOR = Identity.from_phrase("validator").peer_id
ENVIRONMENT = '[environment]\nname = "sort-digits"\n'
PROBLEMS = '{"problem": "2+2?", "answer": "4"}\n{"question": "3*3?", "answer": "so\\n#### 9"}\n'


@pytest.fixture
def create(tmp_path):
    """Create a run from the demo's recipe with another [environment]."""

    def created(environment, *, name="run"):
        recipe = (RECIPES_DIR / "demo.toml").read_text()
        assert ENVIRONMENT in recipe
        path = tmp_path / f"{name}.toml"
        path.write_text(recipe.replace(ENVIRONMENT, f"[environment]\n{environment}\n"))
        return create_run(str(path), tmp_path / name, identity=OPERATOR, validators=[VALIDATOR], issued_at_ms=1)

    return created


def test_parameters_go_into_the_manifest_and_to_contributors(create):
    run = create('name = "sort-digits"\nparameters = { min_digits = 2, max_digits = 3 }')
    spec = run.manifest.record.environment
    assert spec.parameters == {"min_digits": 2, "max_digits": 3}
    assert (spec.package, spec.version) == ("intellect-node", 1)
    work = derive_work(run.manifest.record, Tokenizer(run.policy_dir), seed=bytes(32))
    assert {len(assignment.task.text) - 2 for assignment in work.assignments} <= {2, 3}
    assert spec.digest != create('name = "sort-digits"', name="other").manifest.record.environment.digest


def test_a_data_file_travels_with_the_policy(create, tmp_path):
    source = tmp_path / "problems.jsonl"
    source.write_text(PROBLEMS)
    run = create(f'name = "maths"\nparameters = {{ instruction = "" }}\ndata = "{source}"')
    spec, travelling = run.manifest.record.environment, run.policy_dir / DATA_FILE
    assert spec.data == hashlib.sha256(travelling.read_bytes()).digest()
    source.unlink()
    first = Checkpoints(tmp_path / "state", keep=2).start(run.policy_dir)
    assert (first.policy_dir / DATA_FILE).read_bytes() == travelling.read_bytes()
    environment = open_environment(spec, first.policy_dir)
    assert {environment.task(bytes([number]) * 32).text for number in range(16)} == {"2+2?", "3*3?"}


def test_the_environment_is_opened_once_whatever_checkpoint_it_comes_with(create, tmp_path):
    source = tmp_path / "problems.jsonl"
    source.write_text(PROBLEMS)
    run = create(f'name = "maths"\ndata = "{source}"')
    spec = run.manifest.record.environment
    held = held_environment(spec, run.policy_dir)
    assert held_environment(spec, tmp_path / "nowhere") is held
    with pytest.raises(ModelError, match="cannot be read"):
        held_environment(msgspec.structs.replace(spec, data=bytes(32)), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ('name = "maths"\ndata = "no/such.jsonl"', "there is no data file no/such.jsonl"),
        ('name = "sort-digits"\ndata = "{source}"', "sort-digits takes no data file"),
        ('name = "sort-digits"\nparameters = { max_digits = 99 }', "parameter max_digits"),
        ('name = "sort-digits"\nparameters = { colour = 1 }', "no parameter 'colour'"),
        ('name = "sort-digits"\nparameters = { max_digits = { nested = 1 } }', "Expected"),
        ('name = "sort-digits"\nparameter = 1', "unknown key 'environment.parameter'"),
        ('name = "addition"', r"ends answers at '\\n', for which the model's tokenizer has no token"),
    ],
)
def test_what_cannot_become_a_run_is_named(create, tmp_path, environment, message):
    source = tmp_path / "source"
    source.write_text(PROBLEMS)
    with pytest.raises(ConfigError, match=message):
        create(environment.replace("{source}", str(source)))


def test_an_environment_of_another_release_is_refused_by_contributors(create):
    run = create('name = "sort-digits"')
    spec = msgspec.structs.replace(run.manifest.record.environment, digest=bytes(32), version=2, package_version="9.9")
    manifest = msgspec.structs.replace(run.manifest.record, environment=spec)
    with pytest.raises(EnvironmentUnknown, match=r"uses \(version 2, of intellect-node 9\.9\)"):
        derive_work(manifest, Tokenizer(run.policy_dir), seed=bytes(32))

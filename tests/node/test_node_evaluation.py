"""Evaluation answers held-out prompts with the run's own engine, and measures what the policy can do."""

import msgspec
import pytest
from turns_kit import RowAfterRow

from environments import registry
from environments.registry import get_environment
from environments.sort_digits import SortDigits
from node.engines.torch_engine import TorchEngine
from node.eval_compute import Plan, evaluate_environment
from node.run_create import manifest_from_recipe
from node.trainer.evaluation_compute import EvaluationWorker
from protocol.errors import ConfigError, EnvironmentUnknown, ModelError
from protocol.identity import Identity
from protocol.seeds import evaluation_seed, prompt_seed
from trainer.evaluation import Evaluation
from trainer.recipe import ASSETS_DIR, EvaluationSettings, load_recipe

DEMO_POLICY = ASSETS_DIR / "sort-digits"
ALICE, BOB = (Identity.from_phrase(name).peer_id for name in ("alice", "bob"))
SETTINGS = EvaluationSettings(every_steps=1, prompts=32, samples=4, pass_at=(1, 4))


def manifest():
    return manifest_from_recipe(
        load_recipe("demo"), DEMO_POLICY, trainer=ALICE, validators=[BOB], name="demo", issued_at_ms=1,
        recipe_digest=b"r" * 32,
    )  # fmt: skip


def evaluated(run_id=b"r" * 32, manifest=None, settings=SETTINGS):
    record = msgspec.msgpack.encode(manifest)
    worker = EvaluationWorker(TorchEngine())
    answer = worker.evaluate(str(DEMO_POLICY), run_id, record, msgspec.to_builtins(settings))
    assert answer.pop("seconds") > 0
    return msgspec.convert(answer, Evaluation)


def test_the_demos_policy_solves_a_third_and_the_same_every_time():
    found = evaluated(manifest=manifest())
    assert [one.k for one in found.pass_at] == [1, 4]
    one, four = found.pass_at
    assert one.low < 0.3 < one.high  # what it was made to know
    assert one.value == found.reward < four.value
    assert (found.prompts, found.samples, found.unknown) == (32, 4, 0)
    assert evaluated(manifest=manifest()) == found
    assert evaluated(b"s" * 32, manifest=manifest()) != found


def test_temperature_and_length_can_be_the_evaluations_own():
    cut = evaluated(manifest=manifest(), settings=msgspec.structs.replace(SETTINGS, max_new_tokens=2))
    assert cut.truncated == 1.0
    assert cut.reward == 0.0
    sure = evaluated(manifest=manifest(), settings=msgspec.structs.replace(SETTINGS, temperature=0.01))
    assert sure.reward > 0.5


def test_another_tokenizer_than_the_manifests_is_named():
    other = manifest()
    other = msgspec.structs.replace(other, model=msgspec.structs.replace(other.model, tokenizer=b"t" * 32))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not the one"):
        evaluated(manifest=other)


def plan(**changes):
    return Plan(**({"model": DEMO_POLICY, "environment": "sort-digits", "parameters": {}, "prompts": 16} | changes))


def test_an_environment_of_this_installation_is_evaluated_by_name():
    found = evaluate_environment(plan(pass_at=(1, 2)))
    assert (found.prompts, found.samples) == (16, 4)
    assert 0 < found.pass_at[0].value < found.pass_at[1].value
    assert evaluate_environment(plan(pass_at=(1, 2))) == found
    assert evaluate_environment(plan(pass_at=(1, 2), held_out_set="other")) != found
    easy = evaluate_environment(plan(parameters={"max_digits": 4}, temperature=0.05))
    assert easy.reward > found.reward


def test_prompts_are_those_of_the_held_out_seed():
    environment = get_environment("sort-digits")
    seen = {environment.task(prompt_seed(evaluation_seed(b"r" * 32), index)).text for index in range(8)}
    assert len(seen) == 8


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"environment": "nothing"}, EnvironmentUnknown, "no environment is called 'nothing'"),
        ({"parameters": {"nothing": 1}}, ConfigError, "nothing"),
        ({"pass_at": (8,)}, ConfigError, "pass@8 cannot be told from 4 answers"),
        ({"model": ASSETS_DIR}, ModelError, r"config\.json"),
        ({"max_new_tokens": 1000}, ModelError, "256 positions"),
        ({"engine": "abacus"}, ConfigError, "no engine 'abacus'"),
    ],
)
def test_what_cannot_be_evaluated_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        evaluate_environment(plan(**changes))


def test_answers_of_several_turns_are_played_to_their_end(monkeypatch):
    """An answer is judged by its last turn, and what the environment said is no token of the policy's."""
    monkeypatch.setattr(registry, "BUILT_IN", {**registry.BUILT_IN, "row-after-row": "turns_kit:RowAfterRow"})
    judged = []

    def reward(self, task, completion):
        judged.append(completion)
        return SortDigits.reward(self, task, completion)

    monkeypatch.setattr(RowAfterRow, "reward", reward)
    played = evaluate_environment(plan(environment="row-after-row", max_new_tokens=10))
    many = list(judged)
    judged.clear()
    monkeypatch.setattr(RowAfterRow, "max_turns", 1)
    once = evaluate_environment(plan(environment="row-after-row", max_new_tokens=10))
    assert len(many) == len(judged) == 64
    assert many != judged, "what is judged is the last turn"
    assert 1.5 * once.tokens < played.tokens < 3 * once.tokens

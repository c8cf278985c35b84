"""A contributor's test of its own proofs, and when it is made."""

from dataclasses import replace

import msgspec
import pytest
from submission_kit import POLICY, make_manifest

from node.engines.torch_engine import TorchEngine
from node.inference.compute import RolloutWorker
from node.inference.role import SelfTestFailed, run_self_test
from protocol.errors import ModelError


def worker(engine=None):
    made = RolloutWorker(engine or TorchEngine())
    made.load(str(POLICY), bytes(32))
    return made


def outcome_of(made, manifest):
    return made.self_test(msgspec.msgpack.encode(manifest))


def test_a_sound_engine_holds_against_itself():
    found = outcome_of(worker(), make_manifest(max_new_tokens=40))
    assert (found["answers"], found["reason"]) == (4, "")
    assert 0 <= found["share"] < 0.5
    assert found["tokens"] > 4


def test_a_number_format_that_the_run_does_not_take():
    manifest = make_manifest()
    other = msgspec.structs.replace(manifest, tolerances={"bfloat16": next(iter(manifest.tolerances.values()))})
    assert outcome_of(worker(), other)["reason"] == "dtype: the run takes bfloat16 and not float32"


class Broken(TorchEngine):
    """Prefills something else than it decodes, as a device with faulty memory does."""

    def prefill(self, sequences):
        for each in super().prefill(sequences):
            yield replace(each, logits=lambda start, stop, given=each.logits: -given(start, stop))


def test_an_engine_that_contradicts_itself_is_found():
    found = outcome_of(worker(Broken()), make_manifest(max_new_tokens=40))
    assert found["reason"].startswith("sampling")
    assert found["share"] > 1


def test_without_a_policy_nothing_is_tested():
    with pytest.raises(ModelError, match="no policy is loaded"):
        RolloutWorker(TorchEngine()).self_test(b"")


class FakeCompute:
    def __init__(self, reason):
        self.reason = reason

    async def call(self, method, *, timeout_s, manifest):
        return {"reason": self.reason, "answers": 4}


async def test_a_machine_that_fails_its_own_check_does_not_work():
    assert (await run_self_test(FakeCompute(""), make_manifest()))["answers"] == 4
    with pytest.raises(SelfTestFailed, match="does not hold against itself: sampling") as caught:
        await run_self_test(FakeCompute("sampling: 3 of 4"), make_manifest())
    assert "intellect-node calibrate" in caught.value.hint

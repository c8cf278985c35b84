import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from node.engines.torch_engine import TorchEngine
from protocol.errors import ConfigError
from protocol.identity import Identity
from simnet import zoo
from simnet.cheats import CHEATS
from simnet.zoo_compute import WORKERS, WrongModel
from trainer.recipe import ASSETS_DIR

RUN = f"{Identity.from_phrase('alice').peer_id}/demo"
MODEL = ASSETS_DIR / "sort-digits"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "checkpoint"))


def test_every_cheat_that_a_scenario_can_name_has_a_worker():
    assert WORKERS.keys() == CHEATS.keys()


def test_the_flags_are_those_of_an_inference_node(tmp_path):
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_phrase('bob').peer_id}"
    flags = ["--run", RUN, "--data-dir", str(tmp_path), "--bootstrap", address, "--threads", "1", "--cheat-seed", "7"]
    config, arguments = zoo.parse(["wrong-model", *flags])
    assert (config.role, config.run, config.bootstrap, config.threads) == ("inference", RUN, (address,), 1)
    assert arguments == ["wrong-model", "7", str(tmp_path / "cheat")]


def test_an_unknown_cheat_is_a_matter_of_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        zoo.parse(["wrong-modle"])
    assert caught.value.code == 2
    assert "wrong-model" in capsys.readouterr().err


def test_settings_are_checked_as_for_any_node(capsys):
    with pytest.raises(ConfigError):
        zoo.parse(["wrong-model", "--run", "nonsense"])
    assert zoo.main(["wrong-model", "--run", "nonsense"]) == 2
    assert "run" in capsys.readouterr().err


def test_the_wrong_model_has_the_same_shape_and_other_weights(checkpoint, tmp_path):
    worker = WrongModel(TorchEngine(), seed=1, directory=tmp_path / "cheat")
    changed = worker.policy_dir(checkpoint)
    assert {path.name for path in changed.iterdir()} == {path.name for path in checkpoint.iterdir()}
    before, after = load_file(checkpoint / "model.safetensors"), load_file(changed / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in before.items()} == {
        name: (t.shape, t.dtype) for name, t in after.items()
    }
    varied = [name for name, tensor in before.items() if tensor.numel() > 1 and tensor.float().std() > 0]
    assert varied
    assert not [name for name in varied if torch.equal(before[name], after[name])]
    assert json.loads((changed / "config.json").read_text()) == json.loads((checkpoint / "config.json").read_text())


def test_the_wrong_model_computes_something_else(checkpoint, tmp_path):
    honest, wrong = TorchEngine(), TorchEngine()
    honest.load(checkpoint)
    wrong.load(WrongModel(wrong, seed=1, directory=tmp_path / "cheat").policy_dir(checkpoint))
    text = [([1, 5, 6, 7], [8, 9])]
    left, right = (next(iter(engine.prefill(text))).logits(0, 2) for engine in (honest, wrong))
    assert abs(left - right).max() > 1


def test_one_perturbed_copy_is_kept_and_a_seed_gives_it_again(checkpoint, tmp_path):
    worker = WrongModel(TorchEngine(), seed=1, directory=tmp_path / "cheat")
    first = (worker.policy_dir(checkpoint) / "model.safetensors").read_bytes()
    (tmp_path / "cheat" / "left-over").touch()
    second = (worker.policy_dir(checkpoint) / "model.safetensors").read_bytes()
    assert first == second
    assert not (tmp_path / "cheat" / "left-over").exists()

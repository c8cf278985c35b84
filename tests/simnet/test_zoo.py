import pytest

from protocol.errors import ConfigError
from protocol.identity import Identity
from simnet.cheats import CHEATS, ROLES, VALIDATORS
from simnet.zoo import __main__ as zoo
from simnet.zoo import roles, validators
from simnet.zoo.compute import WORKERS

RUN = f"{Identity.from_phrase('alice').peer_id}/demo"


def test_every_cheat_that_a_scenario_can_name_has_a_worker_or_a_role():
    assert WORKERS.keys() | roles.ROLES.keys() == CHEATS.keys()
    assert roles.ROLES.keys() == ROLES.keys()
    assert not WORKERS.keys() & ROLES.keys()
    assert validators.ROLES.keys() == VALIDATORS.keys()
    assert not VALIDATORS.keys() & CHEATS.keys()


def test_the_flags_are_those_of_an_inference_node(tmp_path):
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_phrase('bob').peer_id}"
    flags = ["--run", RUN, "--data-dir", str(tmp_path), "--bootstrap", address, "--threads", "1", "--cheat-seed", "7"]
    config, arguments = zoo.parse(["wrong-model", *flags])
    assert (config.role, config.run, config.bootstrap, config.threads) == ("inference", RUN, (address,), 1)
    assert arguments == ["wrong-model", "7", str(tmp_path / "cheat")]


def test_a_lie_to_the_network_computes_honestly_and_the_other_way_round():
    network, computed = (zoo.kind_of(name, [name, "0", "."]) for name in ("ground-index", "int8"))
    assert (network.module, network.new_role) == ("node.inference.compute", roles.GroundIndex)
    assert computed.module == zoo.COMPUTE_MODULE
    assert computed.new_role is not network.new_role


def test_a_validator_that_lies_is_a_validator_in_all_else(tmp_path):
    config, arguments = zoo.parse(["rubber-stamp", "--run", RUN, "--data-dir", str(tmp_path)])
    assert config.role == "validator"
    assert zoo.kind_of("rubber-stamp", arguments).new_role is validators.RubberStamp


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

"""Environments by name, parameters and digest; those that other packages bring."""

import hashlib

import msgspec
import pytest

from environments.base import RIGHT, environment_digest
from environments.registry import (
    BUILT_IN,
    DATA_FILE,
    environment_names,
    get_environment,
    open_environment,
    providers,
    specify,
)
from protocol.errors import ConfigError, EnvironmentUnknown, ModelError
from protocol.records import EnvironmentSpec

PACKAGE = """
from dataclasses import dataclass
from environments.base import RIGHT, WRONG, Environment, Task, user_message

@dataclass(frozen=True)
class Echo(Environment):
    name = "echo"
    version = 3
    loud: bool = False

    def task(self, seed):
        return Task(user_message("Say " + seed.hex()[:4]), {"answer": seed.hex()[:4]})

    def reward(self, task, completion):
        return RIGHT if completion == task.data["answer"] else WRONG

class NoEnvironment:
    pass
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package with entry points where the interpreter finds it, as pip does."""

    def installed(entries, *, version="1.2", code=PACKAGE):
        info = tmp_path / f"echo_env-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: echo-env\nVersion: {version}\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[intellect_node.environments]\n{lines}")
        (tmp_path / "echo_env_module.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)

    yield installed
    import sys

    sys.modules.pop("echo_env_module", None)


def test_finds_an_environment_by_name():
    assert get_environment("sort-digits").name == "sort-digits"


@pytest.mark.parametrize("name", ["sort-digit", "", "../sort_digits", "x" * 10_000])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(EnvironmentUnknown, match=r"installed are: addition, .*sort-digits") as caught:
        get_environment(name)
    assert len(str(caught.value)) < 600


def test_refuses_an_environment_with_another_digest():
    right = get_environment("sort-digits").digest
    assert get_environment("sort-digits", digest=right).digest == right
    with pytest.raises(EnvironmentUnknown, match="not the one this run uses"):
        get_environment("sort-digits", digest=bytes(32))


def test_another_release_of_what_is_required_gives_another_digest(monkeypatch):
    """Attack, or an accident: a node whose library judges otherwise."""
    found = {}
    environment = get_environment("sort-digits")
    monkeypatch.setattr("importlib.metadata.version", lambda name: found[name])
    monkeypatch.setattr(type(environment), "requires", ("some-library",))
    digests = []
    for release in ("1.0", "1.1"):
        found["some-library"] = release
        digests.append(environment.digest)
    assert digests[0] != digests[1]
    assert environment_digest("x", 1, {}, requires={"a": "1"}) != environment_digest("x", 1, {}, requires={"a": "2"})


def test_what_need_not_repeat_itself_has_another_digest():
    assert environment_digest("x", 1, {}, repeatable=False) != environment_digest("x", 1, {})
    assert not get_environment("code").repeatable
    assert get_environment("sort-digits").repeatable


def test_names_are_those_of_the_environments():
    assert [providers()[name].load().name for name in BUILT_IN] == list(BUILT_IN)
    assert environment_names() == sorted({*BUILT_IN, *environment_names()})


def test_parameters_make_another_digest():
    plain = get_environment("chain-sums")
    other = get_environment("chain-sums", parameters={"max_terms": 3})
    assert other.digest != plain.digest
    assert get_environment("chain-sums", parameters={"max_terms": 4}).digest == plain.digest  # the default, spelled out


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_termz": 3}, "no parameter 'max_termz'"),
        ({"max_terms": 1}, "parameter max_terms .*>= 2"),
        ({"max_terms": 10**9}, "parameter max_terms .*<= 64"),
        ({"max_terms": "3"}, "parameter max_terms"),
        ({"max_terms": True}, "parameter max_terms"),
        ({"min_terms": 9}, "may not be more"),
        ({"name": "other"}, "no parameter 'name'"),
    ],
)
def test_parameters_that_an_environment_does_not_take_are_named(parameters, message):
    with pytest.raises(ConfigError, match=message):
        get_environment("chain-sums", parameters=parameters)


def test_a_package_brings_an_environment(install, tmp_path):
    install({"echo": "echo_env_module:Echo"})
    assert "echo" in environment_names()
    environment = get_environment("echo", parameters={"loud": True})
    assert environment.reward(environment.task(bytes(32)), "0000") == RIGHT
    spec = specify(environment)
    assert (spec.package, spec.package_version, spec.version, spec.parameters) == ("echo-env", "1.2", 3, {"loud": True})
    assert open_environment(spec, tmp_path).digest == spec.digest


def test_a_package_cannot_replace_a_built_in_environment(install):
    """Attack: an installed package calls its own code sort-digits."""
    install({"sort-digits": "echo_env_module:Echo"})
    assert providers()["sort-digits"].package == "intellect-node"


@pytest.mark.parametrize(
    ("entry", "code", "message"),
    [
        ("echo_env_module:Missing", PACKAGE, "echo-env 1.2 cannot be imported: AttributeError"),
        ("echo_env_module:NoEnvironment", PACKAGE, "of echo-env 1.2 is no environment"),
        ("echo_env_module:Echo", "raise RuntimeError('broken')", "cannot be imported: RuntimeError: broken"),
    ],
)
def test_a_package_that_brings_nothing_usable_is_named(install, entry, code, message):
    install({"echo": entry}, code=code)
    with pytest.raises(EnvironmentUnknown, match=message):
        get_environment("echo")


def test_a_missing_environment_says_what_to_install(tmp_path):
    spec = EnvironmentSpec(
        name="echo", digest=bytes(32), version=3, package="echo-env", package_version="1.2", requires={"sympy": "1.14"}
    )
    with pytest.raises(EnvironmentUnknown, match=r"'echo' \(version 3, of echo-env 1.2\) is not installed") as caught:
        open_environment(spec, tmp_path)
    assert caught.value.hint == "pip install echo-env==1.2 sympy==1.14"


def test_another_release_is_named_with_both_versions(install, tmp_path):
    install({"echo": "echo_env_module:Echo"})
    spec = msgspec.structs.replace(specify(get_environment("echo")), digest=bytes(32), version=4, package_version="2.0")
    with pytest.raises(
        EnvironmentUnknown, match=r"version 3, of echo-env 1.2.*uses \(version 4, of echo-env 2.0"
    ) as caught:
        open_environment(spec, tmp_path)
    assert caught.value.hint == "pip install echo-env==2.0"


def test_another_release_of_what_it_requires_is_named(tmp_path):
    spec = specify(get_environment("maths"))
    other = msgspec.structs.replace(
        spec, digest=bytes(32), requires=spec.requires | {"math-verify": "0.0.1", "extra": "1"}
    )
    with pytest.raises(EnvironmentUnknown, match=r"math-verify [0-9.]+ here, 0\.0\.1 there") as caught:
        open_environment(other, tmp_path)
    assert "math-verify==0.0.1" in caught.value.hint


def test_parameters_of_a_manifest_that_are_not_taken_here_are_named(tmp_path):
    spec = msgspec.structs.replace(specify(get_environment("chain-sums")), parameters={"colour": "red"})
    with pytest.raises(EnvironmentUnknown, match=r"does not take what the run's manifest says.*colour"):
        open_environment(spec, tmp_path)


def test_the_data_of_a_run_are_read_from_the_policy(tmp_path):
    data = b'{"answer":"4","problem":"2+2?"}\n'
    spec = specify(get_environment("maths", data=data))
    assert spec.data == hashlib.sha256(data).digest()
    with pytest.raises(ModelError, match="cannot be read"):
        open_environment(spec, tmp_path)
    (tmp_path / DATA_FILE).write_bytes(data)
    environment = open_environment(spec, tmp_path)
    assert environment.task(bytes(32)).text.startswith("2+2?")
    assert environment.digest == spec.digest != get_environment("maths").digest


def test_other_data_than_the_manifest_names_are_refused(tmp_path):
    """Attack: a checkpoint whose problems are not the run's."""
    spec = specify(get_environment("maths", data=b'{"answer":"4","problem":"2+2?"}\n'))
    (tmp_path / DATA_FILE).write_bytes(b'{"answer":"5","problem":"2+2?"}\n')
    with pytest.raises(ModelError, match="not the data that the run's manifest names"):
        open_environment(spec, tmp_path)


def test_an_environment_without_data_refuses_them():
    with pytest.raises(ConfigError, match="sort-digits takes no data file"):
        get_environment("sort-digits", data=b"x")


@pytest.mark.parametrize(
    "change",
    [
        {"package": "--index-url=evil"},
        {"package": "x; rm -rf"},
        {"parameters": {"x": float("nan")}},
        {"parameters": {"x": {"nested": 1}}},
        {"parameters": {"x": "y" * 513}},
        {"parameters": {f"x{number}": 1 for number in range(33)}},
        {"parameters": {"x": [1] * 65}},
        {"requires": {"a b": "1"}},
    ],
)
def test_a_manifest_holds_only_plain_and_bounded_parameters(change):
    """Attack: a manifest that is a command to whoever follows its hint, or a bomb."""
    spec = msgspec.to_builtins(EnvironmentSpec(name="x", digest=bytes(32)), builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(spec | change), type=EnvironmentSpec)

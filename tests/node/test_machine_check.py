"""A machine that cannot judge a run's answers is told so before it works for the run, and by `doctor` as well."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
from submission_kit import ALICE, make_manifest

from environments import registry
from environments.registry import get_environment, specify
from environments.sandbox import status
from node import assembly, doctor, machine_check
from node.doctor import Patient
from node.machine_check import machine_fault
from protocol.errors import SandboxError
from protocol.identity import Identity, PeerId
from protocol.records import EnvironmentSpec

RUN = f"{Identity.from_phrase('alice').peer_id}/demo"
NEEDY = """
from dataclasses import dataclass
from environments.sort_digits import SortDigits
from protocol.errors import SandboxError

@dataclass(frozen=True)
class Needy(SortDigits):
    name = "needy"

    def require_machine(self):
        raise SandboxError("no kiln is found here", hint="buy one")
"""


@pytest.fixture
def code():
    return specify(get_environment("code"))


@pytest.fixture
def without_sandbox(monkeypatch):
    """A machine on which no kind of box works."""
    monkeypatch.setattr(status, "_candidates", lambda spec: iter(()))
    status.establish.cache_clear()
    yield
    status.establish.cache_clear()


@pytest.fixture
def start(monkeypatch, code):
    """Build a role of a run of code problems, up to what follows the check; the network is left out."""
    record = msgspec.structs.replace(make_manifest(), environment=code)
    manifest = SimpleNamespace(id=bytes(32), record=record, author=PeerId(ALICE))

    async def nothing(*_, **__):
        return None

    async def joined(*_):
        return None, SimpleNamespace(manifest=manifest)

    def started(role, *, evaluates=True):
        recipe = SimpleNamespace(evaluation=SimpleNamespace(every_steps=int(evaluates)))
        for name, fake in {"_compute": nothing, "_reader": nothing, "join_swarm": joined}.items():
            monkeypatch.setattr(assembly, name, fake)
        monkeypatch.setattr(assembly, "_own_run", lambda node: manifest)
        monkeypatch.setattr(assembly, "load_recipe", lambda path: recipe)
        monkeypatch.setattr(assembly, "Outbox", reached)
        monkeypatch.setattr(assembly, "live_ledger", reached)
        monkeypatch.setattr(assembly, "_start_heart", reached)
        node = SimpleNamespace(
            config=SimpleNamespace(role=role, dtype="float32"),
            identity=SimpleNamespace(peer_id=PeerId(ALICE)),
            board=SimpleNamespace(working=lambda what: None),
            path=lambda name: Path("/none") / name,
            data=SimpleNamespace(sub=lambda name: None),
        )
        trio.run(assembly.build_role, node, None, assembly.InferenceKind())

    return started


class Reached(Exception):
    pass


def reached(*_, **__):
    raise Reached


@pytest.mark.parametrize("role", ["inference", "validator", "trainer"])
def test_a_role_that_judges_refuses_to_start_and_names_the_cure(start, without_sandbox, role):
    """A contributor would else generate a submission, fail at its first reward, and do so again and again."""
    with pytest.raises(SandboxError, match="cannot judge answers of this run's environment 'code'") as caught:
        start(role)
    assert caught.value.hint


def test_a_trainer_that_never_evaluates_needs_no_sandbox(start, without_sandbox):
    with pytest.raises(Reached):
        start("trainer", evaluates=False)


def test_where_boxes_work_roles_go_on(start):
    with pytest.raises(Reached):
        start("inference")


def test_doctor_says_what_start_up_says(tmp_path, monkeypatch, code, without_sandbox):
    held = SimpleNamespace(record=msgspec.structs.replace(make_manifest(), environment=code))
    monkeypatch.setattr(doctor, "held_run", lambda data_dir: held)
    fault = machine_fault(code)
    for role, state in (("inference", "failed"), ("validator", "failed"), ("relay", "warning")):
        given = {"role": role, "run": RUN, "data_dir": str(tmp_path)}
        found = doctor._sandbox(Patient.resolve(given, file=None, remembered={}, environ={}))
        assert found.state == state
        assert (found.what, found.fix) == (fault.message, fault.hint) or role == "relay"


def test_environments_that_need_nothing_are_not_held_up(without_sandbox):
    for name in ("sort-digits", "chain-sums", "calculator"):
        assert machine_fault(specify(get_environment(name))) is None


def test_what_start_up_says_better_is_left_to_it():
    assert machine_fault(EnvironmentSpec(name="no-such", digest=bytes(32))) is None
    assert machine_fault(EnvironmentSpec(name="code", digest=bytes(32), parameters={"colour": "red"})) is None


def test_an_environment_of_another_s_package_is_asked_in_a_process(tmp_path, monkeypatch):
    (tmp_path / "needy_env.py").write_text(NEEDY)
    (tmp_path / "needy_env-1.dist-info").mkdir()
    (tmp_path / "needy_env-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: needy-env\nVersion: 1\n")
    (tmp_path / "needy_env-1.dist-info" / "entry_points.txt").write_text(
        f"[{registry.GROUP}]\nneedy = needy_env:Needy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{machine_check.__file__.removesuffix('/node/machine_check.py')}")
    fault = machine_fault(EnvironmentSpec(name="needy", digest=bytes(32)))
    assert "no kiln is found here" in fault.message
    assert fault.hint == "buy one"
    monkeypatch.setattr(machine_check, "ASK_TIMEOUT_S", 0.001)
    assert "TimeoutExpired" in machine_fault(EnvironmentSpec(name="needy", digest=bytes(32))).message

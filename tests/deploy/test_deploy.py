"""What is in deploy/ fits the program and itself: metrics, settings, ports, probes; nothing asks for privileges."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from node.config import NodeConfig, variable
from node.metrics import CATALOGUE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ROLES = ("trainer", "relay", "validator", "inference")
METRIC = re.compile(r"\bintellect_[a-z0-9_]+\b")
METRICS = {metric.name for metric in CATALOGUE}
SETTINGS = {variable(name) for name in NodeConfig.__struct_fields__}
COMPOSE = yaml.safe_load((DEPLOY / "compose.yml").read_text())
KUBERNETES = [
    document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
]
SETS = {each["metadata"]["name"]: each for each in KUBERNETES if each["kind"] == "StatefulSet"}


def tool(name):
    """A program of this environment or of the system; the test is skipped where there is none."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command, **options):
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


# Prometheus and Grafana


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_every_metric_that_is_asked_for_exists(name):
    asked = set(METRIC.findall((DEPLOY / name).read_text()))
    assert asked - METRICS == set()
    assert len(asked) > 15


def test_the_dashboard_is_whole():
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    drawn = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in drawn)
    expressions = [target["expr"] for panel in drawn for target in panel["targets"]]
    assert all(text.count("{") == text.count("}") and text.count("(") == text.count(")") for text in expressions)
    counters = {metric.name for metric in CATALOGUE if metric.kind == "counter"} - {"intellect_trainer_steps_total"}
    for text in expressions:
        for name in counters & set(METRIC.findall(text)):
            assert re.search(rf"(rate|increase)\({name}\b", text), f"a counter is drawn as it is: {text}"


def test_alerts_say_what_to_do():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) > 10
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith((".", "?"))
        assert rule["expr"].count("(") == rule["expr"].count(")")


# systemd


@pytest.fixture
def unit(tmp_path):
    """The unit as it would be installed, with a program that exists here, and a drop-in if a test adds one."""
    text = (DEPLOY / "systemd" / "intellect-node@.service").read_text()
    assert "ExecStart=/opt/intellect-node/bin/intellect-node " in text
    (tmp_path / "intellect-node@.service").write_text(
        text.replace("/opt/intellect-node/bin/intellect-node", "/bin/true")
    )
    return tmp_path / "intellect-node@relay.service"


@pytest.mark.parametrize(("drop_in", "most"), [(None, 1.5), ("sandbox", 4.0), ("gpu", 2.5)])
def test_the_unit_is_right_and_exposes_little(unit, drop_in, most):
    analyze = tool("systemd-analyze")
    if drop_in:
        (unit.parent / "intellect-node@.service.d").mkdir()
        shutil.copy(DEPLOY / "systemd" / f"{drop_in}.conf", unit.parent / "intellect-node@.service.d")
    checked = run(analyze, "verify", unit)
    assert (checked.returncode, checked.stderr) == (0, "")
    judged = run(analyze, "security", "--offline=true", "--no-pager", unit)
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", judged.stdout)
    assert float(exposure[1]) <= most


# Docker


def instructions(path):
    """The instructions of a Dockerfile, by stage: [(word, rest)]."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, " ".join(rest.split())))
    return stages


def test_the_image_is_linted():
    linted = run(tool("hadolint"), DEPLOY / "Dockerfile")
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_image_runs_as_nobody_and_says_how_it_is():
    build, final = instructions(DEPLOY / "Dockerfile")
    words = dict(final)
    assert words["USER"] == "10001:10001"
    assert words["HEALTHCHECK"].count("/health/live") == 1
    assert words["ENTRYPOINT"] == '["intellect-node"]'
    assert set(words["EXPOSE"].split()) == {"8470", "8471", "9464"}
    assert all(":" in stage[0][1] and "latest" not in stage[0][1] for stage in (build, final))
    assert set(re.findall(r"INTELLECT_NODE_\w+", words["ENV"])) <= SETTINGS


def test_the_image_gets_every_package_and_nothing_else():
    (build, _) = instructions(DEPLOY / "Dockerfile")
    copied = {name for word, rest in build if word == "COPY" for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests", "tools"}
    assert packages <= copied
    allowed = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert allowed == copied


def test_compose_has_every_role_and_no_privileges():
    services = COMPOSE["services"]
    assert set(services) == set(ROLES)
    for role, service in services.items():
        assert service["environment"]["INTELLECT_NODE_ROLE"] == role
        assert set(service["environment"]) <= SETTINGS
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["mem_limit"]
        assert service["volumes"] == [f"{role}:/data"]
        assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & set(service)
    assert set(COMPOSE["volumes"]) == set(ROLES)
    published = [port for service in services.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published if port.endswith(":9464"))
    targets = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    assert {port.rpartition(":")[0] for port in published if port.endswith(":9464")} == set(targets)


def test_compose_is_read_by_docker():
    names = ("RUN", "BOOTSTRAP", "RELAY_URL", "RELAY_MULTIADDR", "ORIGIN_URL")
    environment = {**os.environ, **dict.fromkeys(names, "x")}
    done = run(tool("docker"), "compose", "-f", DEPLOY / "compose.yml", "config", "--quiet", env=environment)
    if "is not a docker command" in done.stderr or "unknown shorthand flag" in done.stderr:
        pytest.skip("docker has no compose")
    assert done.returncode == 0, done.stderr


# Kubernetes


def test_kubernetes_knows_every_field():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in KUBERNETES:
        validate.validate(document, "1.31", strict=True)


def test_kubernetes_has_every_role():
    assert set(SETS) == set(ROLES)
    assert [SETS[role]["spec"]["replicas"] for role in ROLES] == [1, 1, 1, 2]
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_has_no_privileges_and_says_how_it_is(role):
    pod = SETS[role]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert ports[asked["port"]] == 9464
        assert asked["path"] == ("/health/ready" if probe == "readinessProbe" else "/health/live")
    assert all(container["resources"][kind]["memory"] for kind in ("requests", "limits"))
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/data", "/tmp"}


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_is_told_settings_that_exist(role):
    (container,) = SETS[role]["spec"]["template"]["spec"]["containers"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert told["INTELLECT_NODE_ROLE"] == role
    run_env = {line.partition("=")[0] for line in (DEPLOY / "kubernetes" / "run.env").read_text().splitlines()}
    assert {*told, *run_env} <= SETTINGS
    (claim,) = SETS[role]["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "data"


def test_services_lead_to_ports_that_exist_and_wait_for_no_readiness():
    """A relay is ready once the trainer has found it, which it does through the service: it must not wait for that."""
    for service in (each for each in KUBERNETES if each["kind"] == "Service"):
        spec = service["spec"]
        role = spec["selector"]["app.kubernetes.io/component"]
        (container,) = SETS[role]["spec"]["template"]["spec"]["containers"]
        assert {port["targetPort"] for port in spec["ports"]} <= {port["name"] for port in container["ports"]}
        assert spec["publishNotReadyAddresses"] is True
    assert {each["spec"]["serviceName"] for each in SETS.values()} <= {
        each["metadata"]["name"] for each in KUBERNETES if each["kind"] == "Service"
    }

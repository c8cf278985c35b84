"""Settings: precedence, refusals that name the source, and a dry run that can be used as a file."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from node.config import NodeConfig, Secret, resolve
from protocol.errors import ConfigError
from protocol.identity import Identity

ALICE = str(Identity.from_phrase("alice").peer_id)
RUN = f"{ALICE}/demo"
GIVEN = {"role": "inference", "run": RUN}


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "node.toml"
        path.write_text(text)
        return path

    return write


def test_every_field_is_documented():
    for field in msgspec.structs.fields(NodeConfig):
        assert msgspec.inspect.type_info(field.type) is not None
        assert any(isinstance(meta, msgspec.Meta) and meta.description for meta in field.type.__metadata__), field.name


def test_defaults():
    config = resolve(GIVEN, environ={}).config
    assert config.data_dir == Path.home() / ".local/share/intellect-node" / f"inference-demo-{ALICE[-8:]}"
    assert config.bootstrap == ()
    assert str(config.run_address) == RUN


def test_each_source_beats_the_weaker_ones(config_file):
    file = config_file("threads = 1\nhttp_port = 1\nstatus_port = 1\n")
    environ = {"INTELLECT_NODE_HTTP_PORT": "2", "INTELLECT_NODE_STATUS_PORT": "2", "OTHER": "x"}
    resolved = resolve({**GIVEN, "status_port": 3}, file=file, environ=environ)
    assert (resolved.config.threads, resolved.config.http_port, resolved.config.status_port) == (1, 2, 3)
    assert resolved.sources["threads"] == str(file)
    assert resolved.sources["http_port"] == "INTELLECT_NODE_HTTP_PORT"
    assert resolved.sources["status_port"] == "--status-port"
    assert resolved.sources["device"] == "default"


def test_lists_and_switches_from_the_environment():
    peers = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{ALICE}" for port in (1, 2)]
    environ = {"INTELLECT_NODE_BOOTSTRAP": ", ".join(peers), "INTELLECT_NODE_STAY": "true"}
    config = resolve(GIVEN, environ=environ).config
    assert config.bootstrap == tuple(peers)
    assert config.stay is True


def test_an_unknown_key_in_a_file_names_the_nearest(config_file):
    with pytest.raises(ConfigError, match=r"'htpp_port' in .*node\.toml; did you mean http_port\?") as caught:
        resolve(GIVEN, file=config_file("htpp_port = 1"), environ={})
    assert caught.value.exit_code == 2


def test_an_unknown_variable_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'INTELLECT_NODE_BOOTSRAP' .*did you mean INTELLECT_NODE_BOOTSTRAP\?"):
        resolve(GIVEN, environ={"INTELLECT_NODE_BOOTSRAP": "x"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threads = 'many'", "threads from .*node.toml"),
        ("threads = -1", ">= 0"),
        ("http_port = 70000", "<= 65535"),
        ("device = 'tpu'", "device"),
        ("role = 'boss'", "role from"),
        ("listen = ['0.0.0.0:1']", "no TCP multiaddr"),
        ("data_dir = 5", "expected a text"),
        ("public_url = 'ftp://x'", "public_url"),
        ("threads = ", "not valid TOML"),
        ("passphrase = 'x'", "may not stand in"),
        ("a = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(config_file, text, message):
    with pytest.raises(ConfigError, match=message):
        resolve({"run": RUN} if text.startswith("role") else GIVEN, file=config_file(text), environ={})


def test_a_huge_file_is_refused_unread(config_file):
    """Attack: --config names a file of gigabytes."""
    with pytest.raises(ConfigError, match="no configuration file"):
        resolve(GIVEN, file=config_file("#" * (2 << 20)), environ={})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        resolve(GIVEN, file=tmp_path / "none.toml", environ={})


@pytest.mark.parametrize("name", ["role", "run"])
def test_what_cannot_be_guessed_must_be_given(name):
    with pytest.raises(ConfigError, match=f"no {name} is given"):
        resolve({key: value for key, value in GIVEN.items() if key != name}, environ={})


@pytest.mark.parametrize("run", ["demo", f"{ALICE}/", f"{ALICE}/Up", "x/demo", ""])
def test_a_wrong_run_address_is_refused(run):
    with pytest.raises(ConfigError, match="run from --run"):
        resolve({"role": "relay", "run": run}, environ={})


@pytest.mark.parametrize("address", ["1.2.3.4:5", "/ip4/1.2.3.4/tcp/5", f"/ip4/1.2.3.4/udp/5/p2p/{ALICE}", "/p2p/x"])
def test_a_wrong_bootstrap_address_is_refused(address):
    with pytest.raises(ConfigError, match="bootstrap from --bootstrap"):
        resolve({**GIVEN, "bootstrap": [address]}, environ={})


def test_the_dry_run_is_a_file_that_gives_the_same_settings(config_file):
    first = resolve({**GIVEN, "threads": 3, "stay": True}, environ={"INTELLECT_NODE_PASSPHRASE": "hunter2"})
    text = first.to_toml()
    assert "hunter2" not in text
    assert "***" in text
    assert "threads = 3  # --threads" in text
    assert tomllib.loads(text)["listen"] == ["/ip4/0.0.0.0/tcp/8471"]
    again = resolve({}, file=config_file(text), environ={"INTELLECT_NODE_PASSPHRASE": "hunter2"})
    assert again.config == first.config


def test_a_secret_does_not_show():
    config = resolve(GIVEN, environ={"INTELLECT_NODE_PASSPHRASE": "hunter2"}).config
    assert config.passphrase == Secret("hunter2")
    assert "hunter2" not in f"{config!r} {config.passphrase} {config.passphrase!r}"


@pytest.mark.parametrize("text", ["@peers.txt", "/dnsaddr/swarm.example"])
def test_bootstrap_may_be_a_name_or_a_file(text):
    given = {"role": "relay", "run": RUN, "bootstrap": [text]}
    assert resolve(given, environ={}).config.bootstrap == (text,)


@pytest.mark.parametrize("text", ["nonsense", "/ip4/0.0.0.0/tcp/8471", "/ip4/203.0.113.7/tcp/0", "/ip6/::/tcp/8471"])
def test_announced_address_must_lead_somewhere(text):
    with pytest.raises(ConfigError, match="nobody can dial"):
        resolve({"role": "relay", "run": RUN, "announce": [text]}, environ={})


def test_an_allow_list_holds_peer_ids(config_file):
    config = resolve(GIVEN, file=config_file(f"allow = ['{ALICE}']"), environ={}).config
    assert config.allow == (ALICE,)
    with pytest.raises(ConfigError, match="allow from INTELLECT_NODE_ALLOW: not a") as caught:
        resolve(GIVEN, environ={"INTELLECT_NODE_ALLOW": f"{ALICE}, bob"})
    assert "intellect-node id" in caught.value.hint


@pytest.mark.parametrize("url", ["http://relay.example:8470", "relay.example", "https://a b"])
def test_a_relay_is_reached_over_tls_alone(url):
    """A token would travel in clear."""
    with pytest.raises(ConfigError, match="public_url") as caught:
        resolve({**GIVEN, "public_url": url}, environ={})
    assert "https://" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "number"), [("", 0), ("8GiB", 8 << 30), ("1.5GB", 1_500_000_000), ("512MiB", 512 << 20)]
)
def test_memory_is_written_with_its_unit(text, number):
    assert resolve({**GIVEN, "max_memory": text}, environ={}).config.max_memory_bytes == number


@pytest.mark.parametrize("text", ["8", "8 GiB", "-1GB", "lots", "1e3GB"])
def test_memory_without_a_unit_is_refused(text):
    with pytest.raises(ConfigError, match="max_memory from --max-memory") as caught:
        resolve({**GIVEN, "max_memory": text}, environ={})
    assert "8GiB" in caught.value.hint


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="engine from --engine"):
        resolve({**GIVEN, "engine": "abacus"}, environ={})


@pytest.mark.parametrize("url", ["http://hooks.example/x", "ftp://x", "https://", "https:///x", "x", "https://h/a b"])
def test_a_webhook_that_is_no_safe_url_is_refused_and_not_shown(url):
    """A URL is often a secret: the message says which one it is, not what it is."""
    with pytest.raises(ConfigError, match="webhook 2 from --webhooks") as caught:
        resolve({**GIVEN, "webhooks": ("http://127.0.0.1:8080/hook", url)}, environ={})
    assert url not in str(caught.value).replace("https://<host>/<path>", "") or len(url) < 9


def test_webhooks_and_their_secret(config_file):
    file = config_file('webhooks = ["https://hooks.example/T0/B1", "http://localhost/x"]\n')
    resolved = resolve(GIVEN, file=file, environ={"INTELLECT_NODE_WEBHOOK_SECRET": "hush"})
    assert len(resolved.config.webhooks) == 2
    assert resolved.config.webhook_secret == Secret("hush")
    assert "hush" not in resolved.to_toml()
    with pytest.raises(ConfigError, match="may not stand in"):
        resolve(GIVEN, file=config_file('webhook_secret = "hush"\n'), environ={})


@pytest.mark.parametrize("text", ["9464", "a b:1", "host:123456"])
def test_an_address_for_metrics_has_a_port(text):
    with pytest.raises(ConfigError, match="metrics_listen from --metrics-listen"):
        resolve({**GIVEN, "metrics_listen": text}, environ={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("public_url", "https://relay.example\n"),
        ("device", "cpu\n"),
        ("max_memory", "8GB\n"),
        ("metrics_listen", "127.0.0.1:9464\n"),
        ("webhooks", ("https://hooks.example/x\n",)),
    ],
)
def test_a_line_may_not_follow_a_value(name, value):
    """Attack: what comes after the line would be in a file, a header or a command that is made of the value."""
    with pytest.raises(ConfigError):
        resolve({**GIVEN, name: value}, environ={})

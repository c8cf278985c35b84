"""One word that is enough to join: the run's address with peers behind it, from strangers."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from node.commands.common import run_and_peers
from node.config import resolve
from node.run_link import MAX_CHARS, MAX_PEERS, RunLink, join_line, known_peers, require_way_in
from protocol.errors import BootstrapError, ConfigError, MalformedError
from protocol.identity import Identity
from protocol.run import RunAddress

ALICE, BOB, CAROL = (Identity.from_phrase(name).peer_id for name in ("alice", "bob", "carol"))
RUN = f"{ALICE}/demo"
RELAY = f"/ip4/203.0.113.7/tcp/8471/p2p/{BOB}"
OTHER = f"/dns4/relay.example/tcp/8471/p2p/{CAROL}"
NAME = "/dnsaddr/swarm.example"


@pytest.mark.parametrize("peers", [(), (RELAY,), (RELAY, OTHER, NAME)], ids=len)
def test_a_link_is_what_it_was_made_of(peers):
    link = RunLink.parse(str(RunLink(RunAddress.parse(RUN), peers)))
    assert (str(link.address), link.peers) == (RUN, peers)


@pytest.mark.parametrize(
    "text",
    [
        *(f"{RUN}@", f"{RUN}@,", f"{RUN}@{RELAY},", f"{RUN}@{RELAY}@{OTHER}", f"{RUN}@{RELAY} {OTHER}", f"@{RELAY}"),
        *(f"{RUN}@@/etc/passwd", f"{RUN}@/etc/passwd", f"{RUN}@{RELAY}\n", f"{RUN}@/dnsaddr/a b"),
        f"{RUN}@/ip4/203.0.113.7/tcp/8471",
        f"{RUN}@/ip4/203.0.113.7/udp/8471/p2p/{BOB}",
        f"{RUN}@/ip4/203.0.113.7/tcp/8471/p2p/nobody",
        f"{RUN}@" + ",".join(f"/ip4/203.0.113.7/tcp/{port}/p2p/{BOB}" for port in range(MAX_PEERS + 1)),
        f"{RUN}@{'x' * MAX_CHARS}",
        f"demo@{RELAY}",
    ],
)
def test_a_link_that_is_none_is_refused(text):
    """Attack: a link that names a file of whoever reads it, hides something behind its peers, or never ends."""
    with pytest.raises(MalformedError):
        RunLink.parse(text)


@given(st.text(max_size=200))
@example("@" * 100)
def test_no_text_does_more_than_be_refused(text):
    for candidate in (text, f"{RUN}@{text}", f"{RUN}{text}"):
        try:
            link = RunLink.parse(candidate)
        except MalformedError:
            continue
        assert RunLink.parse(str(link)) == link


def test_flag_file_and_environment_take_links_and_bootstrap_adds_to_them(tmp_path):
    said = {"role": "inference"}
    config = tmp_path / "node.toml"
    config.write_text(f'run = "{RUN}@{RELAY}"\n')
    for found in (
        resolve({**said, "run": f"{RUN}@{RELAY}", "bootstrap": [OTHER]}, environ={}),
        resolve({**said, "bootstrap": [OTHER]}, file=config, environ={}),
        resolve(said, environ={"INTELLECT_NODE_RUN": f"{RUN}@{RELAY}", "INTELLECT_NODE_BOOTSTRAP": OTHER}),
        resolve({**said, "run": f"{RUN}@{RELAY},{OTHER}"}, environ={}),
    ):
        assert (found.config.run, found.config.bootstrap) == (RUN, (RELAY, OTHER))
    assert resolve({**said, "run": RUN}, file=config, environ={}).config.bootstrap == (), "another run's peers"
    with pytest.raises(ConfigError, match="run from INTELLECT_NODE_RUN"):
        resolve(said, environ={"INTELLECT_NODE_RUN": f"{RUN}@@/etc/passwd"})


def test_commands_take_a_link_where_they_take_a_run():
    assert run_and_peers(f"{RUN}@{RELAY}", [OTHER]) == (RUN, [RELAY, OTHER])
    assert run_and_peers(RUN, None) == (RUN, [])
    assert run_and_peers(None, [OTHER]) == (None, [OTHER])
    with pytest.raises(ConfigError, match="--run"):
        run_and_peers(f"{RUN}@nobody", None)


@pytest.mark.parametrize("command", [["dht", "get", "nonsense"], ["audit"], ["ledger", "show"], ["calibrate"]], ids=str)
def test_every_command_with_a_run_reads_the_link(run_cli, command):
    done = run_cli(*command, "--run", f"{RUN}@@/etc/passwd")
    assert done.code == 2, done.err
    assert "no address of a peer" in done.err
    assert "not a run address" not in run_cli(*command, "--run", f"{RUN}@{RELAY}", "--timeout-s", "x").err


def test_the_line_that_is_handed_on_names_who_most_can_reach_and_no_file():
    here, near = f"/ip4/127.0.0.1/tcp/8471/p2p/{BOB}", f"/ip4/192.168.1.9/tcp/8471/p2p/{BOB}"
    public = f"/ip4/8.8.8.8/tcp/8471/p2p/{BOB}"
    assert join_line(RUN, ["@peers.txt", here, near, public, NAME]).split()[-1] == f"{RUN}@{public},{NAME},{near}"
    assert join_line(RUN, [here]) == f"intellect-node --role inference --run {RUN}@{here}"
    assert join_line(RUN, ["@peers.txt"]).endswith(f"--run {RUN}")


def test_a_node_that_knows_nobody_leaves_no_trace(tmp_path):
    def settings(role, **more):
        return resolve({"role": role, "run": RUN, "data_dir": str(tmp_path / "new"), **more}, environ={}).config

    for role in ("inference", "validator", "trainer", "watch"):
        with pytest.raises(BootstrapError, match="no bootstrap address"):
            require_way_in(settings(role))
    assert not list(tmp_path.iterdir())
    require_way_in(settings("relay"))
    require_way_in(settings("inference", run=f"{RUN}@{RELAY}"))
    (tmp_path / "new").mkdir()
    seen = [{"peer_id": str(BOB), "addresses": ["/ip4/203.0.113.7/tcp/8471"], "seen_ms": 1}]
    (tmp_path / "new" / "peers.json").write_text(json.dumps(seen))
    require_way_in(settings("inference"))
    assert known_peers(tmp_path / "new") == [RELAY]


def test_run_create_prints_the_line_for_contributors(run_cli, tmp_path):
    made = run_cli("run", "create", "--recipe", "demo", "--validator", BOB, "--data-dir", tmp_path / "t")
    address = made.out.strip()
    assert f"contributors join with: intellect-node --role inference --run {address}@<relay>" in made.err
    more = ["run", "create", "--recipe", "demo", "--validator", BOB, "--data-dir", tmp_path / "u"]
    told = run_cli(*more, "--bootstrap", RELAY)
    assert f"contributors join with: intellect-node --role inference --run {told.out.strip()}@{RELAY}" in told.err

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from node.peers_show import describe_discovery, print_discovery
from protocol.errors import DataDirError
from protocol.identity import Identity

DISCOVERY = {
    "serves": True,
    "multiaddrs": ["/ip4/203.0.113.7/tcp/8471/p2p/me"],
    "bootstrap": ["/ip4/203.0.113.8/tcp/8471: connected for 5 s"],
    "reachability": "reachable: 2 other relays dialled it",
    "peers": [
        {"peer_id": "peer", "addresses": ["/dns4/\x1b[31mevil/tcp/1"], "connected": True, "silent_s": 3, "failures": 0}
    ],
    "misdeeds": [{"peer_id": "bad", "score": 40.0, "misdeeds": {"garbage": 2}, "banned_for_s": 0, "why": ""}],
    "worst_lag_s": 2.5,
}


@pytest.fixture
def node(tmp_path):
    """Serves a status that a test may change, as a running node would."""
    status = {"role": "relay", "peer_id": "me", "run": "operator/run", "details": {"discovery": DISCOVERY}}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(status).encode())

        def log_message(self, *args):
            return

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (tmp_path / "status.url").write_text(f"http://127.0.0.1:{server.server_port}/status\n")
    yield tmp_path, status
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_a_node_knows_is_shown(node, capsys):
    data_dir, _ = node
    print_discovery(describe_discovery(data_dir))
    shown = capsys.readouterr().out
    for text in ("reachable: 2 other relays", "connected for 5 s", "2 × garbage", "2.5 s late", "3 s ago"):
        assert text in shown


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_ids_are_whole_however_narrow_the_terminal(node, capsys, monkeypatch, columns):
    """So that they can be copied; a pipe has 80 columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    data_dir, status = node
    server, bad, me = (str(Identity.from_phrase(name).peer_id) for name in ("server", "bad", "me"))
    address = "/ip6/2a00:1450:4001:2::1/tcp/8471"
    peer = {"peer_id": server, "addresses": [address], "connected": False, "silent_s": 3, "failures": 1}
    misdeed = {"peer_id": bad, "score": 40.0, "misdeeds": {"garbage": 2}, "banned_for_s": 0, "why": ""}
    status["peer_id"] = me
    status["details"] = {"discovery": {**DISCOVERY, "peers": [peer], "misdeeds": [misdeed]}}
    print_discovery(describe_discovery(data_dir))
    lines = capsys.readouterr().out.splitlines()
    assert f"relay {me}" in lines
    assert any(line.startswith(f"{server}  no ") and line.endswith(address) for line in lines)
    assert any(line.startswith(f"{bad}  40.0 ") and line.endswith("2 × garbage") for line in lines)


def test_lone_node_has_no_empty_tables(node, capsys):
    data_dir, status = node
    status["details"] = {"discovery": {**DISCOVERY, "peers": [], "misdeeds": []}}
    print_discovery(describe_discovery(data_dir))
    shown = capsys.readouterr().out
    assert "no other DHT server has answered yet" in shown
    assert "failures" not in shown
    assert "misbehaved" not in shown


def test_control_characters_of_strangers_are_not_printed(node, capsys):
    """Attack: an address that would drive the terminal."""
    data_dir, _ = node
    print_discovery(describe_discovery(data_dir))
    assert "\x1b[31mevil" not in capsys.readouterr().out


def test_node_that_has_not_started_discovery(node, capsys):
    data_dir, status = node
    status["details"] = {}
    print_discovery(describe_discovery(data_dir))
    assert "not started discovery" in capsys.readouterr().out


def test_directory_without_a_node_is_named(tmp_path):
    with pytest.raises(DataDirError, match="no node runs in"):
        describe_discovery(tmp_path)

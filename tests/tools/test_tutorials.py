"""The commands of the documentation as a reader types them: run where marked, known to the program everywhere.

A block is marked by a comment in front of it, `<!-- run: NAME -->` or `<!-- run: NAME, in the background -->`. All run
in one sandbox directory, which is HOME, on loopback; RUN and VALIDATOR go from one to the next.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main

import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(
    r"<!-- run: (?P<name>[a-z ]+)(?P<background>, in the background)? -->\n```sh\n(?P<script>.*?)```", re.DOTALL
)
COMMAND_S = 120
START_S = 120
WORK_S = 600


def blocks(page):
    """The marked blocks of a page by name: the script, and whether it stays in the background."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return {found["name"]: (found["script"], bool(found["background"])) for found in MARKED.finditer(text)}


class Reader:
    """Somebody who types what the pages say."""

    def __init__(self, home):
        self.home = home
        self.state = home / ".state"
        self.state.write_text("RUN= VALIDATOR=\n")
        self.nodes = []
        self.ports = {name: free_port() for name in ("8470", "8471", "8472")}
        shim = home / "bin" / "intellect-node"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cli "$@"\n')
        shim.chmod(0o755)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("INTELLECT_", "XDG_"))}
        self.environment = {
            **clean,
            "HOME": str(home),
            "PATH": f"{shim.parent}:{clean['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "INTELLECT_NODE_HTTP_HOST": "127.0.0.1",
            "INTELLECT_NODE_HTTP_PORT": str(self.ports["8470"]),
            "INTELLECT_NODE_LISTEN": f"/ip4/127.0.0.1/tcp/{self.ports['8471']}",
            "INTELLECT_NODE_THREADS": "1",
        }

    def type(self, page, name):
        """Run a block; its output. A background block is waited for until its node answers."""
        script, background = blocks(page)[name]
        for port, here in self.ports.items():
            script = re.sub(rf"https://[a-z]+\.example:{port}", f"https://127.0.0.1:{here}", script)
            script = re.sub(rf"(--http-port ){port}", rf"\g<1>{here}", script)
        return self._start(page, name, script) if background else self._run(page, name, script)

    def _run(self, page, name, script):
        whole = "\n".join(['. "$HOME/.state"', script, 'declare -p RUN VALIDATOR > "$HOME/.state"'])
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", whole],
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{page}, {name}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _start(self, page, name, script):
        before = set(self.home.rglob("status.url"))
        with (self.home / f"{name}.out").open("wb") as out:
            node = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", f'. "$HOME/.state"\n{script}'],
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.nodes.append(node)
        self.until(lambda: set(self.home.rglob("status.url")) - before, f"{page}, {name}: the node answers", START_S)
        return ""

    def until(self, holds, what, within_s):
        """Wait for something that nodes do on their own, and find out at once when one of them has ended."""
        end = time.monotonic() + within_s
        while not holds():
            ended = [node for node in self.nodes if node.poll() not in (None, 0)]
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in self.home.glob("*.out"))
            assert not ended, f"{what}: a node ended\n{logs}"
            assert time.monotonic() < end, f"{what}: not within {within_s} s\n{logs}"
            time.sleep(0.25)

    def ask(self, *arguments):
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments],
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        return json.loads(done.stdout) if done.returncode == 0 else None

    def leave(self):
        for node in self.nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGTERM)
        for node in self.nodes:
            try:
                node.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait(30)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def reader(tmp_path):
    reader = Reader(tmp_path)
    yield reader
    reader.leave()


def test_the_first_steps(reader):
    reader.type("operate.md", "key")
    assert "name = demo" in reader.type("operate.md", "create")
    with reader.state.open("a") as file:
        file.write('RUN="$RUN@/ip4/127.0.0.1/tcp/8471/p2p/$VALIDATOR"\n')
    shown = reader.type("join.md", "dry run")
    assert 'max_memory = "4GiB"  # --max-memory' in shown
    assert 'bootstrap = ["/ip4/127.0.0.1/tcp/8471/p2p/' in shown


@pytest.mark.long
def test_the_whole_exercise(reader):
    """Operate, relay, validate, join: a swarm by hand, until a contributor's work is accepted; then it leaves."""
    reader.type("operate.md", "key")
    reader.type("operate.md", "create")
    reader.type("relay.md", "relay")
    reader.type("relay.md", "address")
    reader.type("validate.md", "validator")
    reader.type("operate.md", "trainer")
    reader.type("join.md", "join")
    reader.until(lambda: (reader.ask("status", "--json") or {}).get("accepted"), "a submission is accepted", WORK_S)
    assert "accepted" in reader.type("join.md", "look")
    assert "relay" in reader.type("relay.md", "relay status")
    assert "validator" in reader.type("validate.md", "validator status")
    assert "trainer" in reader.type("operate.md", "trainer status")
    reader.type("join.md", "dry run")
    reader.type("join.md", "leave")
    assert reader.nodes[-1].wait(60) == 0


def test_every_marked_block_is_run_by_one_of_these():
    source = Path(__file__).read_text(encoding="utf-8")
    for page in ("operate.md", "relay.md", "validate.md", "join.md"):
        assert blocks(page)
        for name in blocks(page):
            assert f'reader.type("{page}", "{name}")' in source, f"{page}: {name}"


# Commands that are not run


def typed(page):
    """Every command line of this program in a page's code, continuation lines joined."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    code = [script for language, script in fences if language in ("", "sh")]
    code += re.findall(r"`(intellect-node [^`]+)`", prose)
    lines = re.sub(r"\\\n\s*", " ", "\n".join(code)).splitlines()
    return [
        found[0]
        for line in lines
        if (found := re.search(r"intellect-node( [a-z-].*)?$", re.split(r"#| \| ", line)[0].rstrip()))
    ]


def words_of(line):
    line = re.sub(r"\$\(|[()&;|]|2>|>", " ", re.sub(r"<[^>]*>", "x", line)).replace("…", "x").replace("'", " ")
    return shlex.split(line.replace('"', " "))[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_command_and_flag_in_the_documentation_exists(page):
    if page.name in ("troubleshooting.md", "cli.md"):
        return  # made from the code
    for line in typed(page):
        command, words = typer.main.get_command(cli.app), words_of(line)
        while words and not words[0].startswith("-") and getattr(command, "commands", None):
            assert words[0].lower() in {*command.commands, "x", "command"}, f"{page.name}: {line}"
            command = command.commands.get(words.pop(0), command)
        known = {"--help", "-h", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))}
        for word in words:
            if word.startswith("--") or re.fullmatch(r"-[a-z]", word):
                assert word.partition("=")[0].rstrip(".,:") in known, f"{page.name}: {line}"

"""Who may import whom: cli → simnet → node → {p2p, trainer, environments} → protocol, and who may use which library."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BELOW = {
    "protocol": set(),
    "environments": {"protocol"},
    "trainer": {"protocol"},
    "p2p": {"protocol"},
    "node": {"p2p", "trainer", "environments", "protocol"},
    "simnet": {"node", "p2p", "trainer", "environments", "protocol"},
    "bench": {"simnet", "node", "p2p", "trainer", "environments", "protocol"},
    "tools": {"cli", "simnet", "node", "p2p", "trainer", "environments", "protocol"},
    "cli": {"simnet", "node", "p2p", "trainer", "environments", "protocol"},
}
COMPUTING = {"torch", "transformers", "vllm", "safetensors"}
NETWORKING = {"libp2p", "aiohttp", "trio", "asyncio", "socket", "requests", "httpx", "urllib3", "websockets", "http"}
FORBIDDEN = {
    "protocol": {*COMPUTING, *NETWORKING, "time", "datetime", "random", "threading", "subprocess"},
    "environments": {*COMPUTING, *NETWORKING},
    "trainer": NETWORKING,
    "p2p": COMPUTING,
    "cli": {*COMPUTING, *NETWORKING},
}
COMPUTE_MODULES = ("node.engines.", "node.compute.read_worker", "simnet.zoo.workers.")
"""What runs in compute processes, beside modules called `compute` or `…_compute`; the rest is the network process."""


@dataclass(frozen=True)
class Import:
    name: str
    line: int
    at_start: bool
    """Whether importing the module runs it: not inside a function, not for types alone."""


def modules():
    paths = [ROOT / "cli.py", *(path for package in BELOW for path in (ROOT / package).rglob("*.py"))]
    return {module_name(path): path for path in paths if "__pycache__" not in path.parts and path.exists()}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Collector(ast.NodeVisitor):
    def __init__(self):
        self.found = []
        self.deferred = 0

    def visit_Import(self, node):
        self.add(node, [alias.name for alias in node.names])

    def visit_ImportFrom(self, node):
        if node.level:
            raise AssertionError(f"relative import in line {node.lineno}")
        self.add(node, [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])

    def add(self, node, names):
        self.found += [Import(name, node.lineno, not self.deferred) for name in names]

    def defer(self, node):
        self.deferred += 1
        self.generic_visit(node)
        self.deferred -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = defer

    def visit_If(self, node):
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.deferred += 1
            for child in node.body:
                self.visit(child)
            self.deferred -= 1
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)


@functools.cache
def imports_of(path):
    collector = Collector()
    collector.visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
    return tuple(collector.found)


def top(name):
    return name.split(".")[0]


def loaded_at_start(start):
    """Every module and library that importing `start` imports, with the way to each."""
    known, ways = modules(), {start: (start,)}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        parents = {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
        names = {each.name for each in imports_of(known[module]) if each.at_start} | parents
        for name in names - ways.keys():
            ways[name] = (*ways[module], name)
            if name in known:
                waiting.append(name)
    return ways


def is_network_module(module):
    computes = module.startswith(COMPUTE_MODULES) or module.endswith((".compute", "_compute"))
    return module == "node.compute" or (top(module) in ("cli", "simnet", "p2p", "node") and not computes)


def offences(judge):
    return [
        f"{path.relative_to(ROOT)}:{found.line} imports {found.name}"
        for module, path in sorted(modules().items())
        for found in imports_of(path)
        if judge(module, found)
    ]


def test_every_package_is_known():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= BELOW.keys()


def test_no_arrow_runs_back_up():
    def runs_up(module, found):
        own, target = top(module), top(found.name)
        return target in BELOW and target != own and target not in BELOW[own]

    assert offences(runs_up) == []


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_libraries_that_a_package_may_not_use(package):
    def is_forbidden(module, found):
        return top(module) == package and top(found.name) in FORBIDDEN[package]

    assert offences(is_forbidden) == []


def test_libp2p_is_used_by_p2p_alone():
    """And by the benchmark that measures the library's own DHT beside it. Hostile peers, too, speak through p2p."""
    users = ("p2p", "bench")
    assert offences(lambda module, found: top(found.name) == "libp2p" and top(module) not in users) == []


@pytest.mark.parametrize("module", sorted(filter(is_network_module, modules())))
def test_the_network_process_never_loads_torch(module):
    ways = loaded_at_start(module)
    assert [" → ".join(ways[name]) for name in ways if top(name) in COMPUTING] == []


def test_the_command_line_loads_no_network_library():
    ways = loaded_at_start("cli")
    assert [" → ".join(ways[name]) for name in ways if top(name) in ("libp2p", "aiohttp", "trio", "asyncio")] == []


def test_the_walker_sees_what_it_must(tmp_path):
    source = tmp_path / "sample.py"
    source.write_text(
        "from typing import TYPE_CHECKING\nimport a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
        "class X:\n    import d\n    def f(self):\n        from e import g\n"
        "try:\n    import h\nexcept ImportError: ...\n"
    )
    seen = {each.name: each.at_start for each in imports_of(source)}
    assert [name for name, at_start in seen.items() if at_start and "typing" not in name] == ["a", "c", "d", "h"]
    assert seen["b"] is seen["e"] is seen["e.g"] is False

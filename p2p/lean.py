"""Importing libp2p without the libraries of what this program never uses: mDNS, ACME, WebSockets.

libp2p 0.8 imports all of its transports and services when it is imported. Libraries that only those need take
some 14 MB and a tenth of the start; while libp2p is imported they are stood in for by empty modules, which are then
forgotten, so that whoever really wants one of these libraries gets it. Not calling this costs only memory.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

UNUSED: Final = ("zeroconf", "requests", "httpx", "trio_websocket")


def import_libp2p() -> None:
    """Import libp2p, once, as leanly as may be. Whatever is loaded already stays what it is."""
    if "libp2p" in sys.modules:
        return
    finder = _Finder(tuple(name for name in UNUSED if name not in sys.modules))
    sys.meta_path.insert(0, finder)
    try:
        for name in ("libp2p", "libp2p.kad_dht.kad_dht"):
            importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.stands_in(name)]:
            del sys.modules[name]


class _StandIn(ModuleType):
    """Has a class by every public name: enough to be imported from, inherited from and named in annotations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def stands_in(self, name: str) -> bool:
        return name.partition(".")[0] in self._names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not self.stands_in(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""

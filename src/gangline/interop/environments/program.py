"""Runs a program of `in_sandbox/` as a command that reads its modules and configuration from stdin.

No file of it is written to the sandbox, and nothing of it appears in `/proc/PID/cmdline`, which every process there can
read: the configuration may contain the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_INSIDE = Path(__file__).with_name("in_sandbox")
_SHARED = ("protocol", "episode", "server", "spaces")

_BOOTSTRAP = """\
import os, sys
if os.stat(".").st_uid != os.getuid():
    sys.path[:] = [path for path in sys.path if path]  # nothing that the agent left there is imported
import json
from importlib.machinery import ModuleSpec
def front(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            sys.exit("no configuration came")
        data += piece
    return data
given = json.loads(front(int.from_bytes(front(8), "big")))
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in given["modules"]:
            return ModuleSpec(name, Finder, is_package=name == "gangline_world")
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        source = given["modules"][module.__name__]
        exec(compile(source, "<%s>" % module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Finder)
from importlib import import_module
from gangline_world.protocol import serve
serve(lambda: import_module(given["main"]).begin(given["config"]))
"""


def command(python: str) -> tuple[str, ...]:
    """The command that reads `opening` and then serves one environment on its standard streams."""
    return (python, "-c", _BOOTSTRAP)


def opening(name: str, config: Mapping[str, Any]) -> bytes:
    """The first bytes to write to the command's stdin. name: a module of `in_sandbox/` with `begin(config)`."""
    modules = {"gangline_world": "", **{f"gangline_world.{one}": _source(one) for one in (*_SHARED, name)}}
    given = json.dumps({"modules": modules, "main": f"gangline_world.{name}", "config": config}).encode()
    return len(given).to_bytes(8, "big") + given


@cache
def _source(name: str) -> str:
    return (_INSIDE / f"{name}.py").read_text(encoding="utf-8")

"""A program of `inside/` as a command line: its modules as one argument, so that no file of it lies in the sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["program"]

_INSIDE = Path(__file__).with_name("inside")
_SHARED = ("protocol", "episode", "spaces")

_BOOTSTRAP = """\
import json, sys
from importlib.machinery import ModuleSpec
given = json.loads(sys.argv.pop())
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


def program(python: str, name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The command that serves one environment on its standard streams.

    name: a module of `inside/` with `begin(config)`.
    """
    modules = {"gangline_world": "", **{f"gangline_world.{one}": _source(one) for one in (*_SHARED, name)}}
    given = {"modules": modules, "main": f"gangline_world.{name}", "config": config}
    return (python, "-c", _BOOTSTRAP, json.dumps(given))


@cache
def _source(name: str) -> str:
    return (_INSIDE / f"{name}.py").read_text(encoding="utf-8")

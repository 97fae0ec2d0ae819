"""The action server as it goes into a sandbox: a bootstrap for a command line, and the rest over the channel.

The bootstrap is short enough for any command line. It reads the modules from descriptor 3 and imports them from memory,
so that the sandbox's disk has nothing of them that an agent could change before, or find after. They travel as bytecode
beside their source: a Python in the sandbox of the node's own version need not compile them. Each is compressed for
itself, because a process unpacks only what it imports: a server's start is mostly page faults.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import json
import marshal
import zlib
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["server_argv", "server_program"]

_INSIDE = Path(__file__).with_name("inside")

_BOOTSTRAP = """\
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import marshal, os, zlib
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER
os.set_blocking(3, True)
def read(size):
    data = b""
    while len(data) < size:
        piece = os.read(3, size - len(data))
        if not piece:
            sys.exit("the channel ended before the program came")
        data += piece
    return data
program = marshal.loads(read(int(read(8), 16)))
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in program["modules"]:
            return ModuleSpec(name, Finder, is_package=name == "gangline_tools")
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        name = module.__name__
        if program["magic"] == MAGIC_NUMBER.hex():
            code = marshal.loads(zlib.decompress(program["bytecode"][name]))
        else:
            code = compile(zlib.decompress(program["modules"][name]), "<%s>" % name, "exec")
        exec(code, module.__dict__)
sys.meta_path.insert(0, Finder)
__import__("gangline_tools." + program["main"])
sys.modules["gangline_tools." + program["main"]].main(3, program)
"""
_OLDEST_FORMAT = 2
"""The one of `marshal` that every Python 3 reads."""


def server_argv(python: str) -> list[str]:
    """The command that becomes the server once `server_program` is on its descriptor 3.

    -I -S: nothing of the sandbox's own packages, folders and variables is imported.
    """
    return [python, "-I", "-S", "-c", _BOOTSTRAP]


def server_program(options: Mapping[str, Any]) -> bytes:
    """The first bytes for descriptor 3: eight hexadecimal digits, the length, and what `marshal` makes."""
    return _encoded(json.dumps(options, sort_keys=True))


@lru_cache(maxsize=16)
def _encoded(options: str) -> bytes:
    program = {
        "bootstrap": _BOOTSTRAP,
        "modules": {name: zlib.compress(source.encode()) for name, source in _modules().items()},
        "bytecode": {name: zlib.compress(marshal.dumps(_compiled(name))) for name in _modules()},
        "magic": importlib.util.MAGIC_NUMBER.hex(),
        "main": "server",
        "options": json.loads(options),
    }
    data = marshal.dumps(program, _OLDEST_FORMAT)
    return b"%08x" % len(data) + data


@cache
def _modules() -> dict[str, str]:
    """Name -> source."""
    names = {path: f"gangline_tools.{path.stem}" for path in sorted(_INSIDE.glob("*.py"))}
    return {
        "gangline_tools" if path.stem == "__init__" else name: path.read_text(encoding="utf-8")
        for path, name in names.items()
    }


@cache
def _compiled(name: str) -> CodeType:
    """Without the import of `__future__`, for whose file a Python would look through its folders."""
    tree = ast.parse(_modules()[name])
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    return compile(tree, f"<{name}>", "exec", __future__.annotations.compiler_flag, dont_inherit=True)

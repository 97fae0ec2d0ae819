"""Packs the action server for a sandbox: a bootstrap for the command line, and the rest to send over the channel.

The bootstrap fits any command line. It reads the modules from descriptor 3 and imports them from memory, so nothing of
them is on the sandbox's disk, where an agent could change them before or find them afterwards. Bytecode is sent with
the source, so a Python of the node's version need not compile. Modules are compressed individually, because a process
unpacks only its imports: a server's start is mostly page faults.
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

_INSIDE = Path(__file__).with_name("in_sandbox")

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
"""The `marshal` version that every Python 3 can read."""


def server_argv(python: str) -> list[str]:
    """The command that becomes the server once `server_program` is written to its descriptor 3.

    -I -S: nothing from the sandbox's own packages, folders and variables is imported.
    """
    return [python, "-I", "-S", "-c", _BOOTSTRAP]


def server_program(options: Mapping[str, Any]) -> bytes:
    """The first bytes for descriptor 3: the length as eight hexadecimal digits, and the `marshal` bytes."""
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
    """Bytecode without the import of `__future__`, for which Python would search its folders."""
    tree = ast.parse(_modules()[name])
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    return compile(tree, f"<{name}>", "exec", __future__.annotations.compiler_flag, dont_inherit=True)

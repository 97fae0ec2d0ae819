"""The action server's source can travel: old syntax, standard library, siblings only."""

from __future__ import annotations

import ast
import json
import sys
import zlib
from pathlib import Path

import pytest

from gangline.tools import inside
from gangline.tools.program import server_argv, server_program

SOURCES = sorted(Path(inside.__file__).parent.glob("*.py"))
ONLY_IF_INSTALLED = {"IPython", "traitlets"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_module_is_python_3_8_and_imports_nothing_that_a_sandbox_may_lack(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    siblings = {source.stem for source in SOURCES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {name.name.split(".")[0] for name in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            if node.level:
                assert (node.level, node.module in siblings) == (1, True)
            else:
                assert node.module.split(".")[0] in sys.stdlib_module_names | ONLY_IF_INSTALLED


def test_the_program_holds_every_module_and_its_length() -> None:
    data = server_program({"python": "python3"})
    assert int(data[:8], 16) == len(data) - 8
    program = json.loads(zlib.decompress(data[8:]))
    names = {f"gangline_tools.{path.stem}" for path in SOURCES if path.stem != "__init__"}
    assert set(program["modules"]) == names | {"gangline_tools"}
    assert set(program["bytecode"]) == set(program["modules"])
    assert (program["main"], program["options"]) == ("server", {"python": "python3"})


def test_the_command_line_is_short_and_shuts_the_sandboxs_packages_out() -> None:
    argv = server_argv("python3")
    assert argv[:3] == ["python3", "-I", "-S"]
    assert sum(map(len, argv)) < 2000
    ast.parse(argv[-1], feature_version=(3, 8))

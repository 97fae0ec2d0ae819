"""The action server's source can travel: old syntax, standard library, siblings only."""

from __future__ import annotations

import ast
import marshal
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from gangline.agents.tools import in_sandbox
from gangline.agents.tools.action_server import ActionServerOptions
from gangline.agents.tools.program import server_argv, server_program

SOURCES = sorted(Path(in_sandbox.__file__).parent.glob("*.py"))
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
    program = marshal.loads(data[8:])
    names = {f"gangline_tools.{path.stem}" for path in SOURCES if path.stem != "__init__"}
    assert set(program["modules"]) == names | {"gangline_tools"}
    assert set(program["bytecode"]) == set(program["modules"])
    sources = {path.stem: path.read_bytes() for path in SOURCES}
    assert zlib.decompress(program["modules"]["gangline_tools.server"]) == sources["server"]
    assert (program["main"], program["options"]) == ("server", {"python": "python3"})


@pytest.mark.parametrize("magic", [None, "00"], ids=["the node's bytecode", "another one"])
def test_it_starts_in_any_python(magic: str | None) -> None:
    program = marshal.loads(server_program(ActionServerOptions().model_dump())[8:])
    program["magic"] = magic or program["magic"]
    unneeded = "modules" if magic is None else "bytecode"
    program[unneeded] = dict.fromkeys(program[unneeded], b"")
    data = marshal.dumps(program)
    ours, theirs = socket.socketpair()
    command = ["sh", "-c", 'exec 3<&0 </dev/null; exec "$@"', "sh", *server_argv(sys.executable)]
    with ours, subprocess.Popen(command, stdin=theirs.fileno()) as server:
        theirs.close()
        ours.sendall(b"%08x" % len(data) + data)
        assert ours.recv(100) == b'{"id": "", "ok": {}}\n'
        ours.shutdown(socket.SHUT_RDWR)
        assert server.wait(30) == 0


def test_it_imports_nothing_slow_and_reads_on_after_what_is_no_message() -> None:
    """In a process that has not imported `json`: this one has."""
    program = (
        "import sys; from messages import loads\n"
        "for line in ('', '{', '[1', '{}x', 'nul', '\"\\n\"'):\n"
        "    try: sys.exit(f'{line!r} is {loads(line)!r}')\n"
        "    except ValueError: pass\n"
        "import loop, output, refusal\n"
        "slow = {'json', 're', 'typing', 'socket', 'signal', 'contextlib', 'heapq', 'struct', 'importlib.machinery'}\n"
        "sys.exit(str(slow & set(sys.modules) or 0))"
    )
    folder = Path(in_sandbox.__file__).parent
    done = subprocess.run([sys.executable, "-S", "-E", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.stderr == "0\n"


def test_the_command_line_is_short_and_shuts_the_sandboxs_packages_out() -> None:
    argv = server_argv("python3")
    assert argv[:3] == ["python3", "-I", "-S"]
    assert sum(map(len, argv)) < 2000
    ast.parse(argv[-1], feature_version=(3, 8))

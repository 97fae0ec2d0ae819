"""The Python tool: state over cells, results, interrupts, deaths; with IPython and without, on every Python here."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from gangline.agents.tools.action_server import ActionServer, ActionServerOptions, PythonTool
from gangline.domain.errors import ActionRefused
from support.node.tools import action_server

T = 60.0
SHORT_S = 2.0
"""Time limit of cells that have begun by then, on a busy machine too, and do not end."""
OTHERS = sorted(
    {path for minor in range(8, 16) if "shims" not in (path := shutil.which(f"python3.{minor}") or "shims")}
    | {
        str(path)
        for path in Path.home().glob(".pyenv/versions/3.*/bin/python3")
        if int(path.parts[-3].split(".")[1]) >= 8
    }
)
"""Other interpreters of this machine. pyenv has real ones alongside its shims."""


def plain_python() -> str:
    """A Python that has no IPython."""
    return "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


@pytest_asyncio.fixture(params=["IPython", "plain"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[ActionServer]:
    python = sys.executable if request.param == "IPython" else plain_python()
    async with action_server(tmp_path, ActionServerOptions(python=python)) as server:
        yield server


@pytest.fixture
def python(server: ActionServer) -> PythonTool:
    return server.python


async def test_names_persist_and_a_last_expression_is_the_result(python: PythonTool) -> None:
    assert (await python.run("import math\ndef f(n):\n    return n + 1\nx = 41", timeout_s=T)).result is None
    result = await python.run("print('to stdout')\nf(x)", timeout_s=T)
    assert (result.state, result.result, result.traceback, result.output.text) == ("ended", "42", None, "to stdout\n")
    assert result.status() == "done"
    assert (await python.run("_ * 2", timeout_s=T)).result == "84"
    assert (await python.run("__name__", timeout_s=T)).result == "'__main__'"


async def test_an_error_is_a_traceback_with_the_cells_line(python: PythonTool) -> None:
    result = await python.run("def f():\n    return 1 / 0\nf()", timeout_s=T)
    assert (result.state, result.result, result.status()) == ("ended", None, "error")
    assert result.traceback is not None
    assert "ZeroDivisionError: division by zero" in result.traceback
    assert "return 1 / 0" in result.traceback
    assert "gangline" not in result.traceback
    wrong = await python.run("def f(:", timeout_s=T)
    assert wrong.traceback is not None
    assert "SyntaxError" in wrong.traceback


async def test_output_of_started_programs_is_captured_in_order(python: PythonTool) -> None:
    code = (
        "import subprocess, sys\nprint(1)\nsubprocess.run('echo 2; echo 3 >&2', shell=True)\nprint(4, file=sys.stderr)"
    )
    assert (await python.run(f"{code}; None", timeout_s=T)).output.text == "1\n2\n3\n4\n"


async def test_out_of_time_a_cell_is_interrupted_and_names_stay(python: PythonTool) -> None:
    await python.run("x = 1", timeout_s=T)
    result = await python.run("print('begun')\nwhile True:\n    x += 1", timeout_s=SHORT_S)
    assert (result.state, result.is_interrupted, result.output.text) == ("ended", True, "begun\n")
    assert result.traceback is not None
    assert "KeyboardInterrupt" in result.traceback
    assert result.status().startswith("interrupted after ")
    assert (await python.run("x > 1", timeout_s=T)).result == "True"


async def test_an_interrupt_reaches_programs_that_a_cell_started(python: PythonTool) -> None:
    result = await python.run("import subprocess\nsubprocess.run(['sleep', '1000']).returncode", timeout_s=SHORT_S)
    assert (result.state, result.is_interrupted) == ("ended", True)


async def test_an_interrupt_on_request_ends_the_cell(python: PythonTool, tmp_path: Path) -> None:
    await python.run("import time, os", timeout_s=T)
    running = asyncio.create_task(python.run("os.mkdir('begun'); time.sleep(1000)", timeout_s=T))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.01)
    await python.interrupt()
    assert (await running).is_interrupted
    await python.interrupt()
    assert (await python.run("1", timeout_s=T)).result == "1"


async def test_a_cell_that_ignores_its_interrupt_leaves_a_restart(python: PythonTool) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(1000)"
    result = await python.run(code, timeout_s=SHORT_S)
    assert (result.state, result.is_interrupted) == ("running", True)
    assert "restart the interpreter" in result.status()
    with pytest.raises(ActionRefused, match="ignores its interrupt: restart") as refused:
        await python.run("1", timeout_s=T)
    assert refused.value.reason == "running"
    await python.restart()
    after = await python.run("1", timeout_s=T)
    assert (after.result, after.is_new) == ("1", True)


@pytest.mark.parametrize(
    ("code", "exit_code"), [("import os; os._exit(3)", 3), ("import os; os.kill(os.getpid(), 11)", 139)]
)
async def test_an_interpreter_that_died_is_followed_by_a_new_one(python: PythonTool, code: str, exit_code: int) -> None:
    await python.run("x = 1", timeout_s=T)
    result = await python.run(f"print('last words', flush=True); {code}", timeout_s=T)
    assert (result.state, result.exit_code, result.output.text) == ("died", exit_code, "last words\n")
    assert "all variables are lost" in result.status()
    after = await python.run("x", timeout_s=T)
    assert (after.traceback is not None, after.is_new) == (True, True)
    assert (await python.run("1", timeout_s=T)).is_new is False


@pytest.mark.parametrize("python_program", [sys.executable, plain_python()])
async def test_a_memory_limit_is_a_memory_error_and_names_stay(tmp_path: Path, python_program: str) -> None:
    options = ActionServerOptions(python=python_program, python_memory_bytes=400 << 20)
    async with action_server(tmp_path, options) as server:
        await server.python.run("x = 1", timeout_s=T)
        result = await server.python.run("big = bytearray(1 << 30)", timeout_s=T)
        assert result.traceback is not None
        assert "MemoryError" in result.traceback
        assert (await server.python.run("x", timeout_s=T)).result == "1"


async def test_a_killed_interpreter_says_that_it_may_have_been_its_memory(python: PythonTool) -> None:
    result = await python.run("import os; os.kill(os.getpid(), 9)", timeout_s=T)
    assert result.status() == (
        "the interpreter ended (it was killed, probably for its memory) and all variables are lost;"
        " the next cell starts a new one"
    )


async def test_exits_input_and_forks_do_not_end_it(python: PythonTool) -> None:
    await python.run("x = 1", timeout_s=T)
    await python.run("exit()", timeout_s=T)
    await python.run("import sys; sys.exit(3)", timeout_s=T)
    asked = await python.run("open(0).read()", timeout_s=T)
    assert asked.state == "ended"
    forked = await python.run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)", timeout_s=T)
    assert forked.state == "ended"
    assert (await python.run("x", timeout_s=T)).result == "1"


async def test_output_between_cells_comes_apart(python: PythonTool, tmp_path: Path) -> None:
    code = "import threading\nready, go = threading.Event(), threading.Event()\n"
    code += "def f():\n    go.wait(); print('from the thread', flush=True); open('said', 'w').close(); ready.set()\n"
    code += "threading.Thread(target=f).start()"
    await python.run(code, timeout_s=T)
    await python.run("import time\nthreading.Timer(0.1, go.set).start()", timeout_s=T)
    while not (tmp_path / "said").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    result = await python.run("ready.wait(); print('own')", timeout_s=T)
    assert (result.earlier.text, result.output.text) == ("from the thread\n", "own\n")


async def test_large_texts_are_shortened(python: PythonTool) -> None:
    result = await python.run("class L:\n    def __repr__(self): return 'x' * 1_000_000\nprint('y' * 1_000_000)\nL()",
                              timeout_s=T)  # fmt: skip
    assert result.result is not None
    assert (result.result.count("x"), "characters omitted" in result.result) == (1 << 16, True)
    assert result.output.omitted_bytes == 1_000_001 - 65_536


async def test_figures_come_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    async with action_server(tmp_path, ActionServerOptions(python=sys.executable)) as server:
        result = await server.python.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nNone", timeout_s=T)
        assert [image[:8] for image in result.images] == [b"\x89PNG\r\n\x1a\n"]
        assert (await server.python.run("1", timeout_s=T)).images == []
        drawn = "class P:\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n' + b'0' * %d\nP()"
        assert len((await server.python.run(drawn % 10, timeout_s=T)).images[0]) == 18
        large = await server.python.run(drawn % (3 << 20), timeout_s=T)
        assert (large.images, large.num_images_omitted) == ([], 1)


async def test_modules_beside_the_agent_are_importable_and_do_not_disturb_us(
    python: PythonTool, tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not the real one')")
    (tmp_path / "mine.py").write_text("y = 7")
    assert (await python.run("import mine; mine.y", timeout_s=T)).result == "7"


@pytest.mark.parametrize("program", OTHERS, ids=lambda path: "-".join(Path(path).parts[-3:]))
async def test_server_and_interpreter_run_on_other_pythons(tmp_path: Path, program: str) -> None:
    async with action_server(tmp_path, ActionServerOptions(python=program)) as server:
        version = await server.python.run("import sys; sys.version_info[1]", timeout_s=T)
        assert version.result is not None
        assert version.result in program or "python" in Path(program).name
        failed = await server.python.run("1/0", timeout_s=T)
        assert "ZeroDivisionError" in (failed.traceback or "")
        assert (await server.shell.run("echo hi", timeout_s=T)).output.text == "hi\n"
        await server.files.write("a.txt", "one\n")
        assert (await server.files.view("a.txt")).lines == ["one"]
        assert [match.line for match in (await server.files.search("o.e")).matches] == [1]

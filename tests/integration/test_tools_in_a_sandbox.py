"""The built-in tools, called as a model calls them, in a sandbox without a network."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gangline.agents.tools.calls import observe
from gangline.agents.tools.contract import Observation, ToolContext
from gangline.settings import plugins
from support.node.tools import tool_context

Call = Callable[..., Awaitable[Observation]]


@pytest_asyncio.fixture
async def context(tmp_path: Path) -> AsyncGenerator[ToolContext]:
    async with tool_context(tmp_path) as context:
        yield context


@pytest.fixture
def call(context: ToolContext) -> Call:
    """Calls a tool by its name."""
    return caller(context)


def caller(context: ToolContext) -> Call:
    tools = {name: plugins.make_tool(name, {}) for name in ("shell", "python", "editor", "search_files", "think")}

    async def call(name: str, **arguments: Any) -> Observation:
        return await observe(tools[name], arguments, context)

    return call


async def settled(call: Call, seen: Observation) -> list[str]:
    """The contents of an observation and of those that follow, until the command is over."""
    contents = [seen.content]
    while "[still running" in contents[-1]:
        contents.append((await call("shell", control="wait")).content)
    return contents


async def test_a_shell_keeps_its_state_and_says_how_a_command_ended(call: Call) -> None:
    assert (await call("shell", command="X=5; mkdir d; cd d")).content == "[exit code 0]"
    seen = await call("shell", command='echo $X; basename "$PWD"; printf end; false')
    assert (seen.content, seen.is_error) == ("5\nd\nend\n[exit code 1]", True)


async def test_a_program_that_waits_for_input_gets_it(call: Call) -> None:
    seen = await call("shell", command="read -p 'name? ' N; echo hello $N")
    assert seen.content.startswith("name? \n[waiting for input")
    assert "control: wait, interrupt, end_input or restart]" in seen.content
    assert not seen.is_error
    refused = await call("shell", command="echo no")
    assert (refused.is_error, refused.content[:28]) == (True, "error: a command has been ru")
    contents = await settled(call, await call("shell", input="ann\n"))
    assert contents[-1].endswith("hello ann\n[exit code 0]")


async def test_a_programs_input_is_ended_and_a_loop_interrupted(call: Call) -> None:
    assert "[waiting for input" in (await call("shell", command="cat; echo over")).content
    assert (await settled(call, await call("shell", control="end_input")))[-1] == "over\n[exit code 0]"
    assert "[still running" in (await call("shell", command="while :; do :; done", timeout=0.2)).content
    seen = await call("shell", control="interrupt", timeout="30")
    assert (seen.content.endswith("[exit code 130]"), seen.is_error) == (True, True)
    await call("shell", command="X=1; sleep 1000", timeout=0.1)
    assert (await call("shell", control="restart")).content == "[a new shell was started]"
    assert (await call("shell", command="echo [$X]")).content.startswith("[]\n[exit code 0")


async def test_long_output_keeps_head_and_tail(tmp_path: Path) -> None:
    async with tool_context(tmp_path, max_output_bytes=1000) as context:
        call = caller(context)
        seen = await call("shell", command="seq 100000; exit 3")
        assert seen.content.startswith("1\n2\n3\n")
        assert "99999\n100000\n[exit code 3; the shell ended" in seen.content
        assert " bytes left out]\n" in seen.content
        assert len(seen.content) <= 1000
        seen = await call("python", code="print('a' * 5000)\n'b' * 5000")
        assert seen.content.count(" bytes left out]\n") == 2
        assert seen.content.endswith("\n[done]")
        assert len(seen.content) <= 1000
        await call("shell", command="seq 5000 > numbers")
        view = (await call("editor", command="view", path="numbers")).content
        assert view.startswith("     1\t1\n     2\t2\n")
        assert view.endswith("of 5000: give view_range for others]")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "give exactly one of command, input and control"),
        ({"command": "ls", "control": "wait"}, "give exactly one of command, input and control"),
        ({"cmd": "ls"}, "there is no argument 'cmd'; there are: command, input, control, timeout"),
        ({"command": ["ls"]}, "the arguments cannot be read: Expected `str`, got `array` - at `$.command`"),
        ({"command": "a\0b"}, "a command cannot hold a NUL byte"),
    ],
)
async def test_a_wrong_call_is_explained(call: Call, arguments: dict[str, Any], why: str) -> None:
    seen = await call("shell", **arguments)
    assert (seen.content, seen.is_error) == (f"error: {why}", True)


async def test_variables_last_over_calls_of_python(call: Call) -> None:
    assert (await call("python", code="x = 20\ndef f(n):\n    return n + 1")).content == "[done]"
    assert (await call("python", code="print('y is'); y = f(x)\ny")).content == "y is\n21\n[done]"
    seen = await call("python", code="x + y")
    assert (seen.content, seen.is_error) == ("41\n[done]", False)
    seen = await call("python", code="1 / 0")
    assert "ZeroDivisionError: division by zero" in seen.content
    assert (seen.content.endswith("\n[error]"), seen.is_error) == (True, True)


async def test_an_interrupted_cell_keeps_the_variables(call: Call) -> None:
    await call("python", code="x = 7")
    seen = await call("python", code="while True:\n    pass", timeout=0.5)
    assert "KeyboardInterrupt" in seen.content
    assert seen.content.endswith(": its time was over; variables are kept]")
    assert seen.is_error
    assert (await call("python", code="x")).content == "7\n[done]"


async def test_lost_variables_are_said(call: Call) -> None:
    await call("python", code="x = 7")
    seen = await call("python", code="import os; os._exit(3)")
    assert "the interpreter ended (code 3) and all variables are lost" in seen.content
    assert "NameError" in (await call("python", code="x")).content
    seen = await call("python", restart=True)
    assert seen.content == "[a new interpreter was started; earlier variables are lost]"
    seen = await call("python", restart=True, code="1")
    assert seen.content == "1\n[done; this is a new interpreter, earlier variables are lost]"
    assert (await call("python")).content == "error: give code, or restart"


async def test_the_editor_makes_views_and_changes_files(call: Call) -> None:
    seen = await call("editor", command="create", path="src/a.py", file_text="one\ntwo\nthree\nfour\n")
    assert seen.content == "src/a.py was created: 19 bytes"
    view = await call("editor", command="view", path="src/a.py", view_range=[2, 3])
    assert (
        view.content
        == "     2\ttwo\n     3\tthree\n[lines 2 to 3 of 4: give view_range for others]"[: len(view.content)]
    )
    seen = await call("editor", command="str_replace", path="src/a.py", old_str="two\n", new_str="TWO\n2\n")
    assert seen.content.startswith("src/a.py was edited. Now:\n     1\tone\n     2\tTWO\n     3\t2\n     4\tthree\n")
    seen = await call("editor", command="insert", path="src/a.py", insert_line=0, new_str="zero")
    assert "     1\tzero\n     2\tone\n" in seen.content
    seen = await call("editor", command="undo_edit", path="src/a.py")
    assert seen.content == "src/a.py was set back to before its last edit"
    assert (await call("shell", command="head -n 1 src/a.py")).content == "one\n[exit code 0]"
    assert (await call("editor", command="view", path="src")).content == "a.py"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"command": "view", "path": "none"}, "error: none does not exist in"),
        ({"command": "create", "path": "f"}, "error: this command needs file_text"),
        ({"command": "view", "path": "f", "view_range": [3]}, "error: view_range has two numbers"),
        (
            {"command": "str_replace", "path": "f", "old_str": "a"},
            "error: the text to replace is 2 times in f, on lines 1, 2",
        ),
        ({"command": "delete", "path": "f"}, "error: the arguments cannot be read: Invalid enum value 'delete'"),
    ],
)
async def test_an_edit_that_cannot_be_done_is_explained(call: Call, arguments: dict[str, Any], why: str) -> None:
    await call("editor", command="create", path="f", file_text="a\na\n")
    seen = await call("editor", **arguments)
    assert seen.is_error
    assert seen.content.startswith(why)


async def test_files_are_searched(call: Call) -> None:
    await call("shell", command="mkdir d; echo 'x = 1' > d/a.py; printf 'y\\nx = 2\\n' > d/b.txt")
    seen = await call("search_files", pattern=r"x = \d", path="d")
    assert seen.content.splitlines() == ["d/a.py:1: x = 1", "d/b.txt:2: x = 2"]
    assert (await call("search_files", pattern="x", glob="*.txt")).content.count("\n") == 0
    assert (await call("search_files", pattern="nowhere")).content == "[no line matches]"
    assert (await call("search_files", pattern="(")).content.startswith("error: ")


async def test_a_killed_action_server_is_replaced_and_the_model_hears_of_it(call: Call) -> None:
    await call("shell", command="X=1; echo kept > file")
    seen = await call("shell", command="kill -9 $PPID; sleep 1000")
    assert seen.is_error
    assert "The shell's state and the variables of Python are lost" in seen.content
    assert (await call("shell", command="echo [$X] $(cat file)")).content == "[] kept\n[exit code 0]"


async def test_a_sandbox_without_python_is_named(tmp_path: Path) -> None:
    async with tool_context(tmp_path, python="python-none") as context:
        seen = await caller(context)("shell", command="ls")
        assert seen.is_error
        assert "which needs python-none (3.8 or newer)" in seen.content


async def test_thoughts_do_nothing_and_a_submission_has_the_answer(context: ToolContext, call: Call) -> None:
    assert (await call("think", thought="so")).content == "ok"
    submit = plugins.make_tool("submit", {})
    assert (await observe(submit, {"answer": "42"}, context)).answer == "42"
    assert (await observe(submit, {}, context)).answer == ""


async def test_the_guides_own_tool_works(context: ToolContext, call: Call) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "tools.md").read_text()
    code = guide.partition("## Write your own tool\n\n```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "my_package"}
    exec(compile(code, "tools.md", "exec", dont_inherit=True), names)
    tool = names["CountWords"](names["NoConfig"]())
    await tool.open(context)
    await call("shell", command="echo one two three > text")
    assert (await observe(tool, {"path": "text"}, context)).content == "3 words"
    assert (await observe(tool, {"path": "none"}, context)).is_error
    await tool.close()

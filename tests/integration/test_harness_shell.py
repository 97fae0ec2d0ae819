from pathlib import Path

import pytest

from gangline.agents.harnesses.shell import ShellConfig, ShellHarness
from gangline.domain.contracts import HarnessContext
from gangline.domain.errors import HarnessError
from gangline.domain.sandbox import ExecResult
from support.node.folder_runtime import FolderRuntime


async def ran(folder: Path, config: ShellConfig, instruction: str) -> ExecResult:
    runtime = FolderRuntime(folder / "r1")
    launch = await ShellHarness(config).prepare(
        HarnessContext(
            session_id="s1",
            task_id="t1",
            instruction=instruction,
            model="m",
            base_url="http://127.0.0.1:1/s/s1",
            api_key="key-1",
            runtime=runtime,
            env={"MINE": "mine"},
        )
    )
    return await runtime.exec(launch.command, env=launch.env, stdin=launch.stdin)


NASTY = 'it\'s $(touch pwned) `id`; "rm" {model}\n--help'


@pytest.mark.parametrize("command", ["printf %s {instruction}", ("printf", "%s", "{instruction}")])
async def test_an_instruction_is_data_in_every_form_of_command(tmp_path: Path, command: str | tuple[str, ...]) -> None:
    result = await ran(tmp_path, ShellConfig(command=command), NASTY)
    assert result.stdout.decode() == NASTY
    assert not list(tmp_path.rglob("pwned"))


async def test_the_program_finds_url_key_and_the_tasks_variables_in_its_environment(tmp_path: Path) -> None:
    config = ShellConfig(command='echo "$OPENAI_BASE_URL $OPENAI_API_KEY $MINE $GANGLINE_SESSION_ID"')
    result = await ran(tmp_path, config, "")
    assert result.stdout == b"http://127.0.0.1:1/s/s1/v1 key-1 mine s1\n"


async def test_a_long_instruction_goes_through_standard_input(tmp_path: Path) -> None:
    long = "x" * 300_000
    result = await ran(tmp_path, ShellConfig(command="wc -c", stdin="{instruction}"), long)
    assert result.stdout.split() == [b"300000"]


@pytest.mark.parametrize("instruction", ["x" * 300_000, "a\0b"])
async def test_an_instruction_that_no_command_line_holds_is_refused_with_advice(
    tmp_path: Path, instruction: str
) -> None:
    with pytest.raises(HarnessError, match="set `stdin`"):
        await ran(tmp_path, ShellConfig(command="echo {instruction}"), instruction)

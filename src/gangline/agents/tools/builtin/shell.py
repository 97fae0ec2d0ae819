"""The tool `shell`: commands in one persistent shell, including commands that keep running or ask for input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.tools import action_server
from gangline.agents.tools.answers import ShellResult
from gangline.agents.tools.arguments import read, schema_of
from gangline.agents.tools.bounding import captured
from gangline.agents.tools.contract import Observation, Tool, ToolContext, ToolFailed

_INPUT_S = 10.0
"""Default seconds for a program to react to keys or an interrupt."""


class ShellConfig(BaseModel):
    """Settings of tool `shell`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_timeout_s: float = Field(default=3600.0, gt=0)
    """The longest timeout that a call may request, in seconds."""


class _Shell(msgspec.Struct):
    command: Annotated[str, Meta(description="Command to run; several lines are fine.")] | UnsetType = UNSET
    input: (
        Annotated[
            str,
            Meta(description="Text to type into the program that is running; end it with a line break for Enter."),
        ]
        | UnsetType
    ) = UNSET
    control: (
        Annotated[
            Literal["wait", "interrupt", "end_input", "restart"],
            Meta(
                description="For a command that is running: wait, interrupt (Ctrl-C), or end_input (Ctrl-D)."
                " restart: kill the shell with all its programs and start a new one."
            ),
        ]
        | UnsetType
    ) = UNSET
    timeout: (
        Annotated[float, Meta(gt=0, description="Seconds to wait for the command's end; it continues after them.")]
        | UnsetType
    ) = UNSET


class ShellTool(Tool):
    """Runs a command, or sends keys or a signal to the running one."""

    Config: ClassVar[type[BaseModel]] = ShellConfig
    name = "shell"
    description = (
        "Run a command in a shell that lasts: its folder, variables and background jobs are kept from call to call."
        " Give exactly one of command, input and control. A command that is still running when the time is over, or"
        " that waits for input, is continued with input or control in the next call."
    )
    parameters = schema_of(_Shell)

    def __init__(self, config: ShellConfig) -> None:
        self._config = config

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        call = read(arguments, _Shell)
        if [call.command, call.input, call.control].count(UNSET) != 2:
            raise ToolFailed("give exactly one of command, input and control")
        shell = (await context.action_server()).shell
        if call.control == "restart":
            await shell.restart()
            return Observation(content="[a new shell was started]")
        return _shown(await self._acted(shell, call, context), context.max_output_bytes)

    async def _acted(self, shell: action_server.ShellTool, call: _Shell, context: ToolContext) -> ShellResult:
        short_s, long_s = (
            min(wanted if call.timeout is UNSET else call.timeout, self._config.max_timeout_s)
            for wanted in (_INPUT_S, context.command_timeout_s)
        )
        if isinstance(call.command, str):
            return await shell.run(call.command, timeout_s=long_s)
        if isinstance(call.input, str):
            return await shell.send_keys(call.input, timeout_s=short_s)
        match call.control:
            case "interrupt":
                return await shell.interrupt(timeout_s=short_s)
            case "end_input":
                return await shell.send_keys("\x04", timeout_s=short_s)
            case _:
                return await shell.wait(timeout_s=long_s)


def _shown(result: ShellResult, max_bytes: int) -> Observation:
    """Output, then one line in brackets with the command's state."""
    status = result.status()
    if result.state in ("running", "waiting"):
        status += ". Go on with input, or with control: wait, interrupt, end_input or restart"
    parts = [captured(result.output, max_bytes - len(status) - 64)]
    if earlier := captured(result.earlier, max_bytes // 8):
        parts.insert(0, f"[output of background jobs]\n{earlier.rstrip()}\n[output of the command]\n")
        parts[1] = captured(result.output, max_bytes - max_bytes // 8 - len(status) - 128)
    output = "".join(parts)
    separator = "" if not output or output.endswith("\n") else "\n"
    return Observation(content=f"{output}{separator}[{status}]", is_error=bool(result.exit_code))

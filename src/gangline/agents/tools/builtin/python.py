"""The tool `python`: cells in one persistent interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.tools.answers import PythonResult
from gangline.agents.tools.arguments import read, schema_of
from gangline.agents.tools.bounding import captured, head_and_tail
from gangline.agents.tools.contract import Observation, Tool, ToolContext, ToolFailed


class PythonConfig(BaseModel):
    """Settings of tool `python`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_timeout_s: float = Field(default=3600.0, gt=0)
    """The longest timeout that a call may request, in seconds."""


class _Cell(msgspec.Struct):
    code: (
        Annotated[str, Meta(description="Python code. The value of its last expression is shown without print.")]
        | UnsetType
    ) = UNSET
    timeout: Annotated[float, Meta(gt=0, description="Seconds after which the code is interrupted.")] | UnsetType = (
        UNSET
    )
    restart: Annotated[bool, Meta(description="Start a new interpreter first; all variables are lost.")] = False


class PythonTool(Tool):
    """Runs a cell in the session's interpreter."""

    Config: ClassVar[type[BaseModel]] = PythonConfig
    name = "python"
    description = (
        "Run Python code in an interpreter that lasts: variables, imports and functions are kept from call to call."
        " Shows printed output, the value of the last expression, and the traceback of an error."
    )
    parameters = schema_of(_Cell)

    def __init__(self, config: PythonConfig) -> None:
        self._config = config

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        call = read(arguments, _Cell)
        if call.code is UNSET and not call.restart:
            raise ToolFailed("give code, or restart")
        python = (await context.action_server()).python
        if call.restart:
            await python.restart()
        if call.code is UNSET:
            return Observation(content="[a new interpreter was started; earlier variables are lost]")
        wanted_s = context.command_timeout_s if call.timeout is UNSET else call.timeout
        result = await python.run(call.code, timeout_s=min(wanted_s, self._config.max_timeout_s))
        return _shown(result, context.max_output_bytes)


def _shown(result: PythonResult, max_bytes: int) -> Observation:
    """Output, value or traceback, then one line in brackets with the cell's state. The value and traceback get half of
    the space if the output needs the other half.
    """
    status = f"[{_status(result)}]"
    room = max_bytes - len(status) - 128
    value = head_and_tail(result.traceback or result.result or "", room // 2)
    earlier = captured(result.earlier, room // 8)
    output = captured(result.output, room - len(value.encode()) - len(earlier.encode()))
    parts = [part if part.endswith("\n") else f"{part}\n" for part in (output, value) if part]
    if earlier:
        parts.insert(0, f"[output since the last cell]\n{earlier.rstrip()}\n[output of this cell]\n")
    is_error = result.traceback is not None or result.state != "ended"
    return Observation(content="".join(parts) + status, is_error=is_error)


def _status(result: PythonResult) -> str:
    status = result.status()
    if result.state == "running":
        status = (
            f"still running after {result.duration_s:.1f} s and an interrupt: call with restart, variables are lost"
        )
    elif result.is_interrupted:
        status += ": its time was over; variables are kept"
    if result.is_new and result.state != "died":
        status += "; this is a new interpreter, earlier variables are lost"
    if num_images := len(result.images) + result.num_images_omitted:
        status += f"; {num_images} image{'s' if num_images > 1 else ''} drawn, which cannot be shown here"
    return status

"""The tool `submit`: ends the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel

from gangline.agents.tools.arguments import read, schema_of
from gangline.agents.tools.contract import NoConfig, Observation, Tool, ToolContext


class _Submit(msgspec.Struct):
    answer: Annotated[
        str, Meta(description="The final answer, where the task asks for one. Leave it out for work on files.")
    ] = ""


class SubmitTool(Tool):
    """Sets `Observation.answer`, which is empty if the work is in files."""

    Config: ClassVar[type[BaseModel]] = NoConfig
    name = "submit"
    description = "Hand in your solution and end the task. Call it once, alone, when you are done and have checked it."
    parameters = schema_of(_Submit)

    def __init__(self, config: NoConfig) -> None: ...

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        return Observation(content="submitted", answer=read(arguments, _Submit).answer)

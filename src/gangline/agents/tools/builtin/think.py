"""The tool `think`: lets the model write down thoughts between actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel

from gangline.agents.tools.arguments import read, schema_of
from gangline.agents.tools.contract import NoConfig, Observation, Tool, ToolContext


class _Think(msgspec.Struct):
    thought: Annotated[str, Meta(description="The thought.")]


class ThinkTool(Tool):
    """Does nothing: the thought is in the conversation."""

    Config: ClassVar[type[BaseModel]] = NoConfig
    name = "think"
    description = (
        "Think before you act: write down a plan, a finding or a doubt. Nothing is run and nothing is looked up."
    )
    parameters = schema_of(_Think)

    def __init__(self, config: NoConfig) -> None: ...

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        read(arguments, _Think)
        return Observation(content="ok")

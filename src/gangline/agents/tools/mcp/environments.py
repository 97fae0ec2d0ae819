"""Tools of a session's environments, for an agent in the node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel

from gangline.agents.tools.contract import NoConfig, Observation, Tool, ToolContext, ToolFailed
from gangline.agents.tools.mcp.connection import name_for_models, shown
from gangline.domain.environment import OfferedTool, SessionEnvironment
from gangline.domain.errors import EnvironmentFailed


class EnvironmentTool(Tool):
    """One tool of an environment."""

    Config: ClassVar[type[BaseModel]] = NoConfig

    def __init__(self, name: str, environment: SessionEnvironment, tool: OfferedTool) -> None:
        self._environment = environment
        self._tool = tool.name
        self.name = name_for_models(name, tool.name)
        self.description = tool.description
        self.parameters: Mapping[str, Any] = tool.parameters

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        try:
            result = await self._environment.call(self._tool, arguments)
        except EnvironmentFailed as error:
            raise ToolFailed(error.message) from error
        return Observation(content=shown(result.content), is_error=result.is_error)


def environment_tools(environments: Mapping[str, SessionEnvironment]) -> list[Tool]:
    """All tools of the environments, named `environment__tool`."""
    return [EnvironmentTool(name, one, tool) for name, one in environments.items() for tool in one.tools]

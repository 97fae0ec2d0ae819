"""Runs a native agent in a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from pydantic import BaseModel

from gangline.agents.harnesses.native.config import NativeConfig
from gangline.agents.harnesses.native.loop import converse
from gangline.agents.harnesses.native.model import ChatModel, Message
from gangline.agents.harnesses.native.toolbox import Toolbox
from gangline.agents.harnesses.shared.evidence import describe_exit
from gangline.agents.tools.action_server import ActionServerOptions
from gangline.agents.tools.contract import Tool, ToolContext
from gangline.agents.tools.mcp.environments import environment_tools
from gangline.agents.tools.mcp.servers import mcp_tools
from gangline.agents.tools.session_server import SessionServer
from gangline.domain.contracts import AgentRun, Capability, HarnessContext, HarnessVerdict
from gangline.domain.errors import HarnessError, InvalidRequest, ToolUnavailable
from gangline.domain.sandbox import ExecResult
from gangline.settings import plugins


class NativeHarness:
    """Runs the agent in the node."""

    name: ClassVar[str] = "native"
    Config: ClassVar[type[BaseModel]] = NativeConfig
    takes: ClassVar[frozenset[Capability]] = frozenset({"mcp_servers"})
    needs_tools: bool = True
    """False if the agent has no tools, as for a plain question."""

    def __init__(self, config: NativeConfig) -> None:
        """Raises: UnknownPlugin, InvalidRequest if a tool or its settings are invalid."""
        self.config = config
        self._tools = _made(config)
        self.needs_tools = bool(self._tools)

    async def prepare(self, context: HarnessContext) -> AgentRun:
        return lambda: self._run(context)

    def judge(self, result: ExecResult) -> HarnessVerdict:
        return HarnessVerdict(True) if result.ok else HarnessVerdict(False, describe_exit(result))

    async def _run(self, context: HarnessContext) -> ExecResult:
        """Exit code 0 with the answer on stdout, or 1 with the reason on stderr. Raises: ToolUnavailable."""
        try:
            async with self._toolbox(context) as toolbox:
                answer = await self._answer(context, toolbox)
        except ToolUnavailable:  # not the agent's fault, so its session is not graded
            raise
        except HarnessError as error:
            return ExecResult(exit_code=1, stderr=error.message.encode(errors="replace"))
        return ExecResult(exit_code=0, stdout=answer.encode(errors="replace"))

    @asynccontextmanager
    async def _toolbox(self, context: HarnessContext) -> AsyncGenerator[Toolbox]:
        """The session's tools, over an action server that starts on first use. Raises: HarnessError."""
        config = self.config
        options = ActionServerOptions(max_output_bytes=config.max_output_bytes)
        server = SessionServer(context.runtime, options, context.env)
        tool_context = ToolContext(
            runtime=context.runtime,
            env=context.env,
            action_server=server.current,
            command_timeout_s=config.command_timeout_s,
            max_output_bytes=config.max_output_bytes,
            network=context.network,
            search_sources=context.search_sources,
            mcp_sources=context.mcp_sources,
        )
        try:
            environments = context.environments
            servers = {name: server for name, server in context.mcp_servers.items() if name not in environments}
            async with (
                mcp_tools(servers, tool_context) as more,
                Toolbox([*self._tools, *more, *environment_tools(environments)], tool_context) as toolbox,
            ):
                yield toolbox
        finally:
            await server.close()

    async def _answer(self, context: HarnessContext, toolbox: Toolbox) -> str:
        """Raises: HarnessError, RuntimeFailed."""
        config = self.config
        fields: dict[str, Any] = {"model": context.model}
        if toolbox.offered:
            fields["tools"] = toolbox.offered
        if config.max_tokens is not None:
            fields["max_tokens"] = config.max_tokens
        async with ChatModel(f"{context.node_url}/v1", context.api_key, fields) as model:
            messages = self._opening(context.instruction)
            return await converse(model, toolbox, messages, finish=config.finish, max_reminders=config.max_reminders)

    def _opening(self, instruction: str) -> list[Message]:
        prompt = self.config.first_message
        system = [{"role": "system", "content": prompt}] if prompt else []
        return [*system, {"role": "user", "content": instruction}]


def _made(config: NativeConfig) -> list[Tool]:
    """Raises: UnknownPlugin, InvalidRequest."""
    tools = [plugins.make_tool(spec.name, spec.settings) for spec in config.tool_specs]
    twice = [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]
    if twice:
        raise InvalidRequest(f"harness 'native': tools: {twice[0]!r} is there twice, and a model could not tell which")
    return tools

"""Harness `claude_code`: Claude Code, npm package `@anthropic-ai/claude-code`.

Its configuration is written to the session's private HOME, the session's key is only in its environment, and
the instruction is its standard input. All models that it uses, including the small one and those for sub-agents, are
mapped to the session's model.

It prints one object when it ends. The run succeeded if `is_error` is false in it. The exit code alone says little, and
an interrupted run prints nothing. Its transcripts, one per conversation, are kept as logs.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program
from gangline.agents.harnesses.shared.configuration import write_json, write_skills
from gangline.agents.harnesses.shared.environment import provider_environment
from gangline.agents.harnesses.shared.evidence import describe_exit, json_events
from gangline.domain.contracts import Capability, HarnessContext, HarnessVerdict, Launch
from gangline.domain.sandbox import ExecResult
from gangline.domain.task import McpServer

_FOLDER = ".claude"
_PROGRAM = Program(
    harness="claude_code",
    command="claude",
    source="npm",
    package="@anthropic-ai/claude-code",
    version="2.1.329",
    oldest=(22, 0),
    needs_script=True,  # it installs the program for this machine
    env={"DISABLE_AUTOUPDATER": "1"},
)
_MODEL_VARIABLES = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}


class ClaudeCodeConfig(BaseModel):
    """Settings of harness `claude_code`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: ProgramVersion = _PROGRAM.version
    """Required version; None: any."""
    context_window: int | None = Field(default=None, gt=0)
    """Context size of the model in tokens; the history is compacted as it fills up. None: Claude Code's guess, which is
    a million for an unknown model.
    """
    max_output_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of each reply; None: its default."""
    max_thinking_tokens: int | None = Field(default=None, ge=0)
    """Thinking budget in tokens; 0: no thinking, None: its default."""
    tools: tuple[str, ...] | None = None
    """Names of the tools to offer, such as `Bash` and `Edit`; None: its default, `()`: no tools."""
    disallowed_tools: tuple[str, ...] = ()
    """Names of tools to remove."""
    agents: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Additional sub-agents by name, in the form of its option `--agents`."""
    system_prompt: str | None = None
    """Replaces its system prompt."""
    append_system_prompt: str | None = None
    """Text appended to the system prompt."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Its own `settings.json`."""
    arguments: tuple[str, ...] = ()
    """Additional command-line arguments."""


class ClaudeCodeHarness:
    """Configures, starts and judges Claude Code."""

    name: ClassVar[str] = "claude_code"
    Config: ClassVar[type[BaseModel]] = ClaudeCodeConfig
    program: ClassVar[Program] = _PROGRAM
    needs_tools: ClassVar[bool] = True
    takes: ClassVar[frozenset[Capability]] = frozenset({"mcp_servers", "skills"})
    varying_text: ClassVar[tuple[str, ...]] = (r"Today's date is (?P<value>\d{4}[-/]\d{2}[-/]\d{2})",)
    logs: ClassVar[tuple[str, ...]] = (f"{_FOLDER}/projects/*/*.jsonl", f"{_FOLDER}/projects/*/*/subagents/*.jsonl")

    def __init__(self, config: ClaudeCodeConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if Claude Code is missing, does not start, or has the wrong version."""
        await check_program(context.runtime, self.program, self._config.version)
        folder = f"{context.runtime.home}/{_FOLDER}"
        servers = {name: _mcp_server(server) for name, server in context.mcp_servers.items()}
        await write_json(
            context.runtime,
            f"{folder}/.claude.json",
            {"hasCompletedOnboarding": True, "autoUpdates": False, "mcpServers": servers},
        )
        await write_json(context.runtime, f"{folder}/settings.json", self._config.settings)
        await write_skills(context.runtime, f"{folder}/skills", context.skills)
        return Launch(
            command=["claude", *self._arguments(context.model)],
            env={**self._environment(context.model, folder), **provider_environment(context)},
            stdin=context.instruction.encode(),
        )

    def judge(self, result: ExecResult) -> HarnessVerdict:
        if result.timed_out:
            return HarnessVerdict(False, describe_exit(result))
        results = [event for event in json_events(result.stdout) if event["type"] == "result"]
        if not results:
            if result.ok and result.truncated:
                return HarnessVerdict(True)
            return HarnessVerdict(False, f"claude ended without a result: {describe_exit(result)}")
        last = results[-1]
        if last.get("is_error") is not False:
            message = str(last.get("result") or last.get("errors") or last.get("subtype") or "no message")[:300]
            return HarnessVerdict(False, f"claude ended in an error ({last.get('terminal_reason')}): {message}")
        return HarnessVerdict(True)

    def _arguments(self, model: str) -> list[str]:
        config = self._config
        arguments = ["-p", "--output-format", "json", "--dangerously-skip-permissions", "--model", model]
        if config.tools is not None:
            arguments += ["--tools", ",".join(config.tools)]
        if config.disallowed_tools:
            arguments += ["--disallowed-tools", ",".join(config.disallowed_tools)]
        if config.agents:
            arguments += ["--agents", json.dumps(config.agents)]
        if config.system_prompt is not None:
            arguments += ["--system-prompt", config.system_prompt]
        if config.append_system_prompt is not None:
            arguments += ["--append-system-prompt", config.append_system_prompt]
        return [*arguments, *config.arguments]

    def _environment(self, model: str, folder: str) -> dict[str, str]:
        """Variables that the task may override."""
        config = self._config
        env = {**_QUIET, "CLAUDE_CONFIG_DIR": folder, **dict.fromkeys(_MODEL_VARIABLES, model)}
        env["IS_SANDBOX"] = "1"  # required to skip permissions as root
        if config.context_window is not None:
            env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(config.context_window)
        if config.max_output_tokens is not None:
            env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(config.max_output_tokens)
        if config.max_thinking_tokens is not None:
            env["MAX_THINKING_TOKENS"] = str(config.max_thinking_tokens)
        return env


def _mcp_server(server: McpServer) -> dict[str, Any]:
    if server.url is not None:
        return {"type": "http", "url": server.url, "headers": server.headers}
    command, *arguments = server.command
    return {"type": "stdio", "command": command, "args": arguments, "env": server.env}

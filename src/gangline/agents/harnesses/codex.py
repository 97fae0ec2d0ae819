"""Harness `codex`: OpenAI's Codex, npm package `@openai/codex`. It uses OpenAI Responses only.

Its configuration is written to the session's private HOME, the session's key is only in its environment, and
the instruction is its standard input. The model's name determines its tools: with an unknown name it offers plain
functions, which suits a self-trained model.

The run succeeded if its events report that the last turn completed. Its record of the conversation is kept as a log.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program
from gangline.agents.harnesses.shared.configuration import write_skills
from gangline.agents.harnesses.shared.environment import provider_environment
from gangline.agents.harnesses.shared.evidence import describe_exit, json_events, object_in
from gangline.domain.contracts import Capability, HarnessContext, HarnessVerdict, Launch
from gangline.domain.sandbox import ExecResult
from gangline.domain.task import McpServer

_FOLDER = ".codex"
_PROVIDER = "gangline"
_KEY_VARIABLE = "GANGLINE_API_KEY"
_PROGRAM = Program(
    harness="codex", command="codex", source="npm", package="@openai/codex", version="0.169.0", oldest=(16, 0)
)


class CodexConfig(BaseModel):
    """Settings of harness `codex`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: ProgramVersion = _PROGRAM.version
    """Required version; None: any."""
    context_window: int | None = Field(default=None, gt=0)
    """Context size of the model in tokens; Codex compacts its history before it is full. None: its own guess."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Reasoning effort that it requests; None: its default."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Additional keys and tables of its `config.toml`, which override the adapter's."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of `codex exec`."""


class CodexHarness:
    """Configures, starts and judges Codex."""

    name: ClassVar[str] = "codex"
    Config: ClassVar[type[BaseModel]] = CodexConfig
    program: ClassVar[Program] = _PROGRAM
    needs_tools: ClassVar[bool] = True
    takes: ClassVar[frozenset[Capability]] = frozenset({"mcp_servers", "skills"})
    varying_text: ClassVar[tuple[str, ...]] = (
        r"(?m)^Chunk ID: (?P<handle>[0-9a-f]+)$",
        r"(?m)^Wall time: (?P<value>[0-9.]+) seconds$",
        r"(?m)^Process running with session ID (?P<handle>\d+)$",
        r"<current_date>(?P<value>[^<]*)</current_date>",
    )
    logs: ClassVar[tuple[str, ...]] = (f"{_FOLDER}/sessions/*/*/*/*.jsonl",)

    def __init__(self, config: CodexConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if Codex is missing, does not start, or has the wrong version."""
        await check_program(context.runtime, self.program, self._config.version)
        folder = f"{context.runtime.home}/{_FOLDER}"
        await context.runtime.upload(f"{folder}/config.toml", tomli_w.dumps(self._settings(context)).encode())
        await write_skills(context.runtime, f"{folder}/skills", context.skills)
        command = ["codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
        return Launch(
            command=[*command, "--disable", "plugins", *self._config.arguments, "-"],
            env={"CODEX_HOME": folder, **provider_environment(context)},
            stdin=context.instruction.encode(),
        )

    def judge(self, result: ExecResult) -> HarnessVerdict:
        if result.timed_out or result.exit_code != 0:
            failed = _failure(result.stdout)
            return HarnessVerdict(False, f"codex failed: {failed}" if failed else describe_exit(result))
        ends = [event for event in json_events(result.stdout) if event["type"] in ("turn.completed", "turn.failed")]
        if not ends:
            return HarnessVerdict(True) if result.truncated else HarnessVerdict(False, "codex ended within a turn")
        if ends[-1]["type"] == "turn.failed":
            return HarnessVerdict(False, f"codex failed: {_failure(result.stdout)}")
        return HarnessVerdict(True)

    def _settings(self, context: HarnessContext) -> dict[str, Any]:
        """Content of `config.toml`."""
        config = self._config
        settings: dict[str, Any] = {
            "model": context.model,
            "model_provider": _PROVIDER,
            "check_for_update_on_startup": False,
            "analytics": {"enabled": False},
            "feedback": {"enabled": False},
            "otel": {"exporter": "none"},
            "model_providers": {
                _PROVIDER: {
                    "name": "Gangline",
                    "base_url": f"{context.base_url.rstrip('/')}/v1",
                    "env_key": _KEY_VARIABLE,
                    "wire_api": "responses",
                }
            },
            "mcp_servers": {name: _mcp_server(server) for name, server in context.mcp_servers.items()},
        }
        if config.context_window is not None:
            settings["model_context_window"] = config.context_window
        if config.reasoning_effort is not None:
            settings["model_reasoning_effort"] = config.reasoning_effort
        return settings | config.config


def _mcp_server(server: McpServer) -> dict[str, Any]:
    if server.url is not None:
        return {"url": server.url, "http_headers": server.headers}
    command, *arguments = server.command
    return {"command": command, "args": arguments, "env": server.env}


def _failure(stdout: bytes) -> str:
    """The message of the last error event; empty if there is none."""
    message = ""
    for event in json_events(stdout):
        if event["type"] == "turn.failed":
            message = str(object_in(event, "error").get("message") or message)
        elif event["type"] == "error":
            message = str(event.get("message") or message)
    return message[:300]

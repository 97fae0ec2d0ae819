"""Harness `opencode`: the coding agent of npm package `opencode-ai`.

Its configuration is written to the session's private HOME, the session's key is only in its environment, and
the instruction is its standard input. The run succeeded if its events contain no error and a last step that finished.
Events with tool results are removed from its output.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program
from gangline.agents.harnesses.shared.configuration import write_json, write_skills
from gangline.agents.harnesses.shared.environment import provider_environment
from gangline.agents.harnesses.shared.evidence import describe_exit, json_events, object_in
from gangline.agents.harnesses.shared.filtered import without_events
from gangline.domain.contracts import Capability, HarnessContext, HarnessVerdict, Launch
from gangline.domain.sandbox import ExecResult
from gangline.domain.task import McpServer

_PROGRAM = Program(
    harness="opencode",
    command="opencode",
    source="npm",
    package="opencode-ai",
    version="1.18.33",
    oldest=(20, 0),
    needs_script=True,  # it installs the program for this machine
    env={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    },
)
_PROVIDER = "gangline"
_KEY_VARIABLE = "GANGLINE_API_KEY"

_APIS = {
    "chat": ("@ai-sdk/openai-compatible", "/v1"),
    "responses": ("@ai-sdk/openai", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "google": ("@ai-sdk/google", "/v1beta"),
}
"""API -> the package that implements it (all are bundled), and the end of its base URL."""


class OpencodeConfig(BaseModel):
    """Settings of harness `opencode`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api: Literal["chat", "responses", "anthropic", "google"] = "chat"
    """The API that the program uses with the proxy."""
    version: ProgramVersion = _PROGRAM.version
    """Required version; None: any."""
    context_window: int = Field(default=32_768, gt=0)
    """Context size of the model in tokens; the program compacts its history before it is full."""
    max_tokens: int = Field(default=4_096, gt=0)
    """Maximum tokens of each reply."""
    disabled_tools: tuple[str, ...] = ("webfetch",)
    """Tools that are not offered."""
    system_prompt: str | None = None
    """Replaces the program's system prompt."""
    compaction: bool = True
    """Whether the program may summarise its history when the context fills up."""
    title_call: bool = True
    """Whether the program asks the model for a session title, in a separate call without tools."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the model in the program's `opencode.json`, such as `reasoning`."""
    arguments: tuple[str, ...] = ()
    """Additional command-line arguments of the program."""


class OpencodeHarness:
    """Configures, starts and judges opencode."""

    name: ClassVar[str] = "opencode"
    Config: ClassVar[type[BaseModel]] = OpencodeConfig
    program: ClassVar[Program] = _PROGRAM
    needs_tools: ClassVar[bool] = True
    takes: ClassVar[frozenset[Capability]] = frozenset({"mcp_servers", "skills"})
    logs: ClassVar[tuple[str, ...]] = (".local/share/opencode/log/*.log",)

    def __init__(self, config: OpencodeConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if the program is missing, does not start, or has the wrong version."""
        runtime = context.runtime
        await check_program(runtime, self.program, self._config.version)
        folder = f"{runtime.home}/.config/opencode"
        await write_json(runtime, f"{folder}/opencode.json", self._settings(context))
        await write_skills(runtime, f"{folder}/skills", context.skills)
        command = without_events(self._command(context), r'/^{"type":"tool_use"/d', r'/^{"type":"step_start"/d')
        return Launch(
            command=command,
            env={**provider_environment(context), **self.program.env},
            stdin=context.instruction.encode(),
        )

    def judge(self, result: ExecResult) -> HarnessVerdict:
        has_ended = False
        for event in json_events(result.stdout):
            if event["type"] == "error":
                return HarnessVerdict(False, f"opencode gave up: {_message(event)}")
            has_ended = has_ended or event["type"] == "step_finish"
        if result.timed_out or result.exit_code != 0:
            return HarnessVerdict(False, describe_exit(result))
        if not has_ended and not result.truncated:
            return HarnessVerdict(False, "opencode ended without an answer from the model")
        return HarnessVerdict(True)

    def _command(self, context: HarnessContext) -> list[str]:
        command = ["opencode", "run", "--format", "json", "--model", f"{_PROVIDER}/{context.model}"]
        if not self._config.title_call:
            command += ["--title", context.session_id]
        return [*command, *self._config.arguments]

    def _settings(self, context: HarnessContext) -> dict[str, Any]:
        config = self._config
        package, path = _APIS[config.api]
        model = {
            "name": context.model,
            "limit": {"context": config.context_window, "output": config.max_tokens},
            "tool_call": True,
            **config.model_options,
        }
        provider = {
            "npm": package,
            "name": _PROVIDER,
            "options": {"baseURL": context.base_url.rstrip("/") + path, "apiKey": f"{{env:{_KEY_VARIABLE}}}"},
            "models": {context.model: model},
        }
        settings: dict[str, Any] = {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "permission": {"*": "allow", **dict.fromkeys(config.disabled_tools, "deny")},
            "small_model": f"{_PROVIDER}/{context.model}",
            "provider": {_PROVIDER: provider},
            "enabled_providers": [_PROVIDER],
            "compaction": {"auto": config.compaction},
            "mcp": {name: _mcp_server(server) for name, server in context.mcp_servers.items()},
        }
        if config.system_prompt is not None:
            settings["agent"] = {"build": {"prompt": config.system_prompt}}
        return settings


def _mcp_server(server: McpServer) -> dict[str, Any]:
    if server.url is not None:
        return {"type": "remote", "url": server.url, "headers": server.headers, "enabled": True}
    return {"type": "local", "command": list(server.command), "environment": server.env, "enabled": True}


def _message(event: dict[str, Any]) -> str:
    error = object_in(event, "error")
    return str(object_in(error, "data").get("message") or error.get("name") or "no message")[:300]

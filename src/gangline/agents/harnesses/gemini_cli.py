"""Harness `gemini_cli`: Google's coding agent, npm package `@google/gemini-cli`.

Its configuration is written to the session's private HOME; the session's key is only in its environment. It ends by
printing one JSON document with the last answer and counts, or an error. The exit code is not enough: it is 0 even after
answers that the program cannot use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program
from gangline.agents.harnesses.shared.configuration import write_json, write_skills
from gangline.agents.harnesses.shared.environment import provider_environment
from gangline.agents.harnesses.shared.evidence import describe_exit, object_in
from gangline.agents.harnesses.shared.prompt import prompt_argument
from gangline.domain.contracts import Capability, HarnessContext, HarnessVerdict, Launch
from gangline.domain.sandbox import ExecResult
from gangline.domain.task import McpServer

_PROGRAM = Program(
    harness="gemini_cli",
    command="gemini",
    source="npm",
    package="@google/gemini-cli",
    version="0.61.0",
    oldest=(20, 0),
    env={"GEMINI_CLI_NO_RELAUNCH": "true"},
)
_ASSUMED_WINDOW = 1_048_576
"""The program's assumption of the context size of an unknown model, in tokens."""
_COMPRESS_AT = 0.75
"""Fraction of the real context."""


class GeminiCliConfig(BaseModel):
    """Settings of harness `gemini_cli`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: ProgramVersion = _PROGRAM.version
    """Required version; None: any."""
    context_window: int = Field(default=32_768, gt=0)
    """Context size of the model in tokens; the program compresses its history when three quarters are used."""
    exclude_tools: tuple[str, ...] = ("google_web_search", "web_fetch")
    """Tools that are not offered. The default two need Google's own servers."""
    disabled_skills: tuple[str, ...] = ("antigravity-support",)
    """Skills that are not offered. The default one is about moving to another program. The program announces two
    bundled skills to the model in random order, so that forks would differ in their first request.
    """
    system_prompt: str | None = None
    """Replaces the program's system prompt."""
    loop_detection: bool = False
    """Whether the program ends a run that seems to repeat itself; it also asks the model to judge that."""
    arguments: tuple[str, ...] = ()
    """Additional command-line arguments of the program."""


class GeminiCliHarness:
    """Configures, starts and judges Gemini CLI."""

    name: ClassVar[str] = "gemini_cli"
    Config: ClassVar[type[BaseModel]] = GeminiCliConfig
    program: ClassVar[Program] = _PROGRAM
    needs_tools: ClassVar[bool] = True
    takes: ClassVar[frozenset[Capability]] = frozenset({"mcp_servers", "skills"})
    varying_text: ClassVar[tuple[str, ...]] = (
        r"(?m)^Today's date is (?P<value>[^\n]*)$",
        r"(?m)^Background PIDs: (?P<handle>\d[\d, ]*)$",
        r"(?m)^Process Group PGID: (?P<handle>\d+)$",
    )
    logs: ClassVar[tuple[str, ...]] = (".gemini/tmp/*/chats/*.jsonl",)

    def __init__(self, config: GeminiCliConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if the program is missing, does not start, or has the wrong version."""
        config, runtime = self._config, context.runtime
        await check_program(runtime, self.program, config.version)
        folder = f"{runtime.home}/.gemini"
        await write_json(runtime, f"{folder}/settings.json", self._settings(context))
        await write_skills(runtime, f"{folder}/skills", context.skills)
        env = provider_environment(context) | {**self.program.env, "GEMINI_TELEMETRY_ENABLED": "false"}
        if config.system_prompt is not None:
            env["GEMINI_SYSTEM_MD"] = f"{folder}/system.md"
            await runtime.upload(env["GEMINI_SYSTEM_MD"], config.system_prompt.encode())
        arguments, stdin = prompt_argument(context.instruction)
        command = ["gemini", "--yolo", "--model", context.model, "--output-format", "json"]
        return Launch(command=[*command, *config.arguments, *arguments], env=env, stdin=stdin)

    def judge(self, result: ExecResult) -> HarnessVerdict:
        printed, complained = _document(result.stdout), _document(result.stderr)
        if "error" in printed or "error" in complained:
            error = object_in(printed, "error") or object_in(complained, "error")
            return HarnessVerdict(False, f"Gemini CLI gave up: {str(error.get('message', 'no message'))[:300]}")
        if result.timed_out or result.exit_code != 0:
            return HarnessVerdict(False, describe_exit(result))
        if "response" not in printed and not result.truncated:
            return HarnessVerdict(False, "Gemini CLI ended without an answer")
        return HarnessVerdict(True)

    def _settings(self, context: HarnessContext) -> dict[str, Any]:
        config = self._config
        return {
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "ide": {"enabled": False},
            "model": {
                "compressionThreshold": _COMPRESS_AT * config.context_window / _ASSUMED_WINDOW,
                "disableLoopDetection": not config.loop_detection,
            },
            "tools": {"exclude": list(config.exclude_tools)},
            "skills": {"disabled": list(config.disabled_skills)},
            "mcpServers": mcp_servers(context.mcp_servers),
        }


def mcp_servers(servers: Mapping[str, McpServer]) -> dict[str, Any]:
    """The servers in the format of Gemini CLI and programs built on it."""
    return {name: {**_reach(server), "trust": True} for name, server in servers.items()}


def _reach(server: McpServer) -> dict[str, Any]:
    if server.url is not None:
        return {"httpUrl": server.url, "headers": server.headers}
    program, *arguments = server.command
    return {"command": program, "args": arguments, "env": server.env}


def _document(output: bytes) -> dict[str, Any]:
    """The last multi-line JSON document in the output; empty if there is none."""
    start = (b"\n" + output).rfind(b"\n{\n")
    try:
        found: Any = json.loads(output[start:]) if start >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

"""Harness `qwen_code`: Alibaba's coding agent, npm package `@qwen-code/qwen-code`, based on Gemini CLI.

Its configuration is written to the session's private HOME; the session's key is only in its environment. Its last event
reports how the run ended. Other events with tool results are removed from its output; its log contains all of them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.gemini_cli import mcp_servers
from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program
from gangline.agents.harnesses.shared.configuration import write_json, write_skills
from gangline.agents.harnesses.shared.environment import provider_environment
from gangline.agents.harnesses.shared.evidence import describe_exit, json_events, object_in
from gangline.agents.harnesses.shared.filtered import without_events
from gangline.agents.harnesses.shared.prompt import prompt_argument
from gangline.domain.contracts import Capability, HarnessContext, HarnessVerdict, Launch
from gangline.domain.sandbox import ExecResult

_PROGRAM = Program(
    harness="qwen_code",
    command="qwen",
    source="npm",
    package="@qwen-code/qwen-code",
    version="0.24.4",
    oldest=(22, 0),
    env={"QWEN_CODE_NO_RELAUNCH": "1"},
    executables=("vendor/ripgrep/*/rg",),
)


class QwenCodeConfig(BaseModel):
    """Settings of harness `qwen_code`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api: Literal["openai", "openai-responses", "anthropic", "gemini"] = "openai"
    """The API that the program uses with the proxy."""
    version: ProgramVersion = _PROGRAM.version
    """Required version; None: any."""
    context_window: int = Field(default=32_768, gt=0)
    """Context size of the model in tokens; the program compresses its history before it is full. Its initial prompt
    alone takes 16,000.
    """
    max_tokens: int = Field(default=4_096, gt=0)
    """Maximum tokens of each reply."""
    disabled_tools: tuple[str, ...] = ("web_fetch",)
    """Tools that are not offered."""
    bundled_skills: bool = True
    """Whether the program announces its bundled skills to the model."""
    memory: bool = False
    """Whether the program lets the model take notes in the background."""
    system_prompt: str | None = None
    """Replaces the program's system prompt."""
    append_system_prompt: str | None = None
    """Text appended to the system prompt."""
    arguments: tuple[str, ...] = ()
    """Additional command-line arguments of the program."""


class QwenCodeHarness:
    """Configures, starts and judges Qwen Code."""

    name: ClassVar[str] = "qwen_code"
    Config: ClassVar[type[BaseModel]] = QwenCodeConfig
    program: ClassVar[Program] = _PROGRAM
    needs_tools: ClassVar[bool] = True
    takes: ClassVar[frozenset[Capability]] = frozenset({"mcp_servers", "skills"})
    varying_text: ClassVar[tuple[str, ...]] = (
        r"(?m)^Today's date is (?P<value>[^\n]*)$",
        r"(?m)^Background PIDs: (?P<handle>\d[\d, ]*)$",
        r"(?m)^Process Group PGID: (?P<handle>\d+)$",
    )
    logs: ClassVar[tuple[str, ...]] = (".qwen/projects/*/chats/*.jsonl",)

    def __init__(self, config: QwenCodeConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if the program is missing, does not start, or has the wrong version."""
        runtime = context.runtime
        await check_program(runtime, self.program, self._config.version)
        folder = f"{runtime.home}/.qwen"
        await write_json(runtime, f"{folder}/settings.json", self._settings(context))
        await write_skills(runtime, f"{folder}/skills", context.skills)
        env = provider_environment(context) | {**self.program.env, "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"}
        arguments, stdin = prompt_argument(context.instruction)
        command = without_events(
            [*self._command(context.model), *arguments], r'/^{"type":"user"/d', r'/^{"type":"stream_event"/d'
        )
        return Launch(command=command, env=env, stdin=stdin)

    def judge(self, result: ExecResult) -> HarnessVerdict:
        results = [event for event in json_events(result.stdout) if event["type"] == "result"]
        if results and results[-1].get("is_error") is not False:
            message = object_in(results[-1], "error").get("message", "no message")
            return HarnessVerdict(False, f"Qwen Code gave up: {str(message)[:300]}")
        if result.timed_out or result.exit_code != 0:
            return HarnessVerdict(False, describe_exit(result))
        if not results and not result.truncated:
            return HarnessVerdict(False, "Qwen Code's events stop before the end of its run")
        return HarnessVerdict(True)

    def _command(self, model: str) -> list[str]:
        config = self._config
        command = ["qwen", "--yolo", "--auth-type", config.api, "--model", model, "--output-format", "stream-json"]
        if config.system_prompt is not None:
            command += [f"--system-prompt={config.system_prompt}"]
        if config.append_system_prompt is not None:
            command += [f"--append-system-prompt={config.append_system_prompt}"]
        return [*command, *config.arguments]

    def _settings(self, context: HarnessContext) -> dict[str, Any]:
        config = self._config
        generation = {"contextWindowSize": config.context_window, "samplingParams": {"max_tokens": config.max_tokens}}
        return {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "security": {"auth": {"selectedType": config.api}, "folderTrust": {"enabled": False}},
            "ide": {"enabled": False},
            "model": {"generationConfig": generation},
            "tools": {"disabled": list(config.disabled_tools)},
            "skills": {"disabledLevels": [] if config.bundled_skills else ["bundled"]},
            "memory": dict.fromkeys(
                ("enableManagedAutoMemory", "enableManagedAutoDream", "enableAutoSkill"), config.memory
            ),
            "mcpServers": mcp_servers(context.mcp_servers),
        }

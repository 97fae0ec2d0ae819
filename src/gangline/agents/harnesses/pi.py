"""Harness `pi`: the coding agent of npm package `@mariozechner/pi-coding-agent`.

Its configuration is written to the session's private HOME, the session's key is only in its environment, and
the instruction is its standard input (an argument beginning with `-` or `@` would be interpreted).

pi exits with 0 even if the model's API failed, so success is read from its events: the run ended (`agent_end`), and the
last assistant message was not ended by an error. The stream repeats the whole message at each token and all messages at
the end; a filter in the launch command removes the repetitions, so that the evidence fits a bounded output.
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

_PROGRAM = Program(
    harness="pi",
    command="pi",
    source="npm",
    package="@mariozechner/pi-coding-agent",
    version="0.73.1",
    oldest=(20, 6),
    env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
)

_PROVIDER = "gangline"
_KEY_VARIABLE = "GANGLINE_API_KEY"

_API_PATHS = {
    "openai-completions": "/v1",
    "openai-responses": "/v1",
    "anthropic-messages": "",
    "google-generative-ai": "/v1beta",
}
"""pi's name of an API -> the end of its base URL."""

_REPEATED = (
    r'/^{"type":"message_update"/d',
    r'/^{"type":"message_start"/d',
    r'/^{"type":"turn_end"/d',
    r'/^{"type":"tool_execution_/d',
    r's/^{"type":"agent_end".*/{"type":"agent_end"}/',
)
"""sed commands that remove repeated content from its events."""


class PiConfig(BaseModel):
    """Settings of harness `pi`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api: Literal["openai-completions", "openai-responses", "anthropic-messages", "google-generative-ai"] = (
        "openai-completions"
    )
    """The API that pi uses with the proxy."""
    version: ProgramVersion = _PROGRAM.version
    """Required version; None: any."""
    context_window: int = Field(default=32_768, gt=0)
    """Context size of the model in tokens; pi compacts its history before it is full."""
    max_tokens: int = Field(default=4_096, gt=0)
    """Maximum tokens of each reply."""
    thinking: Literal["off", "minimal", "low", "medium", "high", "xhigh"] = "off"
    """pi's thinking level; use `off` for models that cannot think."""
    tools: tuple[str, ...] | None = None
    """Names of the tools to enable; None: pi's default: read, bash, edit, write."""
    system_prompt: str | None = None
    """Replaces pi's system prompt."""
    append_system_prompt: str | None = None
    """Text appended to the system prompt."""
    compaction: bool = True
    """Whether pi may summarise its history when the context fills up."""
    compat: dict[str, Any] = Field(default_factory=dict)
    """pi's switches for the capabilities of the engine behind the proxy, as in its `models.json`."""
    arguments: tuple[str, ...] = ()
    """Additional command-line arguments of pi."""


class PiHarness:
    """Configures, starts and judges pi."""

    name: ClassVar[str] = "pi"
    Config: ClassVar[type[BaseModel]] = PiConfig
    program: ClassVar[Program] = _PROGRAM
    needs_tools: ClassVar[bool] = True
    takes: ClassVar[frozenset[Capability]] = frozenset({"skills"})

    def __init__(self, config: PiConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if pi is missing, does not start, or has the wrong version."""
        await check_program(context.runtime, self.program, self._config.version)
        folder = f"{context.runtime.home}/.pi/agent"
        await write_json(context.runtime, f"{folder}/models.json", self._models(context))
        await write_json(context.runtime, f"{folder}/settings.json", self._settings())
        await write_skills(context.runtime, f"{folder}/skills", context.skills)
        env = provider_environment(context) | {
            "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_TELEMETRY": "0",
            "PI_CODING_AGENT_DIR": folder,
        }
        command = without_events(self._arguments(context.model), *_REPEATED)
        return Launch(command=command, env=env, stdin=context.instruction.encode())

    def judge(self, result: ExecResult) -> HarnessVerdict:
        if result.timed_out or result.exit_code != 0:
            return HarnessVerdict(False, describe_exit(result))
        last: dict[str, Any] | None = None
        ended = False
        for event in json_events(result.stdout):
            message = object_in(event, "message")
            if event["type"] == "message_end" and message.get("role") == "assistant":
                last = message
            ended = event["type"] == "agent_end" or (ended and event["type"] != "agent_start")
        if last is None:
            return HarnessVerdict(False, "pi ended without an answer from the model")
        if last.get("stopReason") in ("error", "aborted"):
            return HarnessVerdict(False, f"pi's last model call failed: {last.get('errorMessage', 'no message')}")
        if not ended and not result.truncated:
            return HarnessVerdict(False, "pi's events stop before the end of its run")
        return HarnessVerdict(True)

    def _arguments(self, model: str) -> list[str]:
        config = self._config
        arguments = ["pi", "--provider", _PROVIDER, "--model", model, "--no-session", "--mode", "json", "-p"]
        arguments += ["--thinking", config.thinking]
        if config.tools is not None:
            arguments += ["--tools", ",".join(config.tools)] if config.tools else ["--no-tools"]
        if config.system_prompt is not None:
            arguments += ["--system-prompt", config.system_prompt]
        if config.append_system_prompt is not None:
            arguments += ["--append-system-prompt", config.append_system_prompt]
        return [*arguments, *config.arguments]

    def _models(self, context: HarnessContext) -> dict[str, Any]:
        config = self._config
        model = {
            "id": context.model,
            "reasoning": config.thinking != "off",
            "input": ["text"],
            "contextWindow": config.context_window,
            "maxTokens": config.max_tokens,
            "compat": {"supportsStore": False, "supportsDeveloperRole": False, **config.compat},
        }
        provider = {
            "baseUrl": context.base_url.rstrip("/") + _API_PATHS[config.api],
            "api": config.api,
            "apiKey": _KEY_VARIABLE,
            "models": [model],
        }
        return {"providers": {_PROVIDER: provider}}

    def _settings(self) -> dict[str, Any]:
        window = self._config.context_window
        # pi's own reserve of 16,384 tokens is more than a small model's whole context.
        compaction = {
            "enabled": self._config.compaction,
            "reserveTokens": min(16_384, window // 4),
            "keepRecentTokens": min(20_000, window // 2),
        }
        return {"quietStartup": True, "enableInstallTelemetry": False, "compaction": compaction}

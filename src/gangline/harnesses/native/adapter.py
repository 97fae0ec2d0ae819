"""The run of a native agent: ask, act, ask again, until the model calls no tool any more."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.contracts import AgentRun, ExecResult, HarnessContext, HarnessVerdict
from gangline.domain.errors import HarnessError
from gangline.harnesses.native.model import ChatModel, Message
from gangline.harnesses.native.tools import OFFERED, Tools
from gangline.harnesses.shared.evidence import describe_exit

__all__ = ["NativeConfig", "NativeHarness"]

_SYSTEM_PROMPT = """\
You solve a task on a computer by calling tools. Look before you act, and check what you did. When the task is done, \
answer without calling a tool."""


class NativeConfig(BaseModel):
    """Settings of harness `native`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    system_prompt: str = _SYSTEM_PROMPT
    """The first message; empty is none."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Tokens asked for in each call; None leaves it to the engine."""
    command_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that one command may run."""
    max_output_bytes: int = Field(default=16_384, gt=0, le=1 << 20)
    """Bytes of a command's output, or of a file, that the model is shown."""


class NativeHarness:
    """Runs the agent in the node."""

    name: ClassVar[str] = "native"
    Config: ClassVar[type[BaseModel]] = NativeConfig

    def __init__(self, config: NativeConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> AgentRun:
        return lambda: self._run(context)

    def judge(self, result: ExecResult) -> HarnessVerdict:
        return HarnessVerdict(True) if result.ok else HarnessVerdict(False, describe_exit(result))

    async def _run(self, context: HarnessContext) -> ExecResult:
        """Exit code 0 and the last answer on stdout, or 1 and on stderr why there is none."""
        config = self._config
        tools = Tools(
            context.runtime,
            env=context.env,
            command_timeout_s=config.command_timeout_s,
            max_output_bytes=config.max_output_bytes,
        )
        fields: dict[str, Any] = {"model": context.model, "tools": OFFERED}
        if config.max_tokens is not None:
            fields["max_tokens"] = config.max_tokens
        try:
            async with ChatModel(f"{context.node_url}/v1", context.api_key, fields) as model:
                answer = await _converse(model, tools, self._opening(context.instruction))
        except HarnessError as error:
            return ExecResult(exit_code=1, stderr=error.message.encode())
        return ExecResult(exit_code=0, stdout=answer.encode())

    def _opening(self, instruction: str) -> list[Message]:
        system = [{"role": "system", "content": self._config.system_prompt}] if self._config.system_prompt else []
        return [*system, {"role": "user", "content": instruction}]


async def _converse(model: ChatModel, tools: Tools, messages: list[Message]) -> str:
    """The text of the answer that calls no tool. Raises: HarnessError, RuntimeFailed."""
    while True:
        message = await model.ask(messages)
        messages.append(message)
        calls: list[Message] = message.get("tool_calls") or []
        if not calls:
            return message.get("content") or ""
        for call in calls:
            messages.append(await tools.answer(call))

"""Sends the runner its order and reads its evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program, python_command
from gangline.agents.harnesses.shared.evidence import describe_exit, runner_end
from gangline.agents.harnesses.shared.litellm import litellm_environment, litellm_model
from gangline.domain.contracts import HarnessContext, HarnessVerdict, Launch
from gangline.domain.sandbox import ExecResult

_PROGRAM = Program(
    harness="openhands",
    command="openhands",
    source="pypi",
    package="openhands-sdk",
    version="1.58.0",
    beside=("openhands-tools==1.58.0", "litellm==1.105.3"),
    oldest=(3, 12),
)

_RUNNER = Path(__file__).with_name("runner.py")
_FOLDER = ".openhands"
_EVENTS = f"{_FOLDER}/events"


class OpenHandsConfig(BaseModel):
    """Settings of harness `openhands`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: ProgramVersion = _PROGRAM.version
    """Required version of the SDK; None: any."""
    context_window: int = Field(default=32_768, gt=0)
    """Context size of the model in tokens."""
    max_tokens: int = Field(default=4_096, gt=0)
    """Maximum tokens of each reply."""
    max_iterations: int = Field(default=500, gt=0)
    """Maximum number of steps. `agent.max_turns` ends the session instead."""
    condenser: bool = True
    """Whether it may summarise its history, in separate calls."""
    llm: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the SDK's `LLM`, such as `temperature` or `native_tool_calling`."""


class OpenHandsHarness:
    """Configures, starts and judges OpenHands."""

    name: ClassVar[str] = "openhands"
    Config: ClassVar[type[BaseModel]] = OpenHandsConfig
    program: ClassVar[Program] = _PROGRAM
    needs_tools: ClassVar[bool] = True
    logs: ClassVar[tuple[str, ...]] = (f"{_EVENTS}/*/events/event-*.json",)

    def __init__(self, config: OpenHandsConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if the SDK is missing, does not start, or has the wrong version."""
        runtime = context.runtime
        await check_program(runtime, self.program, self._config.version)
        runner = f"{runtime.home}/{_FOLDER}/runner.py"
        await runtime.upload(runner, _RUNNER.read_bytes())
        return Launch(
            command=python_command(self.program, runner),
            env=litellm_environment(context) | {"OPENHANDS_SUPPRESS_BANNER": "1"},
            stdin=json.dumps(self._order(context)).encode(),
        )

    def judge(self, result: ExecResult) -> HarnessVerdict:
        end = runner_end(result)
        if end is None:
            return HarnessVerdict(False, describe_exit(result))
        if end.get("status") == "finished":
            return HarnessVerdict(True)
        return HarnessVerdict(False, f"OpenHands ended as {end.get('status')}: {end.get('error') or 'no error told'}")

    def _order(self, context: HarnessContext) -> dict[str, Any]:
        config = self._config
        llm = {
            "model": litellm_model(context),
            "base_url": f"{context.base_url}/v1",
            "max_input_tokens": config.context_window,
            "max_output_tokens": config.max_tokens,
            **config.llm,
        }
        return {
            "instruction": context.instruction,
            "llm": llm,
            "condenser": config.condenser,
            "events": f"{context.runtime.home}/{_EVENTS}",
            "max_iterations": config.max_iterations,
        }

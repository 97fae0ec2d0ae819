"""Sends the runner its order and reads its evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program, python_command
from gangline.agents.harnesses.shared.evidence import describe_exit, runner_end
from gangline.agents.harnesses.shared.litellm import litellm_environment, litellm_model
from gangline.domain.contracts import HarnessContext, HarnessVerdict, Launch
from gangline.domain.errors import HarnessError
from gangline.domain.sandbox import ExecResult, Sandbox

_PROGRAM = Program(
    harness="terminus",
    command="harbor",
    source="pypi",
    package="harbor",
    version="0.24.0",
    beside=("litellm==1.106.2",),
    oldest=(3, 12),
)

_RUNNER = Path(__file__).with_name("runner.py")
_FOLDER = ".terminus"
_CHECK_TIMEOUT_S = 60.0


class TerminusConfig(BaseModel):
    """Settings of harness `terminus`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: ProgramVersion = _PROGRAM.version
    """Required version of Harbor; None: any."""
    parser: Literal["json", "xml"] = "json"
    """Format of the model's answers."""
    context_window: int = Field(default=32_768, gt=0)
    """Context size of the model in tokens."""
    max_tokens: int = Field(default=4_096, gt=0)
    """Maximum tokens of an answer."""
    summarize: bool = True
    """Whether it may summarise its history, in separate calls."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Additional options of terminus-2, such as `temperature` or `tmux_pane_height`."""


class TerminusHarness:
    """Configures, starts and judges terminus-2."""

    name: ClassVar[str] = "terminus"
    Config: ClassVar[type[BaseModel]] = TerminusConfig
    program: ClassVar[Program] = _PROGRAM
    logs: ClassVar[tuple[str, ...]] = (f"{_FOLDER}/agent/trajectory.json", f"{_FOLDER}/agent/terminus_2.pane")

    def __init__(self, config: TerminusConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if Harbor or tmux is missing, or Harbor does not start or has the wrong version."""
        runtime = context.runtime
        await check_program(runtime, self.program, self._config.version)
        await _check_tmux(runtime)
        runner = f"{runtime.home}/{_FOLDER}/runner.py"
        await runtime.upload(runner, _RUNNER.read_bytes())
        return Launch(
            command=python_command(self.program, runner),
            env=litellm_environment(context),
            stdin=json.dumps(self._order(context)).encode(),
        )

    def judge(self, result: ExecResult) -> HarnessVerdict:
        end = runner_end(result)
        if end is None:
            return HarnessVerdict(False, describe_exit(result))
        return HarnessVerdict(not end.get("error"), str(end.get("error") or ""))

    def _order(self, context: HarnessContext) -> dict[str, Any]:
        config = self._config
        model_info = {
            "max_input_tokens": config.context_window,
            "max_output_tokens": config.max_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        }
        agent = {
            "model_name": litellm_model(context),
            "api_base": f"{context.base_url}/v1",
            "model_info": model_info,
            "parser_name": config.parser,
            "enable_summarize": config.summarize,
            **config.options,
        }
        return {
            "instruction": context.instruction,
            "session_id": context.session_id,
            "logs": f"{context.runtime.home}/{_FOLDER}",
            "agent": agent,
        }


async def _check_tmux(runtime: Sandbox) -> None:
    result = await runtime.exec("command -v tmux", timeout_s=_CHECK_TIMEOUT_S)
    if not result.ok:
        raise HarnessError("terminus types into tmux, which the runtime does not have. Run: apt-get install tmux")

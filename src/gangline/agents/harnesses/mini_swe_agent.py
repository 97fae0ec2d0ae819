"""Harness `mini_swe_agent`: the agent of Python package `mini-swe-agent`, one tool (`bash`), a linear history.

Its configuration is written to the session's private HOME: the package's `mini.yaml`, ours on top, and the instruction
in a separate file, so that it can have any length and is never read as an option.

It ends when the model runs a command that prints its submit marker, but exits with 0 in other cases too. The trajectory
that it saves shows how it ended; the launch command writes that to stderr.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program
from gangline.agents.harnesses.shared.evidence import describe_exit
from gangline.agents.harnesses.shared.litellm import litellm_environment, litellm_model
from gangline.domain.contracts import HarnessContext, HarnessVerdict, Launch
from gangline.domain.sandbox import ExecResult

_PROGRAM = Program(
    harness="mini_swe_agent",
    command="mini",
    source="pypi",
    package="mini-swe-agent",
    version="2.4.6",
    beside=("mcp==2.3.0", "litellm==1.106.2"),  # without mcp it hangs
    oldest=(3, 10),
)

_FOLDER = ".config/mini-swe-agent"
_TRAJECTORY = f"{_FOLDER}/last_mini_run.traj.json"
_ENDED = "mini-swe-agent ended: "
_SUBMITTED = "Submitted"
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")

# $1 is the trajectory; the rest is mini with its arguments. Four spaces: the run's field, not a message's.
_LAUNCH = rf"""
trajectory=$1; shift
"$@"; code=$?
sed -n 's/^    "exit_status": "\(.*\)",*$/{_ENDED}\1/p' "$trajectory" >&2
exit $code
"""


class MiniSweAgentConfig(BaseModel):
    """Settings of harness `mini_swe_agent`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: ProgramVersion = _PROGRAM.version
    """Required version; None: any."""
    config: str = "mini.yaml"
    """One of its bundled configurations, or a path inside the runtime."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Merged over `config`: sections `agent`, `environment`, `model`."""
    step_limit: int = Field(default=0, ge=0)
    """Maximum number of steps; 0: no limit. `agent.max_turns` ends the session instead."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of each reply; None: the engine's default."""
    command_timeout_s: int = Field(default=30, gt=0)
    """Seconds that one command may run."""


class MiniSweAgentHarness:
    """Configures, starts and judges mini-swe-agent."""

    name: ClassVar[str] = "mini_swe_agent"
    Config: ClassVar[type[BaseModel]] = MiniSweAgentConfig
    program: ClassVar[Program] = _PROGRAM
    logs: ClassVar[tuple[str, ...]] = (_TRAJECTORY,)

    def __init__(self, config: MiniSweAgentConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if it is missing, does not start, or has the wrong version."""
        runtime, config = context.runtime, self._config
        await check_program(runtime, self.program, config.version)
        folder = f"{runtime.home}/{_FOLDER}"
        ours, overrides, task = (f"{folder}/{name}.yaml" for name in ("gangline", "overrides", "task"))
        await runtime.upload(ours, json.dumps(self._settings()).encode())
        await runtime.upload(overrides, json.dumps(config.overrides).encode())
        await runtime.upload(task, f"run:\n  task: {_yaml_text(context.instruction)}\n".encode())
        trajectory = f"{runtime.home}/{_TRAJECTORY}"
        command = ["mini", "-m", litellm_model(context), "-o", trajectory]
        for file in (config.config, ours, overrides, task):
            command += ["-c", file]
        env = litellm_environment(context) | {
            "MSWEA_CONFIGURED": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": folder,
        }
        return Launch(command=["sh", "-c", _LAUNCH, "sh", trajectory, *command], env=env)

    def judge(self, result: ExecResult) -> HarnessVerdict:
        ended = re.findall(f"^{_ENDED}(.*)$", result.stderr.decode(errors="replace"), re.MULTILINE)
        if result.timed_out or result.exit_code != 0:
            return HarnessVerdict(False, describe_exit(result))
        if not ended and not result.truncated:
            return HarnessVerdict(False, "mini-swe-agent saved no trajectory that says how it ended")
        if ended and ended[-1] != _SUBMITTED:
            return HarnessVerdict(False, f"mini-swe-agent gave up: {ended[-1] or 'it does not say why'}")
        return HarnessVerdict(True)

    def _settings(self) -> dict[str, Any]:
        config = self._config
        model_kwargs = {} if config.max_tokens is None else {"max_tokens": config.max_tokens}
        return {
            "agent": {"mode": "yolo", "confirm_exit": False, "cost_limit": 0, "step_limit": config.step_limit},
            "environment": {"timeout": config.command_timeout_s},
            "model": {"model_kwargs": model_kwargs},
        }


def _yaml_text(text: str) -> str:
    """A double-quoted YAML text: JSON's, with escapes for characters that YAML does not allow and for surrogate pairs,
    which YAML does not combine.
    """
    return _UNPRINTABLE.sub(lambda char: f"\\u{ord(char[0]):04x}", json.dumps(text, ensure_ascii=False))

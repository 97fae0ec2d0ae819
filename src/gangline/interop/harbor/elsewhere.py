"""Harness and evaluator `harbor`: what a task says whose agent Harbor ran and graded. Nothing here runs them again."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict

from gangline.domain.contracts import EvaluationContext, HarnessContext, HarnessVerdict
from gangline.domain.errors import EvaluatorError, HarnessError
from gangline.domain.sandbox import ExecResult


class HarborAgentConfig(BaseModel):
    """Settings of harness `harbor`: the agent's names in Harbor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent: str | None = None
    """Its name, such as `claude-code`."""
    version: str | None = None
    model: str | None = None
    """The model's name in Harbor's job; the engine's own is in each record."""


class HarborHarness:
    """Stands for an agent that Harbor ran: see `gangline harbor connect`."""

    name: ClassVar[str] = "harbor"
    Config: ClassVar[type[BaseModel]] = HarborAgentConfig
    runs_elsewhere: ClassVar[str] = "Harbor ran its agent, and no node can: retry the rollout in Harbor"

    def __init__(self, config: HarborAgentConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> NoReturn:
        """Raises: HarnessError."""
        raise HarnessError("Harbor runs this agent: retry its rollout there, under `gangline harbor connect`.")

    def judge(self, result: ExecResult) -> HarnessVerdict:
        return HarnessVerdict(result.ok)


class HarborEvaluatorConfig(BaseModel):
    """Empty: Harbor's own verifier gave the reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HarborEvaluator:
    """Stands for Harbor's verifier."""

    name: ClassVar[str] = "harbor"
    Config: ClassVar[type[BaseModel]] = HarborEvaluatorConfig

    def __init__(self, config: HarborEvaluatorConfig) -> None: ...

    async def evaluate(self, context: EvaluationContext) -> NoReturn:
        """Raises: EvaluatorError."""
        raise EvaluatorError("Harbor's own verifier graded this session: name another evaluator to grade it again.")

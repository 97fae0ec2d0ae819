"""An evaluator inside another one's configuration, validated with it. Errors name the nested field."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gangline.domain.contracts import Controlled, EvaluationContext, Evaluator, GradesClean, Reward
from gangline.domain.errors import CallerError, EvaluatorError, GraderUnavailable, TaskAtFault
from gangline.domain.plain_reward import plain_reward
from gangline.settings import plugins


class NestedEvaluator(BaseModel):
    """One evaluator of several."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """Its name in the details, and the prefix of its artifacts' names. None: its strategy."""
    strategy: str
    """Name of an evaluator plug-in."""
    config: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Its configuration."""

    @field_validator("strategy")
    @classmethod
    def _is_known(cls, strategy: str) -> str:
        try:
            plugins.load("evaluator", strategy)
        except CallerError as error:
            raise ValueError(error.message) from error
        return strategy

    @field_validator("config")
    @classmethod
    def _is_valid(cls, config: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if (strategy := info.data.get("strategy")) is not None:
            plugins.load("evaluator", strategy).Config.model_validate(config)  # keeps the field names in its errors
        return config

    @property
    def label(self) -> str:
        return self.name or self.strategy


def names_are_unique(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Raises: ValueError if two parts have the same name."""
    labels = [part.label for part in parts]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"two evaluators are called {twice[0]!r}: give each a `name`")
    return parts


class Nested:
    """One nested evaluator at run time."""

    def __init__(self, spec: NestedEvaluator) -> None:
        self.label = spec.label
        self.evaluator: Evaluator = plugins.make_evaluator(spec.strategy, spec.config)

    @property
    def is_controlled(self) -> bool:
        return isinstance(self.evaluator, Controlled) and self.evaluator.is_controlled

    @property
    def grades_clean(self) -> bool:
        return isinstance(self.evaluator, GradesClean) and self.evaluator.grades_clean

    async def grade(self, context: EvaluationContext) -> Reward:
        """Its reward. Its artifacts are added to `context` under its name.

        In a control run, an evaluator without a control returns 0 without being called, because its result would not
        matter. Raises: EvaluatorError, GraderUnavailable, GradingSpoiled.
        """
        if context.is_control and not self.is_controlled:
            return Reward(reward=0.0)
        own: dict[str, bytes] = {}
        try:
            context_of_part = msgspec.structs.replace(context, artifacts=own, kept=self._kept(context))
            return plain_reward(await self.evaluator.evaluate(context_of_part))
        except (GraderUnavailable, TaskAtFault) as error:
            raise type(error)(f"{self.label}: {error.message}") from error
        except EvaluatorError as error:
            kind = EvaluatorError if self.is_controlled else GraderUnavailable
            raise kind(f"{self.label}: {error.message}") from error
        finally:
            context.artifacts.update({f"{self.label}.{name}": data for name, data in own.items()})

    def _kept(self, context: EvaluationContext) -> dict[str, bytes]:
        prefix = f"{self.label}."
        return {name.removeprefix(prefix): data for name, data in context.kept.items() if name.startswith(prefix)}


class AroundOne:
    """An evaluator that changes another one's reward. It grades clean and has a control if the other one does."""

    def __init__(self, spec: NestedEvaluator) -> None:
        self._inner = Nested(spec)

    @property
    def is_controlled(self) -> bool:
        return self._inner.is_controlled

    @property
    def grades_clean(self) -> bool:
        return self._inner.grades_clean


def any_controlled(parts: list[Nested]) -> bool:
    return any(part.is_controlled for part in parts)


def any_grades_clean(parts: list[Nested]) -> bool:
    return any(part.grades_clean for part in parts)

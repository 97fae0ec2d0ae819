"""Settings of harness `native`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SUBMIT = "submit"
"""Name of the tool that ends a session."""

Finish = Literal["answer", "submit"]

_PROMPT = "You solve a task on a computer by calling tools. Look before you act, and check your work. "
_PROMPT_ENDS: dict[Finish, str] = {
    "answer": "When the task is done, answer without calling a tool.",
    "submit": f"When the task is done, call the tool `{SUBMIT}`.",
}


class ToolSpec(BaseModel):
    """A tool and its settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of a tool plug-in, as in `gangline.tools`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Validated with the tool's own configuration type at submit."""


class NativeConfig(BaseModel):
    """Settings of harness `native`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    system_prompt: str | None = None
    """The first message. Empty: no system prompt; None: a short one that fits `finish`."""
    tools: tuple[str | ToolSpec, ...] = ("shell", "editor")
    """Names of tool plug-ins, optionally with settings."""
    finish: Finish = "answer"
    """`answer`: a reply without a tool call ends the session and is its answer. `submit`: a call of the tool `submit`
    ends it; that tool is offered in addition to `tools`.
    """
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of a reply, or the rest of the context if that is smaller. None: the engine's default."""
    command_timeout_s: float = Field(default=120.0, gt=0)
    """Default seconds for one action."""
    max_output_bytes: Annotated[int, Field(ge=256, le=1 << 20)] = 16_384
    """Bytes of a result that the model sees; a longer result keeps its head and tail."""
    max_reminders: int = Field(default=3, ge=0)
    """Maximum number of consecutive turns that do nothing but get a report: a reply was cut off, a tool call could not
    be parsed, or nothing was submitted. One more ends the session.
    """

    @model_validator(mode="after")
    def _submits_on_purpose(self) -> Self:
        if self.finish == "answer" and SUBMIT in (spec.name for spec in self.tool_specs):
            raise ValueError("tool `submit` ends the session only with `finish: submit`")
        return self

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """Tools that the model is offered, in order."""
        specs = tuple(ToolSpec(name=tool) if isinstance(tool, str) else tool for tool in self.tools)
        if self.finish == "submit" and SUBMIT not in (spec.name for spec in specs):
            return (*specs, ToolSpec(name=SUBMIT))
        return specs

    @property
    def first_message(self) -> str:
        """The system prompt; empty: no system prompt."""
        return _PROMPT + _PROMPT_ENDS[self.finish] if self.system_prompt is None else self.system_prompt

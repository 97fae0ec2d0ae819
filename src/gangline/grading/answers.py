"""Reads the agent's answer: its standard output, a file, or the model's last message."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gangline.domain.contracts import EvaluationContext
from gangline.domain.errors import CallerError
from gangline.domain.task_values import FilePath
from gangline.grading.transcript import last_answer

_END_OF_THOUGHT = "</think>"


class AnswerSource(BaseModel):
    """Fields of evaluators that read one text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["stdout", "file", "last_message"] = "last_message"
    """The agent's standard output, a file it left in its runtime, or the model's last answer."""
    path: FilePath | None = None
    """The file, with `source: file`."""
    max_bytes: int = Field(default=1 << 20, gt=0)
    """Larger files do not count as an answer."""

    @model_validator(mode="after")
    def _path_goes_with_file(self) -> Self:
        if (self.source == "file") != (self.path is not None):
            raise ValueError("`path` goes with `source: file`, and only with it")
        return self


async def answer_of(context: EvaluationContext, where: AnswerSource) -> tuple[str | None, str]:
    """The text, or None and the reason."""
    if where.source == "stdout":
        return context.harness_stdout.decode(errors="replace"), ""
    if where.source == "last_message":
        return last_answer(context.trajectory), "the model gave no answer"
    assert where.path is not None
    try:
        data = await context.runtime.download(where.path, max_bytes=where.max_bytes)
    except CallerError as error:  # no such file, too large, a link: caused by the agent
        return None, error.message
    return data.decode(errors="replace"), ""


def without_thoughts(text: str) -> str:
    """The text after the model's thoughts, if an engine left them in its answer."""
    return text.rpartition(_END_OF_THOUGHT)[2]

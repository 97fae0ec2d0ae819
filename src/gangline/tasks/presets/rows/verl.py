"""Rows in the form of verl and Eurus-2-RL-Data: a conversation `prompt`, and the answer `reward_model.ground_truth`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class VerlMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["system", "user", "assistant"]
    content: str


def _read_json(given: Any) -> Any:
    """Some files contain the conversation as JSON text. Raises: ValueError."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


class RewardModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    ground_truth: Any


class VerlRow(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: Annotated[tuple[VerlMessage, ...], BeforeValidator(_read_json), Field(min_length=1)]
    reward_model: RewardModel
    ability: str | None = None


def question_of(row: VerlRow) -> str:
    """The last user message. System messages are omitted, because the preset has its own."""
    asked = [message.content for message in row.prompt if message.role == "user"]
    return (asked or [row.prompt[-1].content])[-1].strip()

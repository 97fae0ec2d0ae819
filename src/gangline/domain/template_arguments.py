"""Arguments of chat templates that a task may choose: their names and values, and what operators allow by default.

The default names say how much a model thinks and which thoughts stay in its prompt, in the words of published
templates. Names that carry the conversation, or that are options of the renderer, are never a task's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

__all__ = ["HARMLESS", "TemplateArguments", "why_not_an_argument"]

HARMLESS = (
    "clear_thinking",
    "drop_thinking",
    "enable_thinking",
    "keep_past_thinking",
    "keep_thinking",
    "low_effort",
    "medium_effort",
    "preserve_thinking",
    "preserved_thinking",
    "reasoning",
    "reasoning_effort",
    "reasoning_strength",
    "thinking",
    "thinking_budget",
    "thinking_effort",
    "thinking_mode",
    "thinking_option",
    "truncate_history_thinking",
)
_OF_THE_CALL = frozenset(
    {"add_generation_prompt", "audio", "chat_template", "continue_final_message", "conversation", "custom_tools"}
    | {"documents", "functions", "images", "max_length", "messages", "padding", "processor_kwargs", "raise_exception"}
    | {"response_format", "strftime_now", "tokenize", "tokenizer_kwargs", "tool_choice", "tools", "truncation"}
    | {"videos"}
)


def why_not_an_argument(names: Iterable[str]) -> str | None:
    """Names the first that no client, task or operator may choose; None where all may be chosen."""
    for name in names:
        if not name.isidentifier() or len(name) > 64 or name.startswith(("_", "return_")):
            return f"{name[:100]!r} is not the name of a template's argument: such as enable_thinking"
        if name in _OF_THE_CALL or name.endswith("_token"):
            return f"{name!r} belongs to the call or to the renderer, and cannot be chosen"
    return None


def _chosen(arguments: dict[str, TemplateValue]) -> dict[str, TemplateValue]:
    if (why := why_not_an_argument(arguments)) is not None:
        raise ValueError(why)
    return arguments


_Text: TypeAlias = Annotated[str, Field(max_length=4096)]
TemplateValue: TypeAlias = (
    bool
    | Annotated[int, Field(ge=-(2**63), lt=2**63)]
    | Annotated[float, Field(allow_inf_nan=False, ge=-1e15, le=1e15)]
    | _Text
    | Annotated[list[_Text], Field(max_length=64)]
)
TemplateArguments: TypeAlias = Annotated[dict[str, TemplateValue], Field(max_length=32), AfterValidator(_chosen)]

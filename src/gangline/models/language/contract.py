"""The interface to a model's tokenizer and chat template, for rendering prompts and parsing replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ChatTokenizer(Protocol):
    """A tokenizer with its chat template."""

    eos_ids: frozenset[int]
    num_ids: int
    """Size of the vocabulary, including special tokens."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Literal special tokens in it become special ids; nothing is added around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, including special tokens."""
        ...

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the conversation, rendered with the model's own chat template."""
        ...

    def is_special(self, token_id: int) -> bool: ...

"""The tokenizer and chat template of a model, as everything that renders prompts or reads replies asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["ChatTokenizer"]


class ChatTokenizer(Protocol):
    """A tokenizer with its chat template."""

    eos_ids: frozenset[int]
    num_ids: int
    """Size of the vocabulary, special tokens among it."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; literal special tokens in it become special ids, nothing is added around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        ...

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the conversation in the model's own chat template."""
        ...

    def is_special(self, token_id: int) -> bool: ...

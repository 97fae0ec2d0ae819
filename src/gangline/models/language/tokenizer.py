"""A model's own tokenizer and chat template, without its weights (and without torch).

`tokenizer.json` is authoritative if it exists. transformers' per-family classes rebuild the tokenizer by their own
rules, and some give other ids than the file (GPT-2's class drops SmolLM2's splitting of digits).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, UndefinedError
from transformers import PreTrainedTokenizerFast

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.models.language.models import resolve_tokenizer

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""A template can raise any error of Jinja's language."""
_PROBE = "zqx417"


def load_tokenizer(folder_or_name: Path | str) -> HfChatTokenizer:
    """The tokenizer of a folder (`tokenizer.json`, `tokenizer_config.json`), of `smollm2`, or of a Hugging Face name.

    Raises:
        NotFound: there is no tokenizer of that name.
    """
    folder = resolve_tokenizer(str(folder_or_name))
    loader: Any = PreTrainedTokenizerFast
    if not (folder / "tokenizer.json").is_file():
        from transformers import AutoTokenizer as loader  # noqa: PLC0415 - it imports torch, which takes a second
    try:
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise NotFound(f"the tokenizer in {folder} cannot be read: {error}") from error
    return HfChatTokenizer(tokenizer, _eos_ids(folder))


def _eos_ids(folder: Path) -> frozenset[int]:
    """All ids that end a turn, from the generation config."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return frozenset()
    ids: int | list[int] | None = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return frozenset([ids] if isinstance(ids, int) else ids or ())


class HfChatTokenizer:
    """`ChatTokenizer` over a transformers tokenizer."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self.num_ids = len(tokenizer)
        own: int | None = tokenizer.eos_token_id
        self.eos_ids = eos_ids | (frozenset() if own is None else frozenset([own]))
        added = cast("dict[int, Any]", tokenizer.added_tokens_decoder)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the conversation, rendered with the model's own chat template.

        Raises:
            InvalidRequest: the model has no template, or its template refuses these messages.
        """
        as_wanted = _with_parts if self._wants_parts else _with_text_content
        texts = [as_wanted(message) for message in messages]
        arguments = dict(template_kwargs or {}, add_generation_prompt=add_generation_prompt)
        if tools:
            arguments["tools"] = list(tools)
        try:
            try:
                text = self._apply(texts, arguments)
            except (TypeError, UndefinedError):
                # Simple templates join strings and fail on the null content of a tool call.
                text = self._apply([{**text, "content": text.get("content") or ""} for text in texts], arguments)
        except _REFUSALS as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
        return self.encode(text)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template only accepts a list of parts, as some vision models' do: it drops or refuses a
        string.
        """
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            try:
                if _PROBE in self._apply([{"role": "user", "content": content}], {"add_generation_prompt": True}):
                    return content is not _PROBE
            except _REFUSALS:
                continue
        return False

    def _apply(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments)


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message if isinstance(content, list) else {**message, "content": [{"type": "text", "text": content or ""}]}


def _with_text_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message with text parts joined to one string, the form that text templates expect."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("list[dict[str, Any]]", content)
    if any(part.get("type") not in ("text", "input_text", "output_text") for part in parts):
        return message
    return {**message, "content": "".join(part.get("text") or "" for part in parts)}

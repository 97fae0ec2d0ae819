"""Engines of a chat template alone: one id for each character."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transformers.utils import chat_template_utils

from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.tokens import TokenIds
from gangline.models.engines.generate.template import TemplateText
from gangline.models.language.parsing.parser import Parsers
from gangline.models.language.tokenizer import HfChatTokenizer

__all__ = ["MISTRAL", "TemplateEngine", "template_tokenizer"]

MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set ns = namespace(index=0) %}"
    "{% for m in rest %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id|length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[ID]{{ c.id }}{% endfor %}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"
)
"""The rules of Mistral-Nemo's template."""


class _Characters:
    """As much of a transformers tokenizer as `HfChatTokenizer` asks for."""

    eos_token_id = 0

    def __init__(self, template: str) -> None:
        self._template = template
        self.added_tokens_decoder: dict[int, Any] = {}

    def __len__(self) -> int:
        return 0x110000

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tokenize: bool, **arguments: Any) -> str:
        tools = arguments.pop("tools", None)
        utils: Any = chat_template_utils
        texts, _ = utils.render_jinja_template(
            [messages], tools=tools, chat_template=self._template, bos_token="<s>", eos_token="</s>", **arguments
        )
        return texts[0]


def template_tokenizer(template: str) -> HfChatTokenizer:
    return HfChatTokenizer(_Characters(template))


class TemplateEngine:
    """Renders, and reads ids. `num_asked` counts both."""

    def __init__(self, template: str) -> None:
        self._text = TemplateText(template_tokenizer(template), Parsers.named({}))
        self.num_asked = 0

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        self.num_asked += 1
        await asyncio.sleep(0)
        return self._text.rendered(messages, tools, template_kwargs, add_generation_prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        self.num_asked += 1
        return await self._text.detokenize(ids)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()) -> str:
        """Raises: EngineRefused."""
        return "".join(map(chr, self._text.rendered(messages, tools).tolist()))

"""The plug-in `generate_template`: a raw generate route, with the model's tokenizer and chat template on this side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import Message, ModelCall, ToolDefinition
from gangline.domain.errors import EngineRefused, InvalidRequest
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import TokenIds, token_ids
from gangline.models.engines.fields import messages_fields
from gangline.models.engines.generate.engine import GenerateEngine, RouteName
from gangline.models.engines.generate.text import ReplyReader, TokenReader
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.templates.probe import probe_template
from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.messages import template_messages
from gangline.models.language.parsing.detect import detect_parsers
from gangline.models.language.parsing.parser import Parsers
from gangline.models.language.tokenizer import load_tokenizer
from gangline.models.language.tools import tool_fields


def template_engine(
    url: str,
    *,
    tokenizer: str = "",
    parsers: Mapping[str, Any] | None = None,
    route: RouteName = "auto",
    model: str | None = None,
    max_context: int | None = None,
    api_key: str | None = None,
    timeout_s: float = 1800.0,
) -> GenerateEngine:
    """
    tokenizer: folder with `tokenizer.json` and the chat template, or a Hugging Face name that is cached locally.
    parsers: formats of thinking and tool calls in the text; None: detected from the template.

    Raises: InvalidRequest, NotFound.
    """
    if not tokenizer:
        raise InvalidRequest("an engine of ids needs the model's tokenizer: give its folder or name as `tokenizer`.")
    text = TemplateText(load_tokenizer(tokenizer), None if parsers is None else Parsers.named(parsers))
    http = EngineHttp(url, timeout_s=timeout_s, api_key=api_key)
    return GenerateEngine(http, text, route=route, model=model, max_context=max_context)


async def template_facts(tokenizer: str) -> TemplateFacts:
    """Facts about a model's template, found without an engine, as for an engine of ids. Raises: InvalidRequest,
    NotFound."""
    text = TemplateText(load_tokenizer(tokenizer))
    return msgspec.structs.replace(await probe_template(_Rendering(text)), reads_tools=text.reads_calls)


class _Rendering:
    """Implements `Renders` with only a tokenizer."""

    def __init__(self, text: TemplateText) -> None:
        self._text = text

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        return await self._text.render(messages, tools, template_kwargs, add_generation_prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._text.decode(ids)


class TemplateText:
    """Implements `TextSide`."""

    stops_here = True

    def __init__(self, tokenizer: ChatTokenizer, parsers: Parsers | None = None) -> None:
        """parsers: None detects them from the template."""
        self.num_ids = tokenizer.num_ids
        self.stop_ids = tuple(sorted(tokenizer.eos_ids))
        self._tokenizer = tokenizer
        self._parsers = detect_parsers(tokenizer) if parsers is None else parsers
        self._rendering = asyncio.Lock()

    @property
    def reads_calls(self) -> bool | None:
        """Whether tool calls are parsed from replies. If False, they stay text, though the template may render
        tools."""
        return self._parsers.tools is not None

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool,
    ) -> TokenIds:
        # A long conversation takes tens of milliseconds, and a tokenizer may not be used by two threads.
        async with self._rendering:
            return await asyncio.to_thread(self._render, messages, tools, template_kwargs, add_generation_prompt)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool,
    ) -> TokenIds:
        try:
            ids = self._tokenizer.render(
                template_messages(messages_fields(messages)),
                tools=[tool_fields(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=template_kwargs,
            )
        except InvalidRequest as refused:
            raise EngineRefused(str(refused), status=400) from refused
        return token_ids(ids)

    async def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    async def reader(self, call: ModelCall, prompt_ids: TokenIds, choice_index: int) -> ReplyReader:
        return TokenReader(self._tokenizer, self._parsers, call, prompt_ids, choice_index)

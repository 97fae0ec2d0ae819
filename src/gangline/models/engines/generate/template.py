"""The plug-in `generate_template`: a raw generate route, with the model's tokenizer and chat template on this side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import InvalidRequest
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import TokenIds
from gangline.models.engines.generate.engine import GenerateEngine, RouteName
from gangline.models.engines.generate.text import LocalText, ReplyReader, TokenReader
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.templates.probe import probe_template
from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.parsing.detect import detect_parsers
from gangline.models.language.parsing.parser import Parsers
from gangline.models.language.tokenizer import load_tokenizer


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
    return msgspec.structs.replace(await probe_template(text), reads_tools=text.reads_calls)


class TemplateText(LocalText):
    """Implements `TextSide`."""

    def __init__(self, tokenizer: ChatTokenizer, parsers: Parsers | None = None) -> None:
        """parsers: None detects them from the template."""
        super().__init__(tokenizer)
        self.stop_ids = tuple(sorted(tokenizer.eos_ids))
        self._parsers = detect_parsers(tokenizer) if parsers is None else parsers

    @property
    def reads_calls(self) -> bool | None:
        """Whether tool calls are parsed from replies. If False, they stay text, though the template may render
        tools."""
        return self._parsers.tools is not None

    def _ids(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool,
    ) -> Sequence[int]:
        return self.tokenizer.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )

    async def reader(self, call: ModelCall, prompt_ids: TokenIds, choice_index: int) -> ReplyReader:
        return TokenReader(self.tokenizer, self._parsers, call, prompt_ids, choice_index)

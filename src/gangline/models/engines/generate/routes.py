"""The plug-in `generate`: a raw generate route, with the engine's own `/tokenize` and `/detokenize` for the text.

No part of the model is needed on this side. A reply is parsed once it is complete, so a stream delivers it at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import Message, ModelCall, ToolDefinition
from gangline.domain.reply import ReplyDelta
from gangline.domain.tokens import TokenIds
from gangline.models.engines.generate.engine import GenerateEngine, RouteName
from gangline.models.engines.generate.text import Read, ReplyReader, joined
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.replies import decode
from gangline.models.engines.vllm.wire import render_body, rendered_ids
from gangline.models.language.parsing.parser import Parsers
from gangline.models.language.parsing.replies import ReplyText
from gangline.models.language.parsing.thinking import opens_thought
from gangline.models.language.text import StopStrings


def generate_engine(
    url: str,
    *,
    parsers: Mapping[str, Any] | None = None,
    route: RouteName = "auto",
    model: str | None = None,
    max_context: int | None = None,
    api_key: str | None = None,
    timeout_s: float = 1800.0,
    processor: str | None = None,
) -> GenerateEngine:
    """
    parsers: formats of thinking and tool calls in the text; empty by default.
    processor: folder of the served vision model, for calls with images, which are refused without it.

    Raises: InvalidRequest.
    """
    http = EngineHttp(url, timeout_s=timeout_s, api_key=api_key)
    text = EngineText(http, Parsers.named(parsers or {}), model)
    return GenerateEngine(http, text, route=route, model=model, max_context=max_context, processor=processor)


class EngineText:
    """Implements `TextSide` with the engine's routes."""

    num_ids: int | None = None
    stop_ids: tuple[int, ...] = ()
    stops_here = False

    def __init__(self, http: EngineHttp, parsers: Parsers, model: str | None) -> None:
        self._http = http
        self._parsers = parsers
        self.reads_calls: bool | None = parsers.tools is not None
        self._model = model

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        body = render_body(await self._name(), messages, tools, template_kwargs, add_generation_prompt)
        return await rendered_ids(await self._http.post("/tokenize", body), self._http.url)

    async def detokenize(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        body = msgspec.json.encode({"model": await self._name(), "tokens": list(ids), "skip_special_tokens": False})
        answer = decode(await self._http.post("/detokenize", body), dict[str, Any], self._http.url)
        return str(answer.get("prompt", answer.get("text", "")))

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    async def reader(self, call: ModelCall, prompt_ids: TokenIds, choice_index: int) -> ReplyReader:
        thinking = self._parsers.thinking
        asks = thinking not in (None, "deepseek_r1", "harmony")
        in_thinking = asks and opens_thought(await self.detokenize(prompt_ids.tolist()[-8:]), thinking)
        reply = ReplyText(self._parsers, call, choice_index=choice_index, in_thinking=in_thinking)
        return _WholeReader(self, reply, call.sampling.stop, choice_index)

    async def _name(self) -> str:
        if self._model is None:
            self._model = (await self._http.served_model(None)).id
        return self._model


class _WholeReader:
    def __init__(self, side: EngineText, reply: ReplyText, stops: Sequence[str], choice_index: int) -> None:
        self._side = side
        self._reply = reply
        self._stops = StopStrings(stops)
        self._nothing = ReplyDelta(choice_index=choice_index)
        self._ids: list[int] = []

    async def feed(self, ids: Sequence[int], finish_reason: str | None) -> Read:
        self._ids.extend(ids)
        if finish_reason is None:
            return Read(shown=self._nothing, num_kept=len(ids))
        text, stop = self._stops.feed(await self._side.detokenize(self._ids))
        if finish_reason == "stop" and stop is None:
            # It ended normally: the last id is the end of turn, which is not text.
            text = await self._side.detokenize(self._ids[:-1])
        elif stop is None:
            text += self._stops.flush()
        return Read(
            shown=joined(self._reply.feed(text), self._reply.finish()),
            num_kept=len(ids),
            finish_reason=self._reply.finish_reason(finish_reason),
            stop_reason=stop,
            parse=self._reply.status,
        )

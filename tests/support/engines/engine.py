"""An engine client that only renders: what stitching needs, without a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.errors import EngineRefused, InvalidRequest
from gangline.domain.tokens import TokenIds, token_ids
from gangline.models.engines.contract import EngineCapabilities, EngineDelta, EngineReply, EngineRequest
from gangline.models.engines.vllm.wire import message_fields
from gangline.models.language.messages import template_messages


class TemplateEngine:
    """Implements `Engine` over a chat tokenizer; it samples nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.num_rendered_messages: list[int] = []

    async def probe(self) -> EngineCapabilities:
        return EngineCapabilities(
            engine="template",
            version="",
            model="m",
            max_context=None,
            reports_ids=True,
            takes_prompt_ids=True,
            streams_ids=True,
            renders=True,
            logprob_kind="processed",
        )

    async def capabilities(self) -> EngineCapabilities:
        return await self.probe()

    async def chat(self, request: EngineRequest) -> EngineReply:
        raise NotImplementedError

    def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        raise NotImplementedError

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        self.num_rendered_messages.append(len(messages))
        try:
            return token_ids(
                self.tokenizer.render(
                    template_messages([message_fields(message) for message in messages]),
                    add_generation_prompt=add_generation_prompt,
                    template_kwargs=template_kwargs,
                )
            )
        except InvalidRequest as refused:
            raise EngineRefused(refused.message, status=400) from refused

    async def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))

    async def close(self) -> None:
        return None

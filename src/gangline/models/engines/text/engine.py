"""The client of any OpenAI-compatible server that reports no token ids: text in, text out.

Its replies cannot be trained on, so it is accepted only if the operator allows it (`capture = "text"`), to evaluate a
model or to collect text. Its completions are recorded with empty ids, no log-probs, and marked untrainable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.errors import EngineIncapable, EngineMalformed, EngineRefused
from gangline.domain.tokens import TokenIds
from gangline.models.engines.contract import (
    EngineCapabilities,
    EngineChoice,
    EngineReply,
    EngineRequest,
)
from gangline.models.engines.fields import body_of, call_fields, messages_in_turns
from gangline.models.engines.http import EngineClient, EngineHttp, call_headers
from gangline.models.engines.replies import (
    WireLogprobs,
    WireMessage,
    WireUsage,
    decode,
    message_of,
    token_logprobs,
    usage_of,
)

Capture = Literal["ids", "text"]
"""The operator's choice for model calls: exact tokens, or text if an engine has no tokens."""


class _Choice(msgspec.Struct):
    index: int = 0
    message: WireMessage | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    usage: WireUsage | None = None
    error: dict[str, Any] | str | None = None


class OpenAITextEngine(EngineClient):
    """One server at `url` (without `/v1`)."""

    def __init__(
        self,
        url: str,
        *,
        capture: Capture = "ids",
        model: str | None = None,
        timeout_s: float = 1800.0,
        connect_timeout_s: float = 10.0,
        api_key: str | None = None,
    ) -> None:
        """
        capture: `text` accepts the server; with `ids`, the default, `probe` raises with the reason. model: served name.
        None takes the first listed model.
        """
        http = EngineHttp(url, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, api_key=api_key)
        super().__init__(http, model)
        self._capture = capture

    async def probe(self) -> EngineCapabilities:
        """Raises: EngineIncapable unless `capture` is `text`."""
        if self._capture != "text":
            raise EngineIncapable(
                f"engine {self.url} is a server that reports no token ids: nothing it samples can be trained on. "
                "Start vLLM 0.32 or newer, SGLang 0.5.23 or newer, or `gangline engine`; or accept text without "
                'tokens with `capture = "text"`.'
            )
        card = await self._http.served_model(self._model)
        self._model = card.id
        self._capabilities = EngineCapabilities(
            engine="openai_text",
            version="",
            model=card.id,
            max_context=card.max_model_len,
            reports_ids=False,
            takes_prompt_ids=False,
            streams_ids=False,
            renders=False,
            logprob_kind="missing",
        )
        return self._capabilities

    async def chat(self, request: EngineRequest) -> EngineReply:
        call = request.call
        fields = call_fields(call) | {"model": (await self.capabilities()).model, "stream": False}
        if call.sampling.top_k in (-1, 0):  # all ids, the default; providers refuse the field
            del fields["top_k"]
        if call.num_top_logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": call.num_top_logprobs}
        body = body_of(fields, await messages_in_turns(call.messages))
        answer = await self._http.post("/v1/chat/completions", body, call_headers(request))
        wire = decode(answer, _Reply, self.url)
        if wire.error is not None:
            raise self._http.refusal(200, answer)
        if not wire.choices:
            raise EngineMalformed(f"engine {self.url} answered without any choice")
        return EngineReply(
            prompt_ids=None,
            choices=tuple(_choice(choice, call.num_top_logprobs is not None) for choice in wire.choices),
            usage=usage_of(wire.usage),
        )

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        """Always raises EngineRefused."""
        raise EngineRefused(f"engine {self.url} reports no token ids, so it cannot count or render", status=501)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Always raises EngineRefused."""
        raise EngineRefused(f"engine {self.url} knows no token ids", status=501)


def _choice(choice: _Choice, show_logprobs: bool) -> EngineChoice:
    return EngineChoice(
        index=choice.index,
        message=message_of(choice.message),
        # The finish reason in OpenAI's form before `tool_calls`.
        finish_reason="tool_calls" if choice.finish_reason == "function_call" else choice.finish_reason,
        sampled_ids=None,
        logprobs=None,
        token_logprobs=token_logprobs(choice.logprobs) if show_logprobs else (),
    )

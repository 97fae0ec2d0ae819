"""The client of SGLang's server.

Exact prompt ids travel in `input_ids` on the chat route, so the engine still parses tools and reasoning. It reports ids
only in whole replies, so streams are never requested; the gateway synthesises them. A conversation is rendered by a
call of one token, whose reply reports the prompt.

Source: SGLang 0.5.23; its source was read, and this client is tested against a server that imitates it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, ToolDefinition
from gangline.domain.errors import EngineIncapable, EngineMalformed, EngineRefused
from gangline.domain.evidence.contract import AskedEvidence
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import Logprobs, TokenIds
from gangline.models.engines.contract import EngineCapabilities, EngineReply, EngineRequest
from gangline.models.engines.evidence import WireEvidence
from gangline.models.engines.fields import messages_in_turns, sent_ids
from gangline.models.engines.http import EngineClient, EngineHttp, call_headers, server_version
from gangline.models.engines.replies import SentIds, decode, ids_from_json
from gangline.models.engines.sglang.wire import (
    Detokenized,
    SglangReply,
    chat_body,
    engine_reply,
    learn,
    render_body,
    reply_type,
    score_body,
    scores_of,
)
from gangline.models.engines.sight import Sight, with_evidence
from gangline.models.engines.templates.probe import probe_template
from gangline.models.engines.vocabulary import vocabulary_size

_HOW_TO_START = (
    "Start SGLang 0.5.23 or newer with `python -m sglang.launch_server`, and reach it without a router that strips "
    "fields: stock routers drop `return_prompt_token_ids` and `return_meta_info`."
)

_PROBED = Message("user", (Text("One word."),))
_OTHER = Message("user", (Text("Say anything you like."),))


class SglangEngine(EngineClient):
    """One engine at `url` (without `/v1`)."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout_s: float = 1800.0,
        connect_timeout_s: float = 10.0,
        api_key: str | None = None,
        processor: str | None = None,
        experts_per_token: int | None = None,
    ) -> None:
        """
        model: served name. None takes the first listed model.
        timeout_s: longest silence of the engine within one call; since replies arrive whole, this is also its longest
        call. processor: folder of the served vision model; None leaves calls with images untrainable.
        experts_per_token: `num_experts_per_tok` of the served model. SGLang reports routed experts as numbers without a
        shape, so without it they cannot be captured.
        """
        self._evidence = WireEvidence("sglang", {"experts_per_token": experts_per_token})
        self._sight = Sight(processor)
        http = EngineHttp(url, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, api_key=api_key)
        super().__init__(http, model)

    async def probe(self) -> EngineCapabilities:
        card = await self._http.served_model(self._model)
        self._model = card.id
        prompt_ids = await self._render_or_none()
        # The ids belong to another conversation than the messages, which reveals an engine that ignores them.
        sampling = SamplingParams(max_tokens=1, temperature=1.0)
        call = ModelCall(dialect="probe", model="", messages=(_OTHER,), sampling=sampling)
        request = EngineRequest(call=call, prompt_ids=prompt_ids, evidence=self._evidence.asked_at_once())
        wire = await self._sampled(request)
        try:
            learn(self._evidence, wire)
        except ValueError as error:
            raise EngineIncapable(f"engine {self.url}: {error}") from error
        reply = await self._read(request, wire)
        reported = self._checked_prompt_ids(reply)
        self._capabilities = EngineCapabilities(
            engine="sglang",
            version=await server_version(self._http, "/server_info", "/get_server_info"),
            model=card.id,
            max_context=card.max_model_len,
            reports_ids=True,
            takes_prompt_ids=prompt_ids is not None and np.array_equal(reported, prompt_ids),
            sees_images=self._sight.reader is not None,
            evidence=await self._evidence.reported(
                reply.choices[0].evidence, partial(self._reported_apart, prompt_ids)
            ),
            streams_ids=False,
            renders=prompt_ids is not None,
            logprob_kind="temperature_scaled",
            num_ids=await vocabulary_size(self._http, card.id),
            reports_versions=bool(reply.choices[0].version_spans),
            template=TemplateFacts() if prompt_ids is None else await probe_template(self),
        )
        return self._capabilities

    async def _reported_apart(self, prompt_ids: TokenIds | None, asked: AskedEvidence) -> list[dict[str, Any]]:
        sampling = SamplingParams(max_tokens=1, temperature=1.0, top_k=1)
        call = ModelCall(dialect="probe", model="", messages=(_OTHER,), sampling=sampling)
        wire = await self._sampled(EngineRequest(call=call, prompt_ids=prompt_ids, evidence=(asked,)))
        return [choice.evidence for choice in engine_reply(wire, evidence=self._evidence).choices]

    def _checked_prompt_ids(self, reply: EngineReply) -> TokenIds:
        """Raises: EngineIncapable."""
        choice = reply.choices[0]
        if reply.prompt_ids is None or choice.sampled_ids is None:
            raise EngineIncapable(f"engine {self.url} returned no token ids. {_HOW_TO_START}")
        if choice.logprobs is None or len(choice.logprobs) != len(choice.sampled_ids):
            raise EngineIncapable(f"engine {self.url} returned no log-prob for each token. {_HOW_TO_START}")
        return reply.prompt_ids

    async def chat(self, request: EngineRequest) -> EngineReply:
        return await self._read(request, *await self._asked(request))

    async def _sampled(self, request: EngineRequest) -> SglangReply:
        return (await self._asked(request))[0]

    async def _asked(self, request: EngineRequest) -> tuple[SglangReply, SentIds | None]:
        messages, sent = await messages_in_turns(request.call.messages), sent_ids(request.prompt_ids, request.call)
        evidence = self._evidence.fields(request.evidence)
        body = chat_body(request, await self._model_name(), messages, sent, evidence)
        return await self._chat(body, call_headers(request)), sent

    async def _read(self, request: EngineRequest, wire: SglangReply, sent: SentIds | None = None) -> EngineReply:
        shown = request.call.num_top_logprobs is not None
        try:
            reply = engine_reply(wire, sent, show_logprobs=shown, evidence=self._evidence)
        except (msgspec.ValidationError, ValueError) as error:
            raise EngineMalformed(
                f"engine {self.url} answered odd log-probs or evidence in meta_info: {error}"
            ) from error
        evidence = await self._sight.look(request.call.messages, reply.prompt_ids)
        return msgspec.structs.replace(
            reply, choices=tuple(with_evidence(choice, evidence) for choice in reply.choices)
        )

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        """Raises: EngineRefused without a generation prompt, which SGLang's chat route always adds."""
        if not add_generation_prompt:
            raise EngineRefused(f"engine {self.url} renders with a generation prompt only", status=400)
        body = render_body(await self._model_name(), messages, tools, template_kwargs)
        rendered = ids_from_json((await self._chat(body)).choices[0].prompt_token_ids)
        if rendered is None:
            raise EngineIncapable(f"engine {self.url} returned no token ids. {_HOW_TO_START}")
        return rendered

    async def detokenize(self, ids: Sequence[int]) -> str:
        fields = {"model": await self._model_name(), "tokens": [int(token) for token in ids]}
        body = msgspec.json.encode(fields | {"skip_special_tokens": False})
        text = decode(await self._http.post("/detokenize", body), Detokenized, self.url).text
        return text if isinstance(text, str) else "".join(text)

    async def score(self, ids: TokenIds) -> Logprobs:
        """See `VllmEngine.score`."""
        return scores_of(await self._http.post("/generate", score_body(ids)), ids, self.url)

    async def _chat(self, body: bytes | Sequence[bytes], headers: Mapping[str, str] | None = None) -> SglangReply:
        answer = await self._http.post("/v1/chat/completions", body, headers)
        wire = decode(answer, reply_type(self._evidence), self.url)
        if wire.error is not None:
            raise self._http.refusal(200, answer)
        if not wire.choices:
            raise EngineMalformed(f"engine {self.url} answered without any choice")
        return wire

    async def _render_or_none(self) -> TokenIds | None:
        try:
            return await self.render([_PROBED])
        except (EngineRefused, EngineIncapable):
            return None

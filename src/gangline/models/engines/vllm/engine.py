"""The client of an engine that speaks vLLM's routes: vLLM itself, and the engines that Gangline starts.

Exact prompt ids travel in `kv_transfer_params.prompt_token_ids` on the chat route, so the engine still parses tools and
reasoning and still streams. Versions that do not know the key ignore it, which the probe detects.

A stream's chunks from one read become as few deltas as can represent them. With a busy engine or a slow reader, one
read has many tokens. The work for each delta on the way to the harness is then done once for all of them. Chunks of a
choice are joined as long as thinking, text and tool calls keep their order. Joining never waits for more chunks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from gangline.domain.completion import LogprobKind, VersionSpan
from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, ToolDefinition, Usage
from gangline.domain.errors import ContextOverflow, EngineIncapable, EngineMalformed, EngineRefused, EngineUnavailable
from gangline.domain.evidence.contract import AskedEvidence
from gangline.domain.node_views import TemplateFacts
from gangline.domain.reply import ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.domain.tokens import Logprobs, TokenIds
from gangline.models.engines.contract import (
    EngineCapabilities,
    EngineDelta,
    EngineReply,
    EngineRequest,
    ReplyAccumulator,
)
from gangline.models.engines.evidence import WireEvidence
from gangline.models.engines.fields import has_media, messages_in_turns, sent_ids
from gangline.models.engines.http import EngineClient, EngineHttp, call_headers, server_version
from gangline.models.engines.replies import (
    NO_IDS,
    SentIds,
    WireLogprobs,
    ids_from_json,
    thinking_of,
    token_logprobs,
    usage_of,
    version_spans,
)
from gangline.models.engines.sight import Sight, with_evidence
from gangline.models.engines.templates.probe import probe_template
from gangline.models.engines.vllm.calls import CallsOfChoices, StreamedCalls
from gangline.models.engines.vllm.wire import (
    AnyChoice,
    ShownReply,
    WireReply,
    chat_body,
    decode,
    read_reply,
    render_body,
    rendered_ids,
    reply_type,
    score_body,
    scores_of,
)
from gangline.models.engines.vocabulary import vocabulary_size

_HOW_TO_START = (
    "Start vLLM 0.32 or newer with its OpenAI server (`--logprobs-mode processed_logprobs` is advised), reach it "
    "without a router that strips fields, or use `gangline engine`."
)


class VllmEngine(EngineClient):
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
    ) -> None:
        """
        model: served name. None takes the first listed model.
        timeout_s: longest silence of the engine within one call.
        processor: folder of the served vision model; None leaves calls with images untrainable.
        """
        self._sight = Sight(processor)
        self._evidence = WireEvidence("vllm")
        http = EngineHttp(url, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, api_key=api_key)
        super().__init__(http, model)

    async def probe(self) -> EngineCapabilities:
        card = await self._http.served_model(self._model)
        self._model = card.id
        prompt_ids = await self._render_or_none([_user("One word.")])
        reply = await self._answer(self._probe_request(prompt_ids), self._evidence)
        values = self._probed_logprobs(reply)
        echoed = (
            prompt_ids is not None and reply.prompt_ids is not None and np.array_equal(reply.prompt_ids, prompt_ids)
        )
        streamed = await self._probe_stream()
        self._capabilities = EngineCapabilities(
            engine="vllm",
            version=await server_version(self._http, "/version"),
            model=card.id,
            max_context=card.max_model_len,
            reports_ids=True,
            takes_prompt_ids=echoed,
            sees_images=self._sight.reader is not None,
            evidence=await self._evidence.reported(reply.choices[0].evidence, self._reported_apart),
            streams_ids=streamed,
            renders=prompt_ids is not None,
            logprob_kind=_logprob_kind(values) if self._http.lists_models else "raw",
            num_ids=await vocabulary_size(self._http, card.id),
            reports_versions=bool(reply.choices[0].version_spans),
            template=TemplateFacts() if prompt_ids is None else await probe_template(self, self if echoed else None),
        )
        return self._capabilities

    async def _reported_apart(self, asked: AskedEvidence) -> list[dict[str, Any]]:
        request = msgspec.structs.replace(self._probe_request(None), evidence=(asked,))
        return [choice.evidence for choice in (await self.chat(request)).choices]

    def _probed_logprobs(self, reply: EngineReply) -> list[float]:
        """Raises: EngineIncapable."""
        choice = reply.choices[0] if reply.choices else None
        if choice is None or reply.prompt_ids is None or choice.sampled_ids is None:
            raise EngineIncapable(f"engine {self.url} returned no token ids (`return_token_ids`). {_HOW_TO_START}")
        if choice.logprobs is None or len(choice.logprobs) != len(choice.sampled_ids):
            raise EngineIncapable(f"engine {self.url} returned no log-prob for each token. {_HOW_TO_START}")
        return choice.logprobs.tolist()

    async def _probe_stream(self) -> bool:
        """Whether a stream reports the prompt ids, and an id and a log-prob for each sampled token."""
        folded = ReplyAccumulator()
        async with aclosing(self.stream(self._probe_request(None))) as deltas:
            async for delta in deltas:
                folded.feed(delta)
        reply = folded.reply()
        ids = reply.choices[0].sampled_ids if reply.choices else None
        values = reply.choices[0].logprobs if reply.choices else None
        return reply.prompt_ids is not None and ids is not None and values is not None and 0 < len(ids) == len(values)

    def _probe_request(self, prompt_ids: TokenIds | None) -> EngineRequest:
        """Samples one token. The ids, if given, belong to *another* conversation, which reveals an engine that ignores
        them.

        With `top_k = 1` the sampled distribution has one token: its log-prob is 0 if it was processed, else raw. NeMo
        RL's server, which lists no models, accepts no `top_k`, and only temperature 1, at which both are equal.
        """
        sampling = SamplingParams(max_tokens=1, temperature=1.0, top_k=1 if self._http.lists_models else None)
        call = ModelCall(dialect="probe", model="", messages=(_user("Say anything you like."),), sampling=sampling)
        return EngineRequest(call=call, prompt_ids=prompt_ids)

    async def chat(self, request: EngineRequest) -> EngineReply:
        return await self._answer(request, self._evidence if request.evidence else None)

    async def _answer(self, request: EngineRequest, evidence: WireEvidence | None) -> EngineReply:
        """evidence: read from the reply; None: not read."""
        messages = await messages_in_turns(request.call.messages)
        sent = sent_ids(request.prompt_ids, request.call)
        fields = None if evidence is None else evidence.fields(request.evidence)
        body = chat_body(request, await self._model_name(), messages, sent, stream=False, evidence=fields)
        answer = await self._http.post("/v1/chat/completions", body, call_headers(request))
        reply, is_error = await read_reply(answer, reply_type(request.call), self.url, sent, evidence)
        if is_error:
            raise self._http.refusal(200, answer)
        if not reply.choices:
            raise EngineMalformed(f"engine {self.url} answered without any choice")
        if not has_media(request.call.messages):
            return reply
        images = await self._sight.look(request.call.messages, reply.prompt_ids)
        return msgspec.structs.replace(reply, choices=tuple(with_evidence(choice, images) for choice in reply.choices))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        messages = await messages_in_turns(request.call.messages)
        sent = sent_ids(request.prompt_ids, request.call)
        body = chat_body(request, await self._model_name(), messages, sent, stream=True)
        kind, calls = reply_type(request.call), CallsOfChoices()
        looked = False
        async with aclosing(self._http.events("/v1/chat/completions", body, call_headers(request))) as reads:
            async for events in reads:
                for delta in self._deltas(events, kind, sent, calls):
                    if looked or delta.prompt_ids is None:
                        yield delta
                        continue
                    looked = True
                    yield with_evidence(delta, await self._sight.look(request.call.messages, delta.prompt_ids))
        calls.finish()

    def _deltas(
        self,
        events: Sequence[bytes],
        kind: type[WireReply] | type[ShownReply],
        sent: SentIds | None,
        calls: CallsOfChoices,
    ) -> Iterator[EngineDelta]:
        """The deltas of one read. Raises: EngineError, including the engine's own error, after the deltas before it."""
        chunks = decode_events(events, kind, self.url)
        broken = next((number for number, chunk in enumerate(chunks) if chunk.is_error), None)
        if len(chunks) == 1:
            for choice in chunks[0].choices:
                choice.delta = choice.delta or choice.message  # the whole reply, if the server does not stream
        if good := chunks[:broken]:
            yield from engine_deltas(good, calls, sent)
        if broken is not None:
            raise self._http.refusal(500, events[broken])

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        body = render_body(await self._model_name(), messages, tools, template_kwargs, add_generation_prompt)
        return await rendered_ids(await self._http.post("/tokenize", body), self.url)

    async def detokenize(self, ids: Sequence[int]) -> str:
        body = msgspec.json.encode({"model": await self._model_name(), "tokens": [int(token) for token in ids]})
        return decode(await self._http.post("/detokenize", body), dict[str, str], self.url).get("prompt", "")

    async def score(self, ids: TokenIds) -> Logprobs:
        """Log-probs [T] of all ids, each given those before it, at temperature 1; NaN for the first, and where the
        engine reports none. Raises: ContextOverflow if they, and one token more, exceed the engine's context.
        """
        body = score_body(await self._model_name(), ids)
        try:
            answer = await self._http.post("/v1/completions", body)
        except EngineRefused as error:
            if "max_tokens must be at least 1" in error.message:  # vLLM lowers it to the room that is left
                raise ContextOverflow(f"{len(ids)} ids and one token more exceed the context of {self.url}") from error
            raise
        return scores_of(answer, ids, self.url)

    async def _render_or_none(self, messages: Sequence[Message]) -> TokenIds | None:
        try:
            return await self.render(messages)
        except (EngineRefused, EngineUnavailable):
            return None


def _user(text: str) -> Message:
    return Message("user", (Text(text),))


def _logprob_kind(values: Sequence[float]) -> LogprobKind:
    return "processed" if all(abs(value) < 1e-6 for value in values) else "raw"


_THINKING, _TEXT, _CALLS = range(3)

_NAN = float("nan")


def decode_events(
    events: Sequence[bytes], kind: type[WireReply] | type[ShownReply], url: str
) -> Sequence[WireReply | ShownReply]:
    """The data of events, decoded in one pass. Raises: EngineUnavailable when any does not have the expected form."""
    if len(events) == 1:
        return (decode(events[0], kind, url),)
    # Spelled out, because `list[kind]` is not a type.
    joined = b"[" + b",".join(events) + b"]"
    return decode(joined, list[WireReply] if kind is WireReply else list[ShownReply], url)


class _Run:
    """Chunks of one choice, to be joined. Tokens are many and chunks mostly contain one, so the work for each chunk is
    inlined."""

    __slots__ = ("chunks", "index", "stage")

    def __init__(self, index: int) -> None:
        self.index = index
        self.stage = _THINKING
        """Stage of the last piece: a delta has thinking, then text, then calls."""
        self.chunks: list[AnyChoice] = []

    def delta(self, calls_so_far: StreamedCalls, prompt_ids: TokenIds | None, usage: Usage | None) -> EngineDelta:
        thinking, text, calls, shown = list[str](), list[str](), list[ToolCallDelta](), list[TokenLogprob]()
        ids: list[int] | None = None
        values: list[float] | None = None
        spans: tuple[VersionSpan, ...] = ()
        finish, stop = None, None
        for chunk in self.chunks:
            if (message := chunk.delta) is not None:
                if message.content:
                    text.append(message.content)
                if message.reasoning or message.reasoning_content:
                    thinking.append(thinking_of(message))
                if message.tool_calls or message.function_call is not None:
                    _add_calls(calls, calls_so_far.feed(message.calls))
            if (more := chunk.token_ids) is not None:
                if ids is None:
                    ids = more  # owned by the run, since the decoder made it
                else:
                    ids += more
            if (found := chunk.logprobs) is not None and (content := found.content) is not None:
                values = [] if values is None else values
                for entry in content:
                    values.append(_NAN if entry.logprob is None else entry.logprob)
                if isinstance(found, WireLogprobs):
                    shown += token_logprobs(found)
            if chunk.weight_versions:
                spans = version_spans(chunk.weight_versions)
            finish = finish if chunk.finish_reason is None else chunk.finish_reason
            stop = stop if chunk.stop_reason is None else str(chunk.stop_reason)
        return EngineDelta(
            shown=ReplyDelta(
                choice_index=self.index,
                thinking="".join(thinking),
                text="".join(text),
                tool_calls=tuple(calls),
                logprobs=tuple(shown),
            ),
            sampled_ids=ids,
            logprobs=values,
            version_spans=spans,
            finish_reason=finish,
            stop_reason=stop,
            prompt_ids=prompt_ids,
            usage=usage,
        )


def _add_calls(calls: list[ToolCallDelta], more: Sequence[ToolCallDelta]) -> None:
    """Joins pieces of the last call's arguments."""
    for piece in more:
        last = calls[-1] if calls else None
        if last is not None and last.index == piece.index and piece.name is None:
            calls[-1] = ToolCallDelta(last.index, last.arguments + piece.arguments, last.call_id, last.name)
        else:
            calls.append(piece)


def engine_deltas(
    chunks: Sequence[WireReply | ShownReply], calls: CallsOfChoices, sent: SentIds | None = None
) -> list[EngineDelta]:
    """Deltas of each choice in the order of its chunks. Prompt ids and usage, if present, are on every delta. Chunks
    without a choice (the usage at the end) become a separate delta.

    calls: tool calls of the stream so far. sent: exact ids of the request.

    Raises: EngineMalformed when the prompt ids are invalid, or pieces of tool calls are ambiguous.
    """
    prompt_ids: TokenIds | None = None
    usage: Usage | None = None
    runs: list[_Run] = []
    open_runs: dict[int, _Run] = {}
    for chunk in chunks:
        if chunk.prompt_token_ids is not NO_IDS:
            prompt_ids = ids_from_json(chunk.prompt_token_ids, sent) if prompt_ids is None else prompt_ids
        if chunk.usage is not None:
            usage = usage_of(chunk.usage)
        for choice in chunk.choices:
            run, message = open_runs.get(choice.index), choice.delta
            if run is None or (
                message is not None
                and run.stage != _THINKING
                # Content that belongs before the run's content.
                and (message.reasoning or message.reasoning_content or (run.stage == _CALLS and message.content))
            ):
                run = open_runs[choice.index] = _Run(choice.index)
                runs.append(run)
            run.chunks.append(choice)
            if message is not None:
                run.stage = (
                    _CALLS if message.tool_calls or message.function_call else _TEXT if message.content else run.stage
                )
    if not runs:
        return [EngineDelta(prompt_ids=prompt_ids, usage=usage)]
    return [run.delta(calls[run.index], prompt_ids, usage) for run in runs]

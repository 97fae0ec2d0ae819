"""`/v1/chat/completions`: template, sampling, parsing, and the reply in one body or as a stream.

A stream and a whole reply are built from the same sequence of `_Step`s, so they cannot disagree.
Tool choices `required` and a named function are checked and parsed, but not enforced: sampling is unconstrained.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from gangline.machine.event_loop import call_all
from gangline.models.engine_server.generation import (
    Piece,
    exact_prompt_ids,
    generate,
    plan,
    text_rules,
    token_logprobs,
    weight_spans,
)
from gangline.models.engine_server.sampler import SampledToken, Sampler, SampleRequest
from gangline.models.engine_server.sse import EventStream
from gangline.models.engine_server.wire import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChatRequest,
    Delta,
    FunctionCall,
    ToolCall,
    Usage,
    encode,
)
from gangline.models.language.messages import check_tools, template_messages
from gangline.models.language.parsing.detect import opens_thinking
from gangline.models.language.parsing.events import CallEvent, Event, TextEvent, ThinkingEvent
from gangline.models.language.parsing.parser import Parsers, ReplyParser


def render_chat(sampler: Sampler, chat: ChatRequest) -> list[int]:
    """Prompt ids of a chat request: its exact ids if given, else the rendering of its messages."""
    check_tools(chat.tools, chat.tool_choice)
    exact = exact_prompt_ids(chat)
    if exact is not None:
        return exact
    return sampler.tokenizer.render(
        template_messages(chat.messages),
        tools=chat.tools or None,
        add_generation_prompt=chat.add_generation_prompt,
        template_kwargs=chat.chat_template_kwargs,
    )


def plan_chat(sampler: Sampler, chat: ChatRequest, prompt_ids: Sequence[int]) -> SampleRequest:
    wanted = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    top = chat.top_logprobs or 0 if chat.logprobs else 0
    request = plan(sampler, chat, prompt_ids, max_tokens=wanted, num_top_logprobs=top)
    return msgspec.structs.replace(request, messages=chat.messages, tools=chat.tools)


class ChatRoute:
    def __init__(self, sampler: Sampler, parsers: Parsers) -> None:
        self._sampler = sampler
        self._parsers = parsers

    async def answer(self, request: web.Request, chat: ChatRequest) -> web.StreamResponse:
        call = _ChatCall(self._sampler, self._parsers, chat)
        if chat.stream:
            return await call.stream(request)
        return web.Response(body=encode(await call.whole()), content_type="application/json")


class _Step(msgspec.Struct, frozen=True):
    """The part of the reply added by one sampling step."""

    events: Sequence[Event]
    piece: Piece
    finish_reason: str | None


class _ChatCall:
    """One request with its final prompt."""

    def __init__(self, sampler: Sampler, parsers: Parsers, chat: ChatRequest) -> None:
        self._sampler = sampler
        self._chat = chat
        self._prompt_ids = render_chat(sampler, chat)
        self._request = plan_chat(sampler, chat, self._prompt_ids)
        self._parsers = parsers
        self._wants_tools = bool(chat.tools) and chat.tool_choice != "none"
        rules = text_rules(chat)
        skips = rules.skip_special and not parsers.need_special_tokens
        self._text_rules = msgspec.structs.replace(rules, skip_special=skips)
        self._in_thinking = opens_thinking(sampler.tokenizer, self._prompt_ids, parsers.thinking)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_choices = chat.n or 1

    async def whole(self) -> ChatReply:
        choices = await call_all([self._choice(index) for index in range(self._num_choices)])
        return ChatReply(
            id=self._id,
            created=self._created,
            model=self._sampler.model_name,
            choices=[choice for choice, _ in choices],
            usage=self._usage(sum(num_tokens for _, num_tokens in choices)),
            prompt_token_ids=self._prompt_ids if self._chat.return_token_ids else UNSET,
        )

    async def stream(self, request: web.Request) -> web.StreamResponse:
        async with EventStream(request) as events:
            for index in range(self._num_choices):
                chunk = self._chunk([ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])
                if index == 0 and self._chat.return_token_ids:
                    chunk.prompt_token_ids = self._prompt_ids
                await events.send(chunk)
            counts = await call_all([self._stream_choice(index, events) for index in range(self._num_choices)])
            if self._chat.stream_options and self._chat.stream_options.include_usage:
                usage_chunk = self._chunk([])
                usage_chunk.usage = self._usage(sum(counts))
                await events.send(usage_chunk)
        return events.response

    async def _steps(self, index: int) -> AsyncGenerator[_Step, None]:
        parser = ReplyParser(
            self._parsers,
            in_thinking=self._in_thinking,
            schemas=_schemas(self._chat.tools or ()),
            reads_calls=self._wants_tools,
        )
        async with aclosing(generate(self._sampler, self._request, self._text_rules, index)) as pieces:
            async for piece in pieces:
                events = parser.feed(piece.text)
                if piece.finish_reason is not None:
                    events += parser.finish()
                reason = "tool_calls" if parser.num_calls and piece.finish_reason == "stop" else piece.finish_reason
                if not self._chat.include_reasoning:
                    events = [event for event in events if not isinstance(event, ThinkingEvent)]
                yield _Step(events, piece, reason)

    async def _choice(self, index: int) -> tuple[ChatChoice, int]:
        """Returns the whole choice and its number of sampled tokens."""
        steps = [step async for step in self._steps(index)]
        events = [event for step in steps for event in step.events]
        tokens = [token for step in steps for token in step.piece.tokens]
        calls = [event for event in events if isinstance(event, CallEvent)]
        choice = ChatChoice(
            index=index,
            message=ChatMessage(
                content="".join(e.text for e in events if isinstance(e, TextEvent)) or _none_if(calls),
                reasoning="".join(e.text for e in events if isinstance(e, ThinkingEvent)) or None,
                tool_calls=[self._tool_call(index, number, call) for number, call in enumerate(calls)],
            ),
            logprobs=self._logprobs(tokens),
            finish_reason=steps[-1].finish_reason or "abort",
            stop_reason=steps[-1].piece.stop_reason,
            token_ids=[token.token_id for token in tokens] if self._chat.return_token_ids else UNSET,
            weight_versions=weight_spans(tokens) if self._chat.return_weight_versions else UNSET,
        )
        return choice, len(tokens)

    async def _stream_choice(self, index: int, events: EventStream) -> int:
        """Returns the number of sampled tokens."""
        num_calls = 0
        tokens: list[SampledToken] = []
        async with aclosing(self._steps(index)) as steps:
            async for step in steps:
                tokens.extend(step.piece.tokens)
                for choice in self._chunk_choices(index, step, num_calls):
                    if step.finish_reason and choice.finish_reason and self._chat.return_weight_versions:
                        choice.weight_versions = weight_spans(tokens)
                    await events.send(self._chunk([choice]))
                num_calls += sum(isinstance(event, CallEvent) for event in step.events)
        return len(tokens)

    def _chunk_choices(self, index: int, step: _Step, num_calls: int) -> list[ChatChunkChoice]:
        """Chunks of one step: one per event, with its tokens on the first and its finish reason on the last.

        A step without visible content is sent only if the request asked for ids or log-probs.
        """
        deltas: list[Delta] = []
        for event in step.events:
            match event:
                case TextEvent(text):
                    deltas.append(Delta(content=text))
                case ThinkingEvent(text):
                    deltas.append(Delta(reasoning=text))
                case CallEvent():
                    call = self._tool_call(index, num_calls, event)
                    call.index = num_calls
                    deltas.append(Delta(tool_calls=[call]))
                    num_calls += 1
        wants_tokens = bool(self._chat.return_token_ids or self._chat.logprobs) and bool(step.piece.tokens)
        if not deltas and (wants_tokens or step.finish_reason):
            deltas = [Delta()]
        choices = [ChatChunkChoice(index=index, delta=delta) for delta in deltas]
        if choices and step.piece.tokens:
            choices[0].logprobs = self._logprobs(step.piece.tokens)
        if choices and self._chat.return_token_ids:
            choices[0].token_ids = [token.token_id for token in step.piece.tokens]
        if choices and step.finish_reason:
            choices[-1].finish_reason = step.finish_reason
            choices[-1].stop_reason = step.piece.stop_reason
        return choices

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._sampler.model_name, choices=choices)

    def _logprobs(self, tokens: Sequence[SampledToken]) -> ChatLogprobs | None:
        if not self._chat.logprobs:
            return None
        as_ids = bool(self._chat.return_tokens_as_token_ids)
        return ChatLogprobs(token_logprobs(self._sampler, tokens, as_ids=as_ids))

    def _tool_call(self, index: int, number: int, call: CallEvent) -> ToolCall:
        """The id is derived from the request and the call's index: unique in a conversation, and reproducible."""
        digest = hashlib.blake2b(array("q", self._prompt_ids).tobytes(), digest_size=10)
        digest.update(f"{index}/{number}/{call.name}/{call.arguments}".encode())
        return ToolCall(
            id=f"call_{digest.hexdigest()}", function=FunctionCall(name=call.name, arguments=call.arguments)
        )

    def _usage(self, num_sampled: int) -> Usage:
        num_prompt = len(self._prompt_ids)
        return Usage(num_prompt, num_sampled, num_prompt + num_sampled)


def _schemas(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Schemas of the tools, if valid; clients may send anything."""
    functions = [tool["function"] for tool in tools]
    return {
        function["name"]: function["parameters"]
        for function in functions
        if isinstance(function.get("parameters"), dict)
    }


def _none_if(calls: Sequence[CallEvent]) -> str | None:
    """Content of a reply without text: null if it has calls, else empty."""
    return None if calls else ""

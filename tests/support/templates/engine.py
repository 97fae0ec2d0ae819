"""An engine in the process whose replies are the assistant turns that its template writes."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineRefused, InvalidRequest
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import TokenIds, common_prefix_len, logprobs, token_ids
from gangline.models.engines.contract import (
    EngineCapabilities,
    EngineChoice,
    EngineDelta,
    EngineReply,
    EngineRequest,
    whole_deltas,
)
from gangline.models.engines.fields import messages_fields, tool_fields
from gangline.models.language.messages import template_messages
from support.templates.characters import EOS, Characters

__all__ = ["LaboratoryEngine", "Writer"]

_MARK = "zqx"
_USER = Message("user", (Text("x"),))
_TOOL = ToolDefinition("probe", "p", {"type": "object", "properties": {"query": {"type": "string"}}})
_CALL = ToolCall("aaaaaaaa0", "probe", f'{{"query": "{_MARK}"}}')
_OWN_ENDS = ("<|call|>", "<|calls|>", "<|eom_id|>")
"""Ends of turn by generation configs, which templates write after calls alone (gpt-oss, Solar, Functionary)."""
_THOUGHT = "I think."
_OPENS_THOUGHT = re.compile(r"^[<\[][^/]*(?<!END_)think", re.IGNORECASE)
_OPENS_TURN = re.compile("start|begin|user|bot|system", re.IGNORECASE)
_ANCHOR = 16


class Writer:
    """Renders with one template, and writes the turns that a model of it would sample."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.characters = Characters(template)
        self.tokenizer = self.characters.chat_tokenizer()
        self._num_special = len(self.characters.specials)
        self.unwritten: set[str] = set()
        """Why some turns are not as the template writes them: it refuses or drops them."""
        self.text_end, self.text_opens = self._end(Message("assistant", (Text(_MARK),)), _USER, ())
        answer = Message("tool", (ToolResult(_CALL.call_id, (Text("y"),)),))
        self.call_end, self.call_opens = self._end(Message("assistant", (_CALL,)), answer, (_TOOL,))

    def ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        kwargs: dict[str, Any] | None = None,
        prompt: bool = True,
    ) -> TokenIds:
        """Raises: EngineRefused."""
        try:
            return token_ids(
                self.tokenizer.render(
                    template_messages(messages_fields(messages)),
                    tools=[tool_fields(tool) for tool in tools] or None,
                    add_generation_prompt=prompt,
                    template_kwargs=kwargs,
                )
            )
        except InvalidRequest as refused:
            raise EngineRefused(refused.message, status=400) from refused

    def turn(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition], kwargs: dict[str, Any], reply: Message
    ) -> tuple[Message, TokenIds]:
        """The reply as it is sampled after `messages`: thought about where the prompt opens a thought."""
        calls = any(isinstance(part, ToolCall) for part in reply.parts)
        prompt = self.ids(messages, tools, kwargs)
        try:
            whole = self.ids((*messages, reply), tools, kwargs, prompt=False)
        except EngineRefused as refused:
            self.unwritten.add(refused.message)
            return reply, np.append(self._encode(_as_text(reply)), self._id(self.text_end)).astype(np.int32)
        shared = self._begin(prompt, whole, self.ids(messages, tools, kwargs, prompt=False))
        body = self._cut(whole[shared:], calls)
        opened = [name for name in self._specials(prompt[shared:]) if _OPENS_THOUGHT.search(name)]
        if opened and shared < len(prompt):
            tag = opened[-1].replace("START", "END") if "START" in opened[-1] else f"{opened[-1][:1]}/{opened[-1][1:]}"
            reply = replace(reply, parts=(Thinking(_THOUGHT), *reply.parts))
            body = np.concatenate([self._encode(f"{_THOUGHT}\n{tag}\n\n"), body])
        return reply, body

    def _end(self, turn: Message, after: Message, tools: Sequence[ToolDefinition]) -> tuple[str, bool]:
        """The end of turn, and whether it is the opener of the next message."""
        try:
            closed = self._after_mark(self.ids((_USER, turn), tools, prompt=False))
        except EngineRefused:
            return EOS, False
        try:
            followed = self._after_mark(self.ids((_USER, turn, after), tools, prompt=False))
        except EngineRefused:
            followed = closed
        common = common_prefix_len(closed, followed)
        names, all_names = (
            [name for name in self._specials(ids) if not _OPENS_TURN.search(name)] for ids in (closed[:common], closed)
        )
        is_text = not tools
        names = names or (all_names if is_text else [])
        if is_text and names:
            return names[-1], False
        if not is_text and not self.text_opens and self.text_end in all_names:
            return self.text_end, False
        if all_names and all_names[-1] in _OWN_ENDS:
            return all_names[-1], False
        if common < len(followed) and followed[common] < self._num_special:
            return self.characters.specials[int(followed[common])], True
        return (names[-1], False) if names and not is_text else (EOS, True)

    def _begin(self, prompt: TokenIds, whole: TokenIds, without_opening: TokenIds) -> int:
        """Where in `whole` the turn begins that follows `prompt`."""
        shared = common_prefix_len(prompt, whole)
        if shared >= common_prefix_len(prompt, without_opening):
            return shared
        # The template moves something once the turn stands: the end of the prompt shows the place.
        texts = [self.tokenizer.decode(ids.tolist()) for ids in (prompt, whole)]
        at = texts[1].rfind(texts[0][-_ANCHOR:])
        return shared if at < 0 else len(self.tokenizer.encode(texts[1][: at + _ANCHOR]))

    def _cut(self, body: TokenIds, calls: bool) -> TokenIds:
        end, opens = (self.call_end, self.call_opens) if calls else (self.text_end, self.text_opens)
        if opens:
            return np.append(body, self._id(end)).astype(np.int32)
        at = np.flatnonzero(body == self._id(end))
        return body[: int(at[-1]) + 1] if len(at) else np.append(body, self._id(end)).astype(np.int32)

    def _after_mark(self, ids: TokenIds) -> TokenIds:
        return self._encode(self.tokenizer.decode(ids.tolist()).rpartition(_MARK)[2])

    def _specials(self, ids: TokenIds) -> list[str]:
        return [self.characters.specials[one] for one in ids.tolist() if one < self._num_special]

    def _encode(self, text: str) -> TokenIds:
        return token_ids(self.tokenizer.encode(text))

    def _id(self, name: str) -> int:
        return self.characters.specials.index(name)


def _as_text(reply: Message) -> str:
    texts = [part.text for part in reply.parts if isinstance(part, Text)]
    texts += [f'{{"name": "{p.name}", "arguments": {p.arguments}}}' for p in reply.parts if isinstance(p, ToolCall)]
    return "\n".join(texts)


class LaboratoryEngine:
    """Implements `Engine`."""

    def __init__(self, writer: Writer, *, takes_ids: bool, template: TemplateFacts | None = None) -> None:
        self.writer = writer
        self._takes_ids = takes_ids
        self._template = template or TemplateFacts()
        self._numbers = itertools.count()
        self.reply = Message("assistant")
        """What is said next."""
        self.said: list[Message] = []
        """What was said, with the engine's own call ids."""
        self.asked: list[ModelCall] = []
        """The calls that were answered, as they came here."""

    async def probe(self) -> EngineCapabilities:
        return EngineCapabilities(
            engine="laboratory",
            version="1",
            model="m",
            max_context=None,
            reports_ids=True,
            takes_prompt_ids=self._takes_ids,
            streams_ids=False,
            renders=True,
            logprob_kind="processed",
            template=self._template,
        )

    async def capabilities(self) -> EngineCapabilities:
        return await self.probe()

    async def chat(self, request: EngineRequest) -> EngineReply:
        call = request.call
        own = replace(self.reply, parts=tuple(map(self._own, self.reply.parts)))
        message, sampled = self.writer.turn(call.messages, call.tools, call.template_kwargs, own)
        prompt = request.prompt_ids if self._takes_ids else None
        if prompt is None:
            prompt = self.writer.ids(call.messages, call.tools, call.template_kwargs)
        self.said.append(message)
        self.asked.append(call)
        calls = any(isinstance(part, ToolCall) for part in message.parts)
        choice = EngineChoice(
            index=0,
            message=message,
            finish_reason="tool_calls" if calls else "stop",
            sampled_ids=sampled,
            logprobs=logprobs([-1.0] * len(sampled)),
        )
        return EngineReply(prompt_ids=prompt, choices=(choice,))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        for delta in whole_deltas(await self.chat(request)):
            yield delta

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        return self.writer.ids(messages, tools, template_kwargs, add_generation_prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return self.writer.tokenizer.decode(list(ids))

    async def check_health(self, timeout_s: float) -> None:
        return None

    async def close(self) -> None:
        return None

    def _own(self, part: Any) -> Any:
        """With an id of nine characters, which every template takes."""
        return replace(part, call_id=f"aaaaaa{next(self._numbers):03d}") if isinstance(part, ToolCall) else part

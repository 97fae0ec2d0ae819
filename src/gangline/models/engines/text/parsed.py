"""An engine that returns raw text, from which thinking and tool calls are parsed here, also in streams.

For engines started without a tool or reasoning parser, and for servers without one. Tokens are unchanged. vLLM rejects
tools if it has no parser for them; it then gets `tool_choice: none`, with which it still writes the tools into the
prompt. The probe verifies that.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, Thinking, ToolCall, ToolChoice
from gangline.domain.conversation import ToolDefinition as Tool
from gangline.domain.errors import EngineIncapable, EngineRefused
from gangline.domain.reply import ReplyDelta
from gangline.domain.tokens import TokenIds
from gangline.models.engines.contract import (
    Engine,
    EngineCapabilities,
    EngineChoice,
    EngineDelta,
    EngineReply,
    EngineRequest,
    assistant_message,
)
from gangline.models.language.parsing.parser import Parsers
from gangline.models.language.parsing.replies import ReplyText
from gangline.models.language.parsing.thinking import opens_thought

_PROBE_TOOL = Tool(name="probe", description="Never call it.", parameters={"type": "object", "properties": {}})
_PROBED = ModelCall(
    dialect="probe",
    model="",
    messages=(Message("user", (Text("One word."),)),),
    tools=(_PROBE_TOOL,),
    tool_choice=ToolChoice("auto"),
    sampling=SamplingParams(max_tokens=1),
)

_NUM_TAIL_IDS = 6
"""Ids at the end of a prompt that show whether it ends inside a think block."""


class ParsedEngine:
    """Implements `Engine` over `engine`, which it owns."""

    def __init__(self, engine: Engine, parsers: Parsers) -> None:
        self._engine = engine
        self._parsers = parsers
        self._hides_choice = False
        """Whether the engine refuses tools unless `tool_choice` is `none`."""
        self._opens_thinking: dict[bytes, bool] = {}
        """Last ids of a prompt -> whether they open a think block. Nearly all prompts end alike."""
        self._capabilities: EngineCapabilities | None = None
        self._probing = asyncio.Lock()

    async def capabilities(self) -> EngineCapabilities:
        async with self._probing:
            return self._capabilities or await self.probe()

    async def probe(self) -> EngineCapabilities:
        found = await self._engine.probe()
        if self._parsers.tools is not None:
            await self._probe_tools(found)
        self._capabilities = found
        return found

    async def _probe_tools(self, found: EngineCapabilities) -> None:
        """Raises: EngineIncapable when the engine accepts no tools in any way."""
        self._hides_choice = False
        try:
            await self._engine.chat(EngineRequest(call=_PROBED))
            return
        except EngineRefused as refused:
            if "tool" not in refused.message.lower():
                raise
            self._hides_choice = True
        reply = await self._engine.chat(EngineRequest(call=self._asked(_PROBED)))
        if found.renders and reply.prompt_ids is not None:
            wanted = await self._engine.render(_PROBED.messages, _PROBED.tools)
            if not np.array_equal(wanted, reply.prompt_ids):
                raise EngineIncapable(
                    "the engine has no tool parser and leaves tools out of the prompt under `tool_choice: none`. Start "
                    "it without --exclude-tools-when-tool-choice-none, or with --enable-auto-tool-choice and "
                    "--tool-call-parser."
                )

    def _asked(self, call: ModelCall) -> ModelCall:
        if not (self._hides_choice and call.tools):
            return call
        return msgspec.structs.replace(call, tool_choice=ToolChoice("none"), parallel_tool_calls=None)

    async def chat(self, request: EngineRequest) -> EngineReply:
        await self.capabilities()
        reply = await self._engine.chat(msgspec.structs.replace(request, call=self._asked(request.call)))
        in_thinking = await self._in_thinking(reply.prompt_ids)
        choices = tuple(self._read(request.call, choice, in_thinking) for choice in reply.choices)
        return msgspec.structs.replace(reply, choices=choices)

    def _read(self, call: ModelCall, choice: EngineChoice, in_thinking: bool) -> EngineChoice:
        parts = choice.message.parts
        own_calls = [part for part in parts if isinstance(part, ToolCall)]
        text = ReplyText(self._parsers, call, in_thinking=in_thinking, first_call=len(own_calls))
        shown = (text.feed("".join(part.text for part in parts if isinstance(part, Text))), text.finish())
        calls = [
            ToolCall(piece.call_id or "", piece.name or "", piece.arguments)
            for delta in shown
            for piece in delta.tool_calls
        ]
        thinking = "".join(part.text for part in parts if isinstance(part, Thinking))
        message = assistant_message(
            thinking + "".join(delta.thinking for delta in shown),
            "".join(delta.text for delta in shown),
            [*own_calls, *calls],
        )
        reason = choice.finish_reason and text.finish_reason(choice.finish_reason)
        return msgspec.structs.replace(choice, message=message, finish_reason=reason, parse=text.status)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        await self.capabilities()
        texts: dict[int, ReplyText] = {}
        numbers = defaultdict[int, dict[tuple[str, int], int]](dict)
        in_thinking: bool | None = None
        asked = msgspec.structs.replace(request, call=self._asked(request.call))
        async with aclosing(self._engine.stream(asked)) as deltas:
            async for delta in deltas:
                if in_thinking is None:
                    in_thinking = await self._in_thinking(delta.prompt_ids)
                index = delta.shown.choice_index
                if index not in texts:
                    texts[index] = ReplyText(self._parsers, request.call, choice_index=index, in_thinking=in_thinking)
                yield _read_delta(delta, texts[index], numbers[index])

    async def _in_thinking(self, prompt_ids: TokenIds | None) -> bool:
        """Whether the prompt opened the think block. False if the engine reports no ids."""
        thinking = self._parsers.thinking
        if prompt_ids is None or thinking in (None, "deepseek_r1", "harmony"):
            return False
        tail = prompt_ids[-_NUM_TAIL_IDS:]
        key = tail.tobytes()
        if key not in self._opens_thinking:
            if len(self._opens_thinking) >= 1024:
                self._opens_thinking.clear()
            text = await self._engine.detokenize(tail.tolist())
            self._opens_thinking[key] = opens_thought(text, thinking)
        return self._opens_thinking[key]

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        return await self._engine.render(messages, tools, template_kwargs, add_generation_prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._engine.detokenize(ids)

    async def check_health(self, timeout_s: float) -> None:
        await self._engine.check_health(timeout_s)

    async def close(self) -> None:
        await self._engine.close()


def _read_delta(delta: EngineDelta, text: ReplyText, numbers: dict[tuple[str, int], int]) -> EngineDelta:
    """numbers: of the choice's calls so far, by their parser and their number there."""
    numbered = _numbered("engine", delta.shown, numbers)
    if not numbered.text and delta.finish_reason is None:
        return delta if numbered is delta.shown else msgspec.structs.replace(delta, shown=numbered)
    shown = _joined(numbered, _numbered("here", text.feed(numbered.text), numbers))
    if delta.finish_reason is None:
        return msgspec.structs.replace(delta, shown=shown)
    return msgspec.structs.replace(
        delta,
        shown=_joined(
            msgspec.structs.replace(shown, text=""), _numbered("here", text.finish(), numbers), before=shown.text
        ),
        finish_reason=text.finish_reason(delta.finish_reason),
        parse=text.status,
    )


def _numbered(reader: str, delta: ReplyDelta, numbers: dict[tuple[str, int], int]) -> ReplyDelta:
    """Renumber calls, since the engine may have parsed calls too: no two calls get the same number."""
    if not delta.tool_calls:
        return delta
    calls = tuple(
        msgspec.structs.replace(piece, index=numbers.setdefault((reader, piece.index), len(numbers)))
        for piece in delta.tool_calls
    )
    return msgspec.structs.replace(delta, tool_calls=calls)


def _joined(shown: ReplyDelta, read: ReplyDelta, *, before: str = "") -> ReplyDelta:
    """The engine's non-text fields, combined with the fields parsed from its text."""
    return msgspec.structs.replace(
        shown,
        thinking=shown.thinking + read.thinking,
        text=before + read.text,
        tool_calls=(*shown.tool_calls, *read.tool_calls),
    )

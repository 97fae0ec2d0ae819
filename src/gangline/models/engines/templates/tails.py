"""The ids that a template writes after a turn of the assistant: its closing, the new messages, the generation prompt.

Computed without trusting any text: a stand-in conversation with the new messages is rendered twice, with assistant
turns that end differently. The longest common suffix is the template's closing and everything new. Ids are never
searched by value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from gangline.domain.completion import DivergenceCause
from gangline.domain.conversation import Message, Part, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineRefused, EngineUnavailable
from gangline.domain.tokens import TokenIds, common_prefix_len, token_ids
from gangline.models.engines.templates.renderings import Renders

_USER = Message("user", (Text("x"),))
_OTHER_USER = Message("user", (Text("y"),))


class CannotStitch(Exception):
    """The step is left to the engine's rendering. The message goes into the certificate."""

    def __init__(self, reason: str, cause: DivergenceCause | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause: DivergenceCause | None = cause
        """Why the engine's rendering will differ from the parent's context, if known beforehand."""


class Tails:
    """Tails for the tools and template arguments of one branch. All methods raise EngineUnavailable."""

    def __init__(self, engine: Renders, tools: Sequence[ToolDefinition], template_kwargs: dict[str, Any]) -> None:
        self._engine = engine
        self._tools = tools
        self._template_kwargs = template_kwargs
        self._before: tuple[Message, ...] = (_USER,)
        """Precedes the stand-in turn."""
        self._appends_user_turns: bool | None = None
        self._closing: TokenIds | None = None
        self._opening: TokenIds | None = None
        self._needs_calls: bool | None = None
        """Whether the template writes tool results differently after calls than after text."""

    def after_history(self, history: tuple[Message, ...]) -> Tails:
        """Tails rendered after a whole history, for templates that count or look back. The cost grows with the
        history."""
        tails = Tails(self._engine, self._tools, self._template_kwargs)
        tails._before, tails._needs_calls = history, True
        return tails

    async def after(self, response: Message, new: Sequence[Message]) -> tuple[TokenIds, bool]:
        """The ids after stand-in turns of text, or after stand-in turns with calls if the template accepts results only
        after calls, or renders them differently there. Also whether these ids may begin inside the call: the sampled
        turn must then end with the complete rest of the call.

        Raises: CannotStitch.
        """
        if self._needs_calls and answers_calls(new, response):
            return await self._suffix_after_calls(response, new), True
        try:
            tail = await self._common_suffix(new, (Text("one"),), (Text("two"),))
        except EngineRefused as refused:
            if not any(isinstance(part, ToolResult) for message in new for part in message.parts):
                raise CannotStitch(f"the template refuses the new messages: {refused.message}") from refused
            return await self._suffix_after_calls(response, new), True
        if self._needs_calls is None and answers_calls(new, response):
            self._needs_calls = await self._differs_after_calls(response, new, tail)
            return await self.after(response, new)
        return tail, False

    async def last_id(self, response: Message, new: Sequence[Message], tail: TokenIds) -> int | None:
        """The last id that the template writes for the response itself, before `tail`; None if it cannot be
        determined."""
        try:
            whole = await self._render(response.parts, new)
        except EngineRefused:
            return None
        end = len(whole) - len(tail)
        return int(whole[end - 1]) if end > 0 and common_prefix_len(whole[end:], tail) == len(tail) else None

    async def closing(self) -> TokenIds:
        """The template's ids after an assistant's text, whatever messages follow: [T], end of turn first. Empty if it
        writes none (the next turn's opener ends this one), or if the engine does not show them."""
        if self._closing is None:
            try:
                after_turn = await self._common_suffix((), (Text("one"),), (Text("two"),))
                length = len(after_turn) - len(await self.opening())
            except EngineRefused:
                after_turn, length = token_ids(), 0
            self._closing = after_turn[: max(length, 0)]
        return self._closing

    async def opening(self) -> TokenIds:
        """The ids of a generation prompt: [T]. For a template that always writes one, the ids that it removes once a
        reply follows. Raises: EngineRefused."""
        if self._opening is None:
            with_prompt, without, other = await asyncio.gather(
                self._engine.render((_USER,), self._tools, self._template_kwargs),
                self._engine.render((_USER,), self._tools, self._template_kwargs, add_generation_prompt=False),
                self._engine.render((_OTHER_USER,), self._tools, self._template_kwargs),
            )
            length = len(with_prompt) - common_prefix_len(with_prompt, without)
            if length == 0:
                replied = await self._render((Text("x"),), (_USER,))
                taken_back = len(with_prompt) - common_prefix_len(with_prompt, replied)
                is_behind_text = taken_back <= common_prefix_len(with_prompt[::-1], other[::-1])
                length = taken_back if is_behind_text else 0
            self._opening = with_prompt[len(with_prompt) - length :]
        return self._opening

    async def drops_thinking(self, new: Sequence[Message]) -> bool:
        """Whether a turn's thinking is no longer in the prompt after `new`. Raises: EngineRefused."""
        bodies = [(Thinking(thought), Text("x")) for thought in ("one", "two")]
        a, b = await asyncio.gather(*(self._render(body, new) for body in bodies))
        return np.array_equal(a, b)

    async def appends_user_turns(self) -> bool:
        """Whether the template keeps everything before a user turn unchanged. Raises: EngineRefused."""
        if self._appends_user_turns is None:
            before = await self._engine.render((_USER,), self._tools, self._template_kwargs)
            after = await self._render((Text("x"),), (_USER,))
            self._appends_user_turns = common_prefix_len(before, after) == len(before)
        return self._appends_user_turns

    async def _differs_after_calls(self, response: Message, new: Sequence[Message], after_text: TokenIds) -> bool:
        after_calls = await self._suffix_after_calls(response, new)
        length = min(len(after_calls), len(after_text))
        return common_prefix_len(after_calls[::-1], after_text[::-1]) < length

    async def _suffix_after_calls(self, response: Message, new: Sequence[Message]) -> TokenIds:
        """Uses stand-ins with the reply's calls. With other arguments, the suffix begins right after them. If the
        template refuses those, other names are used, and the suffix begins inside the call. For a template that writes
        no calls, the texts before the same calls differ.

        Raises: CannotStitch.
        """
        calls = tuple(part for part in response.parts if isinstance(part, ToolCall))
        if not calls:
            raise CannotStitch("the template refuses tool results that no call asked for")
        why = ""
        # `1}`, `"}` and `]`: a last brace mostly shares a token with the character before it.
        objects = [tuple(replace(call, arguments=text) for call in calls) for text in ('{"a": 1}', '{"a": "x"}')]
        a_list = tuple(replace(call, arguments="[1]") for call in calls)
        other_names = [tuple(replace(call, name=name) for call in calls) for name in ("call_one", "call_two")]
        other_texts = [(Text(text), *calls) for text in ("one", "two")]
        for bodies in ([*objects, a_list], objects, other_names, other_texts):
            try:
                return await self._common_suffix(new, *bodies)
            except EngineRefused as refused:
                why = f"the template refuses the new messages: {refused.message}"
            except CannotStitch as unclear:
                why = why or unclear.reason
        raise CannotStitch(why)

    async def _common_suffix(self, new: Sequence[Message], *bodies: tuple[Part, ...]) -> TokenIds:
        first, *others = await asyncio.gather(*(self._render(body, new) for body in bodies))
        length = min(common_prefix_len(first[::-1], other[::-1]) for other in others)
        if length == 0 or length == min(map(len, (first, *others))):
            raise CannotStitch("the template does not show where the assistant's turn ends")
        return first[len(first) - length :]

    async def _render(self, body: tuple[Part, ...], new: Sequence[Message]) -> TokenIds:
        """Raises: EngineRefused, also when a template fails at the stand-ins."""
        messages = (*self._before, Message("assistant", body), *new)
        return await rendered(self._engine, messages, self._tools, self._template_kwargs)


async def rendered(
    engine: Renders, messages: Sequence[Message], tools: Sequence[ToolDefinition], template_kwargs: dict[str, Any]
) -> TokenIds:
    """Raises: EngineRefused, also when a template fails at the messages; EngineUnavailable."""
    try:
        return await engine.render(messages, tools, template_kwargs)
    except EngineUnavailable as error:
        if error.details.get("status") != 500:
            raise
        raise EngineRefused(error.message, status=500) from error


def answers_calls(new: Sequence[Message], response: Message) -> bool:
    has_calls = any(isinstance(part, ToolCall) for part in response.parts)
    return has_calls and any(isinstance(part, ToolResult) for message in new for part in message.parts)

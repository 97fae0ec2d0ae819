"""The ids that follow a sampled turn: its closing, the new messages, the next generation prompt.

Computed without trusting any text: a stand-in conversation with the new messages is rendered twice, with assistant
turns that end differently; the longest common suffix is the template's closing and everything new. From its front the
end of the sampled turn is removed. Nothing is ever searched for by value, and the cost does not grow with the history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from gangline.domain.completion import Completion, CompletionTree, DivergenceCause
from gangline.domain.conversation import Message, ModelCall, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import EngineRefused, EngineUnavailable
from gangline.domain.images import images_in, is_inline
from gangline.domain.tokens import TokenIds, common_prefix_len, token_ids
from gangline.engines.contract import Engine, EngineCapabilities
from gangline.engines.fields import has_documents, has_media
from gangline.gateway.truth.placing import Place

__all__ = [
    "CannotStitch",
    "Decision",
    "PromptTier",
    "Stitcher",
    "ThinkingPolicy",
    "Tier",
    "ended_itself",
    "has_thought",
]

ThinkingPolicy = Literal["follow_template", "retain"]
"""At a new user turn whose template strips the thinking before it: start a new chain, or stitch on."""

Tier = Literal["auto", "observe"]
"""auto: stitch where the engine takes exact ids. observe: always let the engine render."""

_USER = Message("user", (Text("x"),))
_NATURAL = ("stop", "tool_calls")


class CannotStitch(Exception):
    """The step is left to the engine's own rendering. The message goes into the certificate."""

    def __init__(self, reason: str, cause: DivergenceCause | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause: DivergenceCause | None = cause
        """Why the engine's rendering will differ from the parent's context, where that is known beforehand."""


class Stitcher:
    """For one session and its engine."""

    def __init__(self, engine: Engine, tree: CompletionTree, thinking: ThinkingPolicy) -> None:
        self._engine = engine
        self._tree = tree
        self._thinking = thinking
        self._appends_user_turns: dict[str, bool] = {}
        """branch key -> the template appends after a user turn, and takes back nothing that stands before it"""
        self._closings: dict[str, TokenIds] = {}
        """branch key -> the template's closing of a turn"""
        self._needs_calls: dict[str, bool] = {}
        """branch key -> the template writes tool results otherwise after calls than after text"""

    async def prompt_ids(self, call: ModelCall, place: Place) -> TokenIds:
        """Parent's prompt, its sampled ids, then the new ids: [T]. `place` has a parent.

        Raises: CannotStitch, EngineUnavailable.
        """
        assert place.parent_id is not None
        parent = self._tree[place.parent_id]
        if not place.new_messages:
            raise CannotStitch("the history ends with the assistant's turn: nothing new follows it")
        if self._thinking == "follow_template" and any(message.role == "user" for message in place.new_messages):
            await self._check_nothing_stripped(call, place, parent)
        tail = await self._closing_and_new(call, place, parent)
        return np.concatenate([self._tree.context_ids(parent), tail])

    async def _closing_and_new(self, call: ModelCall, place: Place, parent: Completion) -> TokenIds:
        """Raises: CannotStitch."""
        tail, begins_in_call = await self._tail(call, place, parent)
        overlap = _overlap(parent.sampled_ids, tail)
        if overlap or not (begins_in_call or ended_itself(parent)):
            return tail[overlap:]
        # Some models have several ends of turn: the sampled one stands where the template writes its own.
        closing = await self._closing(call, place.branch_key) if ended_itself(parent) else token_ids()
        if len(closing) == 0 or not np.array_equal(tail[: len(closing)], closing):
            raise CannotStitch("the sampled turn does not end as the template closes one")
        return tail[1:]

    async def _tail(self, call: ModelCall, place: Place, parent: Completion) -> tuple[TokenIds, bool]:
        """The ids after stand-in turns of text, or after stand-in turns with calls where the template takes results
        only after those, or renders them otherwise. And whether it may begin inside the call: the sampled turn must
        then end with all of the call's rest.

        Raises: CannotStitch.
        """
        new = place.new_messages
        if self._needs_calls.get(place.branch_key) and _answers_calls(new, parent):
            return await self._suffix_after_calls(call, new, parent), True
        try:
            tail = await self._common_suffix(call, new, (Text("one"),), (Text("two"),))
        except EngineRefused as refused:
            if not any(isinstance(part, ToolResult) for message in new for part in message.parts):
                raise CannotStitch(f"the template refuses the new messages: {refused.message}") from refused
            return await self._suffix_after_calls(call, new, parent), True
        if place.branch_key not in self._needs_calls and _answers_calls(new, parent):
            self._needs_calls[place.branch_key] = await self._differs_after_calls(call, new, parent, tail)
            return await self._tail(call, place, parent)
        return tail, False

    async def _differs_after_calls(
        self, call: ModelCall, new: Sequence[Message], parent: Completion, after_text: TokenIds
    ) -> bool:
        try:
            after_calls = await self._suffix_after_calls(call, new, parent)
        except CannotStitch:
            return False
        length = min(len(after_calls), len(after_text))
        return common_prefix_len(after_calls[::-1], after_text[::-1]) < length

    async def _suffix_after_calls(self, call: ModelCall, new: Sequence[Message], parent: Completion) -> TokenIds:
        """Stand-ins with the parent's calls. With other arguments the suffix begins right after them; where a template
        refuses those, with other names it begins inside the call.

        Raises: CannotStitch.
        """
        calls = [part for part in parent.response.parts if isinstance(part, ToolCall)]
        if not calls:
            raise CannotStitch("the template refuses tool results that no call asked for")
        why = ""
        # `1}`, `"}` and `]`: what stands before a last brace mostly takes it into its own token.
        objects = [tuple(replace(one, arguments=text) for one in calls) for text in ('{"a": 1}', '{"a": "x"}')]
        a_list = tuple(replace(one, arguments="[1]") for one in calls)
        other_names = [tuple(replace(one, name=name) for one in calls) for name in ("call_one", "call_two")]
        for bodies in ([*objects, a_list], objects, other_names):
            try:
                return await self._common_suffix(call, new, *bodies)
            except EngineRefused as refused:
                why = refused.message
        raise CannotStitch(f"the template refuses the new messages: {why}")

    async def _closing(self, call: ModelCall, branch_key: str) -> TokenIds:
        """The template's text after an assistant's text, independent of the following messages: [T], end of turn first.
        Empty where it writes nothing (the next turn's opener ends this one), or where the engine does not show it."""
        if branch_key not in self._closings:
            try:
                with_prompt, without = await asyncio.gather(
                    self._engine.render((_USER,), call.tools, call.template_kwargs),
                    self._engine.render((_USER,), call.tools, call.template_kwargs, add_generation_prompt=False),
                )
                after_turn = await self._common_suffix(call, (), (Text("one"),), (Text("two"),))
            except EngineRefused:
                with_prompt = without = after_turn = token_ids()
            length = len(after_turn) - (len(with_prompt) - common_prefix_len(with_prompt, without))
            self._closings[branch_key] = after_turn[: max(length, 0)]
        return self._closings[branch_key]

    async def _common_suffix(self, call: ModelCall, new: Sequence[Message], *bodies: tuple[Part, ...]) -> TokenIds:
        first, *others = await asyncio.gather(*(self._render(call, body, new) for body in bodies))
        length = min(common_prefix_len(first[::-1], other[::-1]) for other in others)
        if length == 0 or length == min(map(len, (first, *others))):
            raise CannotStitch("the template does not show where the assistant's turn ends")
        return first[len(first) - length :]

    async def _render(self, call: ModelCall, body: tuple[Part, ...], new: Sequence[Message]) -> TokenIds:
        """Raises: EngineRefused, also where a template fails at the stand-ins; EngineUnavailable."""
        try:
            messages = (_USER, Message("assistant", body), *new)
            return await self._engine.render(messages, call.tools, call.template_kwargs)
        except EngineUnavailable as error:
            if error.details.get("status") != 500:
                raise
            raise EngineRefused(error.message, status=500) from error

    async def _check_nothing_stripped(self, call: ModelCall, place: Place, parent: Completion) -> None:
        """Raises: CannotStitch when the template, at this user turn, removes content that the model has seen."""
        strips = "a new user turn: the template strips the thinking before it (`thinking = follow_template`)"
        try:
            if self._thought_since_user(parent) and await self._drops_thinking(call, place.new_messages):
                raise CannotStitch(strips, "thinking_dropped")
            if place.branch_key not in self._appends_user_turns:
                self._appends_user_turns[place.branch_key] = await self._appends(call)
        except EngineRefused as refused:
            raise CannotStitch(f"the template refuses the new messages: {refused.message}") from refused
        if not self._appends_user_turns[place.branch_key]:
            raise CannotStitch(strips, "thinking_dropped")

    def _thought_since_user(self, parent: Completion) -> bool:
        """Whether a turn after the last user message has thinking: earlier ones were decided on before."""
        at = parent
        while not has_thought(at.response):
            if at.parent_id is None or any(message.role == "user" for message in at.new_messages):
                return False
            at = self._tree[at.parent_id]
        return True

    async def _drops_thinking(self, call: ModelCall, new: Sequence[Message]) -> bool:
        bodies = [(Thinking(thought), Text("x")) for thought in ("one", "two")]
        a, b = await asyncio.gather(*(self._render(call, body, new) for body in bodies))
        return np.array_equal(a, b)

    async def _appends(self, call: ModelCall) -> bool:
        before = await self._engine.render((_USER,), call.tools, call.template_kwargs)
        after = await self._render(call, (Text("x"),), (_USER,))
        return common_prefix_len(before, after) == len(before)


def has_thought(message: Message) -> bool:
    """Thinking that the engine parsed, or left in the text."""
    return any(
        isinstance(part, Thinking) or (isinstance(part, Text) and "</think>" in part.text) for part in message.parts
    )


def _why_apart(call: ModelCall, capabilities: EngineCapabilities) -> str | None:
    """Why exact ids cannot go together with the media of a call; None when they can."""
    if has_documents(call.messages):
        return "documents in the conversation: ids alone do not hold them"
    if not capabilities.takes_images:
        return "images in the conversation: ids alone do not hold them, and this route takes no images beside ids"
    if not all(map(is_inline, images_in(call.messages))):
        return "an image is at an address: its placeholders are not known before the engine fetched it"
    return None


def _answers_calls(new: Sequence[Message], parent: Completion) -> bool:
    has_calls = any(isinstance(part, ToolCall) for part in parent.response.parts)
    return has_calls and any(isinstance(part, ToolResult) for message in new for part in message.parts)


def ended_itself(completion: Completion) -> bool:
    """By an end of turn that was sampled, rather than by a limit or a stop string."""
    certificate, sampled = completion.certificate, completion.sampled_ids
    by_id = certificate.stop_reason is None or (len(sampled) > 0 and certificate.stop_reason == str(int(sampled[-1])))
    return certificate.finish_reason in _NATURAL and by_id


def _overlap(sampled: TokenIds, tail: TokenIds) -> int:
    """Longest `k` such that `sampled` ends with `tail[:k]`."""
    for k in range(min(len(sampled), len(tail)), 0, -1):
        if sampled[-1] == tail[k - 1] and np.array_equal(sampled[len(sampled) - k :], tail[:k]):
            return k
    return 0


class PromptTier:
    """Decides, for one session, whether prompts are stitched; an engine that ignored exact ids is not asked again."""

    def __init__(self, tier: Tier, stitcher: Stitcher) -> None:
        self._tier = tier
        self._stitcher = stitcher
        self._ignored = False

    async def decide(self, call: ModelCall, place: Place, capabilities: EngineCapabilities) -> Decision:
        """Raises: EngineUnavailable."""
        if self._tier == "observe" or place.parent_id is None or not capabilities.takes_prompt_ids:
            return Decision()
        if has_media(call.messages) and (why := _why_apart(call, capabilities)) is not None:
            return Decision(fallback=why)
        if self._ignored:
            return Decision(fallback="the engine ignored the exact prompt ids of an earlier call")
        if not capabilities.renders:
            return Decision(fallback="the engine has no route that renders a conversation (`/tokenize`)")
        try:
            return Decision(prompt_ids=await self._stitcher.prompt_ids(call, place))
        except CannotStitch as why:
            return Decision(fallback=why.reason, cause=why.cause)

    def ids_were_ignored(self) -> None:
        self._ignored = True


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: TokenIds | None = None
    """Exact prompt to send [T]; None: the engine renders."""
    fallback: str | None = None
    cause: DivergenceCause | None = None

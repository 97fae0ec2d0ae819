"""Adapts a conversation to the nearest one that a chat template accepts. Pure.

Every change is local: it depends on the messages between two replies and on the reply before them, never on later
messages. So the fitted messages up to a reply are a prefix of the fitted whole, and prompts can be stitched. Nothing is
lost, and texts keep their order.

Also sets the template's arguments. The task's arguments take precedence over the client's, and both over the client's
thinking options, which are translated to the template's arguments. Options that the template does not support stay in
the call, and the record lists them as dropped.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from gangline.domain.conversation import (
    EFFORTS,
    Document,
    Image,
    Message,
    ModelCall,
    Part,
    Text,
    Thinking,
    ThinkingWish,
    ToolCall,
    ToolResult,
)
from gangline.domain.node_views import TemplateFacts

PieceT = TypeVar("PieceT", bound=Part)

Fitted = tuple[tuple[Message, ...], dict[str, int]]
"""The messages for the engine, the same object if unchanged, and the changes: kind -> count."""

RESULTS_AS_USER = "results_as_user"
"""Results without a call became a user message."""
SPLIT_CALLS = "split_calls"
"""A reply with several calls became one reply for each."""

_SYSTEM = ("system", "developer")
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_EMPTY_USER = Message("user", (Text(""),))
"""Separates two replies, and precedes a reply at the beginning, for templates that require alternation."""

_ABOUT_THINKING = frozenset({"enable_thinking", "thinking", "reasoning", "thinking_mode", "thinking_option"})
_ABOUT_EFFORT = frozenset({"reasoning_effort", "thinking_effort", "reasoning_strength", "low_effort", "medium_effort"})


def with_task_arguments(call: ModelCall, arguments: Mapping[str, Any]) -> ModelCall:
    """The call with a task's template arguments; `template_wished` contains the replaced arguments of the client."""
    if not arguments:
        return call
    own, wish = call.template_kwargs, call.thinking
    replaced = {name: own[name] for name in arguments if name in own and own[name] != arguments[name]}
    kept = ThinkingWish(
        is_on=None if _ABOUT_THINKING & arguments.keys() else wish.is_on,
        effort=None if _ABOUT_EFFORT & arguments.keys() else wish.effort,
    )
    if kept != wish:
        replaced["thinking_wish"] = msgspec.to_builtins(wish)
    return msgspec.structs.replace(call, template_kwargs={**own, **arguments}, thinking=kept, template_wished=replaced)


def in_template_words(call: ModelCall, template: TemplateFacts) -> ModelCall:
    """The call with its thinking options as arguments of this template; `thinking` keeps the unsupported ones."""
    wish, own = call.thinking, call.template_kwargs
    if wish == ThinkingWish():
        return call
    if _ABOUT_THINKING & own.keys():
        wish = msgspec.structs.replace(wish, is_on=None)
    if _ABOUT_EFFORT & own.keys():
        wish = msgspec.structs.replace(wish, effort=None)
    switch = None if wish.is_on is None else _switch(wish.is_on, template)
    effort = None if wish.effort is None else _effort(wish.effort, template)
    unmet = ThinkingWish(is_on=wish.is_on if switch is None else None, effort=wish.effort if effort is None else None)
    arguments = {**(switch or {}), **(effort or {}), **own}
    return msgspec.structs.replace(call, template_kwargs=arguments, thinking=unmet)


def _switch(is_on: bool, template: TemplateFacts) -> dict[str, Any] | None:
    """None if the template has no switch. With an unknown template, the usual argument may turn thinking off."""
    found = template.thinking_on if is_on else template.thinking_off
    if found is None:
        return None if is_on else {"enable_thinking": False}
    return found or None


def _effort(word: str, template: TemplateFacts) -> dict[str, Any] | None:
    """The nearest word that the template accepts; of two equally near ones, the stronger."""
    for name, words in (template.efforts or {}).items():
        if word in words or word not in EFFORTS:
            return {name: word} if word in words else None
        at = EFFORTS.index(word)
        return {name: min(words, key=lambda one: (abs(EFFORTS.index(one) - at), -EFFORTS.index(one)))}
    return None


def unmet_wishes(call: ModelCall) -> list[str]:
    """Unsupported options, for a record's `dropped`."""
    wish = call.thinking
    found = [] if wish.is_on is None else [f"thinking {'on' if wish.is_on else 'off'} (the template cannot switch it)"]
    return found if wish.effort is None else [*found, f"effort {wish.effort} (the template does not take it)"]


def fit(messages: tuple[Message, ...], facts: TemplateFacts, engine_ids: Mapping[str, str] | None = None) -> Fitted:
    """
    engine_ids: the client's id of a call -> the engine's or the model's, where they differ.
    """
    shows_ids = bool(engine_ids) and facts.prints_call_ids is True
    wants_nine = facts.call_ids == "nine"
    fitted, changes = messages, Counter[str]()
    if _refuses_some(facts):
        fitting = _Fitting(facts)
        mended = fitting.fitted(messages)
        fitted, changes = (mended if fitting.changes else messages), fitting.changes
    if shows_ids or wants_nine:
        fitted = _with_ids(fitted, engine_ids if shows_ids and engine_ids else {}, wants_nine, changes)
    return fitted, dict(changes)


def _refuses_some(facts: TemplateFacts) -> bool:
    return (
        facts.takes_system is False
        or facts.takes_several_system is False
        or facts.takes_late_system is False
        or facts.takes_system_alone is False
        or facts.takes_system_after_results is False
        or facts.takes_neighbours is False
        or facts.takes_reply_first is False
        or facts.takes_empty_replies is False
        or facts.takes_user_after_results is False
        or facts.takes_parallel_calls is False
        or facts.takes_results_without_calls is False
        or facts.takes_calls_without_results is False
        or facts.takes_text_and_thinking_with_calls is False
    )


class _Fitting:
    """Adapts one conversation."""

    def __init__(self, facts: TemplateFacts) -> None:
        self._facts = facts
        self.changes: Counter[str] = Counter()

    def fitted(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        fitted: list[Message] = []
        between: list[Message] = []
        reply: Message | None = None
        """The last reply."""
        for message in messages:
            if message.role != "assistant":
                between.append(message)
                continue
            self._add_run(fitted, between, reply, at_end=False)
            fitted.append(self._reply(message))
            between, reply = [], message
        self._add_run(fitted, between, reply, at_end=True)
        return tuple(fitted)

    def _add_run(self, fitted: list[Message], run: Sequence[Message], reply: Message | None, *, at_end: bool) -> None:
        messages = self._run(run, reply, at_end=at_end)
        calls = [part for part in reply.parts if isinstance(part, ToolCall)] if reply else []
        if self._facts.takes_parallel_calls is False and len(calls) > 1 and messages:
            self.changes[SPLIT_CALLS] += 1
            fitted[-1:] = _one_call_each(fitted[-1], calls, messages)
        else:
            fitted += messages

    # -- replies -------------------------------------------------------------------------------------------------

    def _reply(self, reply: Message) -> Message:
        parts = reply.parts
        texts = [part for part in parts if isinstance(part, Text) and part.text]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if not texts and not calls and self._facts.takes_empty_replies is False:
            self.changes["blank_replies"] += 1
            return replace(reply, parts=(*(part for part in parts if not isinstance(part, Text)), Text(" ")))
        if calls and texts and self._facts.takes_text_and_thinking_with_calls is False:
            thoughts = [part for part in parts if isinstance(part, Thinking) and part.text]
            if thoughts:
                self.changes["text_in_thinking"] += 1
                text = "\n\n".join([*(part.text for part in thoughts), *(part.text for part in texts)])
                others = (part for part in parts if not isinstance(part, (Text, Thinking)))
                return replace(reply, parts=(replace(thoughts[0], text=text), *others))
        return reply

    # -- the messages between two replies ------------------------------------------------------------------------

    def _run(self, run: Sequence[Message], reply: Message | None, *, at_end: bool) -> list[Message]:
        """reply: the preceding one. at_end: whether no reply follows."""
        facts = self._facts
        messages = [one for message in run for one in _apart(message)]
        messages = self._with_results(messages, reply, at_end)
        messages = self._without_system(messages, is_first=reply is None)
        if facts.takes_neighbours is False:
            messages = self._joined(messages, "joined_neighbours", lambda _a, _b: True)
        if not at_end and not any(one.role in ("user", "tool") for one in messages):
            refused = facts.takes_reply_first if reply is None else facts.takes_neighbours
            if refused is False:
                self.changes["empty_users"] += 1
                messages.append(_EMPTY_USER)
        return self._user_in_results(messages) if facts.takes_user_after_results is False else messages

    def _with_results(self, messages: list[Message], reply: Message | None, at_end: bool) -> list[Message]:
        """Turns results without a call into user messages, and adds empty results for calls without one."""
        facts = self._facts
        if facts.takes_results_without_calls is not False and facts.takes_calls_without_results is not False:
            return messages
        asked = [part.call_id for part in reply.parts if isinstance(part, ToolCall)] if reply else []
        answered = {part.call_id for message in messages for part in message.parts if isinstance(part, ToolResult)}
        if facts.takes_results_without_calls is False:
            messages = [self._as_text(message, asked) for message in messages]
        missing = [one for one in asked if one not in answered]
        if missing and facts.takes_calls_without_results is False and not (at_end and not messages):
            self.changes["empty_results"] += len(missing)
            at = 1 + max((number for number, one in enumerate(messages) if one.role == "tool"), default=-1)
            messages[at:at] = [Message("tool", (ToolResult(call_id, (Text(""),)),)) for call_id in missing]
        return messages

    def _as_text(self, message: Message, asked: Sequence[str]) -> Message:
        results = [part for part in message.parts if isinstance(part, ToolResult)]
        if not results or all(part.call_id in asked for part in results):
            return message
        self.changes[RESULTS_AS_USER] += 1
        return Message("user", tuple(piece for part in results for piece in part.content))

    def _without_system(self, messages: list[Message], *, is_first: bool) -> list[Message]:
        facts = self._facts
        num_leading = 0
        while is_first and num_leading < len(messages) and messages[num_leading].role in _SYSTEM:
            num_leading += 1
        leading, rest = messages[:num_leading], messages[num_leading:]
        moved: list[Message] = []
        """Former system messages."""
        if False in (facts.takes_late_system, facts.takes_system_after_results, facts.takes_system):
            rest = [self._as_user(one, moved, "late_system_in_user") for one in rest]
        alone = not any(one.role in ("user", "tool") for one in rest)
        if facts.takes_system is False or (alone and facts.takes_system_alone is False):
            leading = [self._as_user(one, moved, "system_in_user") for one in leading]
        elif facts.takes_several_system is False and len(leading) > 1:
            self.changes["joined_system"] += len(leading)
            leading = [Message(leading[0].role, _glued(*(one.parts for one in leading)), leading[0].name)]
        if not moved:
            return [*leading, *rest]
        return self._joined([*leading, *rest], None, lambda a, b: any(one is a or one is b for one in moved))

    def _as_user(self, message: Message, moved: list[Message], change: str) -> Message:
        if message.role not in _SYSTEM:
            return message
        self.changes[change] += 1
        moved.append(Message("user", message.parts))
        return moved[-1]

    def _joined(
        self, messages: Sequence[Message], change: str | None, joins: Callable[[Message, Message], bool]
    ) -> list[Message]:
        """Joins consecutive user messages. joins: whether to join two neighbours, given the original first one."""
        joined: list[Message] = []
        last: Message | None = None
        """The last message, unjoined."""
        for message in messages:
            if last is not None and last.role == message.role == "user" and joins(last, message):
                joined[-1] = replace(joined[-1], parts=_glued(joined[-1].parts, message.parts))
                if change is not None:
                    self.changes[change] += 1
            else:
                joined.append(message)
            last = message
        return joined

    def _user_in_results(self, messages: Sequence[Message]) -> list[Message]:
        """Moves a user message after a result into that result."""
        fitted: list[Message] = []
        for message in messages:
            result = fitted[-1].parts[-1] if fitted and fitted[-1].role == "tool" else None
            pieces = [part for part in message.parts if isinstance(part, (Text, Image, Document))]
            if message.role != "user" or not isinstance(result, ToolResult):
                fitted.append(message)
                continue
            self.changes["user_in_results"] += 1
            fitted[-1] = replace(fitted[-1], parts=(replace(result, content=_glued(result.content, pieces)),))
        return fitted


def _one_call_each(reply: Message, calls: Sequence[ToolCall], run: Sequence[Message]) -> list[Message]:
    """Splits a reply with several calls into one reply for each, with its result."""
    split, left = list[Message](), list(run)
    first = replace(reply, parts=(*(part for part in reply.parts if not isinstance(part, ToolCall)), calls[0]))
    for call in calls:
        results = [
            one for one in left if any(isinstance(p, ToolResult) and p.call_id == call.call_id for p in one.parts)
        ]
        left = [one for one in left if one not in results]
        split += [first if call is calls[0] else Message("assistant", (call,)), *results]
    return [*split, *left]


def _apart(message: Message) -> list[Message]:
    """Splits a message with results into one message for each, and the rest, as engines receive it."""
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if not results or len(message.parts) == 1:
        return [message]
    rest = tuple(part for part in message.parts if not isinstance(part, ToolResult))
    return [
        *(Message("tool", (result,)) for result in results),
        *([Message("user", rest, message.name)] if rest else []),
    ]


def _glued(*several: Sequence[PieceT]) -> tuple[PieceT, ...]:
    """Joins the parts of several messages, with an empty line between adjacent texts."""
    glued: list[PieceT] = []
    for parts in several:
        first, last = parts[0] if parts else None, glued[-1] if glued else None
        if isinstance(first, Text) and isinstance(last, Text):
            glued[-1] = replace(last, text="\n\n".join(text for text in (last.text, first.text) if text))
            glued += parts[1:]
        else:
            glued += parts
    return tuple(glued)


# -- ids of calls ------------------------------------------------------------------------------------------------


def _with_ids(
    messages: tuple[Message, ...], engine_ids: Mapping[str, str], nine: bool, changes: Counter[str]
) -> tuple[Message, ...]:
    def of(call_id: str) -> str:
        theirs = engine_ids.get(call_id, call_id)
        if not nine or _NINE.fullmatch(theirs):
            return theirs
        changes["call_ids"] += 1
        return _nine(theirs)

    def renamed(part: Part) -> Part:
        if not isinstance(part, (ToolCall, ToolResult)):
            return part
        call_id = of(part.call_id)
        return part if call_id == part.call_id else replace(part, call_id=call_id)

    fitted: list[Message] = []
    for message in messages:
        parts = tuple(map(renamed, message.parts))
        is_same = all(a is b for a, b in zip(parts, message.parts, strict=True))
        fitted.append(message if is_same else replace(message, parts=parts))
    return messages if all(a is b for a, b in zip(fitted, messages, strict=True)) else tuple(fitted)


def _nine(call_id: str) -> str:
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()[:8])
    digits: list[str] = []
    for _ in range(9):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)

"""The loop of a native agent: call the model, act, repeat until the task is done.

Laws
- The conversation only grows. The model's messages are sent back unchanged, so that their tokens are continued and
  never rendered again.
- Each tool call has one result, in the order of the calls, before the model is called again.
- A reply that was cut off, or that contains an unreadable call (even without its tags), is not an answer: the model
  gets a report and continues.
- Every loop ends. Turns that do nothing but get a report are counted, and at most `max_reminders` may be consecutive;
  turns that act are bounded by the session's limits, which refuse its model calls.

Tool calls without the tags of the model's template:

An engine's parser finds calls by their tags, so such a call arrives as text and would be mistaken for an answer. A call
is recognised if a line of the reply begins with a JSON object that names an offered tool and continues with its
arguments, whether or not the rest is valid JSON. The same words inside a sentence do not count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from gangline.agents.harnesses.native.config import SUBMIT, Finish
from gangline.agents.harnesses.native.model import Message, ModelReply
from gangline.agents.harnesses.native.toolbox import Acted, Toolbox
from gangline.domain.errors import HarnessError

_CUT_OFF = "Your reply was cut off: it reached the limit of its length."
_UNREAD = (
    "Your reply has a tool call that could not be read, so it was not done. Write the call again, in the format that"
    " you were given for tool calls, with arguments that are a JSON object."
)
_NOTHING_SUBMITTED = (
    f"You called no tool, so nothing was done. Go on with the task, or call {SUBMIT} if it is done: only that ends it."
)

_CALL = re.compile(
    r'^[ \t]*\[?[ \t]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*"(?P<name>[^"\n]*)"\s*,\s*"(?:arguments|parameters)"\s*:',
    re.MULTILINE,
)


def has_untagged_call(text: str, names: Collection[str]) -> bool:
    """names: the offered tools'."""
    return any(found["name"] in names for found in _CALL.finditer(text))


class Model(Protocol):
    """See `ChatModel`."""

    async def ask(self, messages: Sequence[Message]) -> ModelReply: ...


async def converse(
    model: Model, toolbox: Toolbox, messages: list[Message], *, finish: Finish, max_reminders: int
) -> str:
    """The agent's answer. messages: the opening; the conversation is appended to it.

    Raises: HarnessError if a model call is refused, or the model no longer acts; RuntimeFailed.
    """
    num_in_vain = 0
    while True:
        reply = await model.ask(messages)
        if not reply.calls and has_untagged_call(reply.text, toolbox.names):
            reply = msgspec.structs.replace(reply, has_unread_calls=True)
        acted = await toolbox.act(reply.calls)
        messages += [reply.message, *acted.results]
        if acted.answer is not None:
            return acted.answer or reply.text
        if finish == "answer" and _is_answer(reply):
            return reply.text
        num_in_vain = 0 if acted.num_done else num_in_vain + 1
        if num_in_vain > max_reminders:
            return _given_up(reply, num_in_vain)
        if report := _report(reply, acted):
            messages.append({"role": "user", "content": report})


def _is_answer(reply: ModelReply) -> bool:
    return not (reply.calls or reply.is_cut_off or reply.has_unread_calls)


def _report(reply: ModelReply, acted: Acted) -> str:
    """Information for the model in addition to its calls' results; empty if they are enough."""
    if reply.is_cut_off:
        return " ".join([_CUT_OFF, _after_cut(reply, acted), "Go on from there, and be brief."])
    if reply.has_unread_calls:
        return "" if acted.num_unreadable else _UNREAD
    return "" if reply.calls else _NOTHING_SUBMITTED


def _after_cut(reply: ModelReply, acted: Acted) -> str:
    if acted.num_unreadable or reply.has_unread_calls:
        return "A tool call in it could not be read and was not done: write it again, and shorter."
    return "The tool calls in it were done." if reply.calls else "No tool call was in it, so nothing was done."


def _given_up(reply: ModelReply, num_turns: int) -> str:
    """The answer after too many reports. Raises: HarnessError if the last reply cannot be an answer."""
    if _is_answer(reply):
        return reply.text
    why = "was cut off" if reply.is_cut_off else "had only tool calls that cannot be read"
    raise HarnessError(f"the model did nothing for {num_turns} turns in a row; its last reply {why}")

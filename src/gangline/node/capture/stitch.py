"""A stitched prompt: the parent's ids as sampled, then the ids that the template writes after them.

The end of the sampled turn is removed from the front of those (see `Tails`). The cost does not grow with the history.
"""

from __future__ import annotations

import logging
from typing import Literal

import numpy as np

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Text, Thinking
from gangline.domain.errors import EngineRefused
from gangline.domain.tokens import TokenIds, token_ids
from gangline.models.engines.contract import Engine
from gangline.models.engines.templates.tails import CannotStitch, Tails
from gangline.node.capture.placing import Place

_log = logging.getLogger("gangline.calls")

ThinkingPolicy = Literal["follow_template", "retain"]
"""At a new user turn whose template strips the thinking before it: start a new chain, or keep stitching."""

_NATURAL = ("stop", "tool_calls")


class Stitcher:
    """For one session and its engine."""

    def __init__(self, engine: Engine, tree: CompletionTree, thinking: ThinkingPolicy) -> None:
        self._engine = engine
        self._tree = tree
        self._thinking = thinking
        self._tails: dict[str, Tails] = {}
        """By branch key."""
        self._warned = False

    def tails(self, call: ModelCall, branch_key: str) -> Tails:
        if branch_key not in self._tails:
            self._tails[branch_key] = Tails(self._engine, call.tools, call.template_kwargs)
        return self._tails[branch_key]

    async def prompt_ids(self, call: ModelCall, place: Place, *, behind_history: bool = False) -> TokenIds:
        """Returns the parent's prompt, its sampled ids, then the new ids: [T]. `place` has a parent.

        behind_history: find the new ids after the whole history.

        Raises: CannotStitch, EngineUnavailable.
        """
        assert place.parent_id is not None
        parent = self._tree[place.parent_id]
        if not place.new_messages:
            raise CannotStitch("the history ends with the assistant's turn: nothing new follows it")
        tails = self.tails(call, place.branch_key)
        if self._thinking == "follow_template" and any(message.role == "user" for message in place.new_messages):
            await self._check_nothing_stripped(tails, place, parent)
        # The client may have renamed the calls, and its results use those names.
        *history, echo = call.messages[: place.num_shared]
        if behind_history:
            tails = tails.after_history(tuple(history))
        tail, begins_in_call = await tails.after(echo, place.new_messages)
        overlap = _overlap(parent.sampled_ids, tail)
        if not overlap and (begins_in_call or ended_itself(parent)):
            overlap = await self._num_replaced(parent, echo, place, tails, tail)
        return np.concatenate([self._tree.context_ids(parent), tail[overlap:]])

    async def _num_replaced(self, parent: Completion, echo: Message, place: Place, tails: Tails, tail: TokenIds) -> int:
        """Returns how many ids of the tail the sampled end of turn replaces: some models have several ends of turn.

        Raises: CannotStitch.
        """
        closing = await tails.closing() if ended_itself(parent) else token_ids()
        if len(closing) == 0 or not np.array_equal(tail[: len(closing)], closing):
            cause = "end_of_turn" if ended_itself(parent) and len(closing) == 0 else None
            raise CannotStitch("the sampled turn does not end as the template closes one", cause)
        if len(parent.sampled_ids) == 0:
            return 0
        last = int(parent.sampled_ids[-1])
        is_content = await tails.last_id(echo, place.new_messages, tail) == last
        if is_content or (await self._engine.detokenize([last])).isspace():
            if not self._warned:
                self._warned = True
                _log.warning("call.end_of_turn_left_out session=%s", parent.session_id)
            return 0
        return 1

    async def _check_nothing_stripped(self, tails: Tails, place: Place, parent: Completion) -> None:
        """Raises: CannotStitch when the template, at this user turn, removes content that the model has seen."""
        strips = "a new user turn: the template strips the thinking before it (`thinking = follow_template`)"
        try:
            if self._thought_since_user(parent) and await tails.drops_thinking(place.new_messages):
                raise CannotStitch(strips, "thinking_dropped")
            if not await tails.appends_user_turns():
                raise CannotStitch(strips, "thinking_dropped")
        except EngineRefused as refused:
            raise CannotStitch(f"the template refuses the new messages: {refused.message}") from refused

    def _thought_since_user(self, parent: Completion) -> bool:
        """Whether a turn after the last user message has thinking. Earlier turns were checked before."""
        at = parent
        while not has_thought(at.response):
            if at.parent_id is None or any(message.role == "user" for message in at.new_messages):
                return False
            at = self._tree[at.parent_id]
        return True


def has_thought(message: Message) -> bool:
    """Whether the message has thinking that the engine parsed or left in the text."""
    return any(
        isinstance(part, Thinking) or (isinstance(part, Text) and "</think>" in part.text) for part in message.parts
    )


def ended_itself(completion: Completion) -> bool:
    """Whether it ended with a sampled end of turn, rather than at a limit or a stop string."""
    certificate, sampled = completion.certificate, completion.sampled_ids
    by_id = certificate.stop_reason is None or (len(sampled) > 0 and certificate.stop_reason == str(int(sampled[-1])))
    return certificate.finish_reason in _NATURAL and by_id


def _overlap(sampled: TokenIds, tail: TokenIds) -> int:
    """Returns the largest `k` such that `sampled` ends with `tail[:k]`."""
    for k in range(min(len(sampled), len(tail)), 0, -1):
        if sampled[-1] == tail[k - 1] and np.array_equal(sampled[len(sampled) - k :], tail[:k]):
            return k
    return 0

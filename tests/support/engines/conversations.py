"""Conversations with a session's ledger, without engine and proxy: what is placed where, and how it is related."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gangline.domain.completion import Certificate, Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.tokens import logprobs, token_ids
from gangline.node.capture.ledger import Ledger
from gangline.node.capture.placing import Place
from support.node.proxy import MemoryJournal


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def system(text: str) -> Message:
    return Message("system", (Text(text),))


def result(call_id: str, text: str) -> Message:
    return Message("tool", (ToolResult(call_id, (Text(text),)),))


def said(text: str = "", *calls: ToolCall, thinking: str = "") -> Message:
    parts: list[Part] = [Thinking(thinking)] if thinking else []
    parts += [Text(text)] if text else []
    return Message("assistant", (*parts, *calls))


def arguments(**values: Any) -> str:
    return json.dumps(values)


def model_call(*messages: Message, **fields: Any) -> ModelCall:
    return ModelCall(**({"dialect": "openai_chat", "model": "m", "messages": messages} | fields))


@dataclass
class Asked:
    """A call that was placed and waits for its answer."""

    call: ModelCall
    place: Place


@dataclass
class Talk:
    """A client that talks with a model; every answer is one sampled id after two of prompt, on an exact context."""

    ledger: Ledger = field(default_factory=lambda: Ledger("s", 1, MemoryJournal()))

    @property
    def tree(self) -> CompletionTree:
        return self.ledger.tree

    def ask(self, *messages: Message, **fields: Any) -> Asked:
        call = model_call(*messages, **fields)
        return Asked(call, self.ledger.index_of(None).place(call))

    def answer(self, asked: Asked, *responses: Message, status: Any = "complete") -> list[Completion]:
        drafts = [self._draft(asked, response, number, status) for number, response in enumerate(responses)]
        return asyncio.run(self.ledger.commit(drafts, asked.place.digest))

    def turn(self, messages: Sequence[Message], response: Message, **fields: Any) -> Completion:
        """Asked and answered."""
        return self.answer(self.ask(*messages, **fields), response)[0]

    def _draft(self, asked: Asked, response: Message, choice_index: int, status: Any) -> Completion:
        call, place = asked.call, asked.place
        parent_id = place.parent_id
        return Completion(
            completion_id="",
            session_id="s",
            attempt=1,
            status=status,
            parent_id=parent_id,
            branch_key=place.branch_key,
            dialect=call.dialect,
            model=call.model,
            choice_index=choice_index,
            prompt_shared=0 if parent_id is None else self.tree.num_context_ids(parent_id),
            prompt_suffix_ids=token_ids([1, 2]),
            sampled_ids=token_ids([3]),
            logprobs=logprobs([-1.0]),
            messages_shared=place.num_shared,
            new_messages=place.new_messages,
            response=response,
            tools=call.tools if parent_id is None else (),
            certificate=Certificate(
                prompt_source="stitched",
                context="first" if parent_id is None else "exact",
                logprobs="raw",
                finish_reason="stop",
            ),
            lineage=place.lineage,
            metadata={} if call.agent_id is None else {"agent_id": call.agent_id},
            started_at=float(len(self.tree)),
            finished_at=float(len(self.tree)) + 0.5,
        )


def restored(tree: CompletionTree) -> Talk:
    """As after a restart of the node."""
    return Talk(Ledger("s", 1, MemoryJournal(), list(tree)))

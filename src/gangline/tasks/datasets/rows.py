"""The rows of each kind, as plain values. Every row names the session and the last model call that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gangline.domain.conversation import Message
from gangline.domain.errors import StoreError
from gangline.domain.tokens import encode_json
from gangline.rows.atif.export import atif_of
from gangline.rows.conversations.chat import chat_messages, chat_tools
from gangline.rows.conversations.conversation import Conversation, main_conversation
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.tasks.datasets.index import Index, Place, Split
from gangline.tasks.datasets.kinds import Kind
from gangline.tasks.datasets.selection import Recorded

ReadSession = Callable[[str, str], Recorded]
"""(task id, session id) -> the session. Raises: NotFound."""

Row = dict[str, Any]


def rows_of_kind(kind: Kind, index: Index, read: ReadSession, split: Split) -> Iterator[Row]:
    """Rows of a split, with one session in memory at a time. Raises: NotFound if a session no longer exists."""
    if kind == Kind.preferences:
        for pair in index.pairs(split):
            yield _preference(read(*pair.chosen), read(*pair.rejected), pair.instance)
        return
    standings = ("accepted", "rejected") if kind == Kind.verdicts else ("accepted",)
    make = _MAKERS[kind]
    for place in index.places(split, *standings):
        yield from make(read(place.task_id, place.session_id), place)


def _conversation(recorded: Recorded) -> Conversation:
    found = main_conversation(recorded.result.completions)
    if found is None:
        raise StoreError(f"session {recorded.result.session_id} changed while the dataset was made.")
    return found


def _reference(recorded: Recorded, instance: str, completion_id: str) -> Row:
    result = recorded.result
    return {
        "instance_id": instance,
        "task_id": result.task_id,
        "session_id": result.session_id,
        "attempt": result.attempt,
        "completion_id": completion_id,
        "outcome": result.outcome,
        "reward": result.reward,
        "metadata": _json(recorded.metadata),
    }


def _messages(recorded: Recorded, place: Place) -> Iterator[Row]:
    talk = _conversation(recorded)
    yield {
        "messages": chat_messages(talk.messages),
        "tools": _json(chat_tools(talk.tools)),
        "num_tokens": talk.num_tokens,
        **_reference(recorded, place.instance, talk.last.completion_id),
    }


def _verdict(recorded: Recorded, place: Place) -> Iterator[Row]:
    (row,) = _messages(recorded, place)
    details = _json(recorded.result.reward_details)
    yield row | {"accepted": place.standing == "accepted", "why": place.why, "reward_details": details}


def _tokens(recorded: Recorded, place: Place) -> Iterator[Row]:
    """One row for each trace with trainable tokens."""
    trajectory = recorded.result.trajectory
    for trace in () if trajectory is None else with_whole_prompts(trajectory.traces):
        if trace.untrainable is not None or not trace.loss_mask.any():
            continue
        num_prompt = len(trace.prompt_ids)
        yield {
            "input_ids": np.concatenate([trace.prompt_ids, trace.response_ids]),
            "assistant_masks": _after(num_prompt, trace.loss_mask, 0),
            "logprobs": _after(num_prompt, trace.response_logprobs, 0.0),
            "versions": _after(num_prompt, trace.response_versions, -1),
            "trace_id": trace.trace_id,
            "role": trace.role,
            "trace_reward": trace.reward,
            **_reference(recorded, place.instance, trace.spans[-1].completion_id),
        }


def _after(num: int, values: Any, fill: float) -> Any:
    return np.concatenate([np.full(num, fill, values.dtype), values])


def _preference(chosen: Recorded, rejected: Recorded, instance: str) -> Row:
    """The prompt is the common beginning of both conversations, at most the first call's request."""
    good, bad = _conversation(chosen), _conversation(rejected)
    num = _num_shared(good, bad)
    others = rejected.result
    return {
        "prompt": chat_messages(good.messages[:num]),
        "chosen": chat_messages(good.messages[num:]),
        "rejected": chat_messages(bad.messages[num:]),
        "tools": _json(chat_tools(good.tools)),
        **_reference(chosen, instance, good.last.completion_id),
        "rejected_task_id": others.task_id,
        "rejected_session_id": others.session_id,
        "rejected_reward": others.reward,
    }


def _num_shared(one: Conversation, other: Conversation) -> int:
    most = min(one.num_prompt_messages, other.num_prompt_messages)
    pairs: Iterator[tuple[Message, Message]] = zip(one.messages[:most], other.messages[:most], strict=True)
    return next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), most)


def _atif(recorded: Recorded, place: Place) -> Iterator[Row]:
    agent = "unknown" if recorded.task is None else recorded.task.agent.harness
    document = atif_of(recorded.result, {}, agent=agent)
    if document is not None:
        last = recorded.result.completions[-1].completion_id
        yield {"trajectory": _json(document), **_reference(recorded, place.instance, last)}


def _json(value: Any) -> str:
    return encode_json(value).decode()


_MAKERS: dict[Kind, Callable[[Recorded, Place], Iterator[Row]]] = {
    Kind.messages: _messages,
    Kind.tokens: _tokens,
    Kind.verdicts: _verdict,
    Kind.atif: _atif,
}

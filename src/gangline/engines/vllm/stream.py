"""A stream's chunks from one read -> as few deltas as can represent them. Pure.

A busy engine, or a slow reader, has many tokens in one read. The work for each delta from here to the harness is then
done once for all of them. Of one choice, chunks are joined as long as thinking, text and tool calls keep their order;
nothing waits for more to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gangline.domain.completion import VersionSpan
from gangline.domain.conversation import Usage
from gangline.domain.reply import ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.domain.tokens import TokenIds
from gangline.engines.contract import EngineDelta
from gangline.engines.json_ids import NO_IDS, ids_from_json
from gangline.engines.replies import (
    WireLogprobs,
    WireToolCall,
    logprob_values,
    thinking_of,
    token_logprobs,
    usage_of,
    version_spans,
)
from gangline.engines.vllm.wire import AnyChoice, ShownReply, WireReply, decode

__all__ = ["decode_events", "engine_deltas"]

_THINKING, _TEXT, _CALLS = range(3)

NumberT = TypeVar("NumberT", int, float)


def decode_events(
    events: Sequence[bytes], kind: type[WireReply] | type[ShownReply], url: str
) -> Sequence[WireReply | ShownReply]:
    """The data of events, in one pass. Raises: EngineUnavailable when any does not have the expected form."""
    if len(events) == 1:
        return (decode(events[0], kind, url),)
    # The decoder knows a list of each kind; spelled out, because `list[kind]` is no type.
    joined = b"[" + b",".join(events) + b"]"
    return decode(joined, list[WireReply] if kind is WireReply else list[ShownReply], url)


class _Run:
    """Chunks of one choice, joined."""

    __slots__ = ("_calls", "_finish", "_ids", "_index", "_shown", "_spans", "_stage", "_stop", "_texts", "_values")

    def __init__(self, index: int) -> None:
        self._index = index
        self._stage = _THINKING
        """Stage of the last piece: a delta holds thinking, then text, then calls."""
        self._texts: tuple[list[str], list[str]] = ([], [])
        """Pieces of thinking, of text."""
        self._calls: list[ToolCallDelta] = []
        self._shown: list[TokenLogprob] = []
        self._ids: list[int] | None = None
        self._values: list[float] | None = None
        self._spans: tuple[VersionSpan, ...] = ()
        self._finish: str | None = None
        self._stop: str | None = None

    def takes(self, choice: AnyChoice) -> bool:
        """False: the content of `choice` would come out of order."""
        message = choice.delta
        if message is None or self._stage == _THINKING:
            return True
        return not thinking_of(message) and (self._stage == _TEXT or not message.content)

    def add(self, choice: AnyChoice) -> None:
        message, logprobs = choice.delta, choice.logprobs
        if message is not None:
            if thought := thinking_of(message):
                self._texts[_THINKING].append(thought)
            if message.content:
                self._texts[_TEXT].append(message.content)
                self._stage = _TEXT
            if message.tool_calls:
                self._add_calls(message.tool_calls)
                self._stage = _CALLS
        if choice.token_ids is not None:
            self._ids = _joined(self._ids, choice.token_ids)
        if logprobs is not None and (values := logprob_values(logprobs)) is not None:
            self._values = _joined(self._values, values)
            if isinstance(logprobs, WireLogprobs):
                self._shown += token_logprobs(logprobs)
        if choice.weight_versions:
            self._spans = version_spans(choice.weight_versions)
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
        if choice.stop_reason is not None:
            self._stop = str(choice.stop_reason)

    def _add_calls(self, calls: Sequence[WireToolCall]) -> None:
        for call in calls:
            arguments, last = call.function.arguments or "", self._calls[-1] if self._calls else None
            if last is not None and last.index == call.index and call.id is None and call.function.name is None:
                self._calls[-1] = ToolCallDelta(last.index, last.arguments + arguments, last.call_id, last.name)
            else:
                self._calls.append(ToolCallDelta(call.index, arguments, call.id, call.function.name))

    def delta(self, prompt_ids: TokenIds | None, usage: Usage | None) -> EngineDelta:
        shown = ReplyDelta(
            choice_index=self._index,
            thinking="".join(self._texts[_THINKING]),
            text="".join(self._texts[_TEXT]),
            tool_calls=tuple(self._calls),
            logprobs=tuple(self._shown),
        )
        return EngineDelta(
            shown=shown,
            sampled_ids=self._ids,
            logprobs=self._values,
            version_spans=self._spans,
            finish_reason=self._finish,
            stop_reason=self._stop,
            prompt_ids=prompt_ids,
            usage=usage,
        )


def _joined(front: list[NumberT] | None, back: list[NumberT]) -> list[NumberT]:
    """Both belong to the run, for the decoder made them: the longer one grows."""
    if front is None:
        return back
    front.extend(back)
    return front


def engine_deltas(chunks: Sequence[WireReply | ShownReply]) -> list[EngineDelta]:
    """Deltas of each choice in the order of its chunks. Prompt ids and usage, where chunks bring them, are on every
    delta; chunks without any choice (the usage at the end) are one of their own.

    Raises: EngineUnavailable when the prompt ids are none.
    """
    prompt_ids: TokenIds | None = None
    usage: Usage | None = None
    runs: list[_Run] = []
    open_runs: dict[int, _Run] = {}
    for chunk in chunks:
        if chunk.prompt_token_ids is not NO_IDS:
            prompt_ids = ids_from_json(chunk.prompt_token_ids) if prompt_ids is None else prompt_ids
        if chunk.usage is not None:
            usage = usage_of(chunk.usage)
        for choice in chunk.choices:
            run = open_runs.get(choice.index)
            if run is None or not run.takes(choice):
                run = open_runs[choice.index] = _Run(choice.index)
                runs.append(run)
            run.add(choice)
    if not runs:
        return [EngineDelta(prompt_ids=prompt_ids, usage=usage)]
    return [run.delta(prompt_ids, usage) for run in runs]

"""A stream's chunks from one read -> as few deltas as can represent them. Pure.

A busy engine, or a slow reader, has many tokens in one read. The work for each delta from here to the harness is then
done once for all of them. Of one choice, chunks are joined as long as thinking, text and tool calls keep their order;
nothing waits for more to come.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.domain.completion import VersionSpan
from gangline.domain.conversation import Usage
from gangline.domain.reply import ReplyDelta, TokenLogprob, ToolCallDelta
from gangline.domain.tokens import TokenIds
from gangline.models.engines.contract import EngineDelta
from gangline.models.engines.replies import (
    NO_IDS,
    SentIds,
    WireLogprobs,
    ids_from_json,
    thinking_of,
    token_logprobs,
    usage_of,
    version_spans,
)
from gangline.models.engines.vllm.calls import CallsOfChoices, StreamedCalls
from gangline.models.engines.vllm.wire import AnyChoice, ShownReply, WireReply, decode

_THINKING, _TEXT, _CALLS = range(3)

_NAN = float("nan")


def decode_events(
    events: Sequence[bytes], kind: type[WireReply] | type[ShownReply], url: str
) -> Sequence[WireReply | ShownReply]:
    """The data of events, in one pass. Raises: EngineUnavailable when any does not have the expected form."""
    if len(events) == 1:
        return (decode(events[0], kind, url),)
    # The decoder knows a list of each kind; spelled out, because `list[kind]` is not a type.
    joined = b"[" + b",".join(events) + b"]"
    return decode(joined, list[WireReply] if kind is WireReply else list[ShownReply], url)


class _Run:
    """Chunks of one choice, to be joined. Tokens are many and chunks mostly hold one: what is done for each chunk is
    spelled out here, without calls of functions."""

    __slots__ = ("chunks", "index", "stage")

    def __init__(self, index: int) -> None:
        self.index = index
        self.stage = _THINKING
        """Stage of the last piece: a delta holds thinking, then text, then calls."""
        self.chunks: list[AnyChoice] = []

    def delta(self, calls_so_far: StreamedCalls, prompt_ids: TokenIds | None, usage: Usage | None) -> EngineDelta:
        thinking, text, calls, shown = list[str](), list[str](), list[ToolCallDelta](), list[TokenLogprob]()
        ids: list[int] | None = None
        values: list[float] | None = None
        spans: tuple[VersionSpan, ...] = ()
        finish, stop = None, None
        for chunk in self.chunks:
            if (message := chunk.delta) is not None:
                if message.content:
                    text.append(message.content)
                if message.reasoning or message.reasoning_content:
                    thinking.append(thinking_of(message))
                if message.tool_calls or message.function_call is not None:
                    _add_calls(calls, calls_so_far.feed(message.calls))
            if (more := chunk.token_ids) is not None:
                if ids is None:
                    ids = more  # the run's own, for the decoder made it
                else:
                    ids += more
            if (found := chunk.logprobs) is not None and (content := found.content) is not None:
                values = [] if values is None else values
                for entry in content:
                    values.append(_NAN if entry.logprob is None else entry.logprob)
                if isinstance(found, WireLogprobs):
                    shown += token_logprobs(found)
            if chunk.weight_versions:
                spans = version_spans(chunk.weight_versions)
            finish = finish if chunk.finish_reason is None else chunk.finish_reason
            stop = stop if chunk.stop_reason is None else str(chunk.stop_reason)
        return EngineDelta(
            shown=ReplyDelta(
                choice_index=self.index,
                thinking="".join(thinking),
                text="".join(text),
                tool_calls=tuple(calls),
                logprobs=tuple(shown),
            ),
            sampled_ids=ids,
            logprobs=values,
            version_spans=spans,
            finish_reason=finish,
            stop_reason=stop,
            prompt_ids=prompt_ids,
            usage=usage,
        )


def _add_calls(calls: list[ToolCallDelta], more: Sequence[ToolCallDelta]) -> None:
    """Pieces of the last call's arguments are joined."""
    for piece in more:
        last = calls[-1] if calls else None
        if last is not None and last.index == piece.index and piece.name is None:
            calls[-1] = ToolCallDelta(last.index, last.arguments + piece.arguments, last.call_id, last.name)
        else:
            calls.append(piece)


def engine_deltas(
    chunks: Sequence[WireReply | ShownReply], calls: CallsOfChoices, sent: SentIds | None = None
) -> list[EngineDelta]:
    """Deltas of each choice in the order of its chunks. Prompt ids and usage, where chunks bring them, are on every
    delta; chunks without any choice (the usage at the end) are one of their own.

    calls: tool calls of the stream so far. sent: exact ids of the request.

    Raises: EngineMalformed when the prompt ids are none, or pieces of tool calls are ambiguous.
    """
    prompt_ids: TokenIds | None = None
    usage: Usage | None = None
    runs: list[_Run] = []
    open_runs: dict[int, _Run] = {}
    for chunk in chunks:
        if chunk.prompt_token_ids is not NO_IDS:
            prompt_ids = ids_from_json(chunk.prompt_token_ids, sent) if prompt_ids is None else prompt_ids
        if chunk.usage is not None:
            usage = usage_of(chunk.usage)
        for choice in chunk.choices:
            run, message = open_runs.get(choice.index), choice.delta
            if run is None or (
                message is not None
                and run.stage != _THINKING
                # What belongs before the content that the run has already.
                and (message.reasoning or message.reasoning_content or (run.stage == _CALLS and message.content))
            ):
                run = open_runs[choice.index] = _Run(choice.index)
                runs.append(run)
            run.chunks.append(choice)
            if message is not None:
                run.stage = (
                    _CALLS if message.tool_calls or message.function_call else _TEXT if message.content else run.stage
                )
    if not runs:
        return [EngineDelta(prompt_ids=prompt_ids, usage=usage)]
    return [run.delta(calls[run.index], prompt_ids, usage) for run in runs]

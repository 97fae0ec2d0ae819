"""A stream's chunks from one read -> as few deltas as can represent them. Pure.

With a busy engine or a slow reader, one read has many tokens. The work for each delta on the way to the harness is then
done once for all of them. Chunks of a choice are joined as long as thinking, text and tool calls keep their order.
Joining never waits for more chunks.
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
    """The data of events, decoded in one pass. Raises: EngineUnavailable when any does not have the expected form."""
    if len(events) == 1:
        return (decode(events[0], kind, url),)
    # Spelled out, because `list[kind]` is not a type.
    joined = b"[" + b",".join(events) + b"]"
    return decode(joined, list[WireReply] if kind is WireReply else list[ShownReply], url)


class _Run:
    """Chunks of one choice, to be joined. Tokens are many and chunks mostly contain one, so the work for each chunk is
    inlined."""

    __slots__ = ("chunks", "index", "stage")

    def __init__(self, index: int) -> None:
        self.index = index
        self.stage = _THINKING
        """Stage of the last piece: a delta has thinking, then text, then calls."""
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
                    ids = more  # owned by the run, since the decoder made it
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
    """Joins pieces of the last call's arguments."""
    for piece in more:
        last = calls[-1] if calls else None
        if last is not None and last.index == piece.index and piece.name is None:
            calls[-1] = ToolCallDelta(last.index, last.arguments + piece.arguments, last.call_id, last.name)
        else:
            calls.append(piece)


def engine_deltas(
    chunks: Sequence[WireReply | ShownReply], calls: CallsOfChoices, sent: SentIds | None = None
) -> list[EngineDelta]:
    """Deltas of each choice in the order of its chunks. Prompt ids and usage, if present, are on every delta. Chunks
    without a choice (the usage at the end) become a separate delta.

    calls: tool calls of the stream so far. sent: exact ids of the request.

    Raises: EngineMalformed when the prompt ids are invalid, or pieces of tool calls are ambiguous.
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
                # Content that belongs before the run's content.
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

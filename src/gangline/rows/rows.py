"""Rows: one flat record per trace, as trainers and other tools read them; JSON lines and MessagePack files.

Parquet is in `gangline.rows.parquet`, which needs an extra. All three read back equal.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
import numpy as np

from gangline.domain.completion import Certificate, Lineage
from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.errors import InvalidRequest
from gangline.domain.experts import RowExperts
from gangline.domain.lifecycle import Outcome
from gangline.domain.row_experts import experts_of_traces
from gangline.domain.row_masks import masks_of_traces
from gangline.domain.sampling_masks import RowMask
from gangline.domain.session import SessionResult
from gangline.domain.tokens import Logprobs, LossMask, TokenIds, Versions, decode_msgpack, encode_json, encode_msgpack
from gangline.domain.trajectory import SharedPrefix, Splice, TraceRole, TurnSpan
from gangline.machine.durable import replacing

__all__ = [
    "Row",
    "read_jsonl",
    "read_msgpack",
    "rows_of",
    "write_jsonl",
    "write_msgpack",
]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One trace with the facts about its session. Arrays but `prompt_ids` are [len(response_ids)]."""

    task_id: str
    session_id: str
    attempt: int
    trace_id: str
    builder: str
    outcome: Outcome
    reward: float | None
    """The trace's own."""
    session_reward: float | None
    shared_prefix: SharedPrefix | None = None
    """Reference to the beginning of the prompt, which an earlier row of the session holds; None except in rows of the
    `tree` builder."""
    prompt_ids: TokenIds
    response_ids: TokenIds
    loss_mask: LossMask
    response_logprobs: Logprobs
    """0.0 where masked."""
    response_versions: Versions
    """-1 where masked, or unknown."""
    response_texts: tuple[str | None, ...] = ()
    """Texts of sampled tokens, None for others; empty unless `capture.token_texts` asks for them."""
    routed_experts: RowExperts | None = None
    """Experts of the whole prompt and the response; None unless `capture.routed_experts` asks for them."""
    sampling_mask: RowMask | None = None
    """Ids that the response's tokens were drawn among; None unless `capture.sampling_masks` asks for them."""
    finish_reason: str
    untrainable: str | None
    role: TraceRole
    lineage: Lineage
    parent_trace_id: str | None
    first_completion_id: str
    last_completion_id: str
    spans: tuple[TurnSpan, ...]
    splices: tuple[Splice, ...]
    certificates: tuple[Certificate, ...]
    """One per turn, in order of `spans`."""
    prompt_messages: tuple[Message, ...]
    response_messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...]
    metadata: dict[str, Any]


def rows_of(result: SessionResult) -> list[Row]:
    """The rows of a session, in the order of its traces; none when it has no trajectory."""
    trajectory = result.trajectory
    if trajectory is None:
        return []
    experts, masks = experts_of_traces(result), masks_of_traces(result)
    return [
        Row(
            task_id=result.task_id,
            session_id=result.session_id,
            attempt=result.attempt,
            trace_id=trace.trace_id,
            builder=trajectory.builder,
            outcome=result.outcome,
            reward=trace.reward,
            session_reward=result.reward,
            shared_prefix=trace.shared_prefix,
            prompt_ids=trace.prompt_ids,
            response_ids=trace.response_ids,
            loss_mask=trace.loss_mask,
            response_logprobs=trace.response_logprobs,
            response_versions=trace.response_versions,
            response_texts=trace.response_texts,
            routed_experts=experts.get(trace.trace_id),
            sampling_mask=masks.get(trace.trace_id),
            finish_reason=trace.finish_reason,
            untrainable=trace.untrainable,
            role=trace.role,
            lineage=trace.lineage,
            parent_trace_id=trace.parent_trace_id,
            first_completion_id=trace.spans[0].completion_id,
            last_completion_id=trace.spans[-1].completion_id,
            spans=trace.spans,
            splices=trace.splices,
            certificates=trace.certificates,
            prompt_messages=trace.prompt_messages,
            response_messages=trace.response_messages,
            tools=trace.tools,
            metadata=trace.metadata,
        )
        for trace in trajectory.traces
    ]


def write_jsonl(rows: Iterable[Row], path: Path) -> int:
    """One JSON object per line. Returns how many."""
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("wb") as file:
        for row in rows:
            file.write(encode_json(row) + b"\n")
            num += 1
    return num


def read_jsonl(path: Path) -> Iterator[Row]:
    """Raises: InvalidRequest when a line is no row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield msgspec.json.decode(line, type=Row, dec_hook=_array_of_list)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"{path}, line {number} is no row: {error}") from error


def _array_of_list(kind: Any, value: Any) -> Any:
    """`NDArray[dtype]` fields from JSON lists."""
    (element,) = get_args(get_args(kind)[1])
    return np.asarray(value, dtype=element)


def write_msgpack(rows: Iterable[Row], path: Path) -> int:
    """One MessagePack array of maps; token arrays are extension values (see `domain.tokens`). Returns how many."""
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("wb") as file:
        _write_array_header(file, 0)
        for row in rows:
            file.write(encode_msgpack(row))
            num += 1
        file.seek(0)
        _write_array_header(file, num)
    return num


def _write_array_header(file: BinaryIO, num: int) -> None:
    """`array 32` for any length, so that it can be written before the length is known."""
    file.write(b"\xdd" + num.to_bytes(4, "big"))


def read_msgpack(path: Path) -> Iterator[Row]:
    """The file is mapped, and its rows are decoded one at a time. Raises: InvalidRequest when it holds no rows."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for row in msgspec.msgpack.decode(mapped, type=list[msgspec.Raw]):
            yield decode_msgpack(row, Row)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"{path} holds no rows: {error}") from error

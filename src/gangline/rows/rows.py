"""Rows: one flat record per trace, as trainers and other tools read them; JSON lines and MessagePack files.

Parquet is in `gangline.rows.parquet`, which needs an extra. All three formats read back equal.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
import numpy as np

from gangline.domain.completion import OWN_EVIDENCE, Certificate, Lineage
from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.errors import InvalidRequest
from gangline.domain.evidence.contract import RowNumbers
from gangline.domain.experts import RowExperts
from gangline.domain.lifecycle import Outcome
from gangline.domain.masks import RowMask
from gangline.domain.session import SessionResult
from gangline.domain.tokens import Logprobs, LossMask, TokenIds, Versions, decode_msgpack, encode_json, encode_msgpack
from gangline.domain.trajectory import SharedPrefix, Splice, Trace, TraceRole, TurnSpan
from gangline.machine.durable import replacing
from gangline.settings.evidence import evidence_kinds


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One trace with the facts about its session. Arrays other than `prompt_ids` are [len(response_ids)]."""

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
    """Reference to the beginning of the prompt, which an earlier row of the session contains; None except in rows of
    the `tree` builder."""
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
    """Ids that the response's tokens were drawn from; None unless `capture.sampling_masks` asks for them."""
    evidence: dict[str, RowNumbers] | msgspec.UnsetType = msgspec.UNSET
    """Columns of the kinds that `capture.evidence` asks for, by name; absent without any."""
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


_OF_TRACE = tuple(name for name in Trace.__struct_fields__ if name != "session_id")


def rows_of(result: SessionResult) -> list[Row]:
    """Returns the rows of a session, in the order of its traces; empty when it has no trajectory."""
    trajectory = result.trajectory
    if trajectory is None:
        return []
    columns = _columns(result)
    return [
        Row(
            **{name: getattr(trace, name) for name in _OF_TRACE},
            **_evidence({name: of_trace[trace.trace_id] for name, of_trace in columns.items()}),
            task_id=result.task_id,
            session_id=result.session_id,
            attempt=result.attempt,
            builder=trajectory.builder,
            outcome=result.outcome,
            session_reward=result.reward,
            first_completion_id=trace.spans[0].completion_id,
            last_completion_id=trace.spans[-1].completion_id,
        )
        for trace in trajectory.traces
    ]


def _columns(result: SessionResult) -> dict[str, Mapping[str, Any]]:
    """Returns kind of evidence -> trace id -> column, without kinds that the session does not have."""
    traces = () if result.trajectory is None else result.trajectory.traces
    found = {kind.name: kind.columns(result) for kind in evidence_kinds()}
    recorded = {name for trace in traces for certificate in trace.certificates for name in certificate.evidence or ()}
    for name in recorded - found.keys():
        missing = RowNumbers(missing=f"the plug-in of evidence {name!r} is not installed here")
        found[name] = {trace.trace_id: missing for trace in traces}
    return {name: of_trace for name, of_trace in found.items() if of_trace}


def _evidence(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row."""
    own = {name: column for name, column in columns.items() if name in OWN_EVIDENCE}
    others = {name: column for name, column in columns.items() if name not in OWN_EVIDENCE}
    return own | ({"evidence": others} if others else {})


def write_jsonl(rows: Iterable[Row], path: Path) -> int:
    """Write one JSON object per line. Returns the number of rows."""
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("wb") as file:
        for row in rows:
            file.write(encode_json(row) + b"\n")
            num += 1
    return num


def read_jsonl(path: Path) -> Iterator[Row]:
    """Raises: InvalidRequest when a line is not a row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield msgspec.json.decode(line, type=Row, dec_hook=_array_of_list)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"{path}, line {number} is not a row: {error}") from error


def _array_of_list(kind: Any, value: Any) -> Any:
    """Decode `NDArray[dtype]` fields from JSON lists."""
    (element,) = get_args(get_args(kind)[1])
    return np.asarray(value, dtype=element)


def write_msgpack(rows: Iterable[Row], path: Path) -> int:
    """Write one MessagePack array of maps; token arrays are extension values (see `domain.tokens`). Returns the number
    of rows."""
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
    """Write `array 32` for any length, so that it can be written before the length is known."""
    file.write(b"\xdd" + num.to_bytes(4, "big"))


def read_msgpack(path: Path) -> Iterator[Row]:
    """Yields rows, mapping the file and decoding one row at a time. Raises: InvalidRequest when it contains no rows."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for row in msgspec.msgpack.decode(mapped, type=list[msgspec.Raw]):
            yield decode_msgpack(row, Row)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"{path} holds no rows: {error}") from error

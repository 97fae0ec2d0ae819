"""Sessions and samples as training takes them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gangline.domain.completion import Certificate
from gangline.domain.conversation import Message, ToolCall
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace, Trajectory, TurnSpan
from gangline.train.collecting.groups import Group
from gangline.train.learning.samples import Sample

EXACT = Certificate(prompt_source="engine", context="first", logprobs="raw", finish_reason="stop")


def trace(
    *,
    turns: Sequence[Sequence[int]] = ((10, 11, 2),),
    between: Sequence[int] = (7, 1),
    versions: Sequence[int] | None = None,
    calls: Sequence[str] = (),
    **changes: Any,
) -> Trace:
    """A trace of turns with `between` between them. versions: of the turns. calls: arguments of each turn's call."""
    ids, mask, stamps, spans = list[int](), list[int](), list[int](), list[TurnSpan]()
    for index, turn in enumerate(turns):
        if index:
            ids += between
            mask += [0] * len(between)
            stamps += [-1] * len(between)
        spans.append(TurnSpan(f"c{index:04d}", len(ids), len(ids) + len(turn)))
        ids += turn
        mask += [1] * len(turn)
        stamps += [0 if versions is None else versions[index]] * len(turn)
    fields: dict[str, Any] = {
        "trace_id": "trace-1",
        "session_id": "session-1",
        "prompt_ids": np.array([1, 4, 5], np.int32),
        "response_ids": np.array(ids, np.int32),
        "loss_mask": np.array(mask, np.int8),
        "response_logprobs": -0.5 * np.array(mask, np.float32),
        "response_versions": np.array(stamps, np.int32),
        "spans": tuple(spans),
        "prompt_messages": (),
        "response_messages": tuple(Message("assistant", (ToolCall("id", "bash", one),)) for one in calls),
        "finish_reason": "stop",
        "certificates": (EXACT,) * len(spans),
    }
    return Trace(**{**fields, **changes})


def scored(*scores: float | None) -> Trace:
    """A trace with a turn of three tokens for each score."""
    one = trace(turns=[(10, 11, 2)] * len(scores))
    spans = zip(one.spans, scores, strict=True)
    return msgspec.structs.replace(
        one, spans=tuple(msgspec.structs.replace(span, score=score) for span, score in spans)
    )


def session(session_id: str, reward: float | None, *traces: Trace, **changes: Any) -> SessionResult:
    """A session of `traces`, or of one plain trace, that completed."""
    renamed = tuple(
        Trace(**{**_fields(one), "session_id": session_id, "trace_id": f"{session_id}/{index}"})
        for index, one in enumerate(traces or (trace(),))
    )
    fields: dict[str, Any] = {
        "session_id": session_id,
        "task_id": "task-1",
        "node_id": "node-1",
        "attempt": 1,
        "fence": 1,
        "outcome": "completed",
        "reward": reward,
        "trajectory": Trajectory(
            session_id=session_id, task_id="task-1", builder="prefix_merging", traces=renamed, num_completions=1
        ),
    }
    return SessionResult(**{**fields, **changes})


def group(*rewards: float | None) -> Group:
    return Group("task-1", tuple(session(f"s{index}", reward) for index, reward in enumerate(rewards)))


def _fields(one: Trace) -> dict[str, Any]:
    return {name: getattr(one, name) for name in Trace.__struct_fields__}


def sample(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    session_id: str = "s0",
    weights: Sequence[float] | None = None,
    seed: int = 0,
    temperature: float = 1.0,
) -> Sample:
    """A sample with random advantages and log-probs."""
    random = np.random.default_rng([seed, *prompt, *response])
    num = len(response)
    return Sample(
        trace_id=f"{session_id}/0",
        session_id=session_id,
        task_id="task-1",
        score=1.0,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        weights=np.ones(num, np.float32) if weights is None else np.array(weights, np.float32),
        advantages=random.normal(size=num),
        behaviour_logprobs=-random.uniform(0.1, 3.0, num).astype(np.float32),
        versions=np.zeros(num, np.int32),
        temperatures=np.full(num, temperature, np.float32),
    )

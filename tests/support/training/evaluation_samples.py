"""Small trajectories and evaluation contexts for tests of evaluators."""

from __future__ import annotations

from typing import Any

import numpy as np

from gangline.domain.contracts import EvaluationContext
from gangline.domain.conversation import Message, Text
from gangline.domain.lifecycle import Outcome
from gangline.domain.sandbox import Sandbox
from gangline.domain.session import HarnessExit
from gangline.domain.tokens import token_ids
from gangline.domain.trajectory import Trace, TraceRole, Trajectory


def said(role: Any, text: str) -> Message:
    return Message(role, (Text(text),))


def a_trace(*responses: Message, prompt: tuple[Message, ...] = (), role: TraceRole = "main", name: str = "t0") -> Trace:
    return Trace(
        trace_id=name,
        session_id="s1",
        prompt_ids=token_ids([1, 2]),
        response_ids=token_ids([3]),
        loss_mask=np.ones(1, np.uint8),
        response_logprobs=np.zeros(1, np.float32),
        response_versions=np.zeros(1, np.int32),
        spans=(),
        prompt_messages=prompt,
        response_messages=responses,
        finish_reason="stop",
        role=role,
        certificates=(),
    )


def a_context(
    runtime: Sandbox,
    *,
    fresh: Sandbox | None = None,
    traces: tuple[Trace, ...] = (),
    outcome: Outcome = "completed",
    stdout: bytes = b"",
) -> EvaluationContext:
    """An evaluation in `fresh` where it is given, else in `runtime`."""

    async def fresh_runtime() -> Sandbox:
        assert fresh is not None, "no clean runtime was asked for"
        return fresh

    return EvaluationContext(
        session_id="s1",
        instruction="do it",
        trajectory=Trajectory(session_id="s1", task_id="t1", builder="b", traces=traces, num_completions=len(traces)),
        outcome=outcome,
        harness_exit=HarnessExit(exit_code=0),
        harness_stdout=stdout,
        runtime=runtime,
        fresh_runtime=fresh_runtime,
        refresh_runtime=fresh is not None,
        metadata={"from": "test"},
    )

"""Converts a session to the trace that a task's rewards read: its messages, with each conversation a path of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

_vf: Any = import_module("verifiers.v1")
_graph: Any = import_module("verifiers.v1.graph")
_traces: Any = import_module("verifiers.v1.trace")
_FIELDS = ("role", "content", "reasoning_content", "tool_call_id")


def trace_of(task: Any, session: Mapping[str, Any] | None) -> Any:
    """session: as evaluator `script` provides it; None before the agent starts. The last main trace is placed last,
    because verifiers takes the last message as the answer.
    """
    state = import_module("verifiers.v1.state").state_cls(type(task))()
    trace = _vf.Trace(
        task=_traces.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=_traces.AgentInfo(config=_vf.AgentConfig()),
        state=state,
    )
    for talk in sorted((session or {}).get("traces", ()), key=lambda one: one["role"] == "main"):
        _add(trace, talk["prompt_messages"], talk["response_messages"])
    if session is not None and not trace.nodes:  # a program that calls no model answers on its standard output
        return answered(trace, session["harness_stdout"])
    trace.is_completed = session is not None
    return trace


def answered(trace: Any, text: str) -> Any:
    """The trace with one answer to the task's prompt."""
    _add(trace, [{"role": "user", "content": trace.task.data.prompt_text}], [{"role": "assistant", "content": text}])
    trace.is_completed = True
    return trace


def _add(trace: Any, prompt: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> None:
    parent: int | None = None
    for number, message in enumerate([*prompt, *answers]):
        sampled = number >= len(prompt) and message["role"] == "assistant"
        trace.nodes.append(_graph.MessageNode(parent=parent, message=_message(message), sampled=sampled))
        parent = len(trace.nodes) - 1


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: message[name] for name in _FIELDS if message.get(name) is not None}
    if found["role"] == "developer":
        found["role"] = "system"
    if not isinstance(found.get("content"), str | None):
        known: list[Any] = [part for part in found["content"] if part["type"] in ("text", "image_url")]
        is_answer = found["role"] == "assistant"
        found["content"] = "".join(part.get("text", "") for part in known) if is_answer else known
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [{"id": call["id"], **call["function"]} for call in calls]
    return found

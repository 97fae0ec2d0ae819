"""OpenTelemetry traces: task -> session -> stage -> model call, for any collector that supports OTLP over HTTP.

Spans are created afterwards from the record (a result's timings and completions, a task's times), so nothing is
measured while a session runs. Of a call only the id of its span is kept, which its engine gets. Server and nodes do not
exchange spans: the ids of a task's trace and root span are derived from the task's id, which connects all of them.

This module needs the extra `otel`, and is only imported if a collector is configured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags

from gangline import __version__
from gangline.domain.completion import SPAN, Completion
from gangline.domain.ids import root_span_of
from gangline.domain.session import SessionResult, StageTiming
from gangline.domain.views import SessionView, TaskView

_EXPORT_TIMEOUT_S = 5
"""A collector that does not answer must not delay the shutdown of a service."""

Attributes = Mapping[str, str | int | float | Sequence[str] | None]


def root_of(task_id: str) -> SpanContext:
    """The parent of all spans of a task, on every machine."""
    return SpanContext(*root_span_of(task_id), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class _PlannedIds(RandomIdGenerator):
    """Random ids, except for the span started while `root` is set, which gets its ids, or `span_id`, which it gets."""

    def __init__(self) -> None:
        self.root: SpanContext | None = None
        self.span_id: int | None = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.root is None else self.root.trace_id

    def generate_span_id(self) -> int:
        planned = self.span_id if self.root is None else self.root.span_id
        return super().generate_span_id() if planned is None else planned


class Traces:
    """Bound to one event loop; spans are sent by a separate thread."""

    def __init__(self, processor: SpanProcessor, service: str) -> None:
        self._ids = _PlannedIds()
        resource = Resource.create({"service.name": f"gangline-{service}", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("gangline", __version__)

    @classmethod
    def to_collector(cls, service: str) -> Self:
        """Configured by the variables `OTEL_EXPORTER_OTLP_*`, as for any program."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(timeout=_EXPORT_TIMEOUT_S)), service)

    def close(self) -> None:
        """Send pending spans. Blocking."""
        self._provider.shutdown()

    def task_ended(self, task: TaskView) -> None:
        """Record the root span, and how long its sessions were queued."""
        self._ids.root = root_of(task.task_id)
        try:
            span = self._begin("task", Context(), task.created_at)
        finally:
            self._ids.root = None
        outcomes = {f"gangline.outcome.{name}": number for name, number in task.outcomes.items()}
        _tell(span, {"gangline.task_id": task.task_id, "gangline.num_samples": task.num_samples, **outcomes})
        _end(span, task.created_at if task.ended_at is None else task.ended_at)
        for session in task.sessions:
            if session.attempt == 1 and session.leased_at is not None:
                self._waited(session, session.leased_at)

    def _waited(self, session: SessionView, leased_at: float) -> None:
        """Record the wait in the queue. Of a session that ran again, only the last lease is known: it has no such
        span."""
        span = self._begin("queue", _below(NonRecordingSpan(root_of(session.task_id))), session.created_at)
        _tell(span, {"gangline.task_id": session.task_id, "gangline.session_id": session.session_id})
        _end(span, leased_at)

    def attempt_ended(self, result: SessionResult) -> None:
        """Record the span of a session, or of one of its attempts, and all its child spans."""
        if not result.timings:
            return  # it never started
        began = min(timing.started_at for timing in result.timings)
        ended = max(timing.ended_at for timing in result.timings)
        session = self._begin("session", _below(NonRecordingSpan(root_of(result.task_id))), began)
        _tell(session, _of_session(result))
        if result.failure is not None:
            session.set_status(Status(StatusCode.ERROR, f"{result.failure.boundary}: {result.failure.code}"))
        calls = [completion for completion in result.completions if completion.choice_index == 0]
        for timing in result.timings:
            mine = [call for call in calls if timing.started_at <= call.started_at <= timing.ended_at]
            calls = [call for call in calls if call not in mine]
            self._stage(session, timing, mine)
        for call in calls:
            self._model_call(session, call)
        _end(session, ended)

    def _stage(self, session: Span, timing: StageTiming, calls: Sequence[Completion]) -> None:
        stage = self._begin(timing.stage, _below(session), timing.started_at)
        for call in calls:
            self._model_call(stage, call)
        _end(stage, timing.ended_at)

    def _model_call(self, parent: Span, call: Completion) -> None:
        """Attributes follow OpenTelemetry's conventions for generative AI where these define a name."""
        self._ids.span_id = int(str(call.metadata[SPAN]), 16) if SPAN in call.metadata else None
        try:
            span = self._begin("model call", _below(parent), call.started_at)
        finally:
            self._ids.span_id = None
        certificate = call.certificate
        _tell(
            span,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.model": call.model,
                "gen_ai.usage.input_tokens": call.prompt_shared + len(call.prompt_suffix_ids),
                "gen_ai.usage.output_tokens": len(call.sampled_ids),
                "gen_ai.response.finish_reasons": [certificate.finish_reason],
                "gangline.completion_id": call.completion_id,
                "gangline.dialect": call.dialect,
                "gangline.context": certificate.context,
                "gangline.prompt_source": certificate.prompt_source,
                "gangline.cause": certificate.cause,
            },
        )
        if call.status == "aborted":
            span.set_status(Status(StatusCode.ERROR, "aborted"))
        _end(span, call.finished_at)

    def _begin(self, name: str, context: Context, at: float) -> Span:
        return self._tracer.start_span(name, context=context, start_time=_ns(at))


def _of_session(result: SessionResult) -> Attributes:
    return {
        "gangline.task_id": result.task_id,
        "gangline.session_id": result.session_id,
        "gangline.attempt": result.attempt,
        "gangline.node": result.node_id,
        "gangline.outcome": result.outcome,
        "gangline.reward": result.reward,
    }


def _below(span: Span) -> Context:
    return trace.set_span_in_context(span, Context())


def _tell(span: Span, attributes: Attributes) -> None:
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value)


def _end(span: Span, at: float) -> None:
    span.end(end_time=_ns(at))


def _ns(at: float) -> int:
    return int(at * 1e9)

"""Traces as a collector gets them: real OTLP over loopback, real server; and nothing of it where none is configured."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gangline.cli.options.tracing import traces_of
from gangline.domain.completion import SPAN, Certificate, Completion
from gangline.domain.conversation import Message, Text
from gangline.domain.errors import Failure, InvalidRequest
from gangline.domain.session import SessionResult, StageTiming
from gangline.domain.tokens import logprobs, token_ids
from gangline.machine.telemetry.traces import root_of
from gangline.server.run import serving
from gangline.settings.installation import extra_command
from gangline.settings.machine import Settings
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request


class Collector:
    """Takes spans as they come over HTTP."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: dict[str, list[Any]] = {}
        self.services: set[str] = set()

    async def take(self, post: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await post.read())
        for resource in sent.resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.services.add(named["service.name"])
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.name, []).append(span)
        return web.Response(body=b"", content_type="application/x-protobuf")

    def the(self, name: str) -> Any:
        (span,) = self.spans[name]
        return span


@pytest.fixture
async def collector() -> AsyncGenerator[Collector]:
    async with collecting() as running:
        yield running


@asynccontextmanager
async def collecting() -> AsyncGenerator[Collector]:
    found = Collector()
    app = web.Application()
    app.add_routes([web.post("/v1/traces", found.take)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
    try:
        yield found
    finally:
        await runner.cleanup()


def settings(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Settings:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    return Settings.from_environ()


def a_call(started_at: float, finished_at: float) -> Completion:
    return Completion(
        completion_id="c1-000001",
        session_id="t.0",
        attempt=1,
        status="complete",
        parent_id=None,
        branch_key="",
        dialect="openai_chat",
        model="tiny",
        choice_index=0,
        prompt_shared=0,
        prompt_suffix_ids=token_ids([1, 2]),
        sampled_ids=token_ids([3, 4, 5]),
        logprobs=logprobs([0.0, 0.0, 0.0]),
        messages_shared=0,
        new_messages=(),
        response=Message("assistant", (Text("hi"),)),
        tools=(),
        certificate=Certificate(prompt_source="engine", context="first", logprobs="raw", finish_reason="stop"),
        started_at=started_at,
        finished_at=finished_at,
    )


def result(**fields: Any) -> SessionResult:
    timings = (StageTiming("init", 1.0, 2.0), StageTiming("run", 2.0, 9.0), StageTiming("postrun", 9.0, 10.0))
    told: dict[str, Any] = {"outcome": "completed", "reward": 1.0, "timings": timings, **fields}
    return SessionResult(session_id="t.0", task_id="t", node_id="n", attempt=1, fence=1, **told)


async def sent(collector: Collector, monkeypatch: pytest.MonkeyPatch, one: SessionResult) -> None:
    def send() -> None:
        with traces_of("node", settings(monkeypatch, collector.url)) as traces:
            assert traces is not None
            traces.attempt_ended(one)

    await asyncio.to_thread(send)


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def test_a_session_is_a_tree_of_stages_and_model_calls(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = a_call(3.0, 4.0)
    await sent(collector, monkeypatch, result(completions=(call,)))
    session, run, made = collector.the("session"), collector.the("run"), collector.the("model call")
    root = root_of("t")
    assert int.from_bytes(session.trace_id) == root.trace_id
    assert int.from_bytes(session.parent_span_id) == root.span_id
    assert run.parent_span_id == collector.the("init").parent_span_id == session.span_id
    assert made.parent_span_id == run.span_id
    assert (run.start_time_unix_nano, run.end_time_unix_nano) == (2_000_000_000, 9_000_000_000)
    assert (made.start_time_unix_nano, made.end_time_unix_nano) == (3_000_000_000, 4_000_000_000)
    assert attributes(session)["gangline.session_id"] == "t.0"
    assert attributes(made)["gen_ai.usage.output_tokens"] == 3
    assert collector.services == {"gangline-node"}


async def test_a_model_call_is_the_span_that_its_engine_was_told(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = msgspec.structs.replace(a_call(3.0, 4.0), metadata={SPAN: "00f067aa0ba902b7"})
    later = msgspec.structs.replace(a_call(5.0, 6.0), completion_id="c1-000002")
    await sent(collector, monkeypatch, result(completions=(call, later)))
    told, other = sorted(collector.spans["model call"], key=lambda span: span.start_time_unix_nano)
    assert told.span_id.hex() == "00f067aa0ba902b7"
    assert other.span_id.hex() not in ("00f067aa0ba902b7", "0" * 16)
    assert told.parent_span_id == other.parent_span_id == collector.the("run").span_id


async def test_a_failed_attempt_is_an_error_with_its_boundary(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(boundary="runtime", code="runtime_failed", message="secret words", retryable=True)
    await sent(collector, monkeypatch, result(outcome="infra_error", reward=None, failure=failure))
    status = collector.the("session").status
    assert (status.code, status.message) == (2, "runtime: runtime_failed")


async def test_the_server_sends_the_root_that_sessions_hang_from(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()
    with traces_of("server", settings(monkeypatch, collector.url)) as traces:
        assert traces is not None

        def ended(task: Any) -> None:
            traces.task_ended(task)
            told.set()

        async with (
            serving(data_dir=tmp_path, control_token=None, check_task=any_plugin, on_task_ended=ended) as running,
            ServerClient(running.url) as client,
        ):
            await client.submit(request("t", num_samples=1))
            node = FakeNode(client)
            await node.finish(await node.lease())
            await told.wait()
        await asyncio.to_thread(traces.close)
    task, root = collector.the("task"), root_of("t")
    assert (int.from_bytes(task.trace_id), int.from_bytes(task.span_id)) == (root.trace_id, root.span_id)
    assert not task.parent_span_id
    assert attributes(task)["gangline.outcome.completed"] == 1
    queue = collector.the("queue")
    assert queue.parent_span_id == task.span_id
    assert attributes(queue)["gangline.session_id"] == "t.0"
    assert task.start_time_unix_nano <= queue.start_time_unix_nano < queue.end_time_unix_nano
    assert queue.end_time_unix_nano <= task.end_time_unix_nano
    assert collector.services == {"gangline-server"}


def test_without_a_collector_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with traces_of("node", Settings.from_environ({})) as traces:
        assert traces is None
    load = "import gangline.node.node, gangline.server.run, sys; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", load], check=False).returncode == 0


def test_a_collector_without_the_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gangline.machine.telemetry.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with (
        pytest.raises(InvalidRequest, match=re.escape(extra_command("otel"))),
        traces_of("node", settings(monkeypatch, "http://127.0.0.1:9")),
    ):
        pass

"""Models whose chat template does not render tools: their records say so, and agents that depend on tools do not start.

SmolLM2's is such a template. A scripted engine renders it with the model's own tokenizer, over vLLM's wire.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gangline.cli.machine.checks_service import check_engine, check_service
from gangline.cli.results.audit import audit_results, print_audit
from gangline.cli.results.session_view import session_view, task_view
from gangline.cli.tasks.unshown import lines_of_engines, lines_of_sessions
from gangline.domain.contracts import DependsOnTools
from gangline.domain.errors import ToolsNotRendered
from gangline.domain.node_views import BackendView, TemplateFacts
from gangline.domain.session import SessionResult
from gangline.domain.task import AgentSpec, TaskRequest
from gangline.domain.unshown import UNSHOWN_GUIDE
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.harness.run import check_tools_are_shown
from gangline.server.run import serving
from gangline.server.web.outline import open_session
from gangline.serving.scripted.server import scripted_server
from gangline.settings import plugins
from gangline.settings.machine import Settings
from gangline.wire.client.server import ServerClient
from support.engines.tokenizers import smollm2_name
from support.node.attempt import lease_of, node_parts
from support.node.node import TOKEN, running_node
from support.node.proxy import proxied_engine
from support.service.cli_process import gangline
from support.service.running import FakeNode, any_plugin, beat

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
DROPPED = "tools (the template does not render them)"
SCRIPT: dict[str, Any] = {"default": {"text": "done"}}


@asynccontextmanager
async def smollm2() -> AsyncGenerator[str]:
    async with scripted_server(SCRIPT, smollm2_name()) as url:
        yield url


async def ended(folder: Path, **agent: Any) -> SessionResult:
    async with smollm2() as url, node_parts(folder, engine_url=url) as parts, asyncio.timeout(60):
        return await Attempt(lease_of(agent=agent, timeout_seconds=20), parts).live()


async def test_an_agent_that_depends_on_tools_is_refused_before_it_starts(tmp_path: Path) -> None:
    result = await ended(tmp_path, harness="native")
    assert (result.outcome, result.reward, result.completions) == ("infra_error", None, ())
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code, result.failure.retryable) == (
        *("harness", "tools_not_rendered"),
        False,
    )
    assert "agent.allow_unrendered_tools" in result.failure.message
    assert [timing.stage for timing in result.timings] == ["init", "postrun"]


async def test_a_task_may_start_it_all_the_same_and_its_records_say_what_the_model_was_not_shown(
    tmp_path: Path,
) -> None:
    result = await ended(tmp_path, harness="native", max_turns=1, allow_unrendered_tools=True)
    assert result.outcome in ("completed", "turn_limit")
    assert DROPPED in result.completions[0].dropped


@pytest.mark.parametrize("tools", [TOOLS, []])
async def test_a_record_names_tools_that_are_not_in_the_prompt(tools: Any) -> None:
    """And no others. The results of tools are in SmolLM2's prompts."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
    ]
    async with smollm2() as url, proxied_engine(url) as running, running.client() as client:
        given = {"tools": tools} if tools else {}
        await client.chat.completions.create(model="scripted", messages=messages, **given)
        (completion,) = running.journal.completions
    assert completion.dropped == ((DROPPED,) if tools else ())


async def test_a_record_of_a_model_that_is_shown_its_tools_says_nothing() -> None:
    async with scripted_server(SCRIPT) as url, proxied_engine(url) as running, running.client() as client:
        await client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hello"}], tools=TOOLS
        )
        assert running.journal.completions[0].dropped == ()


def text_of(view: Any) -> str:
    out = Console(width=400)
    with out.capture() as capture:
        out.print(view)
    return capture.get()


async def test_show_the_page_and_the_audit_say_what_the_model_was_not_shown(tmp_path: Path) -> None:
    result = await ended(tmp_path, harness="native", max_turns=1, allow_unrendered_tools=True)
    said = "the model was not shown its 2 tools (shell, editor) in 1 of 1 calls"
    assert f"{said}; its chat template does not render them: {UNSHOWN_GUIDE}" in text_of(session_view(result))
    assert f"{result.session_id}: {said}" in text_of(task_view([result, result]))
    assert [call.unshown for call in open_session(result).outline.calls] == [("its 2 tools (shell, editor)",)]
    document = audit_results([result])
    assert document["report"]["num_unshown"] == 1
    print_audit("t1", document)


async def test_the_page_of_guides_that_they_name_is_there() -> None:
    page, _, anchor = UNSHOWN_GUIDE.partition("#")
    titles = [line for line in Path(page).read_text().splitlines() if line.startswith("#")]
    assert anchor in {line.strip("# ").lower().replace(" ", "-") for line in titles}


async def test_nothing_is_said_of_a_model_that_is_shown_its_tools(tmp_path: Path) -> None:
    async with node_parts(tmp_path, script=SCRIPT) as parts, asyncio.timeout(60):
        result = await Attempt(lease_of(agent={"harness": "native"}), parts).live()
    assert result.completions
    assert "was not shown" not in text_of(session_view(result)) + text_of(task_view([result]))
    assert audit_results([result])["report"]["num_unshown"] == 0


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"harness": "native"}, "harness native has some: its sessions will be refused"),
        ({"harness": "native", "allow_unrendered_tools": True}, "native has some: the model will not see them"),
        ({"harness": "shell", "settings": {"command": "true"}}, None),
    ],
)
async def test_submit_says_it_before_a_session_runs(tmp_path: Path, agent: dict[str, Any], said: str | None) -> None:
    task = TaskRequest.model_validate({"instruction": "x", "agent": agent})
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        for rendered in (None, True, False):
            backends = tuple(msgspec.to_builtins(view(one)) for one in (False, rendered))
            await client.heartbeat(msgspec.structs.replace(beat([], "n1"), backends=backends))
            lines = await lines_of_engines(client, [task, task])
            one, (other, _) = await client.submit(task), await client.submit_many([task, task])
            assert list(one.warnings) == list(other.warnings) == lines
            if rendered is False and said is not None:
                assert len(lines) == 1
                assert said in lines[0]
            else:
                assert lines == []


async def test_an_evaluation_is_refused_before_a_session_runs(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task_id": "q", "instruction": "x", "agent": {"harness": "native"}}))
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        backends = (msgspec.to_builtins(view(False)),)
        await client.heartbeat(msgspec.structs.replace(beat([], "n1"), backends=backends))
        command = ("eval", tasks, "--server", running.url, "--data", tmp_path / "data")
        done = await asyncio.to_thread(gangline, *command, env={"GANGLINE_TOKEN": TOKEN})
        assert done.returncode == 1, done.stderr
        assert "does not render tools" in done.stderr
        assert (await client.tasks()).tasks == ()


async def test_submit_that_waits_says_what_sessions_recorded(tmp_path: Path) -> None:
    """Of an agent program nobody knows its tools before it has asked with them."""
    result = await ended(tmp_path / "node", harness="native", max_turns=1, allow_unrendered_tools=True)
    async with (
        serving(data_dir=tmp_path / "server", control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        await client.submit({"task_id": "t1", "instruction": "x", "agent": {"harness": "shell"}})
        node = FakeNode(client)
        (lease,) = await node.lease()
        changes = {"session_id": lease.session_id, "fence": lease.fence, "node_id": node.node_id, "trajectory": None}
        await client.post_result(msgspec.structs.replace(result, **changes))
        lines = await lines_of_sessions(client, [await client.wait("t1")])
    assert len(lines) == 1
    assert "t1.0: the model was not shown its 2 tools (shell, editor)" in lines[0]


def view(renders_tools: bool | None) -> BackendView:
    return BackendView(
        backend_id="b1",
        url="http://gpu-1:8000",
        engine="vllm",
        label=None,
        api_key_env=None,
        is_near=False,
        state="healthy",
        model="SmolLM2",
        version="0.32.0",
        template=TemplateFacts(renders_tools=renders_tools),
        num_sessions=0,
        num_assigned=0,
        num_calls=0,
        num_failures=0,
        error=None,
        since=0.0,
    )


@pytest.mark.parametrize(
    ("rendered", "is_refused"),
    [([False], True), ([False, False], True), ([True], False), ([None], False), ([False, None], False), ([], False)],
)
def test_only_what_is_known_is_refused(rendered: list[bool | None], is_refused: bool) -> None:
    harness = plugins.make_harness("native", {})
    task = TaskRequest(instruction="x", agent=AgentSpec(harness="native"))
    backends = [view(one) for one in rendered]
    if is_refused:
        with pytest.raises(ToolsNotRendered, match="SmolLM2"):
            check_tools_are_shown(harness, task, backends)
    else:
        check_tools_are_shown(harness, task, backends)


@pytest.mark.parametrize(
    ("settings", "more", "is_refused"),
    [
        ({"tools": []}, {}, False),
        ({"tools": ["shell"]}, {}, True),
        ({"tools": [], "finish": "submit"}, {}, True),
        ({"tools": []}, {"mcp_servers": {"notes": {"command": ["notes"]}}}, True),
    ],
    ids=["a plain question", "a shell", "submit", "a server of tools"],
)
def test_an_agent_without_tools_needs_no_template_for_them(
    settings: dict[str, Any], more: dict[str, Any], is_refused: bool
) -> None:
    agent = AgentSpec.model_validate({"harness": "native", "settings": settings, **more})
    task = TaskRequest(instruction="What is 2 + 2?", agent=agent)
    with pytest.raises(ToolsNotRendered) if is_refused else nullcontext():
        check_tools_are_shown(plugins.make_harness("native", settings), task, [view(False)])


def test_programs_with_a_protocol_of_their_own_in_text_do_not_depend_on_tools() -> None:
    for name in ("shell", "aider", "mini_swe_agent", "terminus", "handler"):
        assert not isinstance(plugins.load("harness", name), DependsOnTools), name


async def test_the_list_of_engines_and_the_doctor_say_so(tmp_path: Path) -> None:
    async with smollm2() as url, running_node(tmp_path, url) as node:
        (backend,) = await node.client.backends()
        assert (backend.template.renders_tools, backend.template.renders_tool_results) == (False, True)
        options = ("backend", "list", "--node", node.url)
        shown = await asyncio.to_thread(gangline, *options, env={"GANGLINE_TOKEN": TOKEN, "COLUMNS": "200"})
        assert "does not render tools" in shown.stdout
        check = await asyncio.to_thread(check_engine, url)
        assert "does not render tools" in check.found
        answer = (await node.ask("GET", "/v1/backends"))[1]
    async with (
        serving(data_dir=tmp_path / "server", control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        await client.heartbeat(msgspec.structs.replace(beat([], "n1"), backends=tuple(answer)))
        named = {"GANGLINE_DATA": str(tmp_path / "none"), "GANGLINE_SERVER": running.url, "GANGLINE_TOKEN": TOKEN}
        found = await asyncio.to_thread(check_service, Settings.from_environ(named))
    assert (found.state, "does not render tools" in found.advice) == ("optional", True)

"""Models whose chat template does not render tools: their records say so, and agents that depend on tools do not start.

SmolLM2's is such a template. A scripted engine renders it with the model's own tokenizer, over vLLM's wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline import plugins
from gangline.cli.machine.checks_service import check_engine, check_service
from gangline.client.server import ServerClient
from gangline.domain.contracts import DependsOnTools
from gangline.domain.errors import ToolsNotRendered
from gangline.domain.node_views import BackendView, TemplateFacts
from gangline.domain.session import SessionResult
from gangline.domain.task import AgentSpec
from gangline.gateway.sessions.attempt import Attempt
from gangline.gateway.sessions.harness.shown_tools import check_tools_are_shown
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.settings import Settings
from support.engines.tokenizers import smollm2_name
from support.node.attempt import lease_of, node_parts
from support.node.node import TOKEN, running_node
from support.node.proxy import proxied_engine
from support.service.cli_process import gangline
from support.service.running import any_plugin, beat

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
    harness, agent = plugins.make_harness("native", {}), AgentSpec(harness="native")
    backends = [view(one) for one in rendered]
    if is_refused:
        with pytest.raises(ToolsNotRendered, match="SmolLM2"):
            check_tools_are_shown(harness, agent, backends)
    else:
        check_tools_are_shown(harness, agent, backends)


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

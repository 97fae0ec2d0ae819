"""The public names, and the client for code without an event loop, against a real server."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import openai
import pytest

import gangline
from gangline import NodeClient, ServerClient, SyncNodeClient, SyncServerClient
from gangline.domain.errors import Conflict, InvalidRequest, NotFound, ServerUnavailable
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from support.node.node import TOKEN, running_node
from support.service.running import any_plugin, request


async def test_a_notebook_with_a_loop_of_its_own_uses_the_synchronous_client(tmp_path: Path) -> None:
    async with serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as server:

        def notebook() -> None:
            with SyncServerClient(server.url) as client:
                submitted = client.submit(request())
                assert client.task(submitted.task_id).status == "queued"
                assert [task.task_id for task in client.tasks().tasks] == [submitted.task_id]
                assert len(client.sessions().sessions) == 2
                with pytest.raises(TimeoutError):
                    client.wait(submitted.task_id, timeout_s=0.1)
                with pytest.raises(Conflict):
                    client.result(submitted.task_id)
                with pytest.raises(InvalidRequest):
                    client.submit({"instruction": 1})
                with pytest.raises(NotFound):
                    client.session("absent")
                assert client.cancel(submitted.task_id).status == "cancelled"
                assert client.wait(submitted.task_id).ended
                assert [task.status for task in client.progress(submitted.task_id)] == ["cancelled"]
            with pytest.raises(RuntimeError, match="enter it first"):
                client.status()

        await asyncio.to_thread(notebook)


def test_a_server_that_is_not_there_is_named() -> None:
    with SyncServerClient("http://127.0.0.1:9") as client, pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:9"):
        client.status()


OF_HTTP = {"close", "twin", "opened", "unavailable", "request", "request_json", "request_msgpack"}
OF_NODES = {"lease", "heartbeat", "release", "post_result", "post_turns", "kept_turns", "begin_anew"}
OF_ADMINS = {"tokens", "create_token", "rotate_token", "revoke_token", "tenants", "set_tenant", "usage"}
RARE = {"events", "references", "health"}  # a stream, and rarely used calls


@pytest.mark.parametrize(
    ("of_loops", "twin", "left_out"),
    [
        (ServerClient, SyncServerClient, OF_HTTP | OF_NODES | OF_ADMINS | RARE),
        (NodeClient, SyncNodeClient, OF_HTTP | {"grade"}),
    ],
)
def test_it_has_every_call_of_a_user_with_the_same_types(of_loops: type, twin: type, left_out: set[str]) -> None:
    calls = {name for name, _ in inspect.getmembers(of_loops, inspect.isfunction) if not name.startswith("_")}
    missing = {name for name in calls if not hasattr(twin, name)}
    assert missing == left_out
    for name in calls - missing:
        theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (of_loops, twin))
        assert list(theirs.parameters.values()) == list(ours.parameters.values()), name
        assert name == "progress" or theirs.return_annotation == ours.return_annotation, name


async def test_a_node_answers_a_notebook_with_records(tmp_path: Path) -> None:
    async with scripted_server({"default": {"text": "x"}}) as engine, running_node(tmp_path, engine) as node:

        def notebook() -> None:
            with SyncNodeClient(node.url, TOKEN) as client:
                opened = client.open_session(metadata={"problem": 17})
                assert client.session(opened.session_id).metadata == {"problem": 17}
                assert [session.session_id for session in client.sessions()] == [opened.session_id]
                assert client.wait_session(opened.session_id, 0.01).status == "open"
                status = client.status()
                assert (status.node_id, status.num_external_sessions) == (opened.node_id, 1)
                assert client.pause("drain", lease_s=60).is_drained
                assert client.hold("keep", 60).mode == "keep"
                assert client.set_version(3).version == 3
                assert not client.resume().is_paused
                (backend,) = client.backends()
                client.remove_backend(backend.backend_id)
                client.add_backend(engine, label="here")
                assert [one.label for one in client.backends()] == ["here"]
                client.clear_backends()
                assert client.gate().version == 3
                assert client.abort_session(opened.session_id).status == "aborted"
                assert client.drain().draining

        await asyncio.to_thread(notebook)


async def test_the_guide_s_example_opens_a_session_and_finalizes_it(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "external-sessions.md").read_text()
    example = guide.partition("```python\n")[2].partition("```")[0]

    async def run_my_agent(*, base_url: str, api_key: str, model: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])

    async with scripted_server({"default": {"text": "x"}}) as engine, running_node(tmp_path, engine) as node:
        names: dict[str, Any] = {"run_my_agent": run_my_agent, "control_token": TOKEN}
        program = textwrap.indent(example.replace("http://127.0.0.1:8642", node.url) + "return result", "    ")
        exec(f"async def of_the_guide():\n{program}", names)
        result = await names["of_the_guide"]()
        assert len(result.completions) == 1


def test_public_names_are_loaded_when_they_are_used() -> None:
    program = "import sys, gangline; assert not [name for name in sys.modules if name.startswith('gangline.')]"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert gangline.NodeClient is NodeClient
    assert all(hasattr(gangline, name) for name in gangline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        _ = gangline.Absent

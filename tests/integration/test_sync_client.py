"""The public names, and the client for code without an event loop, against a real server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import gangline
from gangline import NodeClient, ServerClient, SyncServerClient
from gangline.domain.errors import Conflict, InvalidRequest, NotFound, ServerUnavailable
from gangline.server.run import serving
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


def test_it_has_every_call_of_a_user_with_the_same_options() -> None:
    import inspect

    left_out = {"close", "twin", "events", "references", "health", "wait_session"}  # streams, and rarely used calls
    nodes = {"lease", "heartbeat", "release", "post_result", "opened", "unavailable", "request", "request_json"}
    calls = {name for name, _ in inspect.getmembers(ServerClient, inspect.isfunction) if not name.startswith("_")}
    missing = {name for name in calls if not hasattr(SyncServerClient, name)}
    assert missing == left_out | nodes | {"request_msgpack"}
    for name in calls - missing:
        theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (ServerClient, SyncServerClient))
        assert list(theirs.values()) == list(ours.values()), name


def test_public_names_are_loaded_when_they_are_used() -> None:
    program = "import sys, gangline; assert not [name for name in sys.modules if name.startswith('gangline.')]"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert gangline.NodeClient is NodeClient
    assert all(hasattr(gangline, name) for name in gangline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        _ = gangline.Absent

"""`gangline fork` and its route through a real service: a group that begins at a turn of a recorded session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.client.server import ServerClient
from gangline.domain.errors import Conflict
from support.service.cli_process import UpProcess, gangline

SCRIPT: dict[str, Any] = {
    "rules": [
        {"turn": 0, "tool_calls": [{"run": "echo one > dog.txt"}]},
        {"turn": 1, "tool_calls": [{"run": "cat dog.txt"}]},
        {"turn": 2, "text": "It says one."},
    ]
}
TASK: dict[str, Any] = {
    "task_id": "parent",
    "instruction": "read dog.txt",
    "runtime": {"backend": "process"},
    "agent": {"harness": "native", "settings": {"tools": ["shell"]}},
    "capture": {"seed": 7},
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    service = UpProcess(tmp_path_factory.mktemp("up"), script=SCRIPT)
    try:
        assert "server_url" in service.ready()
        yield service
    finally:
        service.close()


async def test_a_group_of_forks_begins_at_a_turn_of_its_parent(up: UpProcess, tmp_path: Path) -> None:
    running = up.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        await client.submit(TASK)
        await client.wait("parent", timeout_s=60)
        (parent,) = await client.result("parent")
        assert len(parent.completions) == 3, parent.failure
        with pytest.raises(Conflict, match="not forkable, because turn 4 is none of its turns: it has 1 to 3"):
            await client.fork(parent.session_id, 4)
        made = gangline(
            "fork", parent.session_id, "--turn", "2", "--samples", "3", "--id", "forks", "--data", up.data, "--json"
        )
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["task_id"] == "forks"
        view = await client.wait("forks", timeout_s=60)
        assert view.request["fork"] == {"session_id": parent.session_id, "attempt": 1, "turn": 2}
        results = await client.result("forks")
    assert len(results) == 3
    for result in results:
        assert (result.outcome, result.failure) == ("completed", None)
        for own, theirs in zip(result.completions[:2], parent.completions, strict=False):
            assert own.sampled_ids.tolist() == theirs.sampled_ids.tolist()
            assert own.prompt_suffix_ids.tolist() == theirs.prompt_suffix_ids.tolist()
        assert [one.trainable for one in result.completions] == [False, False, True]
    shown = gangline("show", results[0].session_id, "--data", up.data)
    assert f"fork of {parent.session_id} at turn 2, 2 model calls" in shown.stdout, shown.stdout

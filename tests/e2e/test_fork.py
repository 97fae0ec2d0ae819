"""`gangline fork` and its route through a real service: a group that begins at a turn of a recorded session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import Conflict
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
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
        assert view.request["fork"] == {
            "session_id": parent.session_id,
            "attempt": 1,
            "turn": 2,
            "edit": None,
            "engine": None,
        }
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


async def test_an_edited_fork_with_other_sampling_from_the_command_line(up: UpProcess) -> None:
    running = up.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        rules = {"top_k": {"override": 7}, "temperature": {"override": 0.8}}
        await client.submit(TASK | {"task_id": "edited-parent", "capture": {"sampling": rules}})
        await client.wait("edited-parent", timeout_s=60)
        made = gangline(
            *("fork", "edited-parent.0", "--turn", "1", "--edit", "no such file", "--id", "edited"),
            *("--temperature", "0.5", "--top-p", "0.9", "--max-tokens", "64", "--data", up.data),
        )
        assert made.returncode == 0, made.stderr
        view = await client.wait("edited", timeout_s=60)
        (result,) = await client.result("edited")
    assert view.request["fork"]["edit"] == "no such file"
    assert (result.outcome, result.failure) == ("completed", None)
    (sent,) = result.completions[1].new_messages
    assert [part.content[0].text for part in sent.parts] == ["no such file"]  # type: ignore[union-attr]
    asked = result.completions[1].certificate.sampling
    assert (asked.temperature, asked.top_p, asked.max_tokens) == (0.5, 0.9, 64)
    assert asked.top_k == 7, "the parent's rule, as the fork has none of its own for it"
    shown = gangline("show", "edited.0", "--data", up.data)
    assert "1 model calls from its record, edited" in shown.stdout, shown.stdout


async def test_a_fork_goes_on_with_the_engine_of_a_role_from_the_command_line(up: UpProcess) -> None:
    running = up.running()
    async with (
        ServerClient(running["server_url"], running["control_token"]) as client,
        scripted_server({"rules": [{"pattern": ".", "text": "I am the critic."}]}) as critic,
    ):
        await client.submit(TASK | {"task_id": "critic-parent"})
        await client.wait("critic-parent", timeout_s=60)
        fork = ("fork", "critic-parent.0", "--turn", "2", "--engine", "critic", "--data", up.data)
        assert (await asyncio.to_thread(gangline, *fork, "--id", "too-early")).returncode == 0
        await client.wait("too-early", timeout_s=60)
        (early,) = await client.result("too-early", partial=True)
        added = await asyncio.to_thread(gangline, "backend", "add", critic, "--role", "critic", "--data", up.data)
        assert added.returncode == 0, added.stderr
        made = await asyncio.to_thread(gangline, *fork, "--id", "critics")
        assert made.returncode == 0, made.stderr
        await client.wait("critics", timeout_s=60)
        (result,) = await client.result("critics")
    assert early.failure is not None
    assert "no engine answers for role 'critic' on this node" in early.failure.message
    assert (result.outcome, result.failure) == ("completed", None)
    assert [one.certificate.engine_role for one in result.completions] == [None, None, "critic"]
    assert result.completions[-1].certificate.context == "exact"
    shown = gangline("show", "critics.0", "--data", up.data)
    assert "2 model calls from its record, behind it the engines of role critic" in " ".join(shown.stdout.split())

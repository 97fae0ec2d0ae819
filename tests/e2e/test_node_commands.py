"""`gangline gate` and `gangline backend` against a running service; a key that outlives `kill -9` of its node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from gangline.domain.errors import GanglineError
from gangline.domain.node_views import OpenedSession
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.node import NodeClient
from support.service.cli_process import UpProcess, gangline, wait_for


@pytest.fixture
def up(tmp_path: Path) -> Generator[UpProcess]:
    running = UpProcess(tmp_path)
    try:
        assert running.ready()
        yield running
    finally:
        running.close()


def ask(up: UpProcess, *arguments: object) -> Any:
    """The answer of the only node."""
    done = gangline(*arguments, "--data", up.data, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout).values()
    return found


def test_the_gate_is_closed_and_opened_from_the_command_line(up: UpProcess) -> None:
    assert ask(up, "gate", "show")["is_paused"] is False
    paused = ask(up, "gate", "pause", "--mode", "keep", "--lease", "60")
    assert (paused["is_paused"], paused["mode"]) == (True, "keep")
    assert ask(up, "gate", "version", "5")["version"] == 5
    assert ask(up, "gate", "resume")["is_paused"] is False
    shown = gangline("gate", "show", "--data", up.data)
    assert "open" in shown.stdout
    assert "5" in shown.stdout
    (seen,) = ask(up, "gate", "updates")
    assert (seen["mode"], seen["version"], seen["drain_s"], seen["reported"]) == ("keep", 5, 0.0, {})
    shown = gangline("gate", "updates", "--data", up.data)
    assert "drain 0.0, held" in shown.stdout


def test_a_wrong_mode_is_told_in_one_line(up: UpProcess) -> None:
    done = gangline("gate", "pause", "--mode", "abort", "--data", up.data)
    assert done.returncode != 0
    assert "drain" in done.stderr
    assert "Traceback" not in done.stderr


async def test_engines_are_changed_from_the_command_line(up: UpProcess) -> None:
    (first,) = await asyncio.to_thread(ask, up, "backend", "list")
    assert first["state"] == "healthy"
    assert first["template"]["tokenizer_digest"] != ""
    shown = await asyncio.to_thread(gangline, "backend", "list", "--data", up.data)
    assert shown.returncode == 0, shown.stderr
    facts = (
        first["backend_id"],
        first["url"],
        first["engine"],
        first["model"],
        "appends tool and user turns",
        "healthy",
    )
    assert all(fact in shown.stdout for fact in facts), shown.stdout
    async with scripted_server({"default": {"text": "the other"}}) as url:
        # The service's engine has the same name and tokenizer, so that this one may stand alongside it.
        both = await asyncio.to_thread(ask, up, "backend", "add", url)
        assert [one["url"] for one in both] == [first["url"], url]
        (left,) = await asyncio.to_thread(ask, up, "backend", "remove", first["backend_id"])
        assert left["url"] == url
        assert await asyncio.to_thread(ask, up, "backend", "clear") == []
    shown = await asyncio.to_thread(gangline, "backend", "remove", "b9", "--data", up.data)
    assert shown.returncode != 0
    assert "b9" in shown.stderr


def test_without_a_service_the_commands_say_so(tmp_path: Path) -> None:
    for command in (("gate", "show"), ("backend", "list")):
        done = gangline(*command, "--data", tmp_path)
        assert done.returncode != 0
        assert "gangline up" in done.stderr


async def turn(url: str, opened: OpenedSession, messages: list[Any]) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/s/{opened.session_id}/v1", api_key=opened.api_key, max_retries=0
    ) as client:
        messages.append({"role": "user", "content": f"message {len(messages)}"})
        reply = await client.chat.completions.create(model=opened.model, messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})


async def test_a_session_and_its_key_outlive_their_node(up: UpProcess) -> None:
    running = up.running()
    url, token = running["node_urls"][0], running["control_token"]
    messages: list[Any] = []
    async with NodeClient(url, token) as node:
        opened = await node.open_session()
        await turn(url, opened, messages)
        await turn(url, opened, messages)
    os.kill(running["pids"]["node"], signal.SIGKILL)
    await asyncio.to_thread(wait_for, lambda: up.running()["pids"]["node"] != running["pids"]["node"])
    async with NodeClient(url, token) as node:  # the same port again
        await answers(node)
        await turn(url, opened, messages)
        result = await node.finalize(opened.session_id, completions=True)
    assert len(result.completions) == 3
    assert result.trajectory is not None
    assert len(result.trajectory.traces) == 1


async def answers(node: NodeClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await node.status()
            except GanglineError:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.mark.parametrize(
    ("option", "value"), [("--capture", "tokens"), ("--sampling", '{"temprature": {}}'), ("--sampling", "{")]
)
def test_wrong_options_of_the_node_are_told_before_anything_starts(tmp_path: Path, option: str, value: str) -> None:
    done = gangline("up", "--data", tmp_path, option, value)
    assert done.returncode != 0
    assert option in done.stderr
    assert list(tmp_path.iterdir()) == []


async def test_the_service_hands_the_operators_policy_to_its_node(tmp_path: Path) -> None:
    up = UpProcess(tmp_path, "--sampling", '{"temperature": {"override": 0.5}}')
    try:
        await asyncio.to_thread(up.ready)
        running = up.running()
        url = running["node_urls"][0]
        async with NodeClient(url, running["control_token"]) as node:
            opened = await node.open_session()
            await turn(url, opened, [])
            result = await node.finalize(opened.session_id, completions=True)
    finally:
        await asyncio.to_thread(up.close)
    assert result.completions[0].certificate.sampling.temperature == 0.5


async def test_engines_named_at_the_start_and_added_later_outlive_their_node(tmp_path: Path) -> None:
    script = {"default": {"text": "as you wish"}}
    async with scripted_server(script) as one, scripted_server(script) as two, scripted_server(script) as three:
        up = UpProcess(tmp_path, "--engine", one, "--engine", two, "--affinity-slack", "2")
        try:
            await asyncio.to_thread(up.ready)
            running = up.running()
            added = await asyncio.to_thread(ask, up, "backend", "add", three, "--label", "host-3")
            assert [backend["url"] for backend in added] == [one, two, three]
            os.kill(running["pids"]["node"], signal.SIGKILL)
            await asyncio.to_thread(wait_for, lambda: up.running()["pids"]["node"] != running["pids"]["node"])
            async with NodeClient(running["node_urls"][0], running["control_token"]) as node:
                await answers(node)
                again = await node.backends()
            assert [(backend.url, backend.label) for backend in again][-1] == (three, "host-3")
            assert len(again) == 3
        finally:
            await asyncio.to_thread(up.close)


def test_only_the_first_engine_can_be_one_to_start(tmp_path: Path) -> None:
    engines = ("--engine", "http://127.0.0.1:9", "--engine", "embedded:smollm2")
    done = gangline("up", "--data", tmp_path, *engines)
    assert done.returncode != 0
    assert "embedded:smollm2" in done.stderr
    assert list(tmp_path.iterdir()) == []

"""An agent whose requests would stall a node, alongside an ordinary one: only the first one is refused anything."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gangline.wire.client.server import ServerClient
from support.service.cli_process import UpProcess

ATTACKER = textwrap.dedent("""
    import gzip, json, os, urllib.error, urllib.request
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    key = os.environ["OPENAI_API_KEY"]
    asked = {"role": "user", "content": "x"}

    def post(body, **headers):
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key, **headers}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=300) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    def call(messages, **fields):
        return json.dumps({"model": "m", "messages": messages, **fields}).encode()

    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    arguments = "[" + "1.5," * 1_500_000 + "1]"
    named = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    statuses = [
        post(call([asked] * 200_000)),
        post(call([asked] * 2_000_000)),
        post(call([asked], tools=[tool] * 50_000)),
        post(call([{"role": "user", "content": [{"type": "text", "text": "x"}] * 150_000}])),
        post(call([asked], metadata={"a": [0] * 2_000_000})),
        post(gzip.compress(call([{"role": "user", "content": " " * (128 << 20)}])), **{"Content-Encoding": "gzip"}),
        post(call([asked, {"role": "assistant", "content": None, "tool_calls": [named]}, asked])),
        post(call([{"role": "system", "content": "2026-01-01 " * 400_000}, asked])),
        post(b"[" * 4_000_000),
    ]
    print(*statuses)
""")
NEIGHBOUR = textwrap.dedent("""
    import json, os, urllib.request
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    for _ in range(200):
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        urllib.request.urlopen(request, timeout=300).read()
    print("done")
""")


@pytest.fixture
def up(tmp_path: Path) -> Generator[UpProcess]:
    service = UpProcess(tmp_path / "stall")
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


def task(program: str, num_samples: int) -> dict[str, Any]:
    return {
        "instruction": "behave",
        "num_samples": num_samples,
        "runtime": {"backend": "process", "prepare": [{"type": "write", "path": "agent.py", "content": program}]},
        "agent": {"harness": "shell", "settings": {"command": "python3 agent.py"}},
    }


async def test_no_session_of_another_task_fails_while_one_sends_what_stalls_a_node(up: UpProcess) -> None:
    running = up.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        attack, neighbours = [(await client.submit(one)).task_id for one in (task(ATTACKER, 1), task(NEIGHBOUR, 3))]
        await asyncio.gather(client.wait(attack, timeout_s=600), client.wait(neighbours, timeout_s=600))
        (hostile,) = await client.result(attack)
        statuses = [int(status) for status in hostile.artifacts["harness.stdout"].split()]
        assert statuses[:6] == [413] * 6, json.dumps(statuses)
        assert all(status < 500 for status in statuses), json.dumps(statuses)
        for result in await client.result(neighbours):
            assert (result.outcome, result.attempt) == ("completed", 1), result.failure
            assert result.artifacts["harness.stdout"] == b"done\n"

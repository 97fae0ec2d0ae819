"""`kill -9` of the server and of the node under load: every session ends once, every completed call is kept."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.conversation import message_text
from gangline.domain.errors import NotFound
from gangline.wire.client.server import ServerClient

NUM_TASKS, NUM_SAMPLES, NUM_TURNS = 3, 4, 4

# An agent of the standard library alone. Each call carries its own mark; a mark is noted once its answer is here.
AGENT = textwrap.dedent("""
    import json, os, sys, urllib.request, uuid
    messages = []
    for turn in range(int(sys.argv[1])):
        mark = uuid.uuid4().hex
        messages.append({"role": "user", "content": "turn " + mark})
        body = json.dumps({"model": os.environ["GANGLINE_MODEL"], "messages": messages, "max_tokens": 16}).encode()
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
            "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        with open(sys.argv[2], "a") as file:
            file.write(mark + "\\n")
""")

SCRIPT = {"rules": [{"text": "as you wish", "delay_s": 0.15}]}


def task(number: int, marks: Path) -> dict[str, Any]:
    return {
        "task_id": f"crash-{number}",
        "instruction": "go on",
        "num_samples": NUM_SAMPLES,
        "max_attempts": 20,
        "timeout_seconds": 60,
        "runtime": {
            "backend": "process",
            "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}],
        },
        "agent": {
            "harness": "shell",
            "settings": {"command": [sys.executable, "agent.py", str(NUM_TURNS), str(marks)]},
        },
    }


class Service:
    """`gangline up` in its own process."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        script = folder / "script.json"
        script.write_text(json.dumps(SCRIPT))
        options = [
            "--data",
            self.data,
            "--port",
            "0",
            "--engine",
            f"scripted:{script}",
            "--tokenizer",
            "tiny",
            "--json",
        ]
        command = [sys.executable, "-m", "gangline", "up", *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready, f"up ended before it was ready: {self.logs()}"
        told = json.loads(ready)
        self.server_url, self.token = told["server_url"], told["control_token"]

    def pid(self, child: str) -> int:
        return msgspec.json.decode((self.data / "up.json").read_bytes())["pids"][child]

    def kill(self, child: str) -> None:
        os.kill(self.pid(child), signal.SIGKILL)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in (self.data / "logs").glob("*.log"))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def service(tmp_path: Path) -> Generator[Service]:
    service = Service(tmp_path)
    try:
        yield service
    finally:
        service.stop()


async def marks_kept(client: ServerClient, session_id: str, num_attempts: int) -> set[str]:
    """Marks of all completions that the server has of a session, whatever attempt they belong to."""
    kept = set[str]()
    for attempt in range(1, num_attempts + 1):
        try:
            result = await client.session_result(session_id, attempt=attempt)
        except NotFound:
            continue
        for completion in result.completions:
            if completion.status == "complete":
                kept |= {message_text(m).removeprefix("turn ") for m in completion.new_messages if m.role == "user"}
    return kept


@pytest.mark.parametrize("victims", [("server",), ("node",), ("node", "server", "node")])
async def test_a_killed_service_ends_every_session_once_and_keeps_every_completed_call(
    service: Service, tmp_path: Path, victims: tuple[str, ...]
) -> None:
    marks = tmp_path / "marks"
    marks.touch()
    async with ServerClient(service.server_url, service.token) as client:
        ids = [(await client.submit(task(number, marks))).task_id for number in range(NUM_TASKS)]
        noted = 0
        for victim in victims:
            while (now := len(marks.read_text().split())) < noted + 5:
                await asyncio.sleep(0.05)
            noted = now
            service.kill(victim)
        views = [await client.wait(task_id, timeout_s=120) for task_id in ids]
        sessions = [session for view in views for session in view.sessions]
        assert [session.outcome for session in sessions] == ["completed"] * NUM_TASKS * NUM_SAMPLES, service.logs()
        kept = set[str]()
        for session in sessions:
            kept |= await marks_kept(client, session.session_id, session.attempt)
        lost = set(marks.read_text().split()) - kept
        assert not lost
        events = [event async for event in _until_now(client)]
    ended = [event.session_id for event in events if event.kind == "session.ended"]
    assert sorted(ended) == sorted(session.session_id for session in sessions)


async def _until_now(client: ServerClient) -> Any:
    """All events up to the end of the last task."""
    left = NUM_TASKS
    async for event in client.events(after=0):
        yield event
        left -= event.kind == "task.ended"
        if left == 0:
            return

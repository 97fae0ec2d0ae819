"""`gangline serve-agent`: an agent behind OpenAI's Responses API. OpenAI's own client asks, rows are checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gangline.wire.client.running import find_service
from gangline.wire.client.server import ServerClient
from support.service.cli_process import COMMAND, GIVE_UP_S, UpProcess, clean_environment, gangline, wait_for

WRITE = {"name": "shell", "arguments": {"command": "cat told; echo hello > out.txt"}}
LOOK = {"name": "shell", "arguments": {"command": "echo again"}}
SCRIPT: dict[str, Any] = {
    "rules": [
        {"pattern": "wait for ever", "text": "never", "faults": {"hang": True}},  # once
        {"pattern": "wait on", "text": "never", "faults": {"hang": True}},
        {"pattern": "Write hello", "text": "I look first.", "tool_calls": [WRITE]},
        {"pattern": "secret", "text": "It is written."},
        {"pattern": "Loop|again", "tool_calls": [LOOK]},
    ],
    "default": {"text": "as you wish"},
}
TASK: dict[str, Any] = {
    "instruction": "You work in a folder.",
    "agent": {"harness": "native", "max_turns": 2, "settings": {"tools": ["shell"]}},
    "runtime": {"backend": "process", "prepare": [{"type": "write", "path": "told", "content": "a secret word"}]},
    "evaluator": {"strategy": "script", "config": {"command": "grep -c hello out.txt > reward.txt"}},
}


class Served:
    """A running `gangline serve-agent`."""

    def __init__(self, folder: Path, up: UpProcess, *options: object, **variables: str) -> None:
        self.file = folder / "agent.json"
        self.file.write_text(json.dumps(TASK))
        self.up = up
        command = [*COMMAND, "serve-agent", self.file, "--port", "0", "--data", up.data, "--json", *options]
        log = folder / "serve-agent.log"
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=clean_environment(**variables),
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, log.read_text()
        self.url: str = json.loads(line)["url"]

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=GIVE_UP_S)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=GIVE_UP_S)
        return self.process.returncode


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    up = UpProcess(folder, script=SCRIPT)
    try:
        up.ready()
        service = Served(folder, up)
        try:
            yield service
        finally:
            assert service.end() == 0
    finally:
        up.close()


def answered(served: Served, said: Any, **fields: Any) -> dict[str, Any]:
    with served.client() as client:
        return client.responses.create(model="agent", input=said, **fields).to_dict()


def test_a_response_is_the_whole_run_with_its_tokens(served: Served, tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Write hello into out.txt."}]},
    ]
    told = answered(served, said, temperature=0.5)
    assert (told["status"], told["error"], told["metadata"]["reward"]) == ("completed", None, "1.0")
    kinds = [item["type"] for item in told["output"]]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
    assert "a secret word" in told["output"][2]["output"]
    assert told["output"][3]["content"][0]["text"] == "It is written."

    first, second = [item for item in told["output"] if "generation_token_ids" in item]
    assert second["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
    assert told["usage"]["output_tokens"] == sum(len(one["generation_token_ids"]) for one in (first, second))
    shown = json.loads(gangline("show", told["metadata"]["session_id"], "--data", served.up.data, "--json").stdout)
    (trace,) = shown["trajectory"]["traces"]
    assert first["prompt_token_ids"] == trace["prompt_ids"]
    assert second["prompt_token_ids"] + second["generation_token_ids"] == trace["prompt_ids"] + trace["response_ids"]
    trained = [*first["generation_log_probs"], *second["generation_log_probs"]]
    assert trained == [
        value for value, mark in zip(trace["response_logprobs"], trace["loss_mask"], strict=True) if mark
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"responses_create_params": {"input": said}, "response": told, "reward": 1.0}))
    checked = gangline("check-rows", rows, "--json")
    report = json.loads(checked.stdout)
    assert checked.returncode == 0, report


def test_calls_without_a_result_have_outputs_and_the_assistant_has_the_last_word(served: Served) -> None:
    """Who would carry out calls that have none is the caller, and this agent's tools are its own."""
    told = answered(served, "Loop, do not stop.")
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert told["metadata"]["outcome"] == "turn_limit"
    calls = {item["call_id"] for item in told["output"] if item["type"] == "function_call"}
    outputs = [item["call_id"] for item in told["output"] if item["type"] == "function_call_output"]
    assert set(outputs) == calls
    assert len(outputs) == len(calls)
    assert told["output"][-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "function", "name": "look", "parameters": {}}]}, "tools: the agent has its own tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: each request begins its own session"),
        ({"input": [{"role": "assistant", "content": "I am done."}]}, "not with an assistant's words"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
        ({"input": ""}, "input: there is no text"),
        ({"extra_body": {"wibble": 3}}, "wibble: nothing of an agent corresponds to this"),
    ],
)
def test_what_would_be_lost_is_refused(served: Served, fields: dict[str, Any], message: str) -> None:
    with served.client() as client, pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": "agent", "input": "Write hello.", **fields})


def test_a_wrong_route_is_told_in_openai_s_form(served: Served) -> None:
    with served.client() as client, pytest.raises(openai.NotFoundError, match="POST /v1/responses"):
        client.models.list()


async def test_a_client_that_leaves_ends_its_session(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=2.0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.responses.create(model="agent", input="wait for ever")
    service = find_service(served.up.data)
    async with ServerClient(service.server_url, service.control_token) as server:
        while (task := (await server.tasks(limit=1)).tasks[0]).ended_at is None:
            await server.wait(task.task_id, timeout_s=GIVE_UP_S)
        assert (await server.task(task.task_id)).outcomes == {"cancelled": 1}


def test_ctrl_c_ends_the_sessions_that_it_began(tmp_path: Path, served: Served) -> None:
    other = Served(tmp_path, served.up, "--key-env", "DOOR_KEY", "--sessions", "1", DOOR_KEY="a-key")
    with other.client() as client, pytest.raises(openai.AuthenticationError, match="send this service's key"):
        client.responses.create(model="agent", input="hello")
    code = "import openai, sys; openai.OpenAI(max_retries=0).responses.create(model='agent', input='wait on')"
    env = {**os.environ, "OPENAI_BASE_URL": f"{other.url}/v1", "OPENAI_API_KEY": "a-key"}
    asking = subprocess.Popen([COMMAND[0], "-c", code], env=env, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: running(served) == 1)
        with other.client("a-key") as client, pytest.raises(openai.RateLimitError, match="1 sessions run already"):
            client.responses.create(model="agent", input="hello")
        assert other.end() == 0
        wait_for(lambda: running(served) == 0)
    finally:
        asking.communicate(timeout=GIVE_UP_S)


def running(served: Served) -> int:
    listed = json.loads(gangline("list", "sessions", "--data", served.up.data, "--json").stdout)
    return sum(one["state"] == "leased" for one in listed["sessions"])


def test_two_tasks_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(TASK) + "\n" for _ in range(2)))
    refused = gangline("serve-agent", file, "--data", tmp_path)
    assert "give one task, whose agent is served; there are 2" in refused.stderr

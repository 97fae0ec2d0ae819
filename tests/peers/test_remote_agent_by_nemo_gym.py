"""Our agents as services of NeMo Gym's `remote_agent`. Its package judges: its agent server and a resources server,
talking to each other and to us over HTTP, in its own Python."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.node.environments import python_with
from support.service.cli_process import COMMAND, GIVE_UP_S, UpProcess, clean_environment

RIGHT = {"name": "shell", "arguments": {"command": "echo The answer is in here"}}
SCRIPT: dict[str, Any] = {
    "rules": [
        {"pattern": "cystic fibrosis", "text": "Let me look.", "tool_calls": [RIGHT]},
        {"pattern": "in here", "text": "It is \\boxed{B}."},
        {"pattern": ".", "text": "It is \\boxed{J}."},
    ]
}
AGENT: dict[str, Any] = {
    "agent": {"harness": "native", "settings": {"tools": ["shell"]}},
    "runtime": {"backend": "process"},
}
NUM_ROWS = 3

# Both servers as their own `run_webserver` makes them.
JUDGE = """
import asyncio, json, os, pathlib, socket, sys
import aiohttp, uvicorn
from omegaconf import OmegaConf
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from responses_api_agents.remote_agent.app import RemoteAgent, RemoteAgentConfig
from resources_servers.mcqa import app as mcqa

def free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

async def main(url, num_rows):
    ports = {"mcqa": free(), "remote_agent": free()}
    where = {name: {"host": "127.0.0.1", "port": port, "entrypoint": "app.py"} for name, port in ports.items()}
    config = OmegaConf.create({
        "mcqa": {"resources_servers": {"mcqa": where["mcqa"]}},
        "remote_agent": {"responses_api_agents": {"remote_agent": where["remote_agent"]}},
    })
    os.environ["NEMO_GYM_CONFIG_DICT"] = OmegaConf.to_yaml(config)  # as NeMo Gym gives it to the servers that it starts
    client = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config)
    judge = mcqa.MCQAResourcesServer(
        config=mcqa.MCQAResourcesServerConfig(name="mcqa", **where["mcqa"]), server_client=client
    )
    agent = RemoteAgent(server_client=client, config=RemoteAgentConfig(
        name="remote_agent", agent_base_url=url, resources_server={"type": "resources_servers", "name": "mcqa"},
        **where["remote_agent"],
    ))
    servers = []
    for one in (judge, agent):
        app = one.setup_webserver()
        one.setup_exception_middleware(app)
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=ports[one.config.name], log_level="error"))
        servers.append((server, asyncio.create_task(server.serve())))
    while not all(server.started for server, _ in servers):
        await asyncio.sleep(0.05)
    data = pathlib.Path(mcqa.__file__).with_name("data") / "example.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()[:num_rows]]
    rows.append({**rows[0], "responses_create_params": {**rows[0]["responses_create_params"], "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}]}})
    told = []
    async with aiohttp.ClientSession() as session:
        for row in rows:
            at = f"http://127.0.0.1:{ports['remote_agent']}/run"
            async with session.post(at, json=row) as answer:
                told.append(await answer.json())
    for server, task in servers:
        server.should_exit = True
        await task
    print(json.dumps(told))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def python() -> str:
    modules = ("nemo_gym", "responses_api_agents", "resources_servers", "uvicorn", "aiohttp")
    return python_with("GANGLINE_NEMO_GYM", "nemo-gym", *modules)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a served agent."""
    up = UpProcess(tmp_path / "up", script=SCRIPT)
    try:
        up.ready()
        file = tmp_path / "agent.json"
        file.write_text(json.dumps(AGENT))
        command = [*COMMAND, "serve-agent", file, "--port", "0", "--data", up.data, "--json"]
        served = subprocess.Popen(map(str, command), stdout=subprocess.PIPE, text=True, env=clean_environment())
        assert served.stdout is not None
        with served:
            try:
                yield json.loads(served.stdout.readline())["url"]
            finally:
                served.terminate()
    finally:
        up.close()


@pytest.mark.timeout(600)
def test_nemo_gym_runs_and_grades_our_agents(python: str, url: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [f"{python}/bin/python", "-c", JUDGE, url, str(NUM_ROWS)],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=10 * GIVE_UP_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    *told, refused = json.loads(ran.stdout.splitlines()[-1])
    assert [one["reward"] for one in told] == [1.0] + [
        1.0 if one["expected_answer"] == "J" else 0.0 for one in told[1:]
    ]
    assert not any("_ng_failure_class" in one for one in told)

    first = told[0]["response"]
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
    sampled = [item for item in first["output"] if item.get("generation_token_ids")]
    assert len(sampled) == 2, "its types for training have kept the tokens"
    assert first["usage"]["output_tokens"] == sum(len(item["generation_token_ids"]) for item in sampled)

    assert refused["reward"] == 0.0
    assert "the agent has its own tools" in refused["error"]

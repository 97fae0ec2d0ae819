"""Resources servers of NeMo Gym in sessions. Its package judges: one of its own servers, in its own Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.compared import same
from support.node.environments import calls_of, directly, need_python, played, using

# As the server's own tests make it: only the head server is missing.
SERVE = """
import sys
from unittest.mock import MagicMock
import uvicorn
from nemo_gym.mcp_auto_exposure import maybe_auto_expose
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt import app as example

class Counter(example.StatefulCounterResourcesServer):
    async def verify(self, request: example.Request, body: example.StatefulCounterVerifyRequest) -> (
        example.BaseVerifyResponse
    ):
        verdict = await super().verify(request, body)
        verdict.mask_sample, verdict.failure_reason = "masked" in sys.argv, "the judge is away"
        return verdict

config = example.StatefulCounterResourcesServerConfig(
    host="127.0.0.1", port=8000, entrypoint="", name="counter", expose_tools_over_mcp="mcp" in sys.argv
)
server = Counter(config=config, server_client=MagicMock(spec=ServerClient))
app = server.setup_webserver()
maybe_auto_expose(server, app)
uvicorn.run(app, host="127.0.0.1", port=8000, log_level="warning")
"""

# The same episodes without anything of ours.
JUDGE = """
import pathlib
from unittest.mock import MagicMock
from fastapi.testclient import TestClient
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt import app as example
data = pathlib.Path(example.__file__).with_name("data") / "example.jsonl"
row = json.loads(data.read_text().splitlines()[0])
rewards = []
for counts in given["episodes"]:
    config = example.StatefulCounterResourcesServerConfig(host="127.0.0.1", port=8000, entrypoint="", name="counter")
    server = example.StatefulCounterResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    client = TestClient(server.setup_webserver())
    client.post("/seed_session", json=row).raise_for_status()
    for count in counts:
        client.post("/increment_counter", json={"count": count}).raise_for_status()
    response = {"id": "r", "object": "response", "created_at": 0, "model": "m", "output": [], "tools": [],
                "parallel_tool_calls": True, "tool_choice": "auto"}
    rewards.append(client.post("/verify", json={**row, "response": response}).json()["reward"])
result = {"row": row, "rewards": rewards}
"""


@pytest.fixture(scope="module")
def python() -> str:
    return need_python("GANGLINE_NEMO_GYM", "nemo-gym", "nemo_gym", "resources_servers", "uvicorn")


@pytest.fixture(scope="module")
def judge(python: str) -> dict[str, Any]:
    return directly(python, JUDGE, episodes=[[1, 2], [1]])


def served(python: str, judge: dict[str, Any], *options: str) -> dict[str, Any]:
    """An environment whose sandbox starts the server."""
    command = ["python3", "serve.py", *options]
    prepare = [{"type": "write", "path": "serve.py", "content": SERVE}]
    return {
        "kind": "nemo_gym",
        "config": {"command": command, "row": judge["row"], "start_seconds": 240},
        "runtime": {"backend": "sandbox", "python": python, "network": "none", "prepare": prepare},
        "start_timeout_seconds": 240,
    }


def counting(*counts: int) -> list[dict[str, Any]]:
    return using([{"count": count} for count in counts], tool="game__increment_counter")


@pytest.mark.parametrize("options", [(), ("mcp",)], ids=["routes", "mcp"])
async def test_a_session_earns_what_the_server_says_of_the_same_episode(
    tmp_path: Path, python: str, judge: dict[str, Any], options: tuple[str, ...]
) -> None:
    assert judge["rewards"] == [1.0, 0.0]
    ours: dict[tuple[str, str], Any] = {}
    for number, counts in enumerate([(1, 2), (1,)]):
        environment = served(python, judge, *options)
        result = await played(tmp_path / str(number), environment, counting(*counts), init_timeout_seconds=400)
        assert result.outcome == "completed", result.failure
        ours[f"example_session_state_mgmt {options}", str(counts)] = result.reward
        assert [(call.tool, json.loads(call.text)) for call in calls_of(result)] == [
            ("increment_counter", {"success": True})
        ] * len(counts)
        assert result.trajectory is not None
        (trace,) = result.trajectory.traces
        assert {tool.name for tool in trace.tools} == {"game__increment_counter", "game__get_counter_value"}
        assert "add 1 then add 2" in str(trace.prompt_messages), "the row's own words"
    same("NeMo Gym", dict(zip(ours, judge["rewards"], strict=True)), ours)


async def test_a_servers_error_is_an_observation_and_a_masked_verdict_is_no_reward(
    tmp_path: Path, python: str, judge: dict[str, Any]
) -> None:
    rules = using([{"count": "many"}], tool="game__increment_counter")
    result = await played(tmp_path, served(python, judge, "masked"), rules, init_timeout_seconds=400)
    (call,) = calls_of(result)
    assert (call.is_error, "valid integer" in call.text) == (True, True)
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert "the judge is away" in result.failure.message

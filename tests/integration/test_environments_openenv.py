"""OpenEnv servers in sessions. The package judges: its own client, in its own Python, plays the same episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.compared import same
from support.node.environments import calls_of, directly, need_python, played, step_rewards, using

COUNTER = """
import random
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(..., ge=0, le=100, description="The guess")


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = random.Random(seed).randint(0, 100)
        self._state = State(episode_id=episode_id or "", step_count=0)
        return Hint(hint="guess", done=False, reward=None)

    def step(self, action, **kwargs):
        self._state.step_count += 1
        far = abs(action.number - self._number)
        hint = "found" if not far else "higher" if action.number < self._number else "lower"
        return Hint(hint=hint, done=not far, reward=1.0 if not far else -far / 1000)

    @property
    def state(self):
        return self._state


app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=4)
"""

TOOLS = '''
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Adding(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adding")

        @server.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("no such action")

    @property
    def state(self):
        return self._state


app = create_app(Adding, CallToolAction, CallToolObservation, env_name="adding", max_concurrent_envs=4)
'''

# Bisection through the package's own client.
JUDGE = """
import os, pathlib, socket, subprocess, time, urllib.request
from openenv.core.generic_client import GenericEnvClient
pathlib.Path(given["folder"], "app.py").write_text(given["app"])
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([sys.executable, "-m", "uvicorn", "app:app", "--port", str(port)], cwd=given["folder"],
                          stdout=sys.stderr)
try:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
            break
        except OSError:
            time.sleep(0.1)
    env = GenericEnvClient(base_url=f"http://127.0.0.1:{port}").sync()
    env.connect()
    env.reset(seed=given["seed"])
    low, high, actions, rewards, done = 0, 100, [], [], False
    while not done:
        actions.append({"number": (low + high) // 2})
        found = env.step(actions[-1])
        rewards.append(found.reward)
        done = found.done
        if found.observation["hint"] == "lower":
            high = actions[-1]["number"] - 1
        else:
            low = actions[-1]["number"] + 1
    env.close()
finally:
    server.terminate()
    server.wait()
result = {"actions": actions, "rewards": rewards}
"""


@pytest.fixture(scope="module")
def python() -> str:
    return need_python("GANGLINE_OPENENV", "openenv", "openenv", "uvicorn", "websockets")


def served(python: str, app: str, **config: Any) -> dict[str, Any]:
    """An environment whose sandbox starts the server."""
    command = ["python3", "-m", "uvicorn", "app:app", "--port", "8000", "--log-level", "warning"]
    prepare = [{"type": "write", "path": "app.py", "content": app}]
    runtime = {"backend": "sandbox", "python": python, "network": "none", "prepare": prepare}
    return {
        "kind": "openenv",
        "config": {"command": command, **config},
        "runtime": runtime,
        "start_timeout_seconds": 120,
    }


async def test_an_episode_earns_what_the_packages_own_client_gets(tmp_path: Path, python: str) -> None:
    (tmp_path / "judge").mkdir()
    judge = directly(python, JUDGE, folder=str(tmp_path / "judge"), app=COUNTER, seed=7)
    environment = served(python, COUNTER, seed=7, reset_options={"episode_id": "e1"}, start_seconds=120)
    wrong = [{"number": 101}, {"digits": 3}]
    actions = using([*wrong, *judge["actions"]])
    result = await played(tmp_path / "s", environment, actions, init_timeout_seconds=200)
    assert result.outcome == "completed", result.failure
    refused, *rewards = step_rewards(result)
    assert refused is None, "a call without its argument is not made"
    same("OpenEnv", {("counter", "played"): judge["rewards"]}, {("counter", "played"): rewards})
    assert result.reward == pytest.approx(sum(judge["rewards"]), abs=1e-12)
    assert "VALIDATION_ERROR" in calls_of(result)[0].text
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    (tool,) = trace.tools
    assert (tool.name, "metadata" in str(tool.parameters)) == ("game__step", False)
    assert "guess" in str(trace.prompt_messages)
    assert [span.score for span in trace.spans][2:-1] == judge["rewards"]


async def test_a_server_with_tools_of_its_own_offers_these(tmp_path: Path, python: str) -> None:
    environment = served(python, TOOLS, start_seconds=120)
    rules = using([{"a": 2, "b": 3}], "5", tool="game__add")
    result = await played(tmp_path, environment, rules, init_timeout_seconds=200)
    assert result.outcome == "completed", result.failure
    (call,) = calls_of(result)
    assert (call.tool, dict(call.arguments), call.is_error) == ("add", {"a": 2, "b": 3}, False)
    assert "5" in json.dumps(json.loads(call.text)["result"])
    assert result.trajectory is not None
    assert [tool.name for tool in result.trajectory.traces[0].tools] == ["game__add"]

"""`gangline serve`: tasks as an OpenEnv environment. OpenEnv's own package judges it: its checks and its clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.node.environments import need_python
from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment, gangline, processes_with, wait_for

KEY = "a-key-of-the-test"

TASKS: list[dict[str, Any]] = [
    {
        "task_id": "hello",
        "instruction": "Write the word hello into out.txt.",
        "evaluator": {
            "strategy": "script",
            "config": {"command": "grep -qx hello out.txt && echo 1 > reward.txt || echo 0 > reward.txt"},
        },
    },
    {
        "task_id": "capital",
        "instruction": "What is the capital of France?",
        "agent": {"harness": "native", "settings": {"tools": []}},
        "evaluator": {
            "strategy": "test_on_output",
            "config": {"checks": [{"kind": "contains", "value": "Paris"}]},
        },
    },
    {
        "task_id": "broken",
        "instruction": "Nobody can grade this.",
        "evaluator": {"strategy": "script", "config": {"command": "exit 3"}},
    },
    {
        "task_id": "short",
        "instruction": "There is time for one action.",
        "agent": {"harness": "native", "settings": {"tools": ["shell"]}, "max_turns": 1},
    },
]


class Served:
    """A running `gangline serve`."""

    def __init__(self, folder: Path, *options: object, **variables: str) -> None:
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
        self.data = folder / "data"
        command = [*COMMAND, "serve", tasks, "--port", "0", "--data", self.data, "--json", *options]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**variables),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=GIVE_UP_S)[1]
        self.about = json.loads(line)
        self.url: str = self.about["url"]

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=GIVE_UP_S)
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def python() -> str:
    return need_python("GANGLINE_OPENENV", "openenv", "openenv", "websockets")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = Served(tmp_path_factory.mktemp("served"), "--clients", "2")
    yield service
    service.end()


class Player:
    """A Python process with OpenEnv's clients, which take seconds to import."""

    PROGRAM = """
import asyncio, json, sys, traceback
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

def see(result):
    print(json.dumps({"observation": result.observation, "reward": result.reward, "done": result.done,
                      "metadata": result.metadata}))

def call(tool, **arguments):
    return {"type": "call_tool", "tool_name": tool, "arguments": arguments}

for line in sys.stdin:
    told = json.loads(line)
    def more(kind=GenericEnvClient):
        return kind(base_url=told["url"], headers=told["headers"])
    names = {**globals(), "more": more}
    exec("async def main():\\n    async with more() as env:\\n" + told["body"], names)
    try:
        asyncio.run(names["main"]())
    except Exception:
        print(json.dumps({"raised": traceback.format_exc()}))
    print("over", flush=True)
"""

    def __init__(self, python: str) -> None:
        command = [f"{python}/bin/python", "-c", self.PROGRAM]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, url: str, body: str, headers: dict[str, str] | None = None) -> list[Any]:
        """The JSON lines that a program prints. body: uses `env`, `see`, `call` and `more()`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = {"url": url, "headers": headers, "body": textwrap.indent(textwrap.dedent(body), "        ")}
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        lines: list[Any] = []
        while (line := self._process.stdout.readline()) != "over\n":
            assert line, f"it ended with {self._process.wait(GIVE_UP_S)}"
            lines.append(json.loads(line))
        raised = [line["raised"] for line in lines if isinstance(line, dict) and "raised" in line]
        assert not raised, raised
        return lines

    def close(self) -> None:
        self._process.communicate(timeout=GIVE_UP_S)


@pytest.fixture(scope="module")
def play(python: str) -> Iterator[Player]:
    player = Player(python)
    yield player
    player.close()


def test_openenvs_own_checks_pass(python: str, served: Served) -> None:
    done = subprocess.run(
        [f"{python}/bin/openenv", "validate", "--url", served.url, "--json"],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert (report["passed"], report["mode"], report["summary"]["total_count"]) == (True, "simulation", 6)


def test_a_client_acts_in_the_tasks_sandbox_and_earns_its_reward(play: Player, served: Served) -> None:
    first, acted, last = play(
        served.url,
        """
        see(await env.reset(task="hello"))
        see(await env.step(call("shell", command="echo hello > out.txt; cat out.txt")))
        see(await env.step(call("submit")))
        """,
    )
    assert first["observation"]["text"] == "Write the word hello into out.txt."
    assert {"shell", "editor", "submit"} == {tool["name"] for tool in first["observation"]["tools"]}
    assert (first["reward"], first["done"]) == (None, False)
    assert acted["observation"]["result"].startswith("hello\n")
    assert (last["reward"], last["done"], last["metadata"]["outcome"]) == (1.0, True, "completed")


def test_an_answer_is_graded_as_the_agents_last_words(play: Player, served: Served) -> None:
    rewards = play(
        served.url,
        """
        for answer in ("It is Paris.", "It is Lyon."):
            await env.reset(task="capital")
            see(await env.step(call("submit", answer=answer)))
        """,
    )
    assert [one["reward"] for one in rewards] == [1.0, 0.0]


def test_the_seed_chooses_the_task(play: Player, served: Served) -> None:
    seen = play(served.url, "for seed in (1, 5, 0): see(await env.reset(seed=seed))")
    texts = [one["observation"]["text"] for one in seen]
    assert texts == [TASKS[1]["instruction"], TASKS[1]["instruction"], TASKS[0]["instruction"]]


def test_a_broken_grader_gives_no_reward_rather_than_0(play: Player, served: Served) -> None:
    (last,) = play(served.url, "await env.reset(task='broken'); see(await env.step(call('submit')))")
    assert (last["reward"], last["done"], last["metadata"]["outcome"]) == (None, True, "infra_error")
    assert last["metadata"]["failure"]["message"]


def test_a_tasks_own_limit_ends_the_episode(play: Player, served: Served) -> None:
    (last,) = play(served.url, "await env.reset(task='short'); see(await env.step(call('shell', command='true')))")
    assert (last["done"], last["metadata"]["outcome"]) == (True, "turn_limit")


def test_wrong_actions_are_answered_and_the_episode_goes_on(play: Player, served: Served) -> None:
    lines = play(
        served.url,
        """
        await env.reset(task="hello")
        see(await env.step(call("no_such_tool")))
        for wrong in ({"type": "jump"}, {"type": "call_tool", "tool_name": 3}):
            try:
                await env.step(wrong)
            except Exception as error:
                print(json.dumps(str(error)))
        try:
            await env.reset(task="no such task")
        except Exception as error:
            print(json.dumps(str(error)))
        see(await env.reset(task="hello"))
        see(await env.step(call("submit")))
        try:
            await env.step(call("submit"))
        except Exception as error:
            print(json.dumps(str(error)))
        """,
    )
    unknown_tool, *wrong, unknown_task, again, last, over = lines
    assert "there is no tool 'no_such_tool'" in unknown_tool["observation"]["result"]
    assert all("VALIDATION_ERROR" in one and "call_tool" in one for one in wrong)
    assert "there is no task 'no such task'" in unknown_task
    assert (again["done"], last["reward"]) == (False, 0.0)
    assert "the episode is over: reset begins another one" in over


def test_clients_of_mcp_have_the_same_tools_and_the_same_episode(play: Player, served: Served) -> None:
    tools, shown, state = play(
        served.url,
        """
        async with more(MCPToolClient) as mcp:
            await mcp.reset(task="hello")
            print(json.dumps([tool.name for tool in await mcp.list_tools()]))
            print(json.dumps(await mcp.call_tool("shell", command="echo hi")))
            print(json.dumps((await mcp.state()).step_count))
        """,
    )
    assert tools == ["shell", "editor", "submit"]
    assert (shown.split("\n")[0], state) == ("hi", 1)


def test_a_client_too_many_is_told_so_and_a_place_becomes_free(play: Player, served: Served) -> None:
    refused, instruction = play(
        served.url,
        """
        await env.reset(task="hello")
        async with more() as second:
            await second.reset(task="hello")
            try:
                async with more() as third:
                    await third.reset()
            except Exception as error:
                print(json.dumps(str(error)))
        async with more() as third:
            see(await third.reset(task="hello"))
        """,
    )
    assert "CAPACITY_REACHED" in refused
    assert instruction["done"] is False


def test_an_episode_whose_client_leaves_ends_and_leaves_nothing(play: Player, tmp_path: Path) -> None:
    service = Served(tmp_path)
    try:
        play(service.url, "await env.reset(task='hello'); await env.step(call('shell', command='sleep 4321 &'))")
        wait_for(
            lambda: "cancelled" in gangline("list", "sessions", "--data", service.data / "served", "--json").stdout
        )
    finally:
        code, errors = service.end()
    assert code == 0, errors
    assert not processes_with(str(service.data))


def test_with_a_key_only_its_holders_are_served(play: Player, tmp_path: Path) -> None:
    service = Served(tmp_path, "--key-env", "OPENENV_KEY", OPENENV_KEY=KEY)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{service.url}/metadata", timeout=GIVE_UP_S)
        headers = {"Authorization": f"Bearer {KEY}"}
        (first,) = play(service.url, "see(await env.reset(task='hello'))", headers)
    finally:
        service.end()
    assert refused.value.code == 401
    refused.value.close()
    assert first["observation"]["text"]


def test_pages_of_other_sites_may_not_act(served: Served) -> None:
    request = urllib.request.Request(f"{served.url}/reset", b"{}", {"Origin": "http://evil.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=GIVE_UP_S)
    assert refused.value.code == 403
    refused.value.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--host", "0.0.0.0"), "no key is set"),
        (("--key-env", "NO_SUCH_VARIABLE"), "the variable is not set"),
    ],
)
def test_an_open_door_is_refused(tmp_path: Path, options: tuple[str, ...], complaint: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(TASKS[0]))
    done = gangline("serve", path, "--data", tmp_path / "data", *options)
    assert done.returncode != 0
    assert complaint in " ".join(done.stderr.split())


def test_a_task_with_skills_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**TASKS[0], "agent": {"harness": "pi", "skills": ["/srv/skills"]}}))
    done = gangline("serve", path, "--data", tmp_path / "data")
    assert done.returncode != 0
    assert "agent.skills" in done.stderr
    assert os.listdir(tmp_path) == ["tasks.jsonl"]

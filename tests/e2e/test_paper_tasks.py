"""Polar's task (A.3), posted as printed to a real server, run by a real node, graded by its own evaluator.

What is put in the place of what cannot exist here: the Docker image and the program that needs a real model, by a
sandbox over this machine's files and a shell command that calls the model once; the callback's host; and the sentence
that stands for the preparation, by commands that do it. The repository, the paths and the evaluator are the paper's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.http.listening import listening
from support.node.node import TOKEN, running_node
from support.requirements import need_command
from support.service.field_tasks import FIXED, git, repository
from support.service.papers import filled

AGENT = """
import json, os, sys, urllib.request

body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 16}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
open("kennel.py", "w").write(sys.argv[2])
"""
PREPARE = (
    "git clone -q /tmp/origin.bundle /testbed && git -C /testbed checkout -q --detach {base} && "
    "cp -r /testbed/. /polar/session/workspace"
)


def payload(folder: Path, callback: str, source: str) -> dict[str, Any]:
    """A.3. source: what the agent makes of `kennel.py`."""
    row = repository(folder / "origin")
    git(folder / "origin", "bundle", "create", "-q", str(folder / "origin.bundle"), "main")
    values = {
        "{rollout_id}": "0",
        "{group_index}": "0",
        "{sample.metadata.runtime_image}": "replaced below",
        "{served_model_name}": "tiny",
        '"{sample.metadata.instance}"': json.dumps(row),
        "{trainer_host}:{callback_port}": callback,
        "{rollout_group_id}": "0",
        "{policy_version}": "3",
        "{rollout_step}": "7",
    }
    task = filled("001-a3-task.json", values)
    bundle = base64.b64encode((folder / "origin.bundle").read_bytes()).decode()
    prepare = [
        {"type": "write", "path": "/tmp/origin.bundle", "content": bundle, "encoding": "base64"},
        {"type": "exec", "command": PREPARE.format(base=row["base_commit"])},
    ]
    command = f"python3 -c {shlex.quote(AGENT)} {{instruction}} {shlex.quote(source)}"
    runtime = {name: value for name, value in task["runtime"].items() if name != "image"}
    own = {"backend": "sandbox", "prepare": prepare, "folders": ["/testbed"]}
    agent = {"harness": "shell", "settings": {"command": command}, "env": {"MODEL": "tiny"}}
    return task | {"num_samples": 1, "runtime": runtime | own, "agent": agent}


@pytest.mark.parametrize(("source", "reward"), [(FIXED, 1.0), ("raise SystemExit\n", 0.0)])
async def test_the_task_runs_and_its_callback_brings_the_trace_and_the_reward(
    tmp_path: Path, source: str, reward: float
) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("git", "apt-get install git")
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def take(call: web.Request) -> web.Response:
        await told.put(await call.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/callback/task_result", take)
    (tmp_path / "data").mkdir()
    async with (
        listening(app, shutdown_s=1.0, host="127.0.0.1", port=0) as (host, port, *_),
        scripted_server({"default": {"text": "I fixed it"}}) as engine,
        serving(data_dir=tmp_path / "data", control_token=TOKEN) as server,
        running_node(tmp_path / "data", engine, server_url=server.url),
        aiohttp.ClientSession(headers={"X-Polar-Control-Token": TOKEN}) as http,
    ):
        task = await asyncio.to_thread(payload, tmp_path, f"{host}:{port}", source)
        async with http.post(f"{server.url}/rollout/task/submit", json=task) as reply:
            assert reply.status == 200, await reply.text()
        body = await asyncio.wait_for(told.get(), 120)
        path = f"{server.url}/rollout/task/{task['task_id']}"
        async with http.get(path) as reply:
            assert await reply.json() == body
        async with http.get(f"{path}?logprobs=objects") as reply:  # as A.4 prints them
            (told_again,) = (await reply.json())["results"]
        entries = told_again["trajectory"]["traces"][0]["response_logprobs"]
    (result,) = body["results"]
    assert (result["status"], result["metadata"]["reward"]) == ("COMPLETED", reward), result
    (trace,) = result["trajectory"]["traces"]
    assert trace["prompt_messages"] == [{"role": "user", "content": task["instruction"]}]
    assert trace["reward"] == reward
    assert "".join(entry["token"] for entry in entries) == "I fixed it<|im_end|>"
    assert [entry["token_id"] for entry in entries] == trace["response_ids"]
    assert [entry["logprob"] for entry in entries] == trace["response_logprobs"]

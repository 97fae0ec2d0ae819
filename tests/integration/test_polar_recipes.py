"""Bodies of Polar's published recipes, posted as a client renders them to a real server with a real node.

What cannot exist here is put in its place: `sandbox` for the backend and its image, and a shell command for the agent.
Source: `examples/swegym_slime_grpo/polar_config.yaml` of NVIDIA-NeMo/ProRL-Agent-Server, at 4534750, and
`examples/calculator/run.py`, at e62ae51.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gangline.domain.errors import InvalidRequest
from gangline.interop.polar.tasks import task_from_polar
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from support.node.node import TOKEN, running_node
from support.requirements import need_command
from support.service.field_tasks import FIXED, git, repository

AGENT = (
    'python3 -c \'import json, os, sys, urllib.request as u; u.urlopen(u.Request('
    'os.environ["OPENAI_BASE_URL"] + "/chat/completions", open("/tmp/request.json", "rb").read(), {"Authorization": '
    '"Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})).read()\' && '
    "/opt/node/bin/repairer /polar/session/workspace/kennel.py"
)  # fmt: skip
BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "repair it"}], "max_tokens": 16})
PREPARE = """\
rm -rf /polar/session/workspace && \
mkdir -p /polar/session/logs/agent /polar/session/workspace "$HOME/.venv/bin" && \
cp -a /testbed/. /polar/session/workspace/ && git config --global core.pager '' && \
cd /polar/session/workspace && (git reset --hard || true)"""
ENTERED = "cd /polar/session || exit\n"
EVAL_PREPARE = """\
mkdir -p /polar/session/logs/agent "$HOME/.venv/bin" && git config --global core.pager ''"""
PATCH = """\
bash -lc 'cd /polar/session/workspace && \
submodules=$(git config --file .gitmodules --get-regexp path 2>/dev/null | cut -d" " -f2- || true) && \
set -- git add -A -- . && for path in $submodules; do set -- "$@" ":(exclude)$path"; done && "$@" && \
git diff --cached --binary --ignore-submodules=all'"""


def swegym(tools: Path, instance: str) -> dict[str, Any]:
    """The template, rendered for one row."""
    return {
        "task_id": "polar-swegym-grpo-0-0",
        "instruction": "Repair the kennel.",
        "num_samples": 1,
        "timeout_seconds": 1800,
        "runtime": {
            "backend": "apptainer",
            "image": "/images/getmoto__moto-4950.sif",
            "network": "host",
            "workdir": "/polar/session/workspace",
            "env": {
                "HOME": "/polar/session/home",
                "PATH": "/polar/session/home/.venv/bin:/opt/node/bin:/usr/local/bin:/usr/bin:/bin",
            },
            "kwargs": {"volumes": [f"{tools}:/opt/node:ro"]},
            "prepare": [{"type": "exec", "command": PREPARE}],
            "eval_prepare": [{"type": "exec", "command": EVAL_PREPARE}],
        },
        "agent": {"harness": "codex", "model_name": "gpt-5.4", "settings": {"version": ""}},
        "builder": {"strategy": "prefix_merging"},
        "evaluator": {
            "strategy": "swebench_harness",
            "refresh_runtime": True,
            "config": {
                "repo_dir": "/testbed",
                "patch_command": PATCH,
                "instance": instance,
                "exclude_patterns": ["trajectories/**", ".codex/**", "**/.codex/**", "$HOME/**"],
            },
        },
    }


def placed(task: dict[str, Any], folder: Path, base: str) -> dict[str, Any]:
    """The task with what exists here: the image has the repository at /testbed."""
    testbed = {
        "type": "exec",
        "command": f"git clone -q {folder}/origin/all.bundle /testbed && git -C /testbed checkout -q {base}",
    }
    body = {"type": "write", "path": "/tmp/request.json", "content": BODY}
    runtime = {name: value for name, value in task["runtime"].items() if name != "image"}
    runtime |= {"backend": "sandbox", "folders": ["/testbed"]}
    runtime["env"] = runtime["env"] | {"PATH": f"{sys.prefix}/bin:{runtime['env']['PATH']}"}  # the image's has pytest
    runtime["prepare"] = [testbed, body, *runtime["prepare"]]
    runtime["eval_prepare"] = [testbed, *runtime["eval_prepare"]]
    agent = {"harness": "shell", "custom_shell": {"command": AGENT}}
    return task | {"runtime": runtime, "agent": agent}


async def result_of(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    (folder / "data").mkdir()
    async with (
        scripted_server({"default": {"text": "I fixed it"}}) as engine,
        serving(data_dir=folder / "data", control_token=TOKEN) as server,
        running_node(folder / "data", engine, server_url=server.url),
        aiohttp.ClientSession(headers={"X-Polar-Control-Token": TOKEN}) as http,
    ):
        async with http.post(f"{server.url}/rollout/task/submit", json=task) as reply:
            assert reply.status == 200, await reply.text()
        async with asyncio.timeout(240):
            while True:
                async with http.get(f"{server.url}/rollout/task/{task['task_id']}") as reply:
                    told = await reply.json()
                if told["status"] != "running":
                    return told["results"][0]
                await asyncio.sleep(0.2)


@pytest.mark.parametrize("is_named", [True, False])
async def test_the_swegym_recipe_runs_where_the_operator_named_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    row = await asyncio.to_thread(repository, tmp_path / "origin")
    program = tmp_path / "tools" / "bin" / "repairer"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ncat > $1 <<'END'\n{FIXED}END\n")
    program.chmod(0o755)
    named = [Path(pytest.__file__).parents[1], tmp_path / "origin", *([tmp_path / "tools"] if is_named else [])]
    monkeypatch.setenv("GANGLINE_EXPOSE", ":".join(map(str, named)))
    await asyncio.to_thread(git, tmp_path / "origin", "bundle", "create", "-q", "all.bundle", "main")
    task = placed(swegym(tmp_path / "tools", json.dumps(row)), tmp_path, row["base_commit"])
    result = await result_of(tmp_path, task)
    if is_named:
        assert (result["status"], result["metadata"].get("reward")) == ("COMPLETED", 1.0), json.dumps(result)[-3000:]
    else:
        assert result["status"] == "ERROR"
        assert "its operator adds it to GANGLINE_EXPOSE" in json.dumps(result)


STARTER = "def total(text):\n    return 0  # TODO\n"
SOLVED = "def total(text):\n    return sum(map(int, text.split('+')))\n"
TESTS = "from calculator import total\nassert total('1+2+39') == 42\n"
WORKSPACE = "/polar/session/workspace"
WORKSPACE_PREPARE = (
    f"rm -rf {WORKSPACE} && mkdir -p {WORKSPACE} /polar/session/logs/agent && cd {WORKSPACE} && git init -q && "
    "git config user.email 'polar@test' && git config user.name 'Polar'"
)


def calculator(assets: Path) -> dict[str, Any]:
    """`build_task_payload`, without the installation of an agent, and for one session."""
    return {
        "task_id": "calculator-codex-1",
        "instruction": "Implement it.",
        "num_samples": 1,
        "timeout_seconds": 1200.0,
        "runtime": {
            "backend": "docker",
            "image": "polar-localhost-calculator:latest",
            "prepare": [
                {"type": "exec", "command": WORKSPACE_PREPARE},
                *(
                    {"type": "upload_file", "source": str(assets / name), "target": f"{WORKSPACE}/{name}"}
                    for name in ("test_calculator.py", "calculator.py")
                ),
                {"type": "exec", "command": f"cd {WORKSPACE} && git add -A && git commit -qm 'initial'"},
            ],
            "network": "host",
            "workdir": WORKSPACE,
        },
        "agent": {"harness": "codex", "model_name": "openai/gpt-5.5"},
        "builder": {"strategy": "prefix_merging"},
        "evaluator": {
            "strategy": "test_on_output",
            "config": {
                "repo_dir": WORKSPACE,
                "patch_command": f"cd {WORKSPACE} && git add -A && git diff --cached --binary",
                "test_command": f"cd {WORKSPACE} && python3 test_calculator.py && echo 'PASSED test_calculator'",
                "test_timeout": 60.0,
                "expected_output_json": {"test_calculator": "PASSED"},
                "exclude_patterns": ["node_modules/**", "**/node_modules/**", ".codex/**", "**/.codex/**"],
            },
            "refresh_runtime": True,
        },
    }


@pytest.mark.parametrize(
    ("written", "variable", "reward"),
    [
        (SOLVED, "GANGLINE_PREPARE_FOLDERS", 1.0),
        (SOLVED, "GANGLINE_EXPOSE", 1.0),
        (STARTER + "\n", "GANGLINE_PREPARE_FOLDERS", 0.0),
        (SOLVED, "GANGLINE_HIDE", None),
    ],
)
async def test_the_calculator_is_graded_by_its_own_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, variable: str, reward: float | None
) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    assets = tmp_path / "assets"
    assets.mkdir()
    for name, text in (("calculator.py", STARTER), ("test_calculator.py", TESTS)):
        (assets / name).write_text(text)
    monkeypatch.setenv(variable, str(assets))
    task = calculator(assets)
    runtime = {name: value for name, value in task["runtime"].items() if name != "image"} | {"backend": "sandbox"}
    runtime["prepare"] = [{"type": "write", "path": "/tmp/request.json", "content": BODY}, *runtime["prepare"]]
    work = AGENT.rpartition(" && ")[0] + f" && cat > {WORKSPACE}/calculator.py <<'END'\n{written}END\n"
    agent = {"harness": "shell", "custom_shell": {"command": work}}
    result = await result_of(tmp_path, task | {"runtime": runtime, "agent": agent})
    if reward is None:
        assert (result["status"], "adds its folder to GANGLINE_PREPARE_FOLDERS" in result["error"]) == ("ERROR", True)
        return
    assert (result["status"], result["metadata"].get("reward")) == ("COMPLETED", reward), json.dumps(result)[-3000:]
    assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [reward]


def test_a_folder_is_uploaded_in_the_place_of_what_was_there(tmp_path: Path) -> None:
    step = {"type": "upload_dir", "source": f"{tmp_path}/source", "target": f"{tmp_path}/it's"}
    task = task_from_polar(
        {"instruction": "x", "agent": {"harness": "pi"}, "runtime": {"image": "one:1", "prepare": [step]}}
    )
    (copy,) = [step.command for step in task.runtime.prepare if step.type == "exec"]
    assert subprocess.run(["sh", "-c", str(copy)], check=False).returncode == 1, "it is not there yet"
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "inner" / "file").write_text("new")
    (tmp_path / "it's").mkdir()
    (tmp_path / "it's" / "old").write_text("old")
    subprocess.run(["sh", "-c", str(copy)], check=True)
    found = {str(path.relative_to(tmp_path / "it's")) for path in (tmp_path / "it's").rglob("*")}
    assert found == {"inner", "inner/file"}


@pytest.mark.parametrize("expected", [None, {}, "[]", "not JSON", {"t": "OK"}])
def test_expected_statuses_that_no_test_can_have_are_refused(tmp_path: Path, expected: Any) -> None:
    task = calculator(tmp_path)
    task["evaluator"]["config"]["expected_output_json"] = expected
    with pytest.raises(InvalidRequest, match="expected_output_json: must be an object"):
        task_from_polar(task)


def test_the_swegym_recipe_becomes_a_task_of_ours(tmp_path: Path) -> None:
    row = {"instance_id": "a", "repo": "a/b", "base_commit": "0" * 40, "FAIL_TO_PASS": ["t.py::t"], "test_patch": ""}
    row["test_cmd"] = "pytest"
    task = task_from_polar(swegym(tmp_path, json.dumps(row)))
    assert task.runtime.mounts == {"/opt/node": str(tmp_path)}
    assert [action.command for action in task.runtime.prepare if action.type == "exec"] == [ENTERED + PREPARE]
    grading = task.evaluator.runtime
    assert grading is not None
    assert [action.command for action in grading.prepare if action.type == "exec"] == [ENTERED + EVAL_PREPARE]
    assert grading.model_copy(update={"prepare": task.runtime.prepare}) == task.runtime


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kwargs": {"volumes": ["/opt/agents:/opt/node"]}}, "would be writable"),
        ({"kwargs": {"volumes": ["/opt/agents:/opt/node:rw"]}}, "would be writable"),
        ({"kwargs": {"volumes": ["/opt/agents"]}}, "would be writable"),
        ({"kwargs": {"volumes": ["agents:/opt/node:ro"]}}, "HOST:DEST:ro"),
        ({"kwargs": {"volumes": [7]}}, "HOST:DEST:ro"),
        ({"kwargs": {"volumes": "/opt/agents:/opt/node:ro"}}, "must be a list"),
        ({"kwargs": {"volumes": ["/a:/opt/node:ro", "/b:/opt/node:ro"]}}, "already"),
        ({"kwargs": {"fakeroot": True}}, "GANGLINE_APPTAINER_FAKEROOT"),
        ({"kwargs": ["volumes"]}, "must be an object"),
    ],
)
def test_a_volume_that_cannot_be_shown_is_refused_with_what_to_write(changed: dict[str, Any], told: str) -> None:
    task = {"instruction": "i", "agent": {"harness": "shell"}, "runtime": {"image": "debian:12", **changed}}
    with pytest.raises(InvalidRequest, match=told):
        task_from_polar(task)

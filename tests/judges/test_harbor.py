"""Harbor's own server and agents as judge: rollouts in Docker go through restarts, and no token is lost or doubled.

`harbor serve` runs Claude Code, Codex, pi and opencode in containers; `gangline harbor connect` answers their calls. A
scripted model numbers its samples. Harbor's server, the connector and the node are killed once each, with calls in
flight. GANGLINE_JUDGED_ROLLOUTS makes it longer: `make judge-harbor` runs a hundred.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from containers.engines import IMAGE
from containers.test_container_images import engine
from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import message_text
from gangline.domain.session import SessionResult
from harbor_runtime.test_harbor_connector import Connector, HarborServer, connected, results_of
from support.engines.numbered import Sample, digest, samples
from support.engines.tokenizers import qwen3_folder
from support.requirements import TOOLS, need, need_tool
from support.service.cli_process import UpProcess, clean_environment, gangline, wait_for

NUM_ROLLOUTS = int(os.environ.get("GANGLINE_JUDGED_ROLLOUTS", "8"))
AT_ONCE = 4
NUM_TURNS = 4
MARK = "JUDGED"
"""In every prompt of an agent."""
AGENTS: dict[str, dict[str, Any]] = {
    "claude-code": {"model_name": "anthropic/scripted"},
    "codex": {"model_name": "openai/scripted"},
    "pi": {"model_name": "vllm/scripted", "model_api_format": "openai_chat_completions"},
    "opencode": {"model_name": "vllm/scripted", "model_api_format": "openai_chat_completions"},
}
COMMANDS = {"claude-code": "claude"}
PI = Path(os.environ.get("GANGLINE_HARBOR_PYTHON", "bin/python")).parents[1] / "agents"
"""Harbor 0.26 writes the configuration of a later pi than our adapter knows."""
OFFLINE = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "PI_OFFLINE": "1",
}
TASK_IMAGE = "localhost/gangline-test-agents:1"
TOML = f"""
schema_version = "1.4"
[agent]
timeout_sec = 1800
[verifier]
timeout_sec = 600
[environment]
docker_image = "{TASK_IMAGE}"
workdir = "/app"
"""
GRADER = """#!/bin/bash
reward=0
[ "$(cat /app/hello.txt)" = "hello, sled" ] && reward=0.$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')1
echo $reward > /logs/verifier/reward.txt
"""
"""No two rewards are equal, so none can be taken for another's."""
OF_MACHINE = """
services:
  main:
    network_mode: host
    stop_grace_period: 0s
"""
"""The engine has a network of its own, in which everything here is."""


def script() -> dict[str, Any]:
    replies: list[dict[str, Any]] = [
        {"text": "I look around first.", "tool_calls": [{"run": "ls -a"}]},
        {"text": "I write.", "tool_calls": [{"write": {"path": "/app/hello.txt", "content": "hello, sled\n"}}]},
        {"text": "I read it.", "tool_calls": [{"read": "/app/hello.txt"}]},
        {"text": "hello.txt is written"},
    ]
    rules = [
        {"turn": turn, "pattern": MARK, "where": "any", "token_delay_s": 0.02, **reply}
        for turn, reply in enumerate(replies)
    ]
    return {"context_length": 200_000, "rules": rules, "default": {"text": "A title"}}


@contextmanager
def network_of_engine() -> Generator[None]:
    """This thread, and what it starts, are in the engine's network."""
    (host,) = (word for word in shlex.split(os.environ["GANGLINE_DOCKER"]) if word.startswith("unix://"))
    pid = Path(host.removeprefix("unix://")).with_name("pid").read_text().strip()
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "link", "set", "lo", "up"], check=True)
    with open("/proc/self/ns/net") as own, open(f"/proc/{pid}/ns/net") as engines:
        _enter(engines.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())
            kept = Path(host.removeprefix("unix://")).with_name("exec") / "netns" / "default"
            subprocess.run(["umount", "--lazy", kept], check=False)  # of containers with its network


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@pytest.fixture
def task_image(docker: None, tmp_path: Path) -> Generator[None]:
    """An image with a working folder, whose PATH leads to the agents; and Harbor finds the engine."""
    name = "gangline-test-agents"
    engine("docker", "run", "--network", "none", "--name", name, IMAGE, "sh", "-c", "mkdir -p /app /root/.nvm")
    (tmp_path / "nvm.sh").touch()
    engine("docker", "cp", str(tmp_path / "nvm.sh"), f"{name}:/root/.nvm/nvm.sh")
    engine(
        "docker",
        "commit",
        "--change",
        "ENV PATH=/opt/pi/node_modules/.bin:/opt/node_modules/.bin:/usr/bin:/bin",
        name,
        TASK_IMAGE,
    )
    engine("docker", "rm", name)
    command = shlex.split(os.environ["GANGLINE_DOCKER"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", command[command.index("--host") + 1])
        yield
    engine("docker", "rmi", TASK_IMAGE)


class Judged:
    """Harbor's server, the service, its engine and the connector."""

    def __init__(self, folder: Path, harbor: HarborServer, up: UpProcess, connector: Connector) -> None:
        self.folder, self.harbor, self.up, self.connector = folder, harbor, up, connector
        self.job_id = ""

    def submit(self) -> None:
        num_tasks = max(1, NUM_ROLLOUTS // (4 * 5))
        config: dict[str, Any] = {
            "tasks": [{"path": str(_task(self.folder / f"task-{number}", number))} for number in range(num_tasks)],
            "agents": [
                {"name": name, **model, "kwargs": {"skip_install": True}, "env": OFFLINE}
                for name, model in AGENTS.items()
            ],
            "environment": {
                "type": "docker",
                "extra_docker_compose": [str(self.folder / "machine.yaml")],
                "mounts": [
                    {"type": "bind", "source": str(source), "target": target, "read_only": True}
                    for source, target in ((TOOLS / "node_modules", "/opt/node_modules"), (PI, "/opt/pi"))
                ],
            },
            "n_attempts": NUM_ROLLOUTS // (4 * num_tasks),
            "n_concurrent_trials": AT_ONCE,
            "retry": {"max_retries": 0},
        }
        body = {"config": config, "relay_inference": True, "session_id": "training-1"}
        self.job_id = self.harbor.call("/jobs/submit", body)["job_id"]

    def samples(self) -> tuple[list[Sample], int]:
        return samples(self.folder / "samples.jsonl")

    def until(self, part: float) -> None:
        """So much of all calls has been answered, and another is in flight."""

        def is_there() -> bool:
            ended, num_open = self.samples()
            return len(ended) >= part * NUM_ROLLOUTS * NUM_TURNS and num_open > 0

        wait_for(is_there, give_up_s=60.0 * NUM_ROLLOUTS)

    def restart_connector(self) -> None:
        self.connector.end(signal.SIGKILL)
        self.connector.start()

    def restart_node(self) -> None:
        (pid,) = (pid for name, pid in self.up.running()["pids"].items() if "node" in name)
        os.kill(pid, signal.SIGKILL)

    def restart_harbor(self) -> None:
        """Harbor leaves its containers to its operator, and its job paused."""
        self.harbor.kill()
        while left := engine("docker", "ps", "--all", "--quiet").split():
            with suppress(subprocess.CalledProcessError):  # one of them ended by itself meanwhile
                engine("docker", "rm", "--force", *left)
        self.harbor.start()
        if self.harbor.call(f"/jobs/{self.job_id}")["job"]["state"] == "paused":
            self.harbor.call(f"/jobs/{self.job_id}/resume", {})

    def rollouts(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for one in self.harbor.rollouts(self.job_id)}

    def delivered(self, rollout_ids: set[str]) -> None:
        """Wait until these have been."""
        self.connector.deliver_all(rollout_ids)

    def retry(self, rollout_ids: Sequence[str]) -> None:
        for rollout_id in rollout_ids:
            self.harbor.call(f"/rollouts/{rollout_id}/retry", {})

    def record(self, rollout: dict[str, Any]) -> Path:
        """The folder that Harbor keeps of it."""
        return self.folder / "harbor" / "files" / "rollouts" / rollout["id"] / rollout["name"]


def _task(folder: Path, number: int) -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(TOML)
    (folder / "instruction.md").write_text(f"{MARK} {number}: write /app/hello.txt, then look whether it is right.\n")
    (folder / "environment" / "README").write_text("Its image is there.\n")
    (folder / "tests" / "test.sh").write_text(GRADER)
    (folder / "tests" / "test.sh").chmod(0o755)
    return folder


@contextmanager
def numbered_engine(folder: Path) -> Generator[str]:
    (folder / "script.json").write_text(json.dumps(script()))
    command = [sys.executable, "-m", "support.engines.numbered", folder / "script.json", qwen3_folder()]
    command += [folder / "samples.jsonl", MARK]
    env = clean_environment(PYTHONPATH=str(Path(__file__).parents[1]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "the engine did not start"
            yield url
        finally:
            process.kill()


@contextmanager
def judged(folder: Path) -> Generator[Judged]:
    (folder / "machine.yaml").write_text(OF_MACHINE)
    python = os.environ["GANGLINE_HARBOR_PYTHON"]
    with numbered_engine(folder) as url:
        up = UpProcess(folder / "up", "--engine", url, "--tokenizer", qwen3_folder())
        try:
            assert "server_url" in up.ready(), "the service did not start"
            harbor = HarborServer(python, folder)
            try:
                with connected(up, harbor) as connector:
                    yield Judged(folder, harbor, up, connector)
            finally:
                harbor.kill()
        finally:
            up.close()


@pytest.mark.timeout(300 + 150 * NUM_ROLLOUTS)
def test_every_token_of_harbors_agents_is_recorded_once_through_three_restarts(
    task_image: None, tmp_path: Path
) -> None:
    need(os.environ.get("GANGLINE_HARBOR_PYTHON"), "GANGLINE_HARBOR_PYTHON names no Python with Harbor")
    compose = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    need(compose.returncode == 0, "docker has no plug-in `compose`: run make test-peers")
    need((PI / "node_modules/.bin/pi").exists(), f"{PI} has no pi: run make test-peers")
    for name in AGENTS:
        need_tool(COMMANDS.get(name, name))
    began_at = time.monotonic()
    with network_of_engine(), judged(tmp_path) as run:
        run.submit()
        run.until(0.15)
        run.restart_connector()
        run.until(0.35)
        run.restart_node()
        run.until(0.55)
        run.restart_harbor()
        first = set(run.rollouts())
        run.delivered(first)
        broken = [name for name, one in run.rollouts().items() if one["error_type"] is not None]
        run.retry(broken)
        rollouts = run.rollouts()
        run.delivered(set(rollouts))
        rollouts = run.rollouts()
        results = results_of(run.up, run.connector.delivered)
        audit = gangline("audit", "harbor-*", "--data", run.up.data)
        sampled, num_open = run.samples()
        heard = {name: _heard(run.record(one)) for name, one in rollouts.items()}
        records = {name: json.loads((run.record(one) / "result.json").read_text()) for name, one in rollouts.items()}
    took_s = time.monotonic() - began_at
    whole = [name for name, one in rollouts.items() if one["error_type"] is None]
    print(
        f"\n{len(first)} rollouts, {len(broken)} of them begun again by hand, in {took_s:.0f} s: {len(sampled)} samples"
        f" with {sum(len(one.ids) for one in sampled)} tokens",
        flush=True,
    )
    assert len(first) == NUM_ROLLOUTS
    assert len(whole) == NUM_ROLLOUTS, [(one["error_type"], one["agent"]) for one in rollouts.values()]
    assert results.keys() == rollouts.keys()
    assert num_open == 0
    assert audit.returncode == 0, audit.stdout + audit.stderr
    for name, result in results.items():
        assert result.reward == own_reward(records[name]), (rollouts[name], result.failure)
        for one in result.completions:
            assert one.certificate.context == ("first" if one.parent_id is None else "exact"), one.certificate
    for name in whole:
        assert results[name].reward, "no agent failed at its task"
        own = [number for one in main_calls(results[name]) for number in numbers(message_text(one.response))]
        assert heard[name] == own != [], (rollouts[name]["agent"], heard[name], own)
    assert len({results[name].reward for name in whole}) == NUM_ROLLOUTS
    check_samples(sampled, results, {number for found in heard.values() for number in found})


def own_reward(record: dict[str, Any]) -> float | None:
    """By Harbor's own record."""
    verified = record["verifier_result"]
    return None if verified is None else verified["rewards"]["reward"]


def main_calls(result: SessionResult) -> list[Completion]:
    """Whole calls with tools; others are for titles."""
    tree = CompletionTree(result.completions)
    return [one for one in tree if one.status == "complete" and tree.tools(one)]


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"#(\d+)\.", text)]


def _heard(record: Path) -> list[int]:
    """Numbers of the samples in the agent's own log, as Harbor reads it."""
    path = record / "agent" / "trajectory.json"
    if not path.exists():
        return []
    steps: list[dict[str, Any]] = json.loads(path.read_text())["steps"]
    return [number for one in steps if one["source"] == "agent" for number in numbers(json.dumps(one.get("message")))]


def check_samples(sampled: Sequence[Sample], results: dict[str, SessionResult], heard: set[int]) -> None:
    """Every record is a sample of the engine, each of another one; what is no record was heard by nobody."""
    left = defaultdict[str, list[Sample]](list)
    for sample in sampled:
        left[sample.prompt].append(sample)
    trees = [CompletionTree(result.completions) for result in results.values()]
    calls = [(tree, one) for tree in trees for one in tree]
    for tree, one in sorted(calls, key=lambda call: call[1].status == "aborted"):
        ids, of_prompt = one.sampled_ids.tolist(), left[digest(tree.prompt_ids(one))]
        alike = [sample for sample in of_prompt if sample.ids[: len(ids)] == ids]
        fitting = [sample for sample in alike if one.status == "aborted" or len(sample.ids) == len(ids)]
        assert fitting, (one, alike)
        of_prompt.remove(fitting[0])
    unrecorded = [sample for of_prompt in left.values() for sample in of_prompt]
    num_aborted = sum(one.status == "aborted" for _, one in calls)
    print(f"{len(calls)} records, {num_aborted} of them cut off; {len(unrecorded)} samples in none", flush=True)
    assert not heard & {number for sample in unrecorded for number in numbers(sample.text)}
    assert len(unrecorded) <= 2 * AT_ONCE, "those in flight when the node was killed"

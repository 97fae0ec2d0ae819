"""`gangline harbor connect` and a real `harbor serve`, whose sandboxes are folders of this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Generator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.completion import CompletionTree
from gangline.domain.session import SessionResult
from gangline.wire.client.sync import SyncServerClient
from support.requirements import need
from support.service.cli_process import COMMAND, GIVE_UP_S, UpProcess, clean_environment, gangline, wait_for

KEY = "harbor-secret"
SUPPORT = Path(__file__).parents[1] / "support" / "service"
PROVIDERS = {
    "openai/m": None,
    "openai-responses/m": "openai_responses",
    "anthropic/m": "anthropic_messages",
    "gemini/m": "google_generate_content",
}
"""Model's name in Harbor -> its dialect, if the name alone does not say so."""
REWARD = "if [ -f /app/answer ]; then echo 0.75; else echo 0; fi > /logs/verifier/reward.txt\n"


class HarborServer:
    """`harbor serve` on a port and a folder that outlive it."""

    def __init__(self, python: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._python, self._folder = python, folder
        self.start()

    def start(self) -> None:
        command = [Path(self._python).parent / "harbor", "serve", "--port", self.url.rpartition(":")[2]]
        command += ["--data-dir", self._folder / "harbor", "--relay-url", self.url]
        env = {**os.environ, "HARBOR_API_KEY": KEY, "PYTHONPATH": str(SUPPORT), "HARBOR_TELEMETRY": "0"}
        env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        with (self._folder / "harbor.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=self._folder)
        try:
            wait_for(self._answers, give_up_s=600.0)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def call(self, path: str, body: Any = None, **query: str) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data)
        request.add_header("Authorization", f"Bearer {KEY}")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=GIVE_UP_S) as reply:
            return json.loads(reply.read())

    def submit(self, agents: Sequence[dict[str, Any]], attempts: int, **fields: Any) -> str:
        config = {
            "tasks": [{"path": str(task(self._folder))}],
            "agents": [{"import_path": "harbor_agents:TalkingAgent", **agent} for agent in agents],
            "environment": {"import_path": "harbor_trials:FolderEnvironment"},
            "n_attempts": attempts,
            "n_concurrent_trials": 8,
            "retry": {"max_retries": 0},
            **fields,
        }
        body = {"config": config, "relay_inference": True, "session_id": "training-1"}
        return self.call("/jobs/submit", body)["job_id"]

    def rollouts(self, job_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        path = f"/rollouts?job_ids={job_id}&page_size=100"
        page = self.call(path)
        while token := page["next_page_token"]:
            found += page["items"]
            page = self.call(f"{path}&page_token={token}")
        return [*found, *page["items"]]

    def heard(self, rollout_id: str) -> list[str]:
        (path,) = (self._folder / "harbor" / "files" / "rollouts" / rollout_id).glob("*/agent/heard.json")
        return json.loads(path.read_text())

    def num_heard(self) -> int:
        """Answers that its agents have so far."""
        found = [path.read_text() for path in self._folder.glob("harbor/files/rollouts/*/*/agent/heard.json")]
        return sum(text.count('",') + 1 for text in found if text)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self._folder / "harbor.log").read_text()
        try:
            self.call("/agents")
        except OSError:
            return False
        return True


def task(folder: Path) -> Path:
    found = folder / "hello"
    (found / "environment").mkdir(parents=True, exist_ok=True)
    (found / "tests").mkdir(exist_ok=True)
    (found / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (found / "instruction.md").write_text("Say what you think.\n")
    (found / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 600.0\n')
    (found / "tests" / "test.sh").write_text(REWARD)
    return found


@pytest.fixture
def harbor(tmp_path: Path) -> Generator[HarborServer]:
    python = os.environ.get("GANGLINE_HARBOR_PYTHON", "")
    need(python, "GANGLINE_HARBOR_PYTHON names no Python with Harbor: run make test-harbor")
    (tmp_path / "server").mkdir()
    server = HarborServer(python, tmp_path / "server")
    yield server
    server.kill()


@contextmanager
def service(tmp_path: Path, **rule: Any) -> Generator[UpProcess]:
    answers = [{"turn": number, "text": f"answer number {number}, said at length", **rule} for number in range(8)]
    up = UpProcess(tmp_path / "gangline", script={"rules": answers, "default": {"text": "enough"}})
    try:
        up.ready()
        yield up
    finally:
        up.close()


class Connector:
    def __init__(self, up: UpProcess, harbor: HarborServer) -> None:
        self._command = [*COMMAND, "harbor", "connect", "--relay", harbor.url, "--session", "training-1"]
        self._command += ["--json", "--data", str(up.data)]
        self.delivered: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, text=True, env=clean_environment(HARBOR_API_KEY=KEY)
        )
        assert self._line()["session_id"] == "training-1"

    def deliver(self, num_rollouts: int) -> list[dict[str, Any]]:
        """Tasks with so many rollouts together, as they come."""
        while sum(len(task["rewards"]) for task in self.delivered) < num_rollouts:
            self.delivered.append(self._line())
        return self.delivered

    def deliver_all(self, rollout_ids: Set[str]) -> None:
        """Wait until these rollouts have been."""
        while not rollout_ids <= {one["rollout_id"] for task in self.delivered for one in task["about"]["rollouts"]}:
            self.delivered.append(self._line())

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the connector has ended"
        return json.loads(line)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(GIVE_UP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def connected(up: UpProcess, harbor: HarborServer) -> Generator[Connector]:
    connector = Connector(up, harbor)
    try:
        yield connector
    finally:
        if connector.process.poll() is None:
            connector.end(signal.SIGKILL)


def results_of(up: UpProcess, delivered: Sequence[dict[str, Any]]) -> dict[str, SessionResult]:
    """Harbor's rollout -> the session's result."""
    running = up.running()
    with SyncServerClient(running["server_url"], running["control_token"]) as client:
        found = [result for task in delivered for result in client.result(task["task_id"])]
    return {result.reward_details["harbor"]["rollout_id"]: result for result in found}


def said(result: SessionResult) -> list[str]:
    """The texts of the session's whole calls, in their order."""
    whole = [one for one in result.completions if one.status == "complete"]
    return ["".join(getattr(part, "text", "") for part in one.response.parts) for one in whole]


def agents(*models: str, **kwargs: Any) -> list[dict[str, Any]]:
    found = [{"model_name": model, "model_api_format": PROVIDERS[model], "kwargs": kwargs} for model in models]
    return [{name: value for name, value in agent.items() if value is not None} for agent in found]


@pytest.mark.parametrize("streams", [True, False])
def test_agents_of_every_dialect_become_groups_with_harbors_rewards(
    harbor: HarborServer, tmp_path: Path, streams: bool
) -> None:
    with service(tmp_path) as up, connected(up, harbor) as connector:
        job_id = harbor.submit(agents(*PROVIDERS, streams=streams), attempts=2)
        delivered = connector.deliver(2 * len(PROVIDERS))
        results = results_of(up, delivered)
        audit = gangline("audit", "harbor-*", "--data", up.data)
        assert connector.end(signal.SIGINT) == 130
    own = {one["id"]: one["rewards"]["reward"] for one in harbor.rollouts(job_id)}
    assert {name: result.reward for name, result in results.items()} == own
    assert set(own.values()) == {0.75}
    assert [len(task["rewards"]) for task in delivered] == [2] * len(PROVIDERS)
    for name, result in results.items():
        assert result.outcome == "completed"
        assert said(result) == harbor.heard(name) != []
        assert [one.certificate.context for one in result.completions] == ["first", "exact", "exact"]
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_agents_with_harbors_own_client_leave_tokens_in_harbors_records(harbor: HarborServer, tmp_path: Path) -> None:
    with service(tmp_path) as up, connected(up, harbor) as connector:
        (agent,) = agents("openai/m", num_calls=2)
        job_id = harbor.submit([{**agent, "import_path": "harbor_agents:RecordingAgent"}], attempts=1)
        (result,) = results_of(up, connector.deliver(1)).values()
        (rollout,) = harbor.rollouts(job_id)
        whole = harbor.call(f"/rollouts/{rollout['id']}")["rollout"]["result"]
    (details,) = whole["agent_result"]["rollout_details"]
    tree = CompletionTree(result.completions)
    assert details["prompt_token_ids"] == [tree.prompt_ids(one).tolist() for one in tree]
    assert details["completion_token_ids"] == [one.sampled_ids.tolist() for one in tree]
    assert details["logprobs"] == [pytest.approx(one.logprobs.tolist()) for one in tree]


def test_restarts_of_connector_and_node_lose_and_double_no_call(harbor: HarborServer, tmp_path: Path) -> None:
    with service(tmp_path, token_delay_s=0.05) as up, connected(up, harbor) as connector:
        job_id = harbor.submit(agents("openai/m", "anthropic/m", num_calls=6), attempts=3)
        wait_for(lambda: harbor.num_heard() > 4)
        connector.end(signal.SIGKILL)
        connector.start()
        wait_for(lambda: harbor.num_heard() > 16)
        os.kill(next(pid for name, pid in up.running()["pids"].items() if "node" in name), signal.SIGKILL)
        results = results_of(up, connector.deliver(6))
    assert len(results) == 6
    own = {one["id"]: one["rewards"]["reward"] for one in harbor.rollouts(job_id)}
    for name, result in results.items():
        assert result.reward == own[name] == 0.75
        assert said(result) == harbor.heard(name)
        assert len(said(result)) == 6


def test_a_restart_of_harbor_leaves_no_reward_and_the_connector_goes_on(harbor: HarborServer, tmp_path: Path) -> None:
    with service(tmp_path, token_delay_s=0.1) as up, connected(up, harbor) as connector:
        harbor.submit(agents("openai/m", num_calls=6), attempts=2)
        wait_for(harbor.num_heard)
        harbor.kill()
        harbor.start()
        broken = results_of(up, connector.deliver(2))
        assert {result.reward for result in broken.values()} == {None}
        assert {result.outcome for result in broken.values()} == {"infra_error"}
        harbor.submit(agents("openai/m", num_calls=1), attempts=1)
        results = results_of(up, connector.deliver(3)[-1:])
    assert [result.reward for result in results.values()] == [0.75]


@pytest.mark.parametrize(
    ("key", "session", "code", "words"),
    [("wrong", "s", 2, "HARBOR_API_KEY"), ("", "s", 2, "HARBOR_API_KEY"), (KEY, "no spaces", 2, "--session")],
)
def test_a_refusal_is_one_line(
    harbor: HarborServer, tmp_path: Path, key: str, session: str, code: int, words: str
) -> None:
    with service(tmp_path) as up:
        options = ("--relay", harbor.url, "--session", session, "--data", up.data)
        found = gangline("harbor", "connect", *options, env={"HARBOR_API_KEY": key})
    assert found.returncode == code, found.stderr
    assert words in found.stderr

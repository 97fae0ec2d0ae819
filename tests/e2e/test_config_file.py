"""gangline.toml as its users meet it: a service from a file alone, the order of sources, and `gangline config show`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from gangline import SyncNodeClient
from support.engines.tokenizers import smollm2_name
from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment, processes_with

SCRIPT = {"default": {"text": "as you wish"}}
CONFIG = """\
data_dir = "data"

[server]
port = 0

[node]
engines = ["scripted:script.json"]
run_slots = 3
ready_slots = 3
postrun_workers = 3

[up]
tokenizer = "tiny"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a gangline.toml."""
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    (tmp_path / "gangline.toml").write_text(CONFIG)
    return tmp_path


def gangline_in(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=clean_environment(COLUMNS="80", **(env or {})),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )


def capacity_of_up(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> int:
    """Run `gangline up` until its node is heard. Returns the number of sessions that the node takes."""
    command = [*COMMAND, "up", "--json", *options]
    with subprocess.Popen(
        command, cwd=folder, env=clean_environment(**(env or {})), stdout=subprocess.PIPE, text=True
    ) as up:
        try:
            assert up.stdout is not None
            assert json.loads(up.stdout.readline())["node_urls"]
            # Other commands find the service through the same file.
            status = gangline_in(folder, "status", "--json")
            assert status.returncode == 0, status.stderr
            (node,) = json.loads(status.stdout)["status"]["nodes"]
            (own,) = [line for line in processes_with(str(folder / "data")).values() if " node " in line]
            assert "run-slots" not in own
            return node["capacity"]
        finally:
            up.terminate()


def test_a_service_starts_from_a_config_file_alone(folder: Path) -> None:
    assert capacity_of_up(folder) == 3 + 3 + 3
    assert (folder / "data" / "logs" / "node.log").exists()


def test_option_and_variable_win_over_the_file_in_a_real_service(folder: Path) -> None:
    env = {"GANGLINE_NODE__RUN_SLOTS": "7", "GANGLINE_NODE__READY_SLOTS": "7"}
    assert capacity_of_up(folder, "--run-slots", "20", env=env) == 20 + 7 + 3


def shown(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    done = gangline_in(folder, "config", "show", "--json", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return {one["key"]: one for one in json.loads(done.stdout)["settings"]}


def test_config_show_names_where_each_value_came_from(folder: Path) -> None:
    env = {"GANGLINE_NODE__READY_SLOTS": "7", "GANGLINE_TOKEN": "secret", "GANGLINE_DATABASE": "postgresql://u:pw@h/n"}
    found = shown(folder, "--command", "node", "--", "--init-workers", "9", env=env)
    told = {key: (one["value"], one["source"], one["where"]) for key, one in found.items()}
    assert told["node.run_slots"] == (3, "file", "gangline.toml")
    assert told["node.ready_slots"] == (7, "environment", "GANGLINE_NODE__READY_SLOTS")
    assert told["node.init_workers"] == (9, "option", "--init-workers")
    assert told["node.prewarm_workers"] == (2, "default", None)
    assert told["control_token"][0] == "$GANGLINE_TOKEN"
    assert told["database_url"][0] == "postgresql://u:***@h/n"
    assert "server.port" not in told


def test_commands_show_their_own_defaults(folder: Path) -> None:
    assert shown(folder, "--command", "node")["node.engine_wait_s"]["value"] == 60
    assert shown(folder, "--command", "up")["node.engine_wait_s"]["value"] == 10
    behind = shown(folder, "--command", "cluster", "--", "--nodes", "2", "--", "--run-slots", "5")
    assert (behind["cluster.num_nodes"]["value"], behind["node.run_slots"]["value"]) == (2, 5)


def test_config_show_gives_a_pipe_a_line_for_each_setting(folder: Path) -> None:
    done = gangline_in(folder, "config", "show")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Config file: gangline.toml"
    settings = json.loads(gangline_in(folder, "config", "show", "--json").stdout)["settings"]
    assert [line.split()[0] for line in lines[2:]] == [one["key"] for one in settings]
    assert [line.split() for line in lines if "run_slots" in line] == [["node.run_slots", "3", "gangline.toml"]]


@pytest.mark.parametrize("command", [("up", "--json"), ("config", "show", "--json"), ("node", "--json")])
def test_a_mistake_in_the_file_is_the_command_s_error(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "gangline.toml").write_text("[node]\nrun_slot = 3\n")
    done = gangline_in(folder, *command)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["message"] == "gangline.toml, line 2: unknown key 'run_slot' in [node]. Did you mean 'run_slots'?"
    assert not (folder / "data").exists()


def test_a_named_file_wins_over_the_usual_one(folder: Path) -> None:
    (folder / "other.toml").write_text("[node]\nrun_slots = 5")
    (folder / "third.toml").write_text("[node]\nrun_slots = 6")
    env = {"GANGLINE_CONFIG": "third.toml"}
    assert shown(folder, env=env)["node.run_slots"]["value"] == 6
    assert shown(folder, "--config", "other.toml", env=env)["node.run_slots"]["value"] == 5
    assert shown(folder, env={"GANGLINE_CONFIG": ""})["node.run_slots"]["value"] == 16


def test_the_help_of_an_option_comes_from_its_setting(folder: Path) -> None:
    text = " ".join(gangline_in(folder, "node", "--help").stdout.replace("│", " ").split())
    assert "--run-slots <int> Agents that run at once. At least 1." in text
    assert "Environment: GANGLINE_NODE__RUN_SLOTS. [default: 16]" in text
    assert "--capture ids|text" in text
    assert "--settings-from-stdin" not in text
    wide = gangline_in(folder, "up", "--help").stdout
    assert "…" not in wide


def test_a_file_gives_a_role_engines_of_its_own(folder: Path) -> None:
    """Two engines are their own processes with different tokenizers, and one session asks both."""
    script = str(folder / "script.json")
    engine = [*COMMAND, "engine", "--scripted", script, "--tokenizer", smollm2_name(), "--port", "0"]
    with subprocess.Popen(engine, env=clean_environment(), stdout=subprocess.PIPE, text=True) as critic:
        try:
            assert critic.stdout is not None
            url = json.loads(critic.stdout.readline())["engine_url"]
            (folder / "gangline.toml").write_text(f'{CONFIG}\n[node.role_engines.critic]\nurls = ["{url}"]\n')
            assert shown(folder)["node.role_engines"]["source"] == "file"
            _ask_policy_and_critic(folder, url)
        finally:
            critic.terminate()


def _ask_policy_and_critic(folder: Path, critic_url: str) -> None:
    with subprocess.Popen(
        [*COMMAND, "up", "--json"], cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, text=True
    ) as up:
        try:
            assert up.stdout is not None
            (node_url,) = json.loads(up.stdout.readline())["node_urls"]
            listed = json.loads(gangline_in(folder, "backend", "list", "--json").stdout)
            assert [one["role"] for one in listed[node_url]] == [None, "critic"]
            assert listed[node_url][1]["url"] == critic_url
            token = (folder / "data" / "control_token").read_text().strip()
            with SyncNodeClient(node_url, token) as client:
                opened = client.open_session()
                with openai.OpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key) as agent:
                    for role in ({}, {"x-gangline-role": "critic"}):
                        asked: Any = [{"role": "user", "content": "hello"}]
                        agent.chat.completions.create(model="m", messages=asked, extra_headers=role)
                result = client.finalize(opened.session_id)
        finally:
            up.terminate()
    assert result.trajectory is not None
    policy, other = result.trajectory.traces
    assert (policy.untrainable, other.untrainable) == (None, "engine of role critic")
    assert policy.certificates[0].tokenizer_digest != other.certificates[0].tokenizer_digest
    assert policy.response_ids.tolist() != other.response_ids.tolist()

"""An agent of one's own by `gangline submit --file --python`, in the sandbox of a running service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support.requirements import need_command
from support.service.cli_process import UpProcess, gangline

AGENT = """
import sled_package
from sled import helper
print(helper.ANSWER)
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "sled_package.py").touch()
    return folder


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, venv: Path) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    service = UpProcess(tmp_path_factory.mktemp("up"), env={"VIRTUAL_ENV": str(venv)})
    assert "server_url" in service.ready()
    yield service
    service.close()


def submitted(up: UpProcess, folder: Path, *options: object) -> dict[str, Any]:
    """The ended task of an agent that is a file and a folder here."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "library").mkdir(exist_ok=True)
    (folder / "library" / "helper.py").write_text("ANSWER = 42\n")
    files = ("--file", folder / "agent.py", "--file", f"{folder / 'library'}=sled")
    agent = ("--instruction", "go", "--command", "python3 agent.py", "--allow-no-model-call")
    done = gangline("submit", *agent, *files, *options, "--wait", "--json", "--data", up.data)
    return json.loads(done.stdout)


def test_files_and_an_environment_are_all_that_an_agent_needs(up: UpProcess, tmp_path: Path, venv: Path) -> None:
    task = submitted(up, tmp_path, "--python", venv)
    assert task["outcomes"] == {"completed": 1}


def test_without_its_environment_the_failure_names_it(up: UpProcess, tmp_path: Path, venv: Path) -> None:
    task = submitted(up, tmp_path)
    assert task["outcomes"] == {"agent_error": 1}
    shown = gangline("show", f"{task['task_id']}.0", "--data", up.data)
    assert f"--python {venv}" in "".join(shown.stdout.split("\n"))


def test_files_are_read_beside_the_task_file(up: UpProcess, tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("test -s agent.sh\n")
    write = {"type": "write", "path": "agent.sh", "content": {"from_file": "agent.sh"}}
    task = {
        "instruction": "go",
        "runtime": {"prepare": [write]},
        "agent": {"harness": "shell", "settings": {"command": "sh agent.sh"}, "allow_no_model_call": True},
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    done = gangline("submit", tmp_path / "task.json", "--wait", "--json", "--data", up.data)
    assert json.loads(done.stdout)["outcomes"] == {"completed": 1}, done.stderr


def test_a_file_outside_the_task_files_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text('{"instruction": {"from_file": "../secret"}, "agent": {"harness": "shell"}}')
    refused = gangline("submit", tmp_path / "task.json", "--dry-run")
    assert refused.returncode == 2
    assert "from_file must name a file in the folder of the task file" in refused.stderr

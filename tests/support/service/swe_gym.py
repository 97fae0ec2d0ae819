"""Two generated tasks for examples/swe_gym, imported and given an agent by the example's own commands.

Stand-ins, since neither images nor a model that repairs anything are here: the sandbox, with clones, in the place
of the tasks' images; a script that asks the model once in the place of Codex or Claude Code, which repairs the code
in every second session, so that a group has unequal rewards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.service.cli_process import clean_environment, gangline
from support.service.field_tasks import repository
from support.service.swe_rows import family_row

__all__ = ["EXAMPLE", "imported", "stand_ins", "with_agents", "write_rows"]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "swe_gym"
REPOSITORIES = ("dogs/kennel", "cats/basket")
AGENT = """
import json, os, pathlib, urllib.request

body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "Repair it."}], "max_tokens": 12}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
if int(os.environ["GANGLINE_SESSION_ID"].rpartition(".")[2]) % 2 == 0:
    source = pathlib.Path("kennel.py")
    source.write_text(source.read_text().replace("a - b", "a + b"))
"""


def write_rows(folder: Path) -> tuple[Path, Path]:
    """(rows in the columns of SkyRL's data set, folder of the repositories). The agent's user may read `folder`."""
    clones = folder / "clones"
    rows: list[dict[str, Any]] = []
    for name in REPOSITORIES:
        row = repository(clones / name.replace("/", "__")) | {
            "repo": name,
            "instance_id": f"{name.replace('/', '__')}-1",
        }
        rows.append(family_row("skyrl", row, ""))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, clones


def imported(rows: Path, *options: object) -> str:
    """What `gangline tasks from` makes of them: a task a line."""
    done = gangline("tasks", "from", rows, "--format", "swe", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_agents(tasks: str, *options: str) -> list[dict[str, Any]]:
    """What the example's program makes of imported tasks."""
    command = [sys.executable, EXAMPLE / "tasks.py", *options]
    done = subprocess.run(command, input=tasks, capture_output=True, text=True, check=True, env=clean_environment())
    return [json.loads(line) for line in done.stdout.splitlines()]


def stand_ins(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(the two tasks, as they run here; variables of their node, which shows it the repositories and pytest)"""
    rows, clones = write_rows(folder)
    settings = {"command": ["python3", "-c", AGENT]}
    tasks = with_agents(imported(rows, "--repositories", clones))
    variables = {"GANGLINE_PREPARE_FOLDERS": str(clones), "GANGLINE_EXPOSE": str(Path(pytest.__file__).parents[1])}
    return [task | {"agent": task["agent"] | {"harness": "shell", "settings": settings}} for task in tasks], variables

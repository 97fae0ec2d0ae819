"""Tasks of other systems, really graded in the sandbox: their own solution earns 1, an agent that does nothing 0."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gangline.client.server import ServerClient
from support.requirements import need_command
from support.service.cli_process import UpProcess, gangline
from support.service.field_tasks import HARBOR_TOML, git, harbor_task, repository, terminal_bench_task

NOTHING = "true"


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("field") / "clones"
    folder.mkdir()  # pytest's own folders are closed to the agent's user
    return folder


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, clones: Path) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("git", "apt-get install git")
    service = UpProcess(tmp_path_factory.mktemp("up"), env={"GANGLINE_EXPOSE": str(clones)})
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


def imported(*options: object) -> dict[str, Any]:
    """The one task that `gangline submit` makes of them."""
    done = gangline("submit", *options, "--dry-run")
    assert done.returncode == 0, done.stderr
    (task,) = json.loads(done.stdout)
    return task


def with_command(task: dict[str, Any], command: str) -> dict[str, Any]:
    return {**task, "agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}}


async def ended(up: UpProcess, *tasks: dict[str, Any]) -> list[tuple[str, float | None]]:
    """(outcome, reward) of each task's one session, once all have ended."""
    running = up.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        submitted = await client.submit_many(tasks)
        views = [await client.wait(one.task_id, timeout_s=200) for one in submitted]
    return [(session.outcome, session.reward) for view in views for session in view.sessions]


def test_the_oracle_of_a_folder_of_harbor_tasks_from_the_command_line(up: UpProcess, tmp_path: Path) -> None:
    for name in ("one", "two", "other"):
        harbor_task(tmp_path / "tasks" / name, HARBOR_TOML.replace("count-bytes", name))
    chosen = ("--harbor", tmp_path / "tasks", "--only", "[ot][nw][eo]", "--oracle", "--task-id", "check")
    done = gangline("submit", *chosen, "--data", up.data, "--wait", "--json")
    assert done.returncode == 0, done.stderr
    tasks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [task["rewards"] for task in tasks] == [[1.0], [1.0]]
    assert {task["task_id"] for task in tasks} == {"check-kennel-one", "check-kennel-two"}


async def test_harbor_grades_what_the_agent_left_and_not_what_it_planted(up: UpProcess, tmp_path: Path) -> None:
    task = imported("--harbor", harbor_task(tmp_path / "task"), "--command", NOTHING, "--allow-no-model-call")
    answers = "echo 4 red > answer.txt"
    plants = "echo 1 > /logs/verifier/reward.txt; echo 9 > /logs/verifier/reward.json; echo x > /tests/conftest.py"
    tries = [with_command(task, command) for command in (NOTHING, plants, f"{answers}; {plants}")]
    assert await ended(up, *tries) == [("completed", 0.0), ("completed", 0.0), ("completed", 1.0)]


async def test_terminal_bench_grades_by_the_summary_of_its_tests(up: UpProcess, tmp_path: Path) -> None:
    folder = terminal_bench_task(tmp_path / "hello")
    oracle = imported("--terminal-bench", folder, "--oracle")
    (folder / "run-tests.sh").write_text("curl no.such.host | sh\nuv run pytest\n")
    unable = imported("--terminal-bench", folder, "--oracle")
    said = await ended(up, oracle, with_command(oracle, NOTHING), {**unable, "max_attempts": 1})
    assert said == [("completed", 1.0), ("completed", 0.0), ("infra_error", None)]


async def test_swe_bench_grades_the_patch_of_the_source_with_its_own_tests(
    up: UpProcess, tmp_path: Path, clones: Path
) -> None:
    row = repository(clones / "dogs__kennel")
    fix = git(clones / "dogs__kennel", "rev-parse", "HEAD").strip()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    oracle = imported("--swe-bench", tmp_path / "rows.jsonl", "--repositories", clones, "--oracle")
    tests_only = "printf 'def test_add():\\n    pass\\n\\ndef test_double():\\n    pass\\n' > test_kennel.py"
    fixes = "sed -i 's/a - b/a + b/' kennel.py"
    commits = "git -c user.name=a -c user.email=a commit -qam x"
    tries = {
        NOTHING: ("completed", 0.0),
        tests_only: ("completed", 0.0),
        f"{fixes}; {tests_only}; {commits}": ("completed", 1.0),
        f"{fixes}; touch .git/index.lock": ("completed", 1.0),
        f"{fixes}; sed -i 's/2 \\* a/a/' kennel.py": ("completed", 0.0),
        "rm -rf .git": ("completed", 0.0),
        f'! git cat-file -e {fix} && [ -z "$(git tag)$(git branch -r)" ]': ("completed", 0.0),
    }
    said = await ended(up, oracle, *(with_command(oracle, command) for command in tries))
    assert dict(zip(["oracle", *tries], said, strict=True)) == {"oracle": ("completed", 1.0), **tries}

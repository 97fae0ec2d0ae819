"""Tasks of other systems, really graded in the sandbox: their own solution earns 1, an agent that does nothing 0."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from gangline.wire.client.server import ServerClient
from support.requirements import need_command
from support.service.cli_process import UpProcess, gangline
from support.service.field_tasks import FIXED, HARBOR_TOML, git, harbor_task, repository, terminal_bench_task, write
from support.service.swe_rows import FAMILIES, family_row

NOTHING = "true"
RUN_R2E_TESTS = "PYTHONDONTWRITEBYTECODE=1 python3 -W ignore -m pytest -rA -p no:cacheprovider r2e_tests\n"
LOOKS_FOR_THE_FIX = """
git cat-file --batch-check --batch-all-objects | while read -r name kind size; do
  [ "$kind" = blob ] && git cat-file blob "$name" | grep -q 'a + b' && git cat-file blob "$name" > kennel.py
done; true
"""


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("field") / "clones"
    folder.mkdir()  # pytest's own folders are closed to the agent's user
    return folder


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, clones: Path) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("git", "apt-get install git")
    service = UpProcess(tmp_path_factory.mktemp("up"), env={"GANGLINE_PREPARE_FOLDERS": str(clones)})
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


def imported(source: Path, *options: object) -> dict[str, Any]:
    """The one task that `gangline tasks from` makes of a source, without its id: tests submit variants of it."""
    done = gangline("tasks", "from", source, *options)
    assert done.returncode == 0, done.stderr
    return {name: value for name, value in json.loads(done.stdout).items() if name != "task_id"}


def solved(task: dict[str, Any]) -> dict[str, Any]:
    """The task as `gangline submit --oracle` takes it."""
    done = gangline("submit", "-", "--oracle", "--dry-run", stdin=json.dumps(task))
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    return found


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
    file = tmp_path / "tasks.jsonl"
    made = gangline("tasks", "from", tmp_path / "tasks", "--filter", "[ot][nw][eo]", "--prefix", "check", "--out", file)
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    done = gangline("submit", file, "--oracle", "--data", up.data, "--wait", "--json")
    assert done.returncode == 0, done.stderr
    tasks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [task["rewards"] for task in tasks] == [[1.0], [1.0]]
    assert {task["task_id"] for task in tasks} == {"check-kennel-one", "check-kennel-two"}


async def test_harbor_grades_what_the_agent_left_and_not_what_it_planted(up: UpProcess, tmp_path: Path) -> None:
    task = imported(harbor_task(tmp_path / "task"))
    answers = "echo 4 red > answer.txt"
    plants = "echo 1 > /logs/verifier/reward.txt; echo 9 > /logs/verifier/reward.json; echo x > /tests/conftest.py"
    tries = [with_command(task, command) for command in (NOTHING, plants, f"{answers}; {plants}")]
    assert await ended(up, *tries) == [("completed", 0.0), ("completed", 0.0), ("completed", 1.0)]


async def test_a_separate_verifier_of_harbors_sees_the_artifacts_and_nothing_else(
    up: UpProcess, tmp_path: Path
) -> None:
    toml = (
        'artifacts = [{ source = "/app/out", exclude = ["*.log"] }]\n'
        "[environment]\nnetwork_mode = 'no-network'\nhealthcheck = { command = 'test -d /logs' }\n"
        "[verifier]\nenvironment_mode = 'separate'\nenv = { WANTED = '4' }\n"
        "[[verifier.collect]]\ncommand = 'cp answer.txt /logs/artifacts/'\n"
        "[verifier.environment]\nnetwork_mode = 'no-network'\nenv = { WHO = 'judge' }\n"
        "[solution]\nenv = { ANSWER_FILE = 'answer.txt', SLED = '' }\n"
    )
    grade = (
        "#!/bin/sh\n[ $WHO = judge ] && [ ! -e answer.txt ] && [ ! -e out/x.log ] && [ -x out/run ] &&\n"
        '[ "$(cat /logs/artifacts/answer.txt)" = "$WANTED " ]\n'
        "[ $? = 0 ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n"
    )
    solve = "mkdir out; touch out/x.log out/run; chmod +x out/run; echo '4 ' > answer.txt"
    task = imported(
        harbor_task(tmp_path / "task", toml, **{"tests/test.sh": grade, "solution/solve.sh": f"#!/bin/sh\n{solve}\n"})
    )
    tries = [solved(task), with_command(task, NOTHING), with_command(task, f"{solve}; rm answer.txt")]
    assert await ended(up, *tries) == [("completed", 1.0), ("completed", 0.0), ("completed", 0.0)]


async def test_the_one_step_of_a_harbor_task_is_set_up_run_and_graded(up: UpProcess, tmp_path: Path) -> None:
    toml = (
        "multi_step_reward_strategy = 'final'\n[environment]\nnetwork_mode = 'no-network'\n"
        "[verifier]\nenv = { WANTED = 'wrong', SLED = 'red' }\n"
        "[[steps]]\nname = 'first'\nmin_reward = 1.0\nhealthcheck = { command = 'test -e made' }\n"
        "[steps.verifier]\nenv = { WANTED = '4' }\n"
    )
    files = {
        "steps/first/instruction.md": "Write the number.\n",
        "steps/first/workdir/setup.sh": "[[ $0 = /app/setup.sh ]] && cp seed made\n",
        "steps/first/workdir/seed": "4 red\n",
        "steps/first/solution/solve.sh": "#!/bin/sh\ncp made answer.txt\n",
    }
    task = imported(harbor_task(tmp_path / "task", toml, **files))
    broken = imported(harbor_task(tmp_path / "task", toml, **files | {"steps/first/workdir/setup.sh": "exit 3\n"}))
    tries = [solved(task), with_command(task, NOTHING), {**solved(broken), "max_attempts": 1}]
    assert await ended(up, *tries) == [("completed", 1.0), ("completed", 0.0), ("infra_error", None)]


async def test_terminal_bench_grades_by_the_summary_of_its_tests(up: UpProcess, tmp_path: Path) -> None:
    folder = terminal_bench_task(tmp_path / "hello")
    oracle = solved(imported(folder))
    (folder / "run-tests.sh").write_text("curl no.such.host | sh\nuv run pytest\n")
    unable = solved(imported(folder))
    said = await ended(up, oracle, with_command(oracle, NOTHING), {**unable, "max_attempts": 1})
    assert said == [("completed", 1.0), ("completed", 0.0), ("infra_error", None)]


async def test_swe_bench_grades_the_patch_of_the_source_with_its_own_tests(
    up: UpProcess, tmp_path: Path, clones: Path
) -> None:
    row = repository(clones / "dogs__kennel")
    fix = git(clones / "dogs__kennel", "rev-parse", "HEAD").strip()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    oracle = solved(imported(tmp_path / "rows.jsonl", "--repositories", clones))
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
        f"git --git-dir {clones}/dogs__kennel/.git show {fix} | git apply; true": ("completed", 0.0),
        f"cp -r {clones}/dogs__kennel/. .; git checkout -qf {fix}; true": ("completed", 0.0),
        f'! git cat-file -e {fix} && [ -z "$(git tag)$(git branch -r)" ]': ("completed", 0.0),
    }
    said = await ended(up, oracle, *(with_command(oracle, command) for command in tries))
    assert dict(zip(["oracle", *tries], said, strict=True)) == {"oracle": ("completed", 1.0), **tries}


async def test_each_dataset_of_the_swe_family_gives_1_to_its_solution_and_0_to_nothing(
    up: UpProcess, tmp_path: Path, clones: Path
) -> None:
    row = {**repository(clones / "pups__kennel"), "repo": "pups/kennel"}
    # R2E-Gym's repository has the program that runs its tests, and SWE-smith's is sound, with its tests.
    tests = (clones / "pups__kennel" / "test_kennel.py").read_text()
    git(clones, "clone", "-q", clones / "pups__kennel", clones / "swesmith__dogs__kennel.01234567")
    git(clones, "clone", "-q", clones / "pups__kennel", clones / "kennel")
    git(clones / "kennel", "checkout", "-q", row["base_commit"])
    write(clones / "kennel" / "run_tests.sh", RUN_R2E_TESTS)
    git(clones / "kennel", "add", "run_tests.sh")
    git(clones / "kennel", "commit", "-q", "-m", "Run the tests")
    rows = [family_row(family, row, tests) for family in FAMILIES]
    write(tmp_path / "rows.jsonl", "".join(json.dumps(one) + "\n" for one in rows))
    made = gangline("tasks", "from", tmp_path / "rows.jsonl", "--format", "swe", "--repositories", clones)
    assert made.returncode == 0, made.stderr
    tasks = [{**json.loads(line), "task_id": FAMILIES[at]} for at, line in enumerate(made.stdout.splitlines())]
    done = gangline("submit", "-", "--oracle", "--dry-run", stdin="".join(json.dumps(task) + "\n" for task in tasks))
    oracles = json.loads(done.stdout)
    nothing = [{**with_command(task, NOTHING), "task_id": f"{task['task_id']}-nothing"} for task in tasks]
    searches = with_command(tasks[FAMILIES.index("swe-smith")], LOOKS_FOR_THE_FIX) | {"task_id": "looks"}
    said = await ended(up, *oracles, *nothing, searches)
    assert dict(zip(FAMILIES, said, strict=False)) == dict.fromkeys(FAMILIES, ("completed", 1.0))
    assert dict(zip(FAMILIES, said[len(FAMILIES) :], strict=False)) == dict.fromkeys(FAMILIES, ("completed", 0.0))
    assert said[-1] == ("completed", 0.0), "no object of the repository leads to the state before the bug"


SECRET = "kennel-417-red"
SEARCH = """
import os, subprocess, sys
secrets = [b"".join(parts) for parts in SECRETS]
def texts():
    yield subprocess.run(["git", "cat-file", "--batch-all-objects", "--batch"], capture_output=True).stdout
    for folder, folders, names in os.walk("/"):
        if folder == "/":
            folders[:] = set(folders) - {"sys", "usr", "lib", "lib64", "bin", "sbin", "opt"}
        if folder in PYTHONS:
            folders[:], names = [], []
        if folder == "/proc":
            folders[:] = filter(str.isdecimal, folders)
        elif folder.startswith("/proc/"):
            folders[:], names = [], ["environ", "cmdline"]
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                try:
                    yield open(path, "rb").read(1 << 20)
                except OSError:
                    pass
sys.exit(any(secret in text for text in texts() for secret in secrets))
"""


def searches(task: dict[str, Any], *secrets: str, first: str = NOTHING) -> dict[str, Any]:
    """The agent fails when one of them lies anywhere in its sandbox. It is told each in two parts."""
    parts = repr([(secret[:3].encode(), secret[3:].encode()) for secret in secrets])
    # Installations of the host, as /usr is: reading ten times through them takes minutes.
    search = SEARCH.replace("SECRETS", parts).replace("PYTHONS", repr([sys.prefix, sys.base_prefix]))
    return with_command(task, f"{first}; exec python3 -c {shlex.quote(search)}")


async def test_what_solutions_and_graders_know_is_nowhere_in_the_agents_sandbox(
    up: UpProcess, tmp_path: Path, clones: Path
) -> None:
    knows = f"#!/bin/sh\n# {SECRET}\necho 0 > /logs/verifier/reward.txt\n"
    toml = HARBOR_TOML.replace('"4"', f'"{SECRET}"').replace('"answer.txt"', f'"{SECRET}"')
    hidden = {"tests/test.sh": knows, "tests/deep/wanted.txt": SECRET, "solution/solve.sh": knows, "solution/x": SECRET}
    step = {"steps/one/instruction.md": "Go.\n", "steps/one/tests/test.sh": knows, "steps/one/solution/solve.sh": knows}
    bench = terminal_bench_task(tmp_path / "three", **{"solution.sh": knows, "tests/x": SECRET})
    for name in ("run-tests.sh", "tests/test_outputs.py"):
        (bench / name).write_text(f"{(bench / name).read_text()}# {SECRET}\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "Which?", "a": SECRET}) + "\n")
    rows = ("--map", "instruction=q", "--map", "answer=a")
    tasks = {
        "harbor": imported(harbor_task(tmp_path / "one", toml, **hidden)),
        "harbor's steps": imported(harbor_task(tmp_path / "two", f"{toml}[[steps]]\nname = 'one'\n", **hidden, **step)),
        "terminal-bench": imported(bench),
        "rows": imported(tmp_path / "rows.jsonl", *rows, "--preset", "math"),
    }
    row = {**repository(clones / "cats__kennel"), "repo": "cats/kennel"}
    (tmp_path / "swe.jsonl").write_text(json.dumps(row) + "\n")
    test = "assert add(2, 3) == 5"
    swe = imported(tmp_path / "swe.jsonl", "--repositories", clones)
    for name in tasks:
        assert SECRET in json.dumps(tasks[name]), name
    tries = [searches(task, SECRET) for task in tasks.values()]
    finds = [searches(task, SECRET, first=f"echo {SECRET} > note") for task in tasks.values()]
    said = await ended(
        up, *tries, searches(swe, FIXED, test), *finds, searches(swe, test, first=f"echo '{test}' > note")
    )
    outcomes = [outcome for outcome, _ in said]
    assert dict(zip([*tasks, "swe"], outcomes, strict=False)) == dict.fromkeys([*tasks, "swe"], "completed")
    assert outcomes[len(tasks) + 1 :] == ["agent_error"] * (len(tasks) + 1)

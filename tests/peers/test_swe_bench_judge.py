"""SWE-bench's own harness as judge: it and Gangline give the same rows, with the same patches, the same rewards.

GANGLINE_SWEBENCH_PYTHON names the interpreter of an environment with `swebench` 5.0.2, the newest on 2026-11-28, which
reads rows with a script of their own, and in the folder `swebench-4` of its root 4.1.0, which makes the script of a row
without one. Nothing of either is replaced: both run as commands, in Docker, to their reports. Only the images are ours:
one with the names of published ones, a generated repository in /testbed, and the environment `testbed` without pip.
Rows with a script have the one that version 4 makes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Generator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from containers.engines import IMAGE
from containers.test_container_images import engine
from containers.test_container_sessions import service
from e2e.test_field_tasks import NOTHING, ended, with_command
from gangline.grading.swe_bench_rows import PYTEST_PARSERS
from gangline.grading.untrusted.test_logs import read_log
from peers.swe_bench_tasks import CONDA, TASKS, rows
from support.compared import same
from support.requirements import need
from support.service.cli_process import gangline
from support.service.field_tasks import git, write

PYTHON = os.environ.get("GANGLINE_SWEBENCH_PYTHON", "")
VERSION_4 = str(Path(PYTHON).parent.parent / "swebench-4")
INSTANCE = "localhost/gangline-test-swe:1"
OF_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
INIT = 'trap "exit 0" TERM; "$@" & wait $!'
"""So that a container ends at once when the harness stops it."""
ONE_PIPE = "ENV BASH_XTRACEFD=1"
"""The harness reads output and errors by two pipes, and its last mark, an error, may overtake results."""
MAKE = """
python3 -m venv --without-pip /opt/miniconda3/envs/testbed && cd /opt/miniconda3/envs/testbed/ &&
mv /made/packages/* lib/python3*/site-packages/ && mv /made/pytest bin/ && mkdir /opt/miniconda3/bin &&
mv /made/activate /opt/miniconda3/bin/ && mv /made/testbed /
"""
RUN_PYTEST = "#!/opt/miniconda3/envs/testbed/bin/python\nimport sys, pytest\nsys.exit(pytest.main())\n"
SCRIPTS = """
import json, sys
from swebench.harness.log_parsers import MAP_REPO_TO_PARSER
from swebench.harness.test_spec.test_spec import make_test_spec
for line in sys.stdin:
    row = json.loads(line)
    spec = make_test_spec(row, namespace="swebench")
    more = {"image": spec.instance_image_key, "eval_script": spec.eval_script, "eval_type": "pass_and_fail"}
    print(json.dumps({**row, **more, "log_parser": MAP_REPO_TO_PARSER[row["repo"]].__name__}))
"""
"""What version 5 adds to the columns of a row, with the script of version 4."""

OF_5 = ("image", "eval_script", "log_parser", "eval_type")
WITHOUT_SCRIPT = ("one_file", "new_tests", "parameters", "whole_parameters", "paths", "skipped", "expected_failure")
NAMES = """
import pytest
NAMES = ("a b", "a c", "[d] (e)", "f - g", "h", "/", "/etc/kennel", "//host/dog", "/a*", "MouseButton.LEFT", "é")
@pytest.mark.parametrize("name", NAMES)
def test_call(name): pass
@pytest.mark.parametrize("name", NAMES)
def test_fails(name): assert name == "that is - not so"
@pytest.fixture
def broken(): raise ValueError("no - not")
def test_error(broken): pass
def test_skips(): pytest.skip("")
def test_skips_for_a_reason(): pytest.skip("not now")
@pytest.mark.xfail
def test_expected(): raise ValueError
@pytest.mark.xfail
def test_too_good(): pass
class TestCase:
    def test_method(self): print("PASSED nothing\\nERROR    root:kennel.py:3 a log")
"""
PARSE = """
import json, sys
from swebench.harness.log_parsers import PARSER_REGISTRY
log = sys.stdin.read()
print(json.dumps({name: PARSER_REGISTRY[name](log, None) for name in sys.argv[1:]}))
"""
STATUSES = {"PASSED": "passed", "XFAIL": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}

Rows = dict[tuple[str, str], dict[str, Any]]


def harness(*arguments: object, version: int, **how: Any) -> str:
    """Output of a run of Python alongside the harness of a version."""
    command = shlex.split(os.environ["GANGLINE_DOCKER"])
    env = {**os.environ, "DOCKER_HOST": command[command.index("--host") + 1]}
    env["PYTHONPATH"] = VERSION_4 if version == 4 else ""
    done = subprocess.run(
        [PYTHON, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=900, check=False, **how
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def with_scripts(given: Rows) -> Rows:
    lines = "".join(json.dumps(row) + "\n" for row in given.values())
    said = harness("-c", SCRIPTS, version=4, input=lines).splitlines()
    return dict(zip(given, map(json.loads, said), strict=True))


@pytest.fixture
def given(docker: None, tmp_path: Path) -> Generator[Rows]:
    """Rows whose images are there: the repository at its commit, with the harness's own on top, and pytest."""
    need(PYTHON, "GANGLINE_SWEBENCH_PYTHON names no Python with swebench: run make test-peers")
    folder = tmp_path / "made"
    found = rows(folder / "testbed")
    git(folder / "testbed", "commit", "-q", "--allow-empty", "-m", "SWE-bench")
    (folder / "packages").mkdir()
    for one in map(distribution, OF_PYTEST):
        parts = {Path(str(one.locate_file(path.parts[0]))) for path in one.files or () if path.parts[0] != ".."}
        subprocess.run(["cp", "-r", *parts, folder / "packages"], check=True)
    write(folder / "activate", CONDA)
    write(folder / "pytest", RUN_PYTEST, 0o755)
    engine("docker", "create", "--network", "none", "--name", "gangline-test-swe", IMAGE, "sh", "-c", MAKE)
    engine("docker", "cp", str(folder), "gangline-test-swe:/made")
    engine("docker", "start", "--attach", "gangline-test-swe")
    entry = f"ENTRYPOINT {json.dumps(['sh', '-c', INIT, 'sh'])}"
    changes = [word for change in (entry, ONE_PIPE, "WORKDIR /testbed") for word in ("--change", change)]
    engine("docker", "commit", *changes, "gangline-test-swe", INSTANCE)
    engine("docker", "rm", "gangline-test-swe")
    found = with_scripts(found)
    images = [row["image"] for row in found.values()]
    for image in images:
        engine("docker", "tag", INSTANCE, image)
    yield found
    engine("docker", "rmi", INSTANCE, *images)


def judged(folder: Path, given: Rows, version: int) -> dict[tuple[str, str], bool]:
    """(task, agent) -> whether the harness calls it resolved."""
    predictions = [
        {"instance_id": row["instance_id"], "model_patch": row["model_patch"], "model_name_or_path": "judged"}
        for row in given.values()
    ]
    dataset = write(folder / "rows.json", json.dumps(list(given.values())))
    patches = write(folder / "predictions.json", json.dumps(predictions))
    options = {
        "dataset_name": dataset,
        "predictions_path": patches,
        "run_id": "judged",
        "max_workers": 4,
        "timeout": 600,
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    harness("-m", "swebench.harness.run_evaluation", *arguments, version=version, cwd=folder)
    report = json.loads((folder / "judged.judged.json").read_text())
    assert report["error_ids"] == [], report
    assert report["submitted_instances"] == len(given) == len(report["completed_ids"] + report["empty_patch_ids"])
    return {key: row["instance_id"] in report["resolved_ids"] for key, row in given.items()}


async def rewarded(folder: Path, given: Rows) -> dict[tuple[str, str], tuple[str, float | None]]:
    """(task, agent) -> outcome and reward, as Gangline gives them."""
    file = write(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in given.values()))
    made = gangline("tasks", "from", file, "--format", "swe")
    assert made.returncode == 0, made.stderr
    done = gangline("submit", "-", "--oracle", "--dry-run", stdin=made.stdout)
    assert done.returncode == 0, done.stderr
    tasks = json.loads(done.stdout)
    for at, (key, row) in enumerate(given.items()):
        if key[1] != "gold":
            patch = row["model_patch"]
            apply = f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{patch}END_OF_PATCH\n" if patch else NOTHING
            tasks[at] = with_command(tasks[at], apply)
    up = service(folder / "up")
    try:
        assert up.ready(), "the service did not start"
        return dict(zip(given, await ended(up, *tasks), strict=True))
    finally:
        up.close()


async def compared(folder: Path, given: Rows, version: int) -> None:
    answers = {(name, agent): TASKS[name].answers[agent] for name, agent in given}
    resolved = judged(folder, given, version)
    assert resolved == {key: answer.resolved_by(version) for key, answer in answers.items()}
    rewards = await rewarded(folder, given)
    otherwise = [key for key, answer in answers.items() if answer.resolved_by(version) != bool(answer.reward)]
    theirs = {key: ("completed", float(one)) for key, one in resolved.items()}
    same(f"SWE-bench, version {version}", theirs, rewards, but=otherwise)
    assert rewards == {key: ("completed", answer.reward) for key, answer in answers.items()}
    assert engine("docker", "ps", "--all", "--quiet") == ""


@pytest.mark.timeout(1800)
async def test_swe_benchs_harness_and_gangline_give_the_same_rewards(given: Rows, tmp_path: Path) -> None:
    await compared(tmp_path, given, 5)


@pytest.mark.timeout(1800)
async def test_rows_without_a_script_are_graded_as_version_4_of_the_harness_does(given: Rows, tmp_path: Path) -> None:
    """As in the data sets before version 5. Not all answers again, to save time."""
    plain = {key: row for key, row in given.items() if key[0] in WITHOUT_SCRIPT and key[1] != "nothing"}
    plain = {key: {name: value for name, value in row.items() if name not in OF_5} for key, row in plain.items()}
    await compared(tmp_path, plain, 4)


@pytest.mark.parametrize("options", [(), ("-vv",), ("-vv", "-o", "console_output_style=classic"), ("--color=yes",)])
async def test_logs_are_read_as_swe_benchs_parsers_for_pytest_read_them(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    need(PYTHON, "GANGLINE_SWEBENCH_PYTHON names no Python with swebench: run make test-peers")
    write(tmp_path / "test_names.py", NAMES)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options, "test_names.py"]
    log = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    ours = await read_log("pytest", log, timeout_s=60)
    said = subprocess.run(
        [PYTHON, "-c", PARSE, *PYTEST_PARSERS], input=log, capture_output=True, text=True, check=True
    ).stdout
    theirs: dict[str, dict[str, str]] = json.loads(said)
    for parser, found in theirs.items():
        assert found or "--color=yes" in options, parser
        for name, status in found.items():
            if "::" not in name:  # lines of logs, which are not tests
                continue
            assert ours.status_of(name) == STATUSES[status], (parser, name)


async def test_other_parsers_of_swe_bench_need_little_of_what_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `pip install --no-deps swebench unidiff` leaves is enough."""
    need(PYTHON, "GANGLINE_SWEBENCH_PYTHON names no Python with swebench: run make test-peers")
    where = [PYTHON, "-c", "import swebench, unidiff; print(swebench.__path__[0], unidiff.__path__[0])"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "alone"], check=True)
    (packages,) = (tmp_path / "alone").glob("lib/python3*/site-packages")
    for package in subprocess.run(where, capture_output=True, text=True, check=True).stdout.split():
        (packages / Path(package).name).symlink_to(package)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "alone" / "bin" / "python"))
    found = await read_log("parse_log_django", "test_a (t.A) ... ok\ntest_b (t.A) ... FAIL\n", timeout_s=60)
    assert found.statuses == {"test_a (t.A)": "passed", "test_b (t.A)": "failed"}

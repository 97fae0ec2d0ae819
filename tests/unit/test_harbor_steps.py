"""The steps of a Harbor task: parts and settings, as Harbor's own code resolves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gangline.cli.tasks.files import validated
from gangline.domain.errors import InvalidRequest
from gangline.interop.harbor.tasks.config import HarborStep, config_of
from gangline.interop.harbor.tasks.steps import parts_of
from gangline.interop.harbor.tasks.task import read_harbor_task
from gangline.machine.reading.documents import read_toml
from gangline.machine.reading.imported import Choices
from gangline.machine.reading.paths import SourcePath
from support.requirements import need_module
from support.service.field_tasks import HARBOR_SOLUTION, harbor_task

DOCKER = Choices(runtime="docker", network="proxy")
QUIET = Choices(network="proxy")
STEP = '[[steps]]\nname = "first"\n'
INSTRUCTION = {"steps/first/instruction.md": "<!-- canary 7 -->\nWalk the dog.\n"}
DOCKERFILE = "FROM debian:12\nCOPY . /tests/\n"


def body_of(folder: Path, choices: Choices = QUIET) -> dict[str, Any]:
    body = read_harbor_task(SourcePath.of(folder), choices).body
    validated({**body, "agent": {"harness": "pi"}}, "t")
    return body


def test_a_step_brings_its_instruction_files_setup_and_health_check(tmp_path: Path) -> None:
    toml = (
        f"{STEP}healthcheck = {{ command = 'test -e made' }}\nagent = {{ timeout_sec = 7 }}\n[agent]\ntimeout_sec = 9\n"
    )
    workdir = {"steps/first/workdir/setup.sh": "touch made\n", "steps/first/workdir/a/b": "red"}
    body = body_of(harbor_task(tmp_path / "t", toml, **INSTRUCTION, **workdir))
    assert (body["instruction"], body["timeout_seconds"]) == ("Walk the dog.\n", 7)
    *environments, b, script, setup, check = body["runtime"]["prepare"]
    assert [action["path"] for action in environments] == ["/app/data/words.bin"]
    assert (b["path"], b["content"], script["path"]) == ("a/b", "red", "setup.sh")
    assert (setup["command"], "test -e made" in check["command"]) == ('exec bash "$(pwd)/setup.sh"', True)
    assert body["init_timeout_seconds"] == 300 + setup["timeout_seconds"] + check["timeout_seconds"]


def test_a_fresh_copy_of_the_environment_has_no_files_of_the_step(tmp_path: Path) -> None:
    toml = f'{STEP}verifier = {{ environment_mode = "separate" }}\n'
    body = body_of(harbor_task(tmp_path / "t", toml, **INSTRUCTION, **{"steps/first/workdir/seed": "4"}))
    assert [action["path"] for action in body["runtime"]["prepare"]] == ["/app/data/words.bin", "seed"]
    assert [action["path"] for action in body["evaluator"]["runtime"]["prepare"]] == ["/app/data/words.bin"]


def test_a_steps_tests_are_laid_over_the_tasks(tmp_path: Path) -> None:
    own = {"steps/first/tests/test.sh": "#!/bin/sh\ntrue\n", "steps/first/tests/more.txt": "x"}
    files = body_of(harbor_task(tmp_path / "t", STEP, **INSTRUCTION, **own))["evaluator"]["config"]["files"]
    assert set(files) == {"/tests/test.sh", "/tests/wanted.bin", "/tests/more.txt"}
    assert files["/tests/test.sh"]["content"] == own["steps/first/tests/test.sh"]


@pytest.mark.parametrize("has_own", [True, False])
def test_the_solution_is_the_steps_or_else_the_tasks(tmp_path: Path, has_own: bool) -> None:
    own = {"steps/first/solution/solve.sh": "echo own\n"} if has_own else {}
    solve = body_of(harbor_task(tmp_path / "t", STEP, **INSTRUCTION, **own))["solution"]["prepare"][-1]
    assert (solve["content"] == "echo own\n") == has_own


def test_settings_of_a_step_win_and_lists_are_joined(tmp_path: Path) -> None:
    toml = (
        'artifacts = ["/a"]\n[agent]\nuser = "root"\n[verifier]\ntimeout_sec = 5\nenv = { A = "1", B = "1" }\n'
        f'[[verifier.collect]]\ncommand = "one"\n{STEP}artifacts = ["/b"]\nagent = {{ user = "worker" }}\n'
        '[steps.verifier]\nenv = { B = "2" }\nenvironment_mode = "separate"\n'
        '[[steps.verifier.collect]]\ncommand = "two"\n'
    )
    config = body_of(harbor_task(tmp_path / "t", toml, **INSTRUCTION))["evaluator"]["config"]
    assert config["env"] == {"A": "1", "B": "2"}
    assert config["timeout_seconds"] == 600, "Harbor's default for the step wins over the task's, too"
    assert list(config["collect_folders"]) == ["/logs/artifacts", "/a", "/b"]
    assert [one["command"] for one in config["collect_commands"]] == ["one", "two"]


SECOND = {"steps/second/instruction.md": "Walk it again.\n"}


def test_several_steps_have_each_their_own_run_and_grading(tmp_path: Path) -> None:
    toml = (
        'multi_step_reward_strategy = "final"\n[agent]\ntimeout_sec = 9\n'
        f"{STEP}min_reward = {{ style = 0.5 }}\nagent = {{ timeout_sec = 7 }}\nhealthcheck = {{ command = 'true' }}\n"
        '[[steps]]\nname = "second"\nmin_reward = 1\nverifier = { environment_mode = "separate", timeout_sec = 5 }\n'
    )
    files = {"steps/second/workdir/seed": "4", "steps/second/tests/test.sh": "#!/bin/sh\ntrue\n"}
    files["steps/first/solution/solve.sh"] = "echo own\n"
    imported = read_harbor_task(
        SourcePath.of(harbor_task(tmp_path / "t", toml, **INSTRUCTION, **SECOND, **files)), QUIET
    )
    task = validated({**imported.body, "agent": {"harness": "pi"}}, "t")
    assert (task.step_reward, "evaluator" in imported.body, "solution" in imported.body) == ("final", False, False)
    assert [one["path"] for one in imported.body["runtime"]["prepare"]] == ["/app/data/words.bin"]
    first, second = imported.body["steps"]
    assert [one["name"] for one in (first, second)] == ["first", "second"]
    assert [one["solution"]["prepare"][-1]["content"] for one in (first, second)] == ["echo own\n", HARBOR_SOLUTION]
    assert [one["instruction"] for one in (first, second)] == ["Walk the dog.\n", "Walk it again.\n"]
    assert [one["timeout_seconds"] for one in (first, second)] == [7, 9]
    assert [one["min_reward"] for one in (first, second)] == [{"style": 0.5}, 1]
    assert [len(one["prepare"]) for one in (first, second)] == [2, 2], "a health check; a file"
    assert [one["evaluator"].get("refresh_runtime", False) for one in (first, second)] == [False, True]
    assert "runtime" not in second["evaluator"], "a fresh copy of the task's environment, which has no step's files"
    assert first["evaluator"]["config"]["clear"] == ["/tests", "/logs/verifier"]
    assert second["evaluator"]["config"]["files"]["/tests/test.sh"]["content"] == "#!/bin/sh\ntrue\n"
    assert second["evaluation_timeout_seconds"] == 65


def test_steps_with_one_name_or_with_different_networks_are_refused(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", STEP + STEP, **INSTRUCTION)
    with pytest.raises(InvalidRequest, match="two steps have the name 'first'"):
        read_harbor_task(SourcePath.of(folder), QUIET)
    apart = 'verifier = { environment = { network_mode = "no-network" } }\n'
    agent = 'agent = { network_mode = "allowlist", allowed_hosts = ["a.example"] }\n'
    toml = f'[environment]\nnetwork_mode = "no-network"\n{STEP}[[steps]]\nname = "second"\n{agent}{apart}'
    folder = harbor_task(tmp_path / "u", toml, **INSTRUCTION, **SECOND)
    with pytest.raises(InvalidRequest, match="its steps ask for different networks"):
        read_harbor_task(SourcePath.of(folder), Choices(network="list"))


@pytest.mark.parametrize("path", ["steps/first/trajectory.json", "steps/first/tests/docker-compose.yaml"])
def test_files_of_a_step_that_are_not_carried_are_named(tmp_path: Path, path: str) -> None:
    folder = harbor_task(tmp_path / "t", STEP, **INSTRUCTION, **{path: "{}"})
    with pytest.raises(InvalidRequest, match=f"unsupported features: {path}"):
        read_harbor_task(SourcePath.of(folder), QUIET)


def test_what_a_step_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"steps/first/instruction\.md"):
        read_harbor_task(SourcePath.of(harbor_task(tmp_path / "t", STEP)), QUIET)
    folder = harbor_task(tmp_path / "t", STEP, **INSTRUCTION)
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(InvalidRequest, match=r"/t/tests/test\.sh or .*/steps/first/tests/test\.sh does not exist"):
        read_harbor_task(SourcePath.of(folder), QUIET)


@pytest.mark.parametrize(
    "name", ["first", "a b", "é", "..", ".", "", " ", "a/b", "a\\b", "a.", "a ", "a\n", "a?", "x:y"]
)
def test_names_of_steps_are_refused_where_harbor_refuses_them(name: str) -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.models.task.config import StepConfig

    def takes(model: type[StepConfig] | type[HarborStep]) -> bool:
        try:
            model(name=name)
        except ValueError:
            return False
        return True

    assert takes(HarborStep) == takes(StepConfig)


OWN_IMAGE = '{ environment = { docker_image = "kennel/own:1" } }'
TASKS_IMAGE = '[verifier.environment]\ndocker_image = "kennel/tasks:1"\n'


@pytest.mark.parametrize("of_task", ["", '[verifier]\nenvironment_mode = "separate"\n', TASKS_IMAGE])
@pytest.mark.parametrize(
    "of_step",
    ["", OWN_IMAGE, "{ environment = {} }", '{ environment_mode = "shared" }', '{ environment_mode = "separate" }'],
)
@pytest.mark.parametrize("dockerfiles", [(), ("tests",), ("steps/first/tests",), ("tests", "steps/first/tests")])
def test_the_verifier_and_its_image_are_those_that_harbor_resolves(
    tmp_path: Path, of_task: str, of_step: str, dockerfiles: tuple[str, ...]
) -> None:
    need_module("harbor", "make .venv/.dev")
    need_module("pathspec", "make .venv/.dev")
    from harbor.models.task.config import TaskConfig
    from harbor.models.task.paths import TaskPaths
    from harbor.models.task.verifier_mode import resolve_verifier_environment_definition

    toml = of_task + STEP + (f"verifier = {of_step}\n" if of_step else "")
    files = {f"{place}/Dockerfile": DOCKERFILE for place in dockerfiles}
    folder = harbor_task(tmp_path / "t", toml, **INSTRUCTION, **files)
    theirs = TaskConfig.model_validate_toml(toml)
    assert theirs.steps is not None
    wanted = resolve_verifier_environment_definition(theirs, TaskPaths(folder), theirs.steps[0])
    given = body_of(folder, DOCKER)["evaluator"]
    assert given.get("refresh_runtime", False) == (wanted is not None)
    if wanted is None:
        return
    assert (given["config"]["files"] == {}) == wanted.bundled_tests
    toml = SourcePath.of(folder) / "task.toml"
    images = parts_of(toml.parent, "t", config_of(read_toml(toml), toml))[0].images
    ours = next((one for one in images if one.exists), None)
    assert (None if ours is None else Path(str(ours.context))) == (wanted.directory if wanted.bundled_tests else None)
    if wanted.config.docker_image is not None:
        assert given["runtime"]["image"] == wanted.config.docker_image


def test_the_environment_of_a_steps_verifier_wins_over_that_of_the_tasks_verifier(tmp_path: Path) -> None:
    toml = f"[verifier.environment]\nmemory_mb = 64\n{STEP}verifier = {{ environment = {{ memory_mb = 32 }} }}\n"
    runtime = body_of(harbor_task(tmp_path / "t", toml, **INSTRUCTION))["evaluator"]["runtime"]
    assert runtime["limits"] == {"memory_bytes": 32 << 20}
    folder = harbor_task(tmp_path / "t", toml.partition("verifier = ")[0], **INSTRUCTION)
    assert body_of(folder)["evaluator"]["runtime"]["limits"] == {"memory_bytes": 64 << 20}

"""What others wrote, read as our tasks; what cannot be carried is refused by its name."""

from __future__ import annotations

import base64
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from gangline import plugins
from gangline.cli.tasks.files import validated
from gangline.cli.tasks.imported import ImportRequest, import_tasks
from gangline.domain.errors import InvalidRequest
from gangline.domain.task import TaskRequest
from gangline.importers.dockerfile import read_dockerfile
from gangline.importers.harbor import read_harbor_task
from gangline.importers.harbor_config import read_config
from gangline.importers.imported import Choices
from gangline.importers.swe_bench import InstanceChoices, read_instances
from gangline.importers.terminal_bench import read_terminal_bench_task
from support.requirements import need_module
from support.service.field_tasks import (
    HARBOR_TOML,
    TERMINAL_BENCH_COMPOSE,
    TERMINAL_BENCH_YAML,
    WORDS,
    harbor_task,
    terminal_bench_task,
    write,
)

ORACLE = Choices(oracle=True)
QUIET = Choices(network="proxy")


def test_a_harbor_task_is_an_ordinary_one(tmp_path: Path) -> None:
    found = read_harbor_task(harbor_task(tmp_path / "t"), ORACLE)
    task = validated(found.body, "t")
    assert task.instruction == "Write the number of bytes and the sled's colour.\n"
    assert (task.timeout_seconds, task.evaluation_timeout_seconds) == (90, 105)
    assert task.runtime.backend == "sandbox"
    assert (task.runtime.workdir, task.runtime.env, task.runtime.network) == ("/app", {"SLED": "red"}, "proxy")
    assert (task.runtime.limits.cpus, task.runtime.limits.memory_bytes) == (1, 512 << 20)
    copied = {action.path: action for action in task.runtime.prepare if action.type == "write"}
    assert base64.b64decode(copied["/app/data/words.bin"].content) == WORDS
    assert copied["/solution/solve.sh"].mode == 0o755
    assert task.evaluator.config["env"] == {"WANTED": "4"}
    assert task.metadata == {"source": "harbor", "task": "kennel/count-bytes", "harbor": {"difficulty": "easy"}}
    assert found.notes == ("kennel/count-bytes: the machine's own programs stand in for debian:12",)


def test_harbors_own_types_read_the_same_file_in_the_same_way(tmp_path: Path) -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.models.task.config import TaskConfig

    old = HARBOR_TOML.replace('schema_version = "1.4"', 'version = "1.0"').replace("memory_mb = 512", 'memory = "2G"')
    for toml in (HARBOR_TOML, old, 'version = "1.0"\n'):
        ours = read_config(write(tmp_path / "task.toml", toml))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            theirs = TaskConfig.model_validate_toml(toml)
        assert (ours.environment.cpus, ours.environment.memory_mb) == (
            theirs.environment.cpus,
            theirs.environment.memory_mb,
        )
        assert (ours.agent.timeout_sec, ours.verifier.timeout_sec) == (
            theirs.agent.timeout_sec,
            theirs.verifier.timeout_sec,
        )
        assert (ours.environment.env, ours.verifier.env) == (theirs.environment.env, theirs.verifier.env)
        assert (ours.wants_network() is None) == (theirs.environment.network_mode.value == "no-network")


def test_every_field_of_harbors_types_is_known(tmp_path: Path) -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.models.task.config import AgentConfig, EnvironmentConfig, SolutionConfig, TaskConfig, VerifierConfig

    from gangline.importers import harbor_config as ours

    pairs = {
        ours.HarborConfig: TaskConfig,
        ours.HarborAgent: AgentConfig,
        ours.HarborEnvironment: EnvironmentConfig,
        ours.HarborVerifier: VerifierConfig,
        ours.HarborSolution: SolutionConfig,
    }
    for mine, theirs in pairs.items():
        assert set(theirs.model_fields) <= set(mine.model_fields), mine


@pytest.mark.parametrize(
    ("section", "line", "told"),
    [
        ("environment", "gpus = 1", "environment.gpus"),
        ("environment", 'os = "windows"', "environment.os"),
        ("environment", 'skills_dir = "/skills"', "environment.skills_dir"),
        ("environment", 'healthcheck = { command = "true" }', "environment.healthcheck"),
        ("environment", "colour = 1", "environment.colour: Extra inputs"),
        ("verifier", 'environment_mode = "separate"', "verifier.environment_mode"),
        ("verifier", 'user = "root"', "verifier.user"),
        ("agent", 'user = "root"', "agent.user"),
        ("agent", "timeout_sec = -1", "agent.timeout_sec"),
    ],
)
def test_what_a_harbor_task_cannot_be_given_is_named(tmp_path: Path, section: str, line: str, told: str) -> None:
    folder = harbor_task(tmp_path / "t", f"[{section}]\n{line}\n")
    with pytest.raises(InvalidRequest, match=told):
        read_harbor_task(folder, Choices())


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("trajectory.json", "trajectory.json"),
        ("environment/docker-compose.yaml", "docker-compose.yaml"),
        ("tests/.harborignore", ".harborignore"),
    ],
)
def test_files_that_ask_for_more_are_named(tmp_path: Path, path: str, told: str) -> None:
    folder = harbor_task(tmp_path / "t")
    write(folder / path, "{}")
    with pytest.raises(InvalidRequest, match=told):
        read_harbor_task(folder, Choices())


def test_servers_of_tools_go_to_the_agent(tmp_path: Path) -> None:
    stdio = '[[environment.mcp_servers]]\nname = "a"\ntransport = "stdio"\ncommand = "serve"\nargs = ["x"]\n'
    http = '[[environment.mcp_servers]]\nname = "b"\ntransport = "http"\nurl = "http://tools/mcp"\n'
    folder = harbor_task(tmp_path / "t", stdio + http)
    agent = read_harbor_task(folder, QUIET).body["agent"]
    assert agent == {"mcp_servers": {"a": {"command": ["serve", "x"]}, "b": {"url": "http://tools/mcp"}}}
    assert "mcp_servers" not in read_harbor_task(folder, Choices(oracle=True, network="proxy")).body["agent"], (
        "a solution asks no one"
    )
    write(folder / "task.toml", http.replace('"http"', '"sse"'))
    with pytest.raises(InvalidRequest, match=r"mcp_servers\.0.*streamable HTTP"):
        read_harbor_task(folder, QUIET)


def test_steps_are_refused(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", '[[steps]]\nname = "first"\n')
    with pytest.raises(InvalidRequest, match="steps"):
        read_harbor_task(folder, QUIET)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh", "solution/solve.sh"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    folder = harbor_task(tmp_path / "t")
    (folder / missing).unlink()
    with pytest.raises(InvalidRequest, match=missing):
        read_harbor_task(folder, ORACLE)


def test_values_of_this_machines_environment_stay_out_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KENNEL_KEY", "secret")
    for value in ("${KENNEL_KEY}", "${KENNEL_KEY:-none}", "${NOT_SET_ANYWHERE}"):
        folder = harbor_task(tmp_path / "t", f'[verifier.env]\nKEY = "{value}"\n')
        with pytest.raises(InvalidRequest, match=r"verifier\.env\.KEY.*not written into a task"):
            read_harbor_task(folder, QUIET)


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t")
    (folder / "tests" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="link"):
        read_harbor_task(folder, QUIET)


def test_a_task_that_builds_an_image_needs_a_runtime_with_images(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", **{"environment/Dockerfile": "FROM debian:12\nRUN apt-get install -y jq\n"})
    built = read_harbor_task(folder, QUIET)
    assert built.body["runtime"]["backend"] == "docker"
    image = built.body["runtime"]["image"]
    assert image.startswith("gangline-task/kennel-count-bytes:")
    assert f"docker build -t {image} {folder / 'environment'}" in built.notes[0]
    with pytest.raises(
        InvalidRequest, match=r"line 2: RUN apt-get.*which runtime `sandbox` cannot give.*--image FOLDER"
    ):
        read_harbor_task(folder, Choices(runtime="sandbox", network="proxy"))
    given = read_harbor_task(folder, Choices(runtime="sandbox", network="proxy", image="/roots/one"))
    assert given.body["runtime"]["image"] == "/roots/one"
    write(folder / "environment" / "more", "x")
    assert read_harbor_task(folder, QUIET).body["runtime"]["image"] != image, "other content, another name"


def test_a_published_image_wins_and_the_process_runtime_is_refused(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", '[environment]\ndocker_image = "kennel/base:1"\n')
    runtime = read_harbor_task(folder, QUIET).body["runtime"]
    assert (runtime["backend"], runtime["image"]) == ("docker", "kennel/base:1")
    with pytest.raises(InvalidRequest, match="process"):
        read_harbor_task(folder, Choices(runtime="process", network="proxy"))


def test_who_submits_says_what_becomes_of_a_wish_for_the_network(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", 'schema_version = "1.4"\n')
    with pytest.raises(InvalidRequest, match=r"asks for the network \(public\).*--network full.*--oracle"):
        read_harbor_task(folder, Choices())
    for network in ("proxy", "full"):
        runtime = read_harbor_task(folder, Choices(network=network)).body["runtime"]
        assert runtime["network"] == network


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("FROM a\nWORKDIR /w\nWORKDIR sub\nENV A=1 B='two words'\nENV C three four\nCMD x", None),
        ("from a\n# RUN no\nworkdir /w\\\n/sub\nEnv A=1 B='two words' C='three four'", None),
        ("FROM a\nWORKDIR /w/sub\nENV A=1 B='two words' C='three four'\nRUN <<EOF\ntrue\nEOF", "line 4: RUN <<EOF"),
        ("FROM a\nFROM b\nWORKDIR /w/sub\nENV A=1 B='two words' C='three four'", "line 2: FROM b"),
        ("FROM a\nWORKDIR /w/sub\nENV A=1 B='two words' C='three four'\nENV D=$A", "line 4: ENV"),
        ("FROM a\nWORKDIR /w/sub\nENV A=1 B='two words' C='three four'\nCOPY --from=x a b", "line 4: COPY"),
        ("FROM a\nWORKDIR /w/sub\nENV A=1 B='two words' C='three four'\nCOPY ../x b", "line 4: COPY"),
        ("FROM a\nWORKDIR /w/sub\nENV A=1 B='two words' C='three four'\nUSER me", "line 4: USER"),
    ],
)
def test_a_dockerfile_says_what_any_linux_can_do(tmp_path: Path, text: str, needs: str | None) -> None:
    found = read_dockerfile(write(tmp_path / "Dockerfile", text))
    assert found.workdir == "/w/sub"
    assert found.env == {"A": "1", "B": "two words", "C": "three four"}
    if needs is None:
        assert found.needs_image is None
    else:
        assert found.needs_image is not None
        assert found.needs_image.startswith(needs)


def test_copied_files_go_where_docker_puts_them(tmp_path: Path) -> None:
    dockerfile = (
        "FROM a\nWORKDIR /app\nCOPY one.txt .\nCOPY one.txt /data/in/\nCOPY one.txt renamed\nCOPY data /app/all\n"
    )
    folder = harbor_task(tmp_path / "t", **{"environment/Dockerfile": dockerfile, "environment/one.txt": "1"})
    runtime = read_harbor_task(folder, Choices()).body["runtime"]
    paths = [action["path"] for action in runtime["prepare"]]
    assert paths == ["/app/one.txt", "/data/in/one.txt", "/app/renamed", "/app/all/words.bin"]
    assert "/data/in" in runtime["folders"]


def test_a_terminal_bench_task_is_an_ordinary_one(tmp_path: Path) -> None:
    need_module("yaml", "pip install 'gangline[importers]'")
    task = validated(read_terminal_bench_task(terminal_bench_task(tmp_path / "t"), ORACLE).body, "t")
    assert task.instruction == "Create hello.txt with the word sled.\n"
    assert (task.timeout_seconds, task.evaluation_timeout_seconds) == (80, 100)
    assert task.runtime.env == {"COLOUR": "red", "TEST_DIR": "/tests"}
    assert set(task.evaluator.config["files"]) == {"/tests/run-tests.sh", "/tests/test_outputs.py"}


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("task.yaml", TERMINAL_BENCH_YAML.replace("pytest", "swe_lancer"), "swe_lancer"),
        ("task.yaml", "instruction: [", "no YAML"),
        ("task.yaml", "difficulty: easy", "instruction: Field required"),
        ("docker-compose.yaml", TERMINAL_BENCH_COMPOSE + "  db:\n    image: x\n", "other than one service"),
        ("docker-compose.yaml", TERMINAL_BENCH_COMPOSE + "    privileged: true\n", "privileged"),
        ("docker-compose.yaml", "services:\n  client:\n    build: ../..\n", "outside the task"),
        ("docker-compose.yaml", "[]", "other than one service"),
    ],
)
def test_what_a_terminal_bench_task_cannot_be_given_is_named(tmp_path: Path, path: str, text: str, told: str) -> None:
    need_module("yaml", "pip install 'gangline[importers]'")
    folder = terminal_bench_task(tmp_path / "t")
    write(folder / path, text)
    with pytest.raises(InvalidRequest, match=told):
        read_terminal_bench_task(folder, Choices())


ROW: dict[str, Any] = {
    "instance_id": "Dogs__kennel-1",
    "repo": "dogs/kennel",
    "base_commit": "0" * 40,
    "problem_statement": "{broken}",
    "patch": "p",
    "test_patch": "--- a/t/test_a.py\n+++ b/t/test_a.py\n--- /dev/null\n+++ b/t/data.txt\n",
    "FAIL_TO_PASS": '["t/test_a.py::test_x"]',
    "PASS_TO_PASS": [],
}


def instance(
    tmp_path: Path, choices: Choices = ORACLE, how: InstanceChoices | None = None, **changes: Any
) -> dict[str, Any]:
    path = write(tmp_path / "rows.jsonl", json.dumps({**ROW, **changes}) + "\n\n")
    (found,) = read_instances(path, choices, how or InstanceChoices())
    TaskRequest.model_validate(found.body)
    plugins.make_evaluator("swe_bench", found.body["evaluator"]["config"])
    return found.body


def test_a_row_is_a_task_in_the_image_of_its_name(tmp_path: Path) -> None:
    body = instance(tmp_path)
    assert body["runtime"]["image"] == "swebench/sweb.eval.x86_64.dogs_1776_kennel-1:latest"
    assert "{broken}" in body["instruction"]
    config = body["evaluator"]["config"]
    assert config["fail_to_pass"] == ["t/test_a.py::test_x"]
    assert config["test_command"].endswith("-m pytest -rA -p no:cacheprovider t/test_a.py")
    assert body["evaluator"]["refresh_runtime"] is True
    assert instance(tmp_path, image="a/b:1")["runtime"]["image"] == "a/b:1"
    pattern = Choices(oracle=True, image="me/{instance_id}:2")
    assert instance(tmp_path, pattern, image="a/b:1")["runtime"]["image"] == "me/dogs_1776_kennel-1:2"


def test_a_row_may_bring_its_own_script_and_parser(tmp_path: Path) -> None:
    config = instance(tmp_path, eval_script="run me", log_parser="parse_log_django")["evaluator"]["config"]
    assert (config["eval_script"], config["log_parser"]) == ("run me", "parse_log_django")
    assert "test_patch" not in config
    how = InstanceChoices(test_command="nox {tests}", log_parser="unittest")
    config = instance(tmp_path, how=how, eval_script="run me")["evaluator"]["config"]
    assert (config["test_command"], config["log_parser"]) == ("nox t/test_a.py", "unittest")
    assert instance(tmp_path, test_cmd="tox")["evaluator"]["config"]["test_command"] == "tox"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"FAIL_TO_PASS": []}, "row 1: FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "["}, "row 1: FAIL_TO_PASS"),
        ({"base_commit": "main; rm -rf /"}, "base_commit"),
        ({"eval_type": "fail_only"}, "by its failures alone"),
        ({"repo": "django/django"}, "on import: --test-command and --log-parser"),
        ({"patch": ""}, "no solution"),
    ],
)
def test_what_a_row_cannot_be_given_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        instance(tmp_path, **changes)


def test_the_sandbox_needs_repositories(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--repositories FOLDER"):
        instance(tmp_path, Choices(oracle=True, runtime="sandbox"))
    runtime = instance(tmp_path, how=InstanceChoices(repositories="/srv/it's/"))["runtime"]
    assert runtime["backend"] == "sandbox"
    assert "'/srv/it'\"'\"'s/dogs__kennel'" in runtime["prepare"][0]["command"]


def test_rows_come_as_parquet_too_and_are_chosen_by_their_names(tmp_path: Path) -> None:
    need_module("pyarrow", "pip install 'gangline[parquet]'")
    import pyarrow
    from pyarrow import parquet

    rows = [{**ROW, "instance_id": name} for name in ("a__b-1", "a__b-2", "c__d-1")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read_instances(tmp_path / "rows.parquet", ORACLE, InstanceChoices(), "a__*")
    assert [one.name for one in found] == ["a__b-1", "a__b-2"]
    with pytest.raises(InvalidRequest, match="matches 'x'"):
        read_instances(tmp_path / "rows.parquet", ORACLE, InstanceChoices(), "x")
    write(tmp_path / "rows.parquet", "no parquet")
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_instances(tmp_path / "rows.parquet", ORACLE, InstanceChoices())


def request(**changes: Any) -> ImportRequest:
    fields: dict[str, Any] = dict.fromkeys(ImportRequest.__struct_fields__) | {"oracle": True, **changes}
    return ImportRequest(**fields)


def test_a_folder_of_tasks_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        harbor_task(tmp_path / name, HARBOR_TOML.replace("kennel/count-bytes", f"kennel/{name}"))
    (tmp_path / "no-task").mkdir()
    assert [one.name for one in import_tasks(request(harbor=tmp_path), None)] == ["kennel/a", "kennel/b", "kennel/c"]
    assert [one.name for one in import_tasks(request(harbor=tmp_path, only="[bc]"), None)] == ["kennel/b", "kennel/c"]
    assert [one.name for one in import_tasks(request(harbor=tmp_path / "b"), None)] == ["kennel/b"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"harbor": "nowhere"}, "there is no such folder"),
        ({"harbor": "."}, "holds no task"),
        ({"harbor": "tasks", "only": "x*"}, r"holds no task that matches 'x\*'"),
        ({"terminal_bench": "tasks"}, "holds no task"),
        ({"harbor": "tasks", "network": "internet"}, "must be one of none, proxy"),
        ({"swe_bench": "nowhere.jsonl"}, "cannot read"),
        ({"swe_bench": "tasks/one/task.toml"}, "no JSON"),
    ],
)
def test_a_source_without_tasks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    harbor_task(tmp_path / "tasks" / "one")
    paths = {name: Path(value) if name not in ("only", "network") else value for name, value in changes.items()}
    with pytest.raises(InvalidRequest, match=told):
        import_tasks(request(**paths), None)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="give one of"):
        _ = request(harbor=Path("a"), swe_bench=Path("b")).names_tasks
    with pytest.raises(InvalidRequest, match=r"--oracle.*go with --harbor"):
        _ = request().names_tasks
    assert not request(oracle=False).names_tasks

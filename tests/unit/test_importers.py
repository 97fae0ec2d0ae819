"""What others wrote, read as our tasks; what cannot be carried is refused by its name."""

from __future__ import annotations

import base64
import tomllib
import warnings
from pathlib import Path

import pytest

from gangline.cli.tasks.files import validated
from gangline.domain.errors import InvalidRequest
from gangline.interop.harbor.tasks.config import config_of
from gangline.interop.harbor.tasks.task import read_harbor_task
from gangline.machine.reading.dockerfile import read_dockerfile
from gangline.machine.reading.documents import read_toml
from gangline.machine.reading.files import own_file
from gangline.machine.reading.imported import Choices
from gangline.machine.reading.paths import SourcePath
from gangline.tasks.importers.terminal_bench import read_terminal_bench_task
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

QUIET = Choices(network="proxy")


def test_a_harbor_task_is_an_ordinary_one(tmp_path: Path) -> None:
    found = read_harbor_task(SourcePath.of(harbor_task(tmp_path / "t")), Choices())
    task = validated({**found.body, "agent": {"harness": "pi"}}, "t")
    assert task.instruction == "Write the number of bytes and the sled's colour.\n"
    assert (task.timeout_seconds, task.evaluation_timeout_seconds) == (90, 105)
    assert task.runtime.backend == "sandbox"
    assert (task.runtime.workdir, task.runtime.env, task.runtime.network) == ("/app", {"SLED": "red"}, "proxy")
    assert (task.runtime.limits.cpus, task.runtime.limits.memory_bytes) == (1, 512 << 20)
    copied = {action.path: action for action in task.runtime.prepare if action.type == "write"}
    assert base64.b64decode(copied["/app/data/words.bin"].content) == WORDS
    assert task.solution is not None
    assert task.solution.command == ("/solution/solve.sh",)
    assert {action.path: action.mode for action in task.solution.prepare if action.type == "write"} == {
        "/solution/solve.sh": 0o755
    }
    assert task.evaluator.config["env"] == {"WANTED": "4"}
    assert task.metadata == {
        "source": "harbor",
        "task": "kennel/count-bytes",
        "instance": tomllib.loads(HARBOR_TOML),
    }
    assert found.notes == ("kennel/count-bytes: the machine's own programs stand in for debian:12",)


def test_harbors_own_types_read_the_same_file_in_the_same_way(tmp_path: Path) -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.models.task.config import TaskConfig

    old = HARBOR_TOML.replace('schema_version = "1.4"', 'version = "1.0"').replace("memory_mb = 512", 'memory = "2G"')
    for toml in (HARBOR_TOML, old, 'version = "1.0"\n'):
        path = own_file(write(tmp_path / "task.toml", toml))
        ours = config_of(read_toml(path), path)
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
        quiet = ours.environment.network_mode == "no-network"
        assert quiet == (theirs.environment.network_mode.value == "no-network")


def test_every_field_of_harbors_types_is_known(tmp_path: Path) -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.models.task import config as theirs

    from gangline.interop.harbor.tasks import config as ours

    pairs = {
        ours.HarborConfig: theirs.TaskConfig,
        ours.HarborAgent: theirs.AgentConfig,
        ours.HarborEnvironment: theirs.EnvironmentConfig,
        ours.HarborVerifier: theirs.VerifierConfig,
        ours.HarborSolution: theirs.SolutionConfig,
        ours.HarborHealthcheck: theirs.HealthcheckConfig,
        ours.HarborCollect: theirs.VerifierCollectConfig,
        ours.HarborArtifact: theirs.ArtifactConfig,
        ours.HarborMcpServer: theirs.MCPServerConfig,
    }
    for mine, other in pairs.items():
        assert set(other.model_fields) <= set(mine.model_fields), mine


@pytest.mark.parametrize(
    ("section", "line", "told"),
    [
        ("environment", 'gpu_types = ["H100"]', "environment.gpu_types"),
        ("environment", 'os = "windows"', "environment.os"),
        ("environment", "healthcheck = { interval_sec = 1 }", "environment.healthcheck.command"),
        ("environment", "colour = 1", "environment.colour: Extra inputs"),
        ("verifier", 'environment = { gpu_types = ["H100"] }', "verifier.environment.gpu_types"),
        ("verifier", 'environment = { skills_dir = "/s" }', "verifier.environment.skills_dir"),
        ("verifier", 'user = "root"', "verifier.user"),
        ("agent", 'user = "root"', "agent.user"),
        ("agent", "timeout_sec = -1", "agent.timeout_sec"),
    ],
)
def test_what_a_harbor_task_cannot_be_given_is_named(tmp_path: Path, section: str, line: str, told: str) -> None:
    folder = harbor_task(tmp_path / "t", f"[{section}]\n{line}\n")
    with pytest.raises(InvalidRequest, match=told):
        read_harbor_task(SourcePath.of(folder), Choices())


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("trajectory.json", "trajectory.json"),
        ("tests/docker-compose.yaml", "tests/docker-compose.yaml"),
        ("tests/.harborignore", ".harborignore"),
    ],
)
def test_files_that_ask_for_more_are_named(tmp_path: Path, path: str, told: str) -> None:
    folder = harbor_task(tmp_path / "t")
    write(folder / path, "{}")
    with pytest.raises(InvalidRequest, match=told):
        read_harbor_task(SourcePath.of(folder), Choices())


def test_servers_of_tools_go_to_the_agent(tmp_path: Path) -> None:
    stdio = '[[environment.mcp_servers]]\nname = "a"\ntransport = "stdio"\ncommand = "serve"\nargs = ["x"]\n'
    http = '[[environment.mcp_servers]]\nname = "b"\ntransport = "http"\nurl = "http://tools/mcp"\n'
    folder = harbor_task(tmp_path / "t", stdio + http)
    agent = read_harbor_task(SourcePath.of(folder), QUIET).body["agent"]
    assert agent == {"mcp_servers": {"a": {"command": ["serve", "x"]}, "b": {"url": "http://tools/mcp"}}}
    write(folder / "task.toml", http.replace('"http"', '"sse"'))
    with pytest.raises(InvalidRequest, match=r"mcp_servers\.0.*talks sse"):
        read_harbor_task(SourcePath.of(folder), QUIET)


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    folder = harbor_task(tmp_path / "t")
    (folder / missing).unlink()
    with pytest.raises(InvalidRequest, match=missing):
        read_harbor_task(SourcePath.of(folder), Choices())


def test_a_task_without_a_solution_has_none(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t")
    (folder / "solution" / "solve.sh").unlink()
    assert "solution" not in read_harbor_task(SourcePath.of(folder), Choices()).body


def test_values_of_this_machines_environment_stay_out_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KENNEL_KEY", "secret")
    for value in ("${KENNEL_KEY}", "${KENNEL_KEY:-none}", "${NOT_SET_ANYWHERE}"):
        folder = harbor_task(tmp_path / "t", f'[verifier.env]\nKEY = "{value}"\n')
        with pytest.raises(InvalidRequest, match=r"verifier\.env\.KEY.*not written into a task"):
            read_harbor_task(SourcePath.of(folder), QUIET)


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t")
    (folder / "tests" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="link"):
        read_harbor_task(SourcePath.of(folder), QUIET)


def test_a_task_that_builds_an_image_needs_a_runtime_with_images(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", **{"environment/Dockerfile": "FROM debian:12\nRUN apt-get install -y jq\n"})
    built = read_harbor_task(SourcePath.of(folder), QUIET)
    assert built.body["runtime"]["backend"] == "docker"
    image = built.body["runtime"]["image"]
    assert image.startswith("gangline-task/kennel-count-bytes:")
    assert f"docker build -t {image} {folder / 'environment'}" in built.notes[0]
    with pytest.raises(
        InvalidRequest, match=r"line 2: RUN apt-get.*which runtime `sandbox` cannot give.*--image FOLDER"
    ):
        read_harbor_task(SourcePath.of(folder), Choices(runtime="sandbox", network="proxy"))
    given = read_harbor_task(SourcePath.of(folder), Choices(runtime="sandbox", network="proxy", image="/roots/one"))
    assert given.body["runtime"]["image"] == "/roots/one"
    write(folder / "environment" / "more", "x")
    assert read_harbor_task(SourcePath.of(folder), QUIET).body["runtime"]["image"] != image, (
        "other content, another name"
    )


def test_a_published_image_wins_and_the_process_runtime_is_refused(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", '[environment]\ndocker_image = "kennel/base:1"\n')
    runtime = read_harbor_task(SourcePath.of(folder), QUIET).body["runtime"]
    assert (runtime["backend"], runtime["image"]) == ("docker", "kennel/base:1")
    with pytest.raises(InvalidRequest, match="process"):
        read_harbor_task(SourcePath.of(folder), Choices(runtime="process", network="proxy"))


def test_who_submits_says_what_becomes_of_a_wish_for_the_network(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", 'schema_version = "1.4"\n')
    with pytest.raises(InvalidRequest, match=r"asks for the network \(public\).*--network full.*--oracle"):
        read_harbor_task(SourcePath.of(folder), Choices())
    for network in ("proxy", "full"):
        runtime = read_harbor_task(SourcePath.of(folder), Choices(network=network)).body["runtime"]
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
    found = read_dockerfile(own_file(write(tmp_path / "Dockerfile", text)))
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
    runtime = read_harbor_task(SourcePath.of(folder), Choices()).body["runtime"]
    paths = [action["path"] for action in runtime["prepare"]]
    assert paths == ["/app/one.txt", "/data/in/one.txt", "/app/renamed", "/app/all/words.bin"]
    assert "/data/in" in runtime["folders"]


def test_a_terminal_bench_task_is_an_ordinary_one(tmp_path: Path) -> None:
    need_module("yaml", "pip install 'gangline[importers]'")
    found = read_terminal_bench_task(SourcePath.of(terminal_bench_task(tmp_path / "t")), Choices())
    task = validated({**found.body, "agent": {"harness": "pi"}}, "t")
    assert task.instruction == "Create hello.txt with the word sled.\n"
    assert (task.timeout_seconds, task.evaluation_timeout_seconds) == (80, 100)
    assert task.runtime.env == {"COLOUR": "red", "TEST_DIR": "/tests"}
    assert set(task.evaluator.config["files"]) == {"/tests/run-tests.sh", "/tests/test_outputs.py"}
    assert task.metadata["instance"]["tags"] == ["files"], "fields that only describe the task are kept too"
    assert task.solution is not None


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("task.yaml", TERMINAL_BENCH_YAML.replace("pytest", "swe_lancer"), "swe_lancer"),
        ("task.yaml", "instruction: [", "not YAML"),
        ("task.yaml", "difficulty: easy", "instruction: Field required"),
        ("docker-compose.yaml", TERMINAL_BENCH_COMPOSE + "  db:\n    image: x\n", "other than one service"),
        ("docker-compose.yaml", TERMINAL_BENCH_COMPOSE + "    privileged: true\n", "privileged"),
        ("docker-compose.yaml", "services:\n  client:\n    build: ../..\n", "leads out of the folder"),
        ("docker-compose.yaml", "[]", "other than one service"),
    ],
)
def test_what_a_terminal_bench_task_cannot_be_given_is_named(tmp_path: Path, path: str, text: str, told: str) -> None:
    need_module("yaml", "pip install 'gangline[importers]'")
    folder = terminal_bench_task(tmp_path / "t")
    write(folder / path, text)
    with pytest.raises(InvalidRequest, match=told):
        read_terminal_bench_task(SourcePath.of(folder), Choices())

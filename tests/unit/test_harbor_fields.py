"""Fields of Harbor's task format alongside the usual ones: carried, or refused by name."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from gangline.cli.tasks.files import validated
from gangline.domain.errors import InvalidRequest
from gangline.domain.task import NetworkPolicy
from gangline.interop.harbor.tasks.config import HarborHealthcheck
from gangline.interop.harbor.tasks.healthcheck import healthcheck_action
from gangline.interop.harbor.tasks.task import read_harbor_task
from gangline.machine.reading.imported import Choices
from gangline.machine.reading.paths import SourcePath
from support.requirements import need_module
from support.service.field_tasks import harbor_task, write

QUIET = Choices(network="proxy")
LISTED = Choices(network="list")


def test_a_user_of_the_images_is_the_sandboxs_own(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", '[agent]\nuser = "worker"\n[verifier]\nuser = 1000\n')
    notes = read_harbor_task(SourcePath.of(folder), QUIET).notes
    assert "t: agent.user 'worker' is the sandbox's own user" in notes
    assert "t: verifier.user 1000 is the sandbox's own user" in notes


def test_the_disk_is_limited(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", '[environment]\nstorage = "2G"\n')
    assert read_harbor_task(SourcePath.of(folder), QUIET).body["runtime"]["limits"] == {"disk_bytes": 2 << 30}


def test_skills_that_the_dockerfile_copies_go_to_the_agent(tmp_path: Path) -> None:
    folder = harbor_task(
        tmp_path / "t",
        '[environment]\nskills_dir = "/skills"\n',
        **{
            "environment/Dockerfile": "FROM debian:12\nCOPY skills /skills\nRUN apt-get install -y jq\n",
            "environment/skills/mush/SKILL.md": "---\nname: mush\n---\n",
            "environment/skills/mush/docs/sled.md": "Red.\n",
            "environment/skills/notes/README.md": "No skill.\n",
        },
    )
    body = read_harbor_task(SourcePath.of(folder), QUIET).body
    skills = {"mush": {"SKILL.md": "---\nname: mush\n---\n", "docs/sled.md": "Red.\n"}}
    assert body["agent"] == {"skills": skills}
    write(folder / "task.toml", '[environment]\nskills_dir = "/elsewhere"\n')
    with pytest.raises(InvalidRequest, match=r"skills_dir: no COPY .* below /elsewhere"):
        read_harbor_task(SourcePath.of(folder), QUIET)
    write(folder / "task.toml", '[environment]\nskills_dir = "/skills"\n')
    write(folder / "environment" / "skills" / "mush" / "sled.png", b"\xff\x00")
    with pytest.raises(InvalidRequest, match=r"skills_dir: /skills/mush/sled\.png is not text"):
        read_harbor_task(SourcePath.of(folder), QUIET)


def test_headers_of_tool_servers_go_along_unless_they_are_secrets(tmp_path: Path) -> None:
    server = '[[environment.mcp_servers]]\nname = "b"\ntransport = "streamable-http"\nurl = "http://tools/mcp"\n'
    folder = harbor_task(tmp_path / "t", f'{server}headers = {{ X-Team = "red" }}\n')
    given = read_harbor_task(SourcePath.of(folder), QUIET).body["agent"]["mcp_servers"]
    assert given == {"b": {"url": "http://tools/mcp", "headers": {"X-Team": "red"}}}
    folder = harbor_task(tmp_path / "t", f'{server}headers = {{ Authorization = "Bearer ${{KEY}}" }}\n')
    with pytest.raises(InvalidRequest, match=r"headers\.Authorization has a variable"):
        read_harbor_task(SourcePath.of(folder), QUIET)


HOSTS = 'network_mode = "allowlist"\nallowed_hosts = ["pypi.org", "*.debian.org"]\n'
NONE = 'network_mode = "no-network"\n'


@pytest.mark.parametrize(
    ("toml", "given"),
    [
        (f"[environment]\n{HOSTS}", ["pypi.org", "*.debian.org"]),
        (f"[agent]\n{HOSTS}[verifier]\n{HOSTS}[environment]\n", ["pypi.org", "*.debian.org"]),
        (f"[agent]\n{NONE}[verifier]\n{NONE}[environment]\n", None),
        ("[environment]\nallow_internet = false\n", None),
    ],
)
def test_network_list_grants_what_the_task_names(tmp_path: Path, toml: str, given: list[str] | None) -> None:
    runtime = read_harbor_task(SourcePath.of(harbor_task(tmp_path / "t", toml)), LISTED).body["runtime"]
    assert (runtime["network"], runtime.get("network_allow")) == ("proxy" if given is None else "list", given)
    assert validated({"instruction": "x", "runtime": runtime, "agent": {"harness": "pi"}}, "t").runtime.network


@pytest.mark.parametrize(
    ("toml", "network", "told"),
    [
        (f"[environment]\n{HOSTS}", None, r"\(allowlist: pypi\.org, \*\.debian\.org\).*--network list"),
        ("", "list", "public network, which is not a list"),
        (f"[agent]\n{NONE}[environment]\n{HOSTS}", "list", r"agent\.network_mode \(no-network\) and verifier"),
        (f"[environment]\n{HOSTS.replace('pypi.org', '10.0.0.0/8')}", "list", r"allowed_hosts: '10\.0\.0\.0/8'"),
    ],
)
def test_a_network_that_cannot_be_given_is_named(
    tmp_path: Path, toml: str, network: NetworkPolicy | None, told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        read_harbor_task(SourcePath.of(harbor_task(tmp_path / "t", toml)), Choices(network=network))


def test_a_health_check_is_the_last_prepare_action(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", "[environment]\nhealthcheck = { command = \"test -e '/app'\" }\n")
    task = validated({**read_harbor_task(SourcePath.of(folder), QUIET).body, "agent": {"harness": "pi"}}, "t")
    last = task.runtime.prepare[-1]
    assert last.type == "exec"
    assert "test -e" in last.command
    assert last.timeout_seconds == 5 + 30 + 3 * 35 + 10
    assert task.init_timeout_seconds == 300 + last.timeout_seconds


@pytest.mark.parametrize(
    ("check", "fails", "tries", "healthy"),
    [
        ({"retries": 3}, 2, 3, True),
        ({"retries": 3}, 3, 3, False),
        ({"retries": 0}, 1, 1, False),
        ({"retries": 1, "start_period_sec": 60}, 4, 5, True),
    ],
)
def test_checks_are_counted_as_harbor_counts_them(
    tmp_path: Path, check: dict[str, int], fails: int, tries: int, healthy: bool
) -> None:
    command = f"echo >> tries; [ $(wc -l < tries) -gt {fails} ] && : 'it is'"
    action = healthcheck_action(
        HarborHealthcheck.model_validate({"command": command, "interval_sec": 0, "start_interval_sec": 0, **check})
    )
    done = subprocess.run(["sh", "-c", action["command"]], cwd=tmp_path, check=False, capture_output=True)
    assert (done.returncode == 0, len((tmp_path / "tries").read_text())) == (healthy, tries)


def test_our_defaults_are_harbors() -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.models.task.config import ArtifactConfig, HealthcheckConfig, VerifierCollectConfig

    from gangline.interop.harbor.tasks import config as ours

    assert ours.HarborHealthcheck(command="x").model_dump() == HealthcheckConfig(command="x").model_dump()
    assert ours.HarborCollect(command="x").model_dump() == VerifierCollectConfig(command="x").model_dump()
    assert ours.HarborArtifact(source="x").model_dump() == ArtifactConfig(source="x").model_dump()


SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'


def evaluator_of(folder: Path, choices: Choices = QUIET) -> dict[str, Any]:
    body = read_harbor_task(SourcePath.of(folder), choices).body
    validated({**body, "agent": {"harness": "pi"}}, "t")
    return body["evaluator"]


def test_a_separate_verifier_gets_the_artifacts_and_a_fresh_copy_of_the_environment(tmp_path: Path) -> None:
    toml = f'artifacts = ["/app/answer.txt", {{ source = "/app/out/", exclude = ["*.log"] }}]\n{SEPARATE}'
    given = evaluator_of(harbor_task(tmp_path / "t", toml))
    assert given["refresh_runtime"]
    assert "runtime" not in given, "one like the agent's"
    assert "/tests/test.sh" in given["config"]["files"]
    assert given["config"]["max_collect_bytes"] == 64 << 20
    assert given["config"]["collect_folders"] == {
        "/logs/artifacts": [],
        "/app/answer.txt": [],
        "/app/out": ["*.log"],
    }


def test_an_environment_of_the_verifiers_own_has_its_settings(tmp_path: Path) -> None:
    toml = (
        "[verifier.environment]\nmemory_mb = 64\nenv = { WHO = 'judge' }\nworkdir = '/judge'\n"
        "healthcheck = { command = 'true', retries = 100 }\n"
    )
    folder = harbor_task(tmp_path / "t", toml)
    body = read_harbor_task(SourcePath.of(folder), QUIET).body
    runtime = body["evaluator"]["runtime"]
    assert (runtime["env"], runtime["workdir"], runtime["limits"]) == (
        {"WHO": "judge"},
        "/judge",
        {"memory_bytes": 64 << 20},
    )
    assert body["init_timeout_seconds"] == 300 + 5 + 30 + 100 * 35 + 10
    write(folder / "task.toml", toml + '[verifier]\nenvironment_mode = "shared"\n')
    with pytest.raises(InvalidRequest, match="exclude each other"):
        read_harbor_task(SourcePath.of(folder), QUIET)


def test_an_image_of_the_verifiers_brings_its_tests(tmp_path: Path) -> None:
    toml = f'{SEPARATE}environment = {{ docker_image = "kennel/judge:1" }}\n'
    folder = harbor_task(tmp_path / "t", toml)
    given = evaluator_of(folder, Choices(runtime="docker", network="proxy", image="kennel/agent:1"))
    assert given["runtime"]["image"] == "kennel/judge:1"
    assert "/tests" not in given["runtime"]["folders"], "that would hide those of the image"
    assert (given["config"]["files"], given["config"]["clear"]) == ({}, ["/logs/verifier"])
    folder = harbor_task(tmp_path / "t", SEPARATE, **{"tests/Dockerfile": "FROM debian:12\nCOPY . /tests/\n"})
    given = evaluator_of(folder)
    assert given["config"]["files"] == {}
    assert "/tests/test.sh" in [action["path"] for action in given["runtime"]["prepare"]]


def test_collect_hooks_run_first(tmp_path: Path) -> None:
    hooks = '[[verifier.collect]]\ncommand = "dump > /logs/artifacts/db"\ntimeout_sec = 7\n'
    body = read_harbor_task(SourcePath.of(harbor_task(tmp_path / "t", hooks)), QUIET).body
    commands = [{"command": "dump > /logs/artifacts/db", "timeout_seconds": 7}]
    assert body["evaluator"]["config"]["collect_commands"] == commands
    assert body["evaluation_timeout_seconds"] == 600 + 7 + 60


def test_a_separate_verifier_has_a_network_of_its_own(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "t", f"{SEPARATE}{HOSTS}[environment]\n{NONE}")
    body = read_harbor_task(SourcePath.of(folder), LISTED).body
    assert body["runtime"]["network"] == "proxy"
    assert body["evaluator"]["runtime"]["network_allow"] == ["pypi.org", "*.debian.org"]


@pytest.mark.parametrize(
    "toml",
    [
        "",
        SEPARATE,
        "[verifier.environment]\n",
        '[verifier]\nenvironment_mode = "shared"\n',
    ],
)
def test_the_mode_is_the_one_that_harbor_resolves(tmp_path: Path, toml: str) -> None:
    need_module("harbor", "make .venv/.dev")
    need_module("pathspec", "make .venv/.dev")
    from harbor.models.task.config import TaskConfig
    from harbor.models.task.verifier_mode import resolve_task_verifier_mode

    theirs = resolve_task_verifier_mode(TaskConfig.model_validate_toml(toml)).value
    given = evaluator_of(harbor_task(tmp_path / "t", toml))
    assert given.get("refresh_runtime", False) == (theirs == "separate")

"""A Harbor task's `environment/docker-compose.yaml`: services that are carried, and keys that are refused by name."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import RuntimeSpec, TaskRequest
from gangline.grading.script.evaluator import ScriptConfig
from gangline.interop.harbor.tasks.task import read_harbor_task
from gangline.machine.reading.imported import Choices
from gangline.machine.reading.paths import SourcePath
from gangline.settings.plugins import check_task
from support.requirements import need_module
from support.service.field_tasks import harbor_task, write

QUIET = Choices(network="proxy", image="debian:12")
STORE = "services: {store: {image: redis:7}}"


@pytest.fixture(autouse=True)
def _yaml() -> None:
    need_module("yaml", "pip install 'gangline[importers]'")


def task(folder: Path, compose: str, toml: str = "", **files: str) -> Path:
    return harbor_task(folder / "t", toml, **{"environment/docker-compose.yaml": textwrap.dedent(compose), **files})


def runtime(folder: Path, compose: str, toml: str = "", **files: str) -> dict[str, Any]:
    return read_harbor_task(SourcePath.of(task(folder, compose, toml, **files)), QUIET).body["runtime"]


COMPOSE = """
    version: "3.8"
    x-often: &often
      environment: [LEVEL=0755, "ANSWER=no"]
    services:
      main:
        build: {context: .}
        command: ["sh", "-c", "sleep infinity"]
        depends_on:
          db: {condition: service_healthy}
          seed: {condition: service_completed_successfully}
        environment:
          DB: "postgres://db/${NAME:-sled}"
          DEBUG: 1
      db:
        image: postgres:16
        user: postgres
        container_name: db
        restart: "no"
        expose: ["5432"]
        environment:
          POSTGRES_DB: ${NAME:-sled}
          ON: yes
          CASH: "5$$"
        healthcheck:
          test: ["CMD", "pg_isready", "-U", "postgres"]
          interval: 2s
          timeout: 1m30s
          start_period: 1s
      seed:
        <<: *often
        image: postgres:16
        entrypoint: sh -c
        command: ["psql -h db -c 'select 1'"]
        working_dir: /tmp
        depends_on: {db: {condition: service_healthy}}
      web:
        image: nginx:1
        depends_on: [db, main]
"""


def test_services_are_carried_as_compose_reads_them(tmp_path: Path) -> None:
    given = runtime(tmp_path, COMPOSE)
    assert given["backend"] == "docker"
    assert given["env"] == {"DB": "postgres://db/sled", "DEBUG": "1"}
    check = {"command": ["pg_isready", "-U", "postgres"], "timeout_seconds": 90.0, "within_seconds": 277.0}
    assert given["services"] == {
        "db": {
            "image": "postgres:16",
            "user": "postgres",
            "env": {"POSTGRES_DB": "sled", "ON": "yes", "CASH": "5$"},
            "healthcheck": check,
        },
        "seed": {
            "image": "postgres:16",
            "entrypoint": ["sh", "-c"],
            "command": ["psql -h db -c 'select 1'"],
            "env": {"LEVEL": "0755", "ANSWER": "no"},
            "workdir": "/tmp",
            "completes": True,
            "depends_on": {"db": "ready"},
        },
        "web": {"image": "nginx:1", "depends_on": {"db": "started"}},
    }
    RuntimeSpec.model_validate(given)


def test_variables_of_the_task_fill_the_file_and_the_tasks_own_win(tmp_path: Path) -> None:
    compose = "services: {main: {environment: {A: 1, B: 2}}, db: {image: 'redis:${TAG:-7}', environment: ['T=$TAG']}}"
    given = runtime(tmp_path, compose, '[environment]\nenv = { TAG = "8", B = "3" }\n')
    assert given["services"] == {"db": {"image": "redis:8", "env": {"T": "8"}}}
    assert given["env"] == {"A": "1", "B": "3", "TAG": "8"}


def test_the_image_of_a_service_is_built_beforehand(tmp_path: Path) -> None:
    folder = task(
        tmp_path,
        "services: {db: {build: ./db, image: mine}, api: {build: {context: db, dockerfile: Api}}}",
        **{"environment/db/Dockerfile": "FROM redis:7\n", "environment/db/Api": "FROM redis:7\n"},
    )
    found = read_harbor_task(SourcePath.of(folder), QUIET)
    db, api = (found.body["runtime"]["services"][name]["image"] for name in ("db", "api"))
    assert db.startswith("gangline-task/t-db-dockerfile:")
    context = folder / "environment" / "db"
    build = "t: the image of its service {} must be there: docker build -t {} {}"
    assert build.format("db", db, folder / "environment" / "./db") in found.notes
    assert build.format("api", api, f"-f {context / 'Api'} {context}") in found.notes


def test_the_health_of_services_is_part_of_the_budget(tmp_path: Path) -> None:
    check = "healthcheck: {test: ok, interval: 10s, timeout: 20s, retries: 5}"
    folder = task(tmp_path, f"services: {{a: {{image: a, {check}}}, b: {{image: b, {check}}}}}")
    assert read_harbor_task(SourcePath.of(folder), QUIET).body["init_timeout_seconds"] == 600


OF_STORE = """
artifacts = ["/app/answer", { source = "/data/", service = "store", exclude = ["*.log"] }]
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "redis-cli save"
service = "store"
user = "root"
[[verifier.collect]]
command = "true"
service = "main"
"""


def test_hooks_and_artifacts_of_services_are_carried(tmp_path: Path) -> None:
    folder = task(tmp_path, STORE)
    write(folder / "task.toml", OF_STORE)
    given = read_harbor_task(SourcePath.of(folder), QUIET).body["evaluator"]
    config = ScriptConfig.model_validate(given["config"])
    assert [(one.service, one.user) for one in config.collect_commands] == [("store", "root"), (None, None)]
    assert config.collect_services == {"store": {"/data": ("*.log",)}}
    assert set(config.collect_folders) == {"/logs/artifacts", "/app/answer"}
    assert "/data" in given["runtime"]["folders"], "nobody can have the folder `/`"


def test_the_place_of_a_services_artifact_is_the_graders_own(tmp_path: Path) -> None:
    folder = task(tmp_path, STORE)
    write(folder / "task.toml", OF_STORE.replace("/data/", "/var/lib/redis/dump.rdb"))
    body = read_harbor_task(SourcePath.of(folder), QUIET).body
    assert "/var/lib/redis" in body["evaluator"]["runtime"]["folders"]
    assert "/var/lib/redis" not in body["runtime"]["folders"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('service = "store"\nuser', 'service = "shop"\nuser', "the service 'shop', which it does not have"),
        ('"/data/"', '"data"', "'data' of a service must be absolute"),
    ],
)
def test_what_cannot_be_collected_is_named(tmp_path: Path, old: str, new: str, why: str) -> None:
    folder = task(tmp_path, STORE)
    write(folder / "task.toml", OF_STORE.replace(old, new))
    with pytest.raises(InvalidRequest, match=why):
        read_harbor_task(SourcePath.of(folder), QUIET)


def test_a_clean_copy_of_the_environment_has_the_services_too(tmp_path: Path) -> None:
    folder = task(tmp_path, STORE, '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\ncpus = 1\n')
    assert read_harbor_task(SourcePath.of(folder), QUIET).body["evaluator"]["runtime"]["services"] == {
        "store": {"image": "redis:7"}
    }


@pytest.mark.parametrize(
    ("compose", "told"),
    [
        ("services: {db: {image: x, volumes: [a]}}\nnetworks: {}", r"networks, services\.db\.volumes\."),
        ("services: {db: {image: x, ports: [80]}}", r"services\.db\.ports"),
        ("services: {db: {image: x, privileged: true}}", r"services\.db\.privileged"),
        ("services: {db: {image: x, profiles: [a]}}", r"services\.db\.profiles"),
        ("services: {db: {image: x, restart: always}}", r"services\.db\.restart"),
        ("services: {db: {image: x, hostname: y}}", r"services\.db\.hostname"),
        ("services: {db: {image: x, env_file: y}}", r"services\.db\.env_file"),
        ("services: {db: {image: x, environment: [HOME]}}", r"services\.db\.environment\.HOME"),
        ("services: {db: {image: x, environment: {HOME: }}}", r"services\.db\.environment\.HOME"),
        (
            "services: {db: {image: x, environment: {A: $KEY}}}",
            r"environment\.A \(the variable \$KEY of this",
        ),
        ("services: {db: {image: x, environment: {A: '${KEY:?}'}}}", r"environment\.A \(the variable \$"),
        ("services: {db: {image: x, environment: {A: '${PATH:-x}'}}}", r"environment\.A \(the variable \$\{PATH:-x\}"),
        ("services: {db: {build: {context: ., args: [A=1]}}}", r"services\.db\.build\.args"),
        ("services: {db: {build: ../..}}", r"services\.db\.build"),
        ("services: {db: {}}", "services.db without image or build"),
        ("services: {db: {image: x, depends_on: [y]}}", r"services\.db\.depends_on\.y"),
        ("services: {db: {image: x, depends_on: {main: {condition: service_healthy}}}}", r"depends_on\.main"),
        ("services: {a: {image: x}, b: {image: x, depends_on: {a: {condition: service_healthy}}}}", "of an image"),
        ("services: {db: {image: x, healthcheck: {test: [x]}}}", r"services\.db\.healthcheck\.test"),
        ("services: {db: {image: x, healthcheck: {test: x, interval: fast}}}", r"healthcheck\.interval"),
        ("services: {main: {command: serve}}", r"services\.main\.command"),
        ("services: {main: {build: other}}", r"services\.main\.build"),
        ("services: {main: {volumes: [a]}}", r"services\.main\.volumes"),
        ("services: [db]", "services is not a mapping"),
        ("services: {db: [", "is not YAML"),
    ],
)
def test_what_is_not_carried_is_named(tmp_path: Path, compose: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        runtime(tmp_path, compose)


def test_a_runtime_without_services_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"t: needs services .*\(store\), which runtime `sandbox` cannot start"):
        read_harbor_task(SourcePath.of(task(tmp_path, STORE)), Choices(network="proxy", runtime="sandbox"))


@pytest.mark.parametrize("backend", ["sandbox", "apptainer", "process"])
def test_a_task_with_services_is_refused_where_none_are_started(backend: str) -> None:
    request: dict[str, Any] = {
        "instruction": "x",
        "runtime": {"backend": backend, "services": {"store": {"image": "redis:7"}}},
        "agent": {"harness": "shell", "settings": {"command": "true"}},
    }
    with pytest.raises(InvalidRequest, match=rf"runtime\.services: runtime `{backend}` starts no services \(store\)"):
        check_task(TaskRequest.model_validate(request))
    request["runtime"] |= {"backend": "docker", "image": "debian:12"}
    check_task(TaskRequest.model_validate(request))


def test_what_is_different_of_services_is_told(tmp_path: Path) -> None:
    notes = read_harbor_task(SourcePath.of(task(tmp_path, STORE)), QUIET).notes
    assert "t: its services reach nothing outside" in notes
    write(tmp_path / "t" / "task.toml", '[environment]\nnetwork_mode = "no-network"\n')
    notes = read_harbor_task(SourcePath.of(tmp_path / "t"), Choices(network="full", image="debian:12")).notes
    (told,) = [note for note in notes if "services" in note]
    assert "at their names" in told

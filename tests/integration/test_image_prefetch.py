"""`gangline image prefetch`, with a program in place of Docker, here and on a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gangline.cli.machine.prefetch import prefetch
from gangline.domain.errors import InvalidRequest, PullFailed
from gangline.serving.scripted.server import scripted_server
from support.node.node import running_node

DOCKER = """#!/bin/sh
# docker image inspect NAME | image ls ... | pull --quiet NAME; images are files in $IMAGES
file() { echo "$IMAGES/$(echo "$1" | tr '/:' '__')"; }
case "$1 $2" in
"image inspect")
    [ -e "$(file "$3")" ] || { echo "Error: No such image: $3" >&2; exit 1; }
    id=$(echo "$3" | sha256sum | cut -d' ' -f1)
    echo "[{\\"Id\\": \\"sha256:$id\\", \\"RepoDigests\\": [\\"${3%:*}@sha256:$id\\"], \\"Size\\": 7}]" ;;
"image ls") exit 0 ;;
"pull --quiet")
    case "$3" in *absent*) echo "Error response from daemon: manifest unknown" >&2; exit 1 ;; esac
    echo "$3" >> "$IMAGES/pulled"; touch "$(file "$3")" ;;
*) echo "unexpected: $*" >&2; exit 64 ;;
esac
"""


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    docker, images = tmp_path / "docker", tmp_path / "images"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    images.mkdir()
    monkeypatch.setenv("IMAGES", str(images))
    monkeypatch.setenv("GANGLINE_DOCKER", str(docker))
    monkeypatch.setenv("GANGLINE_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("GANGLINE_SERVER", raising=False)
    return images / "pulled"


def write_tasks(folder: Path, *images: str) -> str:
    runtime = {"backend": "docker", "image": "grader:1"}
    grader = {"strategy": "script", "refresh_runtime": True, "runtime": runtime, "config": {"command": "true"}}
    tasks: list[dict[str, Any]] = [
        {"instruction": "x", "runtime": {"backend": "docker", "image": image}, "evaluator": grader} for image in images
    ]
    tasks[0]["runtime"]["services"] = {"db": {"image": "postgres:16"}}
    tasks.append({"instruction": "x", "runtime": {"backend": "sandbox"}})
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return str(file)


def invoked(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    app = typer.Typer()
    app.command()(prefetch)
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), repr(ran.exception)
    return ran.exit_code, json.loads(ran.stdout)


def test_every_image_of_a_task_file_is_pulled_once_on_this_machine_if_no_service_runs(
    tmp_path: Path, pulled: Path
) -> None:
    code, found = invoked(write_tasks(tmp_path, "swe:1", "swe:2", "docker.io/library/swe:1"))
    assert code == 0
    names = ["grader:1", "postgres:16", "swe:1", "swe:2"]
    assert sorted(pulled.read_text().split()) == [f"docker.io/library/{name}" for name in names]
    assert {one["where"] for one in found} == {"this machine"}
    assert sorted(one["image"] for one in found) == sorted([*names, "docker.io/library/swe:1"])
    assert all(one["digest"].startswith("sha256:") and one["size_bytes"] == 7 for one in found)
    assert invoked(write_tasks(tmp_path, "swe:1"))[0] == 0
    assert len(pulled.read_text().split()) == 4, "what is there stays as it is"


def test_an_image_that_cannot_be_pulled_is_named_and_the_others_come(tmp_path: Path, pulled: Path) -> None:
    code, found = invoked(write_tasks(tmp_path, "absent:1", "swe:2"))
    assert code == 1
    failed = {one["image"]: one["error"] for one in found if one["error"]}
    assert list(failed) == ["absent:1"]
    assert "manifest unknown" in failed["absent:1"]
    assert "docker.io/library/swe:2" in pulled.read_text()


def test_a_mirror_is_asked_in_place_of_the_registry(
    tmp_path: Path, pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_IMAGE_MIRRORS", '{"docker.io": "cache.corp:5000/hub"}')
    assert invoked(write_tasks(tmp_path, "swe:1"))[0] == 0
    assert "cache.corp:5000/hub/library/swe:1" in pulled.read_text().split()


async def test_a_node_pulls_what_it_is_asked_for_and_says_why_it_cannot(tmp_path: Path, pulled: Path) -> None:
    async with scripted_server({"default": {"text": "hi"}}) as url, running_node(tmp_path / "data", url) as node:
        held = await node.client.prefetch("docker", "swe:1")
        assert held.digest.startswith("sha256:")
        with pytest.raises(PullFailed, match="manifest unknown"):
            await node.client.prefetch("docker", "absent:1")
        for runtime, image in (("process", "swe:1"), ("docker", "--privileged"), ("sandbox", "--privileged")):
            with pytest.raises(InvalidRequest, match=r"pulls no images|the name of an image"):
                await node.client.prefetch(runtime, image)
    assert pulled.read_text().split() == ["docker.io/library/swe:1"]

"""Names of a registry of Harbor's, resolved on this machine only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.interop.harbor.tasks.registry import registered_folders
from gangline.machine.reading.imported import Choices, Imported
from gangline.machine.reading.paths import SourcePath
from gangline.tasks.importers.source import Wanted, read_source
from gangline.tasks.importers.swe import InstanceChoices
from support.requirements import need_module
from support.service.field_tasks import HARBOR_TOML, harbor_task, write

COMMIT = "0123456789" * 4
URL = "https://git.example/dogs/kennel.git"


def registry_of(folder: Path, **task: Any) -> Path:
    datasets = [
        {"name": "dogs/sleds", "version": version, "description": "", "tasks": [{"name": "one", **task}]}
        for version in ("1.0", "2.0")
    ]
    datasets.append({**datasets[0], "name": "dogs/single"})
    return write(folder / "registry.json", json.dumps(datasets))


def test_tasks_of_a_clone_at_the_commit_are_read(tmp_path: Path) -> None:
    clones = tmp_path / "clones"
    harbor_task(clones / "dogs__kennel" / "tasks" / "one", HARBOR_TOML)
    registry = registry_of(tmp_path, path="tasks/one", git_url=URL, git_commit_id=COMMIT)
    head = write(clones / "dogs__kennel" / ".git" / "HEAD", COMMIT + "\n")
    wanted = Wanted(
        registry=registry, instances=InstanceChoices(repositories=str(clones)), choices=Choices(network="proxy")
    )
    (one,) = read_source(Path("dogs/sleds@2.0"), wanted)
    assert isinstance(one, Imported)
    assert one.name == "kennel/count-bytes"
    write(head, "ref: refs/heads/main\n")
    with pytest.raises(InvalidRequest, match=f"is at no commit. Run: git -C .*dogs__kennel checkout {COMMIT}"):
        registered_folders(registry, "dogs/sleds@2.0", clones)
    write(clones / "dogs__kennel" / ".git" / "refs" / "heads" / "main", COMMIT + "\n")
    assert registered_folders(registry, "dogs/sleds@2.0", clones)


def test_a_path_without_a_repository_begins_at_the_registry(tmp_path: Path) -> None:
    harbor_task(tmp_path / "tasks" / "one")
    registry = registry_of(tmp_path, path="tasks/one")
    assert registered_folders(registry, "dogs/single", None) == [SourcePath.of(tmp_path) / "tasks/one"]


@pytest.mark.parametrize(
    ("wanted", "task", "told"),
    [
        ("dogs/none@1", {"path": "x"}, "no dataset 'dogs/none'; it has dogs/single, dogs/sleds"),
        ("dogs/sleds", {"path": "x"}, r"has the versions 1\.0, 2\.0"),
        ("dogs/sleds@3.0", {"path": "x"}, r"has the versions 1\.0, 2\.0"),
        ("dogs/single", {"path": "x"}, "x/task.toml does not exist"),
        ("dogs/single", {"path": "x", "git_url": URL}, f"--repositories CLONES, after: git clone {URL}"),
        ("dogs/single", {}, "not a registry of Harbor.*path"),
    ],
)
def test_what_a_registry_cannot_give_is_named(tmp_path: Path, wanted: str, task: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        registered_folders(registry_of(tmp_path, **task), wanted, None)


def test_a_task_stays_inside_of_its_repository(tmp_path: Path) -> None:
    (tmp_path / "dogs__kennel").mkdir()
    registry = registry_of(tmp_path, path="../secret", git_url=URL)
    with pytest.raises(InvalidRequest, match="leads out of the folder"):
        registered_folders(registry, "dogs/single", tmp_path)


def test_harbors_own_types_read_the_file_in_the_same_way(tmp_path: Path) -> None:
    need_module("harbor", "make .venv/.dev")
    need_module("shortuuid", "make .venv/.dev")
    from harbor.models.registry import Registry

    folder = harbor_task(tmp_path / "tasks" / "one")
    registry = registry_of(tmp_path, path="tasks/one")
    (theirs,) = [one for one in Registry.from_path(registry).datasets if one.name == "dogs/single"]
    assert [(tmp_path / task.path).resolve() for task in theirs.tasks] == [folder.resolve()]

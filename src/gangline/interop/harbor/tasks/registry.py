"""Reads a local copy of Harbor's registry: `NAME@VERSION` of a dataset -> folders of its tasks.

Nothing is downloaded. Tasks in Git repositories are read from a clone that is checked out at the exact commit.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.files import own_file, read_text
from gangline.machine.reading.paths import SourcePath

_MAX_HEAD_BYTES = 1024


class _Task(msgspec.Struct, frozen=True):
    name: str
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


class _Dataset(msgspec.Struct, frozen=True):
    name: str
    version: str
    tasks: list[_Task]


def registered_folders(registry: Path, wanted: str, clones: Path | None) -> list[SourcePath]:
    """The folders of a dataset's tasks, in order.

    wanted: `NAME` or `NAME@VERSION`. Without a version: `head`, or the only version.
    clones: folder with clones named `owner__name`; paths without a repository are relative to the registry's folder.
    Raises: InvalidRequest, naming the dataset, the task or the missing clone.
    """
    dataset = _found(registry, wanted)
    return [_folder(registry, task, clones) for task in dataset.tasks]


def _found(registry: Path, wanted: str) -> _Dataset:
    try:
        datasets = msgspec.json.decode(read_text(own_file(registry.resolve())), type=list[_Dataset])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{registry} is not a registry of Harbor: {error}") from error
    name, has_version, version = wanted.partition("@")
    versions = {dataset.version: dataset for dataset in datasets if dataset.name == name}
    if not versions:
        known = ", ".join(sorted({dataset.name for dataset in datasets})) or "none"
        raise InvalidRequest(f"{registry} has no dataset {name!r}; it has {known}.")
    if not has_version:
        version = "head" if len(versions) > 1 else next(iter(versions))
    if version not in versions:
        raise InvalidRequest(f"{registry}: {name} has the versions {', '.join(sorted(versions))}. Write NAME@VERSION.")
    return versions[version]


def _folder(registry: Path, task: _Task, clones: Path | None) -> SourcePath:
    root = registry.parent if task.git_url is None else _clone(task, task.git_url, clones)
    try:
        folder = SourcePath.of(root.resolve()) / task.path
        if not (folder / "task.toml").has_file():
            raise InvalidRequest(f"{folder / 'task.toml'} does not exist.")
    except InvalidRequest as error:
        raise InvalidRequest(f"{task.name}: {error.message}") from error
    return folder


def _clone(task: _Task, url: str, clones: Path | None) -> Path:
    """The clone of a task's repository. Raises: InvalidRequest if it is missing or at another commit."""
    commit = task.git_commit_id
    clone = (clones or Path("CLONES")) / "__".join(url.removesuffix(".git").replace(":", "/").split("/")[-2:])
    checkout = "" if commit in (None, "HEAD") else f" && git -C {clone} checkout {commit}"
    if clones is None or not clone.is_dir():
        where = "Give --repositories CLONES, after: " if clones is None else "Run: "
        raise InvalidRequest(
            f"{task.name}: is in {url}, of which no clone is there. {where}git clone {url} {clone}{checkout}"
        )
    if checkout and not (head := _head(clone)).startswith(str(commit)):
        raise InvalidRequest(f"{task.name}: {clone} is at {head or 'no commit'}. Run: git -C {clone} checkout {commit}")
    return clone


def _head(clone: Path) -> str:
    """The commit that is checked out; empty if unknown, as on a branch with packed references."""
    git = SourcePath.of(clone.resolve()) / ".git"
    head = read_text(git / "HEAD", _MAX_HEAD_BYTES).strip()
    if not head.startswith("ref: "):
        return head
    branch = git / head.removeprefix("ref: ")
    return read_text(branch, _MAX_HEAD_BYTES).strip() if branch.has_file() else ""

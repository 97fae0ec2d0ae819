"""Harbor's registry as a file that the user gives: `NAME@VERSION` of a dataset -> folders of its tasks.

Nothing is downloaded. Tasks of a Git repository are read from a clone that stands at the very commit.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.importers.files import read_text

__all__ = ["registered_folders"]


class _Task(msgspec.Struct, frozen=True):
    name: str
    path: str
    git_url: str | None = None
    git_commit_id: str | None = None


class _Dataset(msgspec.Struct, frozen=True):
    name: str
    version: str
    tasks: list[_Task]


def registered_folders(registry: Path, wanted: str, clones: Path | None) -> list[Path]:
    """The folders of a dataset's tasks, in its order.

    wanted: `NAME` or `NAME@VERSION`. Without a version it is `head`, or the only one.
    clones: folder with clones named `owner__name`; paths without a repository begin in the registry's own folder.
    Raises: InvalidRequest, naming the dataset, the task, or the clone that is missing.
    """
    dataset = _found(registry, wanted)
    return [_folder(registry, task, clones) for task in dataset.tasks]


def _found(registry: Path, wanted: str) -> _Dataset:
    try:
        datasets = msgspec.json.decode(read_text(registry), type=list[_Dataset])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{registry} is no registry of Harbor: {error}") from error
    name, has_version, version = wanted.partition("@")
    versions = {one.version: one for one in datasets if one.name == name}
    if not versions:
        known = ", ".join(sorted({one.name for one in datasets})) or "none"
        raise InvalidRequest(f"{registry} has no dataset {name!r}; it has {known}.")
    if not has_version:
        version = "head" if len(versions) > 1 else next(iter(versions))
    if version not in versions:
        raise InvalidRequest(f"{registry}: {name} has the versions {', '.join(sorted(versions))}. Write NAME@VERSION.")
    return versions[version]


def _folder(registry: Path, task: _Task, clones: Path | None) -> Path:
    root = registry.parent if task.git_url is None else _clone(task, task.git_url, clones)
    folder = root / task.path
    if task.git_url is not None and not folder.resolve().is_relative_to(root.resolve()):
        raise InvalidRequest(f"{task.name}: its path {task.path!r} is outside of its repository.")
    if not (folder / "task.toml").is_file():
        raise InvalidRequest(f"{task.name}: {folder / 'task.toml'} does not exist.")
    return folder.resolve()


def _clone(task: _Task, url: str, clones: Path | None) -> Path:
    """The clone of a task's repository. Raises: InvalidRequest where it is not there, or at another commit."""
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
    """The commit that is checked out; empty where it cannot be told, as on a branch whose references are packed."""
    head = read_text(clone / ".git" / "HEAD").strip()
    if not head.startswith("ref: "):
        return head
    branch = clone / ".git" / head.removeprefix("ref: ")
    return read_text(branch).strip() if branch.is_file() else ""

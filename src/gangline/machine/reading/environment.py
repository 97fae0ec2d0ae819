"""The runtime of a task written for a container: an image if it needs one, otherwise files and variables."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.dockerfile import Dockerfile, read_dockerfile
from gangline.machine.reading.files import digest_of_folder, written, written_folder
from gangline.machine.reading.imported import Choices
from gangline.machine.reading.paths import SourcePath

DEFAULT_WORKDIR = "/app"
_WITHOUT_IMAGES = ("sandbox", "process")


class OwnFolders(msgspec.Struct, frozen=True):
    """Folders that are hard-coded in common graders and solutions."""

    paths: tuple[str, ...]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment described by a task's folder."""

    name: str
    """The task's name, for messages and image names."""
    context: SourcePath
    """Folder of the Dockerfile, if there is one."""
    image: str | None = None
    """A published image."""
    workdir: str | None = None
    """Overrides the Dockerfile's."""
    env: dict[str, str]
    limits: dict[str, Any]
    folders: OwnFolders
    gpus: int = 0
    services: dict[str, Any] = {}
    """Further containers, in the format of `runtime.services`."""
    notes: tuple[str, ...] = ()
    """Remarks on these services."""

    def runtime(self, choices: Choices) -> tuple[dict[str, Any], list[str]]:
        """The body's `runtime`, and notes. Raises: InvalidRequest if the chosen runtime cannot provide it."""
        dockerfile = self._dockerfile()
        is_container = bool(self.services or self.gpus or self._why_image(dockerfile))
        backend = choices.runtime or ("docker" if is_container else "sandbox")
        if self.services and backend in _WITHOUT_IMAGES:
            raise InvalidRequest(
                f"{self.name}: needs services alongside its container ({', '.join(self.services)}), which runtime "
                f"`{backend}` cannot start. Use --runtime docker or podman."
            )
        if self.gpus and backend in _WITHOUT_IMAGES:
            raise InvalidRequest(
                f"{self.name}: needs GPUs ({self.gpus}), which runtime `{backend}` cannot give. Use --runtime docker "
                "or podman."
            )
        if backend == "process":
            raise InvalidRequest(
                f"{self.name}: needs folders such as {self.folders.paths[0]}, which runtime `process` "
                "cannot give. Use --runtime sandbox."
            )
        workdir = self.workdir or (dockerfile and dockerfile.workdir) or DEFAULT_WORKDIR
        body: dict[str, Any] = {
            "backend": backend,
            "network": choices.network or "proxy",
            "workdir": DEFAULT_WORKDIR if workdir == "/" else workdir,
            "folders": list(self.folders.paths),
            "env": {**(dockerfile.env if dockerfile else {}), **self.env},
        }
        if self.limits:
            body["limits"] = self.limits
        if self.gpus:
            body["gpus"] = self.gpus
        if self.services:
            body["services"] = self.services
        with_it = self._without_image if backend in _WITHOUT_IMAGES else self._with_image
        return body, [*with_it(body, dockerfile, choices), *self.notes]

    def copied(self) -> dict[str, dict[str, Any]]:
        """Path inside -> file, for files copied by its Dockerfile. Raises: InvalidRequest for a link."""
        dockerfile = self._dockerfile()
        return {} if dockerfile is None else _copied(dockerfile)

    def _dockerfile(self) -> Dockerfile | None:
        path = self.context / "Dockerfile"
        return read_dockerfile(path) if path.has_file() else None

    def _why_image(self, dockerfile: Dockerfile | None) -> str | None:
        """Why it needs an image; None if it does not."""
        if self.image is not None:
            return f"its image {self.image}"
        return dockerfile and dockerfile.needs_image and f"an image ({dockerfile.path}, {dockerfile.needs_image})"

    def _without_image(self, body: dict[str, Any], dockerfile: Dockerfile | None, choices: Choices) -> list[str]:
        if choices.image is not None:
            body["image"] = choices.image
        elif why := self._why_image(dockerfile):
            raise InvalidRequest(
                f"{self.name}: needs {why}, which runtime `{body['backend']}` cannot give. Use --runtime docker, or "
                "--image FOLDER: a root file system made of it."
            )
        if dockerfile is None:
            return []
        body["prepare"] = [{"type": "write", "path": path, **file} for path, file in _copied(dockerfile).items()]
        body["folders"] += _more_folders(body)
        if choices.image is not None:
            return []
        return [f"{self.name}: the machine's own programs stand in for {dockerfile.base}"]

    def _with_image(self, body: dict[str, Any], dockerfile: Dockerfile | None, choices: Choices) -> list[str]:
        if choices.image is not None or self.image is not None:
            body["image"] = choices.image or self.image
            return []
        if dockerfile is None:
            raise InvalidRequest(f"{self.name}: has neither an image nor {self.context / 'Dockerfile'}. Give --image.")
        body["image"] = image_name(self.name, self.context)
        return [f"{self.name}: its image must be there: docker build -t {body['image']} {self.context}"]


def image_name(name: str, context: SourcePath) -> str:
    """Name of the image built from a folder. It depends on the folder's content. Raises: InvalidRequest."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    return f"gangline-task/{plain}:{digest_of_folder(context)[:12]}"


def _copied(dockerfile: Dockerfile) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for copy in dockerfile.copies:
        if copy.source.is_folder():
            files |= written_folder(copy.source, copy.target)
        else:
            files[str(PurePosixPath(copy.target) / copy.source.name) if copy.into else copy.target] = written(
                copy.source
            )
    return files


def _more_folders(body: dict[str, Any]) -> list[str]:
    """Top-level folders that files are copied to and that do not exist yet."""
    known = [PurePosixPath(path) for path in (body["workdir"], *body["folders"], "/tmp", "/home/agent")]
    found: dict[str, None] = {}
    for action in body["prepare"]:
        path = PurePosixPath(action["path"])
        if not any(folder in path.parents for folder in known):
            found[str(path.parent)] = None
    return list(found)

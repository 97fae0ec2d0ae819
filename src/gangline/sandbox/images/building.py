"""Builds images, or finds an existing one. Blocking; output of the building program goes to stderr.

`render` turns a recipe into the text of a definition file (Apptainer) or a Dockerfile with Jinja2, without building.

All values of a recipe are quoted for the shell. An undefined name in a template is an error.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest, RuntimeFailed, RuntimeUnavailable
from gangline.sandbox.images.recipe import Inputs, Recipe, digest_of
from gangline.sandbox.images.shelf import ImageRecord, Shelf
from gangline.settings.installation import extra_command

_ASK_S = 60.0
_DEFINITION = {"apptainer": "image.def", "docker": "Dockerfile"}

LOCK_NAME = "requirements.lock"
"""The lock file's name, next to the definition and in `/opt/gangline` of the image."""
_TEMPLATES = Path(__file__).parent / "templates"
_BUILT_IN = {"apptainer": "apptainer.def.j2", "docker": "Dockerfile.j2"}


def render(recipe: Recipe, inputs: Inputs) -> str:
    """Raises: InvalidRequest when a template is wrong, or Jinja2 is missing."""
    source = recipe.definition or _TEMPLATES / _BUILT_IN[recipe.kind]
    text = _read(source)
    return _filled(text, source.name, _variables(recipe, inputs)) if source.suffix == ".j2" else text


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}.") from error


def _filled(text: str, name: str, variables: dict[str, Any]) -> str:
    try:
        import jinja2  # noqa: PLC0415 (an extra)
        import jinja2.sandbox  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"images need Jinja2. Run: {extra_command('images')}") from error
    environment = jinja2.sandbox.SandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = lambda value: shlex.quote(str(value))
    try:
        return environment.from_string(text).render(variables)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the template {name} is wrong: {error}") from error


def _variables(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Variables of the templates; docs/guides/images.md lists them."""
    npm = [tool for tool in recipe.tools if tool.source == "npm"]
    return {
        "name": recipe.name,
        "base": recipe.base_name,
        "bootstrap": "localimage" if recipe.is_base_local else recipe.base.rpartition("://")[0] or "docker",
        "packages": recipe.packages,
        "lock": LOCK_NAME if recipe.lock is not None else None,
        "npm_requirements": [requirement for tool in npm for requirement in tool.requirements],
        "npm_node": ".".join(map(str, max((tool.oldest for tool in npm), default=(0, 0)))),
        "pypi_tools": [tool for tool in recipe.tools if tool.source == "pypi"],
        "harnesses": [tool.harness for tool in recipe.tools],
        "framework": inputs.framework,
    }


class Built(msgspec.Struct, frozen=True, kw_only=True):
    record: ImageRecord
    is_new: bool
    """False: the image existed already."""


class ImageBuilder:
    """Builds with `apptainer` and `docker`, and keeps records and Apptainer's images in `folder`."""

    def __init__(self, folder: Path, *, apptainer: Sequence[str], docker: Sequence[str]) -> None:
        self.shelf = Shelf(folder)
        self._folder = folder
        self._apptainer = tuple(apptainer)
        self._docker = tuple(docker)

    def definition(self, recipe: Recipe) -> str:
        """The definition that `build` would use. Raises: InvalidRequest."""
        return render(recipe, Inputs.read(recipe, self._base_identity(recipe)))

    def build(self, recipe: Recipe) -> Built:
        """Raises: InvalidRequest, RuntimeUnavailable, RuntimeFailed when the build program fails."""
        inputs = Inputs.read(recipe, self._base_identity(recipe))
        text = render(recipe, inputs)
        with self.shelf.alone():
            if (key := inputs.key(recipe)) and (found := self._found(key)):
                return Built(record=found, is_new=False)
            digest = digest_of([recipe.kind, inputs.base, text, str(inputs.lock_sha256)])
            with TemporaryDirectory(prefix="gangline-image-") as context:
                (Path(context) / _DEFINITION[recipe.kind]).write_text(text)
                if recipe.lock is not None:
                    shutil.copyfile(recipe.lock, Path(context) / LOCK_NAME)
                make = self._make_apptainer if recipe.kind == "apptainer" else self._make_docker
                image, size_bytes = make(recipe.name, digest, Path(context))
            record = ImageRecord(
                name=recipe.name,
                kind=recipe.kind,
                digest=digest,
                image=image,
                caching=recipe.caching,
                key=key,
                base=recipe.base,
                base_identity=inputs.base,
                framework=inputs.framework,
                lock_sha256=inputs.lock_sha256,
                harnesses=tuple(tool.harness for tool in recipe.tools),
                built_at=time.time(),
                size_bytes=size_bytes,
            )
            self.shelf.put(record)
        return Built(record=record, is_new=True)

    def prune(self, num_kept: int) -> list[ImageRecord]:
        """Remove all but the newest images of each name and kind, and the remains of failed builds.

        Raises: RuntimeUnavailable when some are docker images and docker is missing.
        """
        with self.shelf.alone():
            removed = self.shelf.old(num_kept)
            for record in removed:
                if record.kind == "apptainer":
                    Path(record.image).unlink(missing_ok=True)
                elif self._is_there(record):
                    self._run([*self._docker, "image", "rm", record.image])
                self.shelf.forget(record)
            kept = {record.image for record in self.shelf.records()}
            for path in self._folder.glob("*.sif*"):
                if str(path) not in kept:
                    path.unlink()
        return removed

    # -- one kind or the other -----------------------------------------------------------------------------------

    def _found(self, key: str) -> ImageRecord | None:
        record = self.shelf.find(key)
        return record if record is not None and self._is_there(record) else None

    def _is_there(self, record: ImageRecord) -> bool:
        if record.kind == "apptainer":
            return Path(record.image).is_file()
        return self._docker_id(record.image) is not None

    def _base_identity(self, recipe: Recipe) -> str:
        """Digest of a file's content, or of a local docker image; for a folder, or an image that is not local yet, its
        name."""
        path = Path(recipe.base)
        if path.is_file():
            with path.open("rb") as file:
                return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if recipe.kind == "docker" and (found := self._docker_id(recipe.base_name)):
            return found
        return recipe.base

    def _docker_id(self, image: str) -> str | None:
        with suppress(OSError, subprocess.TimeoutExpired):
            asked = [*self._docker, "image", "inspect", "--format", "{{.Id}}", image]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S, check=False)
            return done.stdout.strip() or None if done.returncode == 0 else None
        return None

    def _make_apptainer(self, name: str, digest: str, context: Path) -> tuple[str, int]:
        image = self._folder.absolute() / f"{name}-{digest[:12]}.sif"
        unfinished = image.with_suffix(".sif.new")
        try:
            options = [] if os.geteuid() == 0 else ["--fakeroot"]
            self._run([*self._apptainer, "build", "--force", *options, str(unfinished), "image.def"], context)
            os.replace(unfinished, image)
        finally:
            unfinished.unlink(missing_ok=True)
        return str(image), image.stat().st_size

    def _make_docker(self, name: str, digest: str, context: Path) -> tuple[str, int]:
        tag = f"gangline/{name}:{digest[:12]}"
        self._run([*self._docker, "build", "--tag", tag, "--label", f"org.gangline.digest={digest}", "."], context)
        asked = [*self._docker, "image", "inspect", "--format", "{{.Size}}", tag]
        size = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S, check=False).stdout
        return tag, int(size.strip() or 0)

    @staticmethod
    def _run(command: Sequence[str], folder: Path | None = None) -> None:
        """Raises: RuntimeUnavailable, RuntimeFailed."""
        try:
            done = subprocess.run(command, cwd=folder, stdout=sys.stderr, check=False)
        except FileNotFoundError as error:
            raise RuntimeUnavailable(f"{command[0]} is not installed: it builds images of this kind.") from error
        if done.returncode != 0:
            raise RuntimeFailed(f"`{' '.join(command)}` failed with exit code {done.returncode}; it says why above.")

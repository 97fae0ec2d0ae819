"""The content of an image, and the conditions for reusing an existing one. Pure, except for reading files.

Source: ProRL Agent, 3.2.2 (three caching modes).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gangline import __version__
from gangline.domain.errors import InvalidRequest

ImageKind = Literal["apptainer", "docker"]
Caching = Literal["scratch", "versioned", "lock"]

_PACKAGE = r"^[a-z0-9][a-z0-9+.-]*(=[A-Za-z0-9.+:~-]+)?$"
_BASE = re.compile(r"[^\s\x00-\x1f\x7f]+")


def _one_word(base: str) -> str:
    if not _BASE.fullmatch(base):
        raise ValueError(f"{base!r} is not a name of an image")
    return base


class Tool(BaseModel):
    """An agent program installed into the image."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    harness: str
    command: str
    source: Literal["npm", "pypi"]
    requirements: tuple[str, ...]
    """In npm's or pip's syntax, with versions."""
    oldest: tuple[int, int] = (0, 0)
    """Oldest Node or Python version that runs it."""


class Recipe(BaseModel):
    """The requested content of an image."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Name of the image; each build adds a digest to it."""
    kind: ImageKind = "apptainer"
    base: Annotated[str, AfterValidator(_one_word)] = "docker://debian:bookworm-slim"
    """Image to start from: a name in a registry, with or without `docker://`; an image file or root folder."""
    caching: Caching = "versioned"
    """`scratch`: always build. `versioned`: reuse an image of the same base image and version of Gangline. `lock`:
    reuse one with the same dependency lock."""
    lock: Path | None = None
    """File of pinned requirements for pip, installed into the image's Python."""
    packages: tuple[Annotated[str, Field(pattern=_PACKAGE)], ...] = ()
    """Debian packages."""
    tools: tuple[Tool, ...] = ()
    definition: Path | None = None
    """A custom definition file or Dockerfile, used unchanged. A name ending in `.j2` marks a Jinja2 template with the
    same variables as the built-in ones."""

    @property
    def is_base_local(self) -> bool:
        """Whether it is built from a file or folder of this machine."""
        return self.base.startswith(("/", "./", "../")) or self.base.endswith(".sif")

    @property
    def base_name(self) -> str:
        """The base without its scheme; a path is absolute."""
        return str(Path(self.base).absolute()) if self.is_base_local else self.base.rpartition("://")[2]

    @model_validator(mode="after")
    def _is_consistent(self) -> Recipe:
        if self.kind == "docker" and self.is_base_local:
            raise ValueError("docker builds on images that it has: `docker import` makes one of a root file system")
        if self.caching == "lock" and self.lock is None:
            raise ValueError("caching `lock` needs a lock file")
        return self


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The current content of a recipe's files and base image."""

    base: str
    """The base image: its digest if known, else its name."""
    lock_sha256: str | None
    definition_sha256: str | None
    framework: str = __version__

    @classmethod
    def read(cls, recipe: Recipe, base: str) -> Inputs:
        """Raises: InvalidRequest when a file cannot be read."""
        return cls(base=base, lock_sha256=_sha256_of(recipe.lock), definition_sha256=_sha256_of(recipe.definition))

    def key(self, recipe: Recipe) -> str | None:
        """Recipes with the same key share one image. None: never reuse an image."""
        if recipe.caching == "scratch":
            return None
        asked = [
            recipe.kind,
            recipe.name,
            *recipe.packages,
            *(requirement for tool in recipe.tools for requirement in tool.requirements),
        ]
        if recipe.caching == "versioned":
            own = ["base", self.base, "framework", self.framework, "definition", str(self.definition_sha256)]
        else:
            own = ["lock", str(self.lock_sha256)]
        return digest_of([recipe.caching, *own, *asked])


def digest_of(parts: Iterable[str]) -> str:
    """Digest of a sequence of texts; their boundaries count."""
    return hashlib.sha256(msgspec.json.encode(list(parts))).hexdigest()


def _sha256_of(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.") from error

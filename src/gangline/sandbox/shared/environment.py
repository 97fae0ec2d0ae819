"""The clean environment of every command of a runtime, and the arguments of a command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangline.domain.errors import InvalidRequest
from gangline.sandbox.shared.leftovers import LABEL

_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_INTERPRETERS = ("python3", "python")
_MAX_LINKS = 16
_NOT_THE_IMAGE_S = (LABEL, "HOSTNAME", "TERM", "container")
"""Variables that we set, and ones that podman sets."""


def exposed_folders(expose: Sequence[Path]) -> list[Path]:
    """The existing folders, each once, in the same order, without folders inside another or /usr, which is visible
    anyway."""
    there = [path for path in dict.fromkeys(expose) if path.is_absolute() and path.is_dir()]
    outer = {Path("/usr"), *there}
    return [path for path in there if path != Path("/usr") and outer.isdisjoint(path.parents)]


class PythonEnvironment:
    """The host's Python environment of a task (`RuntimeSpec.python`), or none."""

    def __init__(self, folder: str | None) -> None:
        """Raises: InvalidRequest when the folder has no interpreter."""
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not any((self._folder / "bin" / name).exists() for name in _INTERPRETERS):
            raise InvalidRequest(
                f"runtime.python must be the folder of a Python environment on the node's machine, and {folder!r} has "
                "no bin/python3."
            )

    def beside(self, expose: Sequence[Path]) -> list[Path]:
        """The exposed folders, and the folders of the environment."""
        return list(expose) if self._folder is None else exposed_folders([*_folders_of(self._folder), *expose])

    def first_in(self, environment: Mapping[str, str]) -> dict[str, str]:
        """A command's environment with this interpreter as `python3`."""
        if self._folder is None:
            return dict(environment)
        own = {"PATH": f"{self._folder}/bin:{environment['PATH']}", "VIRTUAL_ENV": str(self._folder)}
        return {**environment, **own}


def _folders_of(environment: Path) -> list[Path]:
    """The environment, and the installations of its interpreter and its standard library."""
    found = [environment]
    for name in _INTERPRETERS:
        found += [path.parents[1] for path in _links(environment / "bin" / name)]
    configured = environment / "pyvenv.cfg"
    if configured.is_file():
        settings = dict(line.split("=", 1) for line in configured.read_text().splitlines() if "=" in line)
        homes = [value.strip() for name, value in settings.items() if name.strip() == "home"]
        found += [Path(home).parent for home in homes]
    return [folder for folder in found if folder != Path("/")]


def _links(path: Path) -> list[Path]:
    """Absolute paths of a chain of links, including its target; empty if the path is not a link."""
    found: list[Path] = []
    while path.is_symlink() and len(found) < _MAX_LINKS:
        path = Path(os.path.normpath(path.parent / path.readlink()))
        found.append(path)
    return found


def clean_environment(expose: Sequence[Path], home: str, extra: Mapping[str, str]) -> dict[str, str]:
    """PATH, HOME, LANG and `extra`. PATH begins with the programs of the exposed folders."""
    return {"PATH": ":".join([*_programs(expose), _SYSTEM_PATH]), "HOME": home, "LANG": "C.UTF-8", **extra}


def image_environment(
    expose: Sequence[Path], home: str, image: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    """The same on top of an image's variables. The image's programs come before the exposed folders' programs."""
    path = [image.get("PATH", _SYSTEM_PATH), *_programs(expose)]
    return {"LANG": "C.UTF-8", **image, "PATH": ":".join(path), "HOME": home, **extra}


def image_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns what an image sets for commands. env: the variables of its container or its configuration. Variables that
    no program can have are left out."""
    mine = {name: value for name, value in env.items() if name and name not in _NOT_THE_IMAGE_S}
    return {name: value for name, value in mine.items() if "\0" not in name + value}


def engine_environment() -> dict[str, str]:
    """The node's environment, without its label, since processes that an engine leaves running are not the node's, and
    without the keys of the control plane."""
    return {name: value for name, value in os.environ.items() if name not in (LABEL, "GANGLINE_TOKEN")}


def _programs(expose: Sequence[Path]) -> list[str]:
    """As strings, since this runs for each command."""
    bins = [f"{folder}/{name}" for folder in expose for name in ("bin", "node_modules/.bin")]
    return [folder for folder in dict.fromkeys(bins) if not folder.startswith("/usr/") and os.path.isdir(folder)]


def argv_of(command: str | Sequence[str]) -> list[str]:
    """Arguments of a command; a string runs in a shell. Raises: InvalidRequest when it is empty."""
    argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not argv[0]:
        raise InvalidRequest("a command must name a program.")
    return argv

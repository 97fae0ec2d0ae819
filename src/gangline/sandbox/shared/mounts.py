"""Folders of the node's machine that a task mounts at other paths (`RuntimeSpec.mounts`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import RuntimeSpec


def granted(spec: RuntimeSpec, exposed: Iterable[Path]) -> dict[str, Path]:
    """Path inside -> resolved folder, so that later links cannot change the checked target. Blocking.

    exposed: folders that the node's operator allows. Raises: InvalidRequest.
    """
    named = [Path(os.path.realpath(folder)) for folder in exposed]
    found = {inside: Path(os.path.realpath(folder)) for inside, folder in spec.mounts.items()}
    for inside, folder in found.items():
        setting = f"runtime.mounts.{inside}: {spec.mounts[inside]!r}"
        if not any(folder.is_relative_to(one) for one in named):
            raise InvalidRequest(f"{setting} is not exposed on this node; its operator adds it to GANGLINE_EXPOSE.")
        if not folder.is_dir():
            raise InvalidRequest(f"{setting} is not a folder on this node's machine.")
    return found


def refuse_own(spec: RuntimeSpec, own: Iterable[str]) -> None:
    """own: the session's folders, with all their content.

    Raises: InvalidRequest when a mount would hide one or lie in it: the session may remove its files.
    """
    own = tuple(own)
    for inside in map(PurePosixPath, spec.mounts):
        for path in map(PurePosixPath, own):
            if path.is_relative_to(inside) or inside.is_relative_to(path):
                does = "hide" if path.is_relative_to(inside) else "lie in"
                raise InvalidRequest(
                    f"runtime.mounts.{inside}: it would {does} {path}, which is the session's own: choose another path."
                )


def refuse_mounts(spec: RuntimeSpec, runtime: str) -> None:
    """Raises: InvalidRequest when a task requests mounts from a runtime without support for them."""
    if spec.mounts:
        raise InvalidRequest(
            f"runtime.mounts: runtime `{runtime}` cannot show a folder at another path; use `sandbox` or `docker`."
        )

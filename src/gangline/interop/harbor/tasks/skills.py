"""Skills of a Harbor task: what its Dockerfile copies to `environment.skills_dir`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from gangline.domain.errors import InvalidRequest

__all__ = ["skills_of"]


def skills_of(name: str, skills_dir: str, copied: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The body's `agent.skills`: each folder with a SKILL.md.

    copied: path in the environment -> file.
    Raises: InvalidRequest when none is known, or a file of one is no text.
    """
    inside = PurePosixPath(skills_dir)
    found: dict[str, dict[str, str]] = {}
    for text, file in copied.items():
        path = PurePosixPath(text)
        if inside not in path.parents or len(parts := path.relative_to(inside).parts) < 2:
            continue
        if "encoding" in file:
            raise InvalidRequest(f"{name}: environment.skills_dir: {path} is no text, and a skill's files are.")
        found.setdefault(parts[0], {})["/".join(parts[1:])] = file["content"]
    skills = {skill: files for skill, files in found.items() if "SKILL.md" in files}
    if not skills:
        raise InvalidRequest(
            f"{name}: environment.skills_dir: no COPY of environment/Dockerfile brings a SKILL.md below {skills_dir}; "
            "skills that only an image has are not carried."
        )
    return skills

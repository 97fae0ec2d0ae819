"""Columns of SWE-Gym: SWE-bench's, with lists where SWE-bench has JSON.

A row's image has its repository: a column `image`, `image_name` or `docker_image`, else the one that SWE-Gym publishes.
A row with `files` needs no image: the repository is made of them, as in the generated samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from gangline.evaluators.swe_bench_rows import SweBenchRow, grading_of
from gangline.presets.rows.history import FORGET_LATER_COMMITS, NEW_REPOSITORY

__all__ = ["swe_fields"]

_IMAGE = "xingyaoww/sweb.eval.x86_64.{instance_id}:latest"
_GIT_TIMEOUT_S = 600.0


class _Row(SweBenchRow):
    problem_statement: str = Field(min_length=1)
    files: dict[str, str] = Field(default_factory=dict)
    image: str | None = None
    image_name: str | None = None
    docker_image: str | None = None


def swe_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem`, `repo`, `backend`, `image`, `prepare` and `grading`, the configuration of evaluator `swe_bench`.

    Raises: ValidationError, InvalidRequest.
    """
    read = _Row.model_validate(row)
    about = {"problem": read.problem_statement.strip(), "repo": read.repo, "grading": grading_of(read)}
    if read.files:
        written = [{"type": "write", "path": path, "content": text} for path, text in read.files.items()]
        return about | {"backend": "sandbox", "image": None, "prepare": [*written, _command(NEW_REPOSITORY)]}
    return about | {"backend": "docker", "image": _image(read), "prepare": [_command(FORGET_LATER_COMMITS)]}


def _command(command: str) -> dict[str, Any]:
    return {"type": "exec", "command": command, "timeout_seconds": _GIT_TIMEOUT_S}


def _image(row: _Row) -> str:
    """Names of images have no double underscores, and no capitals."""
    published = _IMAGE.replace("{instance_id}", row.instance_id.lower().replace("__", "_s_"))
    return row.image or row.image_name or row.docker_image or published

"""Rows of the SWE family (`swe_families`) as fields of the preset `swe`.

A row's image contains its repository: a column `image`, `image_name` or `docker_image`, else the image published with
its dataset. A row with `files` needs no image: the repository is created from them, as in the generated samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from gangline.grading.swe_bench_rows import grading_of
from gangline.tasks.presets.rows.history import NEW_REPOSITORY, at_its_commit, command
from gangline.tasks.presets.rows.swe_families import swe_instance

_FILES: TypeAdapter[dict[str, str] | None] = TypeAdapter(dict[str, str] | None)


def swe_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem`, `repo`, `backend`, `image`, `workdir`, `prepare` and `grading`, the configuration of evaluator
    `swe_bench`.

    Raises: ValidationError, InvalidRequest, RowUnsuitable.
    """
    read = swe_instance(row)
    about = {
        "problem": read.problem_statement.strip(),
        "repo": read.repo,
        "workdir": read.workdir,
        "grading": grading_of(read),
    }
    if files := _FILES.validate_python(row.get("files")):
        written = [{"type": "write", "path": path, "content": text} for path, text in files.items()]
        return about | {"backend": "sandbox", "image": None, "prepare": [*written, command(NEW_REPOSITORY)]}
    return about | {"backend": "docker", "image": read.image_of(), "prepare": at_its_commit(read)}

"""SWE-bench style instances: one row of a dataset (JSON lines, JSON or Parquet) is one task.

A row names its image (`image`, `image_name` or `docker_image`), else the name follows SWE-bench's pattern. The agent
finds the repository at its base commit, without later commits: many images contain the fix in their history. Rows of
SWE-bench 5 contain `eval_script` and `log_parser`, others `test_cmd`; for all else pytest is assumed.
"""

from __future__ import annotations

import shlex
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from pydantic import Field, ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.evaluators.swe_bench_rows import TEST_TIMEOUT_S, SweBenchRow, grading_of
from gangline.importers.grading import GRADING_MARGIN_S
from gangline.importers.imported import Choices, Imported
from gangline.importers.rows import read_rows
from gangline.plugins import explain
from gangline.presets.rows.history import FORGET_LATER_COMMITS

__all__ = ["InstanceChoices", "read_instances"]

IMAGE_PATTERN = "swebench/sweb.eval.x86_64.{instance_id}:latest"
TESTBED = "/testbed"
_PREPARE_TIMEOUT_S = 900.0
_GIT_TIMEOUT_S = 600.0
_FETCH = """
git config --global safe.directory '*' && git init -q . && git fetch -q {repository} {commit} &&
git checkout -q --detach FETCH_HEAD && rm .git/FETCH_HEAD
"""
"""Only objects that lead to the commit are copied."""

_INSTRUCTION = """The repository {repo} is checked out in the working folder. Resolve the issue below by changing its \
source files. Hidden tests decide; changes to tests do not count.

<issue>
{problem}
</issue>
"""


class InstanceChoices(msgspec.Struct, frozen=True, kw_only=True):
    """Options for SWE-bench rows only."""

    repositories: str | None = None
    """A folder, as it is seen inside the runtime, with a clone of each `owner/name` as `owner__name`: for runtimes
    whose image has no repository."""
    test_command: str | None = None
    """Runs the tests; `{tests}` is the files of the test patch."""
    log_parser: str | None = None


class _Row(SweBenchRow):
    """With the fields that the agent's side reads."""

    base_commit: str = Field(pattern=r"^[0-9a-fA-F]{7,64}$")
    problem_statement: str
    patch: str = ""
    image: str | None = None
    image_name: str | None = None
    docker_image: str | None = None


def read_instances(path: Path, choices: Choices, how: InstanceChoices, only: str | None = None) -> list[Imported]:
    """Those whose id matches `only`, a pattern. Raises: InvalidRequest, naming the row and the field."""
    rows = [_checked(row, where) for where, row in read_rows(path)]
    chosen = [row for row in rows if only is None or fnmatchcase(row.instance_id, only)]
    if not chosen:
        raise InvalidRequest(f"{path}: holds no row{f' whose instance_id matches {only!r}' if rows else ''}.")
    return [_imported(row, choices, how) for row in chosen]


def _checked(row: Any, where: str) -> _Row:
    try:
        return _Row.model_validate(row)
    except ValidationError as error:
        raise InvalidRequest(f"{where}: {explain(error)}") from error


def _imported(row: _Row, choices: Choices, how: InstanceChoices) -> Imported:
    grading = grading_of(row, test_command=how.test_command, log_parser=how.log_parser)
    runtime = _runtime(row, choices, how)
    body: dict[str, Any] = {
        "instruction": _INSTRUCTION.format(repo=row.repo, problem=row.problem_statement.strip()),
        "runtime": runtime,
        "evaluator": {"strategy": "swe_bench", "refresh_runtime": True, "config": grading},
        "init_timeout_seconds": _PREPARE_TIMEOUT_S,
        "evaluation_timeout_seconds": TEST_TIMEOUT_S + GRADING_MARGIN_S,
        "metadata": {"source": "swe-bench", "task": row.instance_id, "repo": row.repo},
    }
    if choices.oracle:
        if not row.patch:
            raise InvalidRequest(f"{row.instance_id}: its row has no `patch`: there is no solution to run.")
        settings = {"command": ["git", "apply", "--whitespace=nowarn", "-"], "stdin": row.patch}
        body["agent"] = {"harness": "shell", "settings": settings, "allow_no_model_call": True}
    return Imported(name=row.instance_id, body=body)


def _runtime(row: _Row, choices: Choices, how: InstanceChoices) -> dict[str, Any]:
    backend = choices.runtime or ("sandbox" if how.repositories else "docker")
    body: dict[str, Any] = {"backend": backend, "network": choices.network or "proxy", "workdir": TESTBED}
    prepare = FORGET_LATER_COMMITS
    if how.repositories is not None:
        source = f"{how.repositories.rstrip('/')}/{row.repo.replace('/', '__')}"
        prepare = _FETCH.format(repository=shlex.quote(source), commit=row.base_commit)
        if choices.image is not None:
            body["image"] = choices.image
    elif backend in ("sandbox", "process"):
        raise InvalidRequest(
            f"{row.instance_id}: runtime `{backend}` has no image with the repository. Use --runtime docker, or "
            "--repositories FOLDER with clones named owner__name, and GANGLINE_EXPOSE=FOLDER for the node."
        )
    else:
        body["image"] = _image(row, choices.image)
    body["prepare"] = [{"type": "exec", "command": prepare, "timeout_seconds": _GIT_TIMEOUT_S}]
    return body


def _image(row: _Row, pattern: str | None) -> str:
    named = row.image or row.image_name or row.docker_image
    if pattern is None and named is not None:
        return named
    # Names of images have no double underscores, and no capitals.
    return (pattern or IMAGE_PATTERN).replace("{instance_id}", row.instance_id.lower().replace("__", "_1776_"))

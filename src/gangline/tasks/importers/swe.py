"""Imports instances of the SWE family: each row of SWE-bench, SWE-Gym, SkyRL, SWE-smith, R2E-Gym, SWE-rebench or
OpenSWE becomes a task.

The agent gets the repository at its commit, without later commits: many images contain the fix in their history.
`presets.rows.swe_families` maps the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.grading.swe_bench_rows import TEST_TIMEOUT_S, grading_of
from gangline.grading.untrusted.patch_text import completed
from gangline.machine.reading.grading import GRADING_MARGIN_S
from gangline.machine.reading.imported import Choices, Imported, plain
from gangline.settings.plugins import explain
from gangline.tasks.presets.rows.history import at_its_commit, fetched
from gangline.tasks.presets.rows.swe_families import SweInstance, swe_instance

_PREPARE_TIMEOUT_S = 900.0
_SOLUTION = "/tmp/gangline-solution.patch"
_INSTRUCTION = """The repository {repo} is checked out in the working folder. Resolve the issue below by changing its \
source files. Hidden tests decide; changes to tests do not count.

<issue>
{problem}
</issue>
"""


class InstanceChoices(msgspec.Struct, frozen=True, kw_only=True):
    """Options for rows of the SWE family only."""

    repositories: str | None = None
    """A folder inside the runtime with a clone of each `owner/name` as `owner__name`, for runtimes whose image has no
    repository.
    """
    test_command: str | None = None
    """Runs the tests; `{tests}` is replaced by the files of the test patch."""
    log_parser: str | None = None


def read_instance(row: Mapping[str, Any], where: str, choices: Choices, how: InstanceChoices) -> Imported:
    """Raises: InvalidRequest, naming the row and the field; RowUnsuitable for a row that cannot be graded."""
    try:
        kept = plain(row)
        instance = swe_instance(row)
        grading = grading_of(instance, test_command=how.test_command, log_parser=how.log_parser)
        runtime = _runtime(instance, choices, how)
    except ValidationError as error:
        raise InvalidRequest(f"{where}: {explain(error)}") from error
    except InvalidRequest as error:
        raise type(error)(f"{where}: {error.message}") from error
    body: dict[str, Any] = {
        "instruction": _INSTRUCTION.format(repo=instance.repo, problem=instance.problem_statement.strip()),
        "runtime": runtime,
        "evaluator": {"strategy": "swe_bench", "refresh_runtime": True, "config": grading},
        "init_timeout_seconds": _PREPARE_TIMEOUT_S,
        "evaluation_timeout_seconds": TEST_TIMEOUT_S + GRADING_MARGIN_S,
        "metadata": {"source": "swe", "task": instance.instance_id, "instance": kept},
    }
    if solved := _solution(instance):
        body["solution"] = solved
    return Imported(name=instance.instance_id, body=body)


def _solution(instance: SweInstance) -> dict[str, Any] | None:
    if instance.patch.strip():
        return {"patch": instance.patch}
    if not instance.bug_patch:
        return None
    bring = {"type": "write", "path": _SOLUTION, "content": completed(instance.bug_patch)}
    return {"command": ["git", "apply", "-R", "--whitespace=nowarn", _SOLUTION], "prepare": [bring]}


def _runtime(instance: SweInstance, choices: Choices, how: InstanceChoices) -> dict[str, Any]:
    backend = choices.runtime or ("sandbox" if how.repositories else "docker")
    body: dict[str, Any] = {"backend": backend, "network": choices.network or "proxy", "workdir": instance.workdir}
    if how.repositories is not None:
        clone = f"{how.repositories.rstrip('/')}/{instance.repo.replace('/', '__')}"
        if choices.image is not None:
            body["image"] = choices.image
        return body | {"prepare": fetched(instance, clone)}
    if backend in ("sandbox", "process"):
        raise InvalidRequest(
            f"{instance.instance_id}: runtime `{backend}` has no image with the repository. Use --runtime docker, or "
            "--repositories FOLDER with clones named owner__name, and GANGLINE_PREPARE_FOLDERS=FOLDER for the node."
        )
    return body | {"image": instance.image_of(choices.image), "prepare": at_its_commit(instance)}

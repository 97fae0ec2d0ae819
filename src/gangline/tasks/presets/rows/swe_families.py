"""Rows of the SWE family: maps each dataset's columns to `SweInstance`.

| dataset | recognized by | peculiarities |
|---|---|---|
| SkyRL | `instance`, an object or JSON | the row is inside; `data_source` names the images |
| R2E-Gym | `expected_output_json` | the statuses of all tests; the patch is in `parsed_commit_content` |
| SWE-smith | `image_name` or `repo` with `swesmith` | the applied `patch` is the bug |
| OpenSWE | `OPENSWE_EXIT_CODE` in `eval_script` | the script's exit code decides |
| SWE-rebench | `install_config` | its command and parser; version 2 has the repository in `/NAME` |
| SWE-bench Pro | `before_repo_set_cmd` | its tests' scripts are not in its rows |
| SWE-bench-Live | `test_cmds` | the commands of its tests |
| SWE-bench, Verified, SWE-Gym | all else | lists as JSON in a text, or as lists (SWE-Gym) |

Sources: SkyRL a956457, R2E-Gym 69bc953, SWE-smith cf2e649, OpenSWE c2294ce, SWE-rebench-V2 c71902a, verifiers a60a606,
SWE-bench_Pro-os 0875a8a.

R2E-Gym's `parsed_commit_content` is JSON of its `ParsedCommit` (`commit_models/diff_classes.py`).
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.errors import InvalidRequest
from gangline.domain.text_lists import texts_of
from gangline.grading.swe_bench_rows import SweBenchRow
from gangline.grading.untrusted.outcomes import Status
from gangline.grading.untrusted.test_logs import PARSERS
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable

_SWE_BENCH_IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
_SWE_GYM_IMAGE = "xingyaoww/sweb.eval.x86_64.{id}:latest"
_REBENCH_IMAGE = "swerebench/sweb.eval.x86_64.{id}:latest"
_LIVE_IMAGE = "starryzhang/sweb.eval.x86_64.{id}:latest"
_PRO_IMAGE = "jefzda/sweap-images:{tag}"
_OPENSWE_MARK = "OPENSWE_EXIT_CODE"
_STATUSES: dict[str, Status] = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}

Row = dict[str, Any]


class SweInstance(SweBenchRow):
    """An instance with the fields for the agent and for the grader."""

    base_commit: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{7,64}$")
    """None: the commit that is checked out in the image."""
    problem_statement: str = Field(min_length=1)
    patch: str = ""
    """The solution; empty if unknown."""
    bug_patch: str = ""
    """Introduces the bug; its reverse is the solution."""
    image: str | None = None
    image_name: str | None = None
    docker_image: str | None = None
    image_pattern: str = _SWE_BENCH_IMAGE
    separator: str = "_1776_"
    """Replaces double underscores, which image names cannot contain."""
    workdir: str = "/testbed"
    hidden_folders: tuple[str, ...] = ()
    """Folders of the image that the agent must not see."""

    def image_of(self, pattern: str | None = None) -> str:
        """The image's name. pattern: replaces the row's, with `{instance_id}`."""
        own = self.image or self.image_name or self.docker_image
        if pattern is None and own is not None:
            return own
        name = self.instance_id.lower().replace("__", self.separator)
        return (pattern or self.image_pattern).replace("{instance_id}", name).replace("{id}", name)


_COLUMNS = {name.casefold(): name for key, field in SweInstance.model_fields.items() for name in [field.alias or key]}


class _R2eTests(BaseModel):
    """The part of `execution_result_content` that contains the hidden tests."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    test_file_names: tuple[str, ...] = ()
    test_file_codes: tuple[str, ...] = ()


class _Family(NamedTuple):
    recognizes: Callable[[Row], bool]
    mapped: Callable[[Row], Row]


def swe_instance(row: Mapping[str, Any]) -> SweInstance:
    """Raises: pydantic's ValidationError; InvalidRequest; RowUnsuitable for a row that cannot be graded."""
    inner = _object(dict(row), "instance")
    given = _under_their_names(row if inner is None else inner)
    family = next((one for one in _FAMILIES if one.recognizes(given)), None)
    if family is not None:
        given = family.mapped(given)
    elif isinstance(given.get("FAIL_TO_PASS"), list) or "swe-gym" in str(row.get("data_source")).lower():
        given = {"image_pattern": _SWE_GYM_IMAGE, "separator": "_s_", **given}
    return SweInstance.model_validate(given)


def _under_their_names(row: Mapping[str, Any]) -> Row:
    """Columns in SWE-bench's spelling, which others write in lower case; nulls are dropped.

    Raises: InvalidRequest if a row has both spellings with different values.
    """
    given = {name: value for name, value in row.items() if value is not None}
    for name in list(given):
        known = _COLUMNS.get(name.casefold(), name)
        if known == name:
            continue
        value = given.pop(name)
        if given.setdefault(known, value) != value:
            raise InvalidRequest(f"{name}: differs from the column {known}")
    return given


def _object(row: Row, name: str) -> Row | None:
    """A column that is an object, or JSON of one; None if absent. Raises: InvalidRequest."""
    value = row.get(name)
    if value is None:
        return None
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{name}: is neither an object nor JSON of one")
    return cast("Row", found)


def _is_of_smith(row: Row) -> bool:
    return "swesmith" in f"{row.get('image_name', '')} {row.get('repo', '')}"


def _of_smith(row: Row) -> Row:
    """The tests are pytest's unless a row has `test_cmd`: SWE-smith keeps commands in its package, not in rows."""
    if not str(row.get("problem_statement") or "").strip():
        raise RowUnsuitable("problem_statement: is empty, as of instances without a written issue")
    names = [name for column in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _names(row, column)]
    files = tuple(dict.fromkeys(name.split("::")[0] for name in names if ".py" in name))
    if not files and "test_cmd" not in row:
        raise InvalidRequest(
            "test_cmd: SWE-smith's rows have none, and these tests are not pytest's. Give the row `test_cmd` and "
            "`log_parser`, as SWE-smith's profile of the repository has them."
        )
    return {**row, "patch": "", "bug_patch": row.get("patch"), "test_files": files}


def _names(row: Row, column: str) -> list[str]:
    try:
        return texts_of(row.get(column))
    except ValueError as error:
        raise InvalidRequest(f"{column}: {error}") from error


def _of_r2e(row: Row) -> Row:
    """The tests come from the row or, if missing there, from the image."""
    expected = _object(row, "expected_output_json") or {}
    tests = _R2eTests.model_validate(_object(row, "execution_result_content") or {})
    codes = zip(tests.test_file_names, tests.test_file_codes, strict=True)
    files = {f"r2e_tests/{name}": code for name, code in codes}
    commit = str(row.get("commit_hash") or "")
    repo = str(row.get("repo_name") or "")
    return {
        "instance_id": f"{repo}__{commit[:12]}" if commit else repo,
        "repo": repo,
        "problem_statement": row.get("problem_statement"),
        "docker_image": row.get("docker_image"),
        "patch": patch_of_commit(_object(row, "parsed_commit_content") or {}),
        "expected_statuses": {name.split(" - ")[0]: _status(name, status) for name, status in expected.items()},
        "log_parser": "r2e",
        "eval_script": _r2e_script(files),
        "test_files": ("run_tests.sh", *(files or ("r2e_tests/*",))),
        "hidden_folders": ("/r2e_tests", "r2e_tests") if files else (),
    }


def _status(name: str, status: Any) -> Status:
    if status not in _STATUSES:
        raise InvalidRequest(f"expected_output_json: {name!r} is {status!r}, not one of {', '.join(_STATUSES)}")
    return _STATUSES[status]


def _r2e_script(files: Mapping[str, str]) -> str:
    written = [
        f"printf %s {base64.b64encode(text.encode()).decode()} | base64 -d > {shlex.quote(path)}"
        for path, text in files.items()
    ]
    bring = ["mkdir -p r2e_tests", *written] if written else ["cp -r /r2e_tests r2e_tests"]
    return "\n".join(["rm -rf r2e_tests", *bring, "bash run_tests.sh", ""])


def _of_openswe(row: Row) -> Row:
    patch = str(row.get("patch") or "").strip()
    if patch and patch in row["eval_script"]:
        raise RowUnsuitable("eval_script: applies the solution itself, so that it passes whatever the agent does")
    return {**row, "exit_code_line": _OPENSWE_MARK, "FAIL_TO_PASS": [], "PASS_TO_PASS": []}


def _of_rebench(row: Row) -> Row:
    """Version 2 has its own images, and runs its commands unchanged; version 1 adds the test files."""
    config = _object(row, "install_config") or {}
    commands = config.get("test_cmd")
    lines = [commands] if isinstance(commands, str) else [str(one) for one in cast("list[Any]", commands or [])]
    command, parser = "\n".join(line for line in lines if line.strip()), str(config.get("log_parser") or "pytest")
    if not command:
        raise InvalidRequest("install_config.test_cmd: is empty")
    if parser not in PARSERS and not parser.startswith("parse_log_"):
        raise RowUnsuitable(f"install_config.log_parser: {parser!r} is a parser of SWE-rebench alone")
    own = {**row, "test_cmd": command, "log_parser": parser}
    if row.get("image_name") is None:
        return {"image_pattern": _REBENCH_IMAGE, **own, "test_cmd": f"{command} {{tests}}"}
    return own | {"workdir": f"/{str(row.get('repo')).rpartition('/')[2]}", "ignore_timings": True}


def _of_pro(row: Row) -> Row:
    if row.get("test_cmd") is None:
        raise RowUnsuitable(
            "test_cmd: is missing. SWE-bench Pro runs a script for each instance that is not in its rows. Give the row "
            "`test_cmd` and `log_parser`."
        )
    return {"image": _PRO_IMAGE.format(tag=row.get("dockerhub_tag")), "workdir": "/app", **row}


def _of_live(row: Row) -> Row:
    commands = "\n".join(_names(row, "test_cmds"))
    return {"image_pattern": _LIVE_IMAGE, "test_cmd": commands or None, **row}


def _is_of_pro(row: Row) -> bool:
    return row.get("before_repo_set_cmd") is not None


def _is_of_live(row: Row) -> bool:
    return row.get("test_cmds") is not None


def _is_of_r2e(row: Row) -> bool:
    return "expected_output_json" in row


def _is_of_openswe(row: Row) -> bool:
    return _OPENSWE_MARK in str(row.get("eval_script"))


def _is_of_rebench(row: Row) -> bool:
    return row.get("install_config") is not None and row.get("eval_script") is None


_FAMILIES = (
    _Family(_is_of_r2e, _of_r2e),
    _Family(_is_of_smith, _of_smith),
    _Family(_is_of_openswe, _of_openswe),
    _Family(_is_of_rebench, _of_rebench),
    _Family(_is_of_pro, _of_pro),
    _Family(_is_of_live, _of_live),
)


_MARKS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
_TEST_FOLDERS = {"tests", "Tests", "test", "Test"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Range(_Part):
    start: int
    length: int | None = None

    def __str__(self) -> str:
        return str(self.start) if self.length is None else f"{self.start},{self.length}"


class _Descriptor(_Part):
    old_range: _Range
    new_range: _Range
    section: str = ""


class _Line(_Part):
    content: str
    type: Literal["context", "added", "deleted", "note"]


class _Lines(_Part):
    all_lines: tuple[_Line, ...] = ()


class _Hunk(_Part):
    descriptor: _Descriptor
    line_group: _Lines

    def lines(self) -> Iterator[str]:
        about = self.descriptor
        yield f"@@ -{about.old_range} +{about.new_range} @@ {about.section}".rstrip()
        for line in self.line_group.all_lines:
            yield f"{_MARKS[line.type]}{line.content}"


class _File(_Part):
    path: str


class _Header(_Part):
    file: _File
    misc_line: str | None = None
    """For example `new file mode 100644`."""


class _FileDiff(_Part):
    header: _Header
    minus_file: _File | None = None
    plus_file: _File | None = None
    hunks: tuple[_Hunk, ...] = ()

    def is_source(self) -> bool:
        *folders, name = self.header.file.path.split("/")
        is_test = name.startswith("test_") or name.endswith("_test.py") or _TEST_FOLDERS & set(folders)
        return name.endswith(".py") and not is_test

    def lines(self) -> Iterator[str]:
        path = self.header.file.path
        yield f"diff --git a/{path} b/{path}"
        if self.header.misc_line:
            yield self.header.misc_line
        if self.minus_file is not None and self.plus_file is not None:
            yield f"--- {self.minus_file.path}"
            yield f"+++ {self.plus_file.path}"
        for hunk in self.hunks:
            yield from hunk.lines()


class _Commit(_Part):
    file_diffs: tuple[_FileDiff, ...] = Field(default=())


def patch_of_commit(commit: Any) -> str:
    """The changes of Python files except tests: R2E-Gym's images already contain the fix's tests.

    Raises: pydantic's ValidationError.
    """
    files = (file for file in _Commit.model_validate(commit).file_diffs if file.is_source())
    lines = [line for file in files for line in file.lines()]
    return "\n".join([*lines, ""]) if lines else ""

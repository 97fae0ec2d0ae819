"""Rows of SWE-bench style datasets, and the `swe_bench` configuration derived from a row.

Rows of SWE-bench 5 contain `eval_script` and `log_parser`, others `test_cmd`; otherwise pytest is assumed.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gangline.domain.errors import InvalidRequest
from gangline.domain.text_lists import texts_of
from gangline.grading.untrusted.outcomes import Status
from gangline.grading.untrusted.patch_text import files_of

TEST_TIMEOUT_S = 1800.0
PYTEST_PARSERS = frozenset(
    f"parse_log_{name}"
    for name in (
        *("pytest", "pytest_v2", "pytest_options", "matplotlib"),
        *("astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"),
        *("pydicom", "requests", "pylint", "astropy", "scikit", "sphinx"),
    )
)
"""Names of the parsers of `swebench` and of SWE-rebench for the formats that `pytest` reads."""
PROTECTED = ("conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc")
"""Names of files that run before any test, or could replace tests."""
_OTHER_RUNNERS = ("django/django", "sympy/sympy")
"""Repositories of SWE-bench whose tests do not run under pytest."""
_PYTEST = "PATH=/opt/miniconda3/envs/testbed/bin:$PATH python -m pytest -rA -v -p no:cacheprovider {tests}"
"""The folder contains the repository's Python in SWE-bench's images; elsewhere it does not exist. `-v` is needed
because a summary does not name skipped tests.
"""


class SweBenchRow(BaseModel):
    """The fields used for grading. Datasets have more, which describe the instance to people."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str = Field(min_length=1)
    repo: str
    test_patch: str = ""
    fail_to_pass: tuple[str, ...] = Field(default=(), alias="FAIL_TO_PASS")
    pass_to_pass: tuple[str, ...] = Field(default=(), alias="PASS_TO_PASS")
    eval_script: str | None = None
    log_parser: str | None = None
    test_cmd: str | None = None
    eval_type: str | None = None
    image_assets: Any = None
    expected_statuses: dict[str, Status] = Field(default_factory=dict)
    exit_code_line: str | None = None
    ignore_timings: bool = False
    test_files: tuple[str, ...] = ()
    """Test files, instead of the files of `test_patch`."""

    @field_validator("fail_to_pass", "pass_to_pass", mode="before")
    @classmethod
    def _read_list(cls, given: Any) -> Any:
        """Many datasets keep lists as text. Raises: ValueError."""
        return texts_of(given)


def grading_of(row: SweBenchRow, *, test_command: str | None = None, log_parser: str | None = None) -> dict[str, Any]:
    """Configuration of evaluator `swe_bench` for one row.

    test_command: overrides the row's; `{tests}` is replaced by the files of the test patch.

    Raises: InvalidRequest if the row needs unsupported grading, or does not specify any.
    """
    if row.eval_type == "fail_only" or row.image_assets not in (None, {}, "", "{}"):
        raise InvalidRequest(
            f"{row.instance_id}: graded by its failures alone, or by files from elsewhere: neither is done here."
        )
    config: dict[str, Any] = {**_decision(row, log_parser), "timeout_seconds": TEST_TIMEOUT_S}
    changed = [file for file in files_of(row.test_patch) if file.after is not None]
    own = [*row.test_files, *(glob.escape(str(file.after)) for file in changed if not row.test_files)]
    has_script = test_command is None and row.eval_script is not None
    if row.test_files or (has_script and own):  # a script that applies the patch fails where the agent has its files
        config["protected"] = [*PROTECTED, *dict.fromkeys(own)]
    if has_script:
        return {**config, "eval_script": row.eval_script}
    command = test_command or row.test_cmd or _PYTEST
    named = row.test_files or [str(file.after) for file in changed if file.has_content]
    tests = [name for name in named if name.endswith(".py")] or _files_with_tests(row)
    quoted = " ".join(map(shlex.quote, dict.fromkeys(tests)))
    return {**config, "test_patch": row.test_patch, "test_command": command.replace("{tests}", quoted)}


def _files_with_tests(row: SweBenchRow) -> Iterator[str]:
    """Used if the patch contains only data."""
    return (name.partition("::")[0] for name in (*row.fail_to_pass, *row.pass_to_pass) if ".py::" in name)


def _decision(row: SweBenchRow, log_parser: str | None) -> dict[str, Any]:
    """The fields that decide whether a log shows a resolved instance."""
    if row.exit_code_line is not None:
        return {"exit_code_line": row.exit_code_line}
    if not (row.fail_to_pass or row.expected_statuses):
        raise InvalidRequest("FAIL_TO_PASS: names no test")
    parser = log_parser or _parser(row)
    if row.expected_statuses:
        return {"expected_statuses": row.expected_statuses, "log_parser": parser}
    lists = {"fail_to_pass": list(row.fail_to_pass), "pass_to_pass": list(row.pass_to_pass), "log_parser": parser}
    return {**lists, "ignore_timings": True} if row.ignore_timings else lists


def _parser(row: SweBenchRow) -> str:
    if row.log_parser is not None:
        return "pytest" if row.log_parser in PYTEST_PARSERS else row.log_parser
    if row.repo in _OTHER_RUNNERS:
        raise InvalidRequest(
            f"{row.instance_id}: the tests of {row.repo} are not pytest's, and its row says neither how they run "
            "nor how they are read. Give the row `test_cmd` and `log_parser` (on import: --test-command and "
            "--log-parser), or take a dataset of SWE-bench 5."
        )
    return "pytest"

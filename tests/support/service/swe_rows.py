"""One bug as the datasets of the SWE family write it: `repository` makes the clone and SWE-bench's row of it."""

from __future__ import annotations

import json
from typing import Any

FAMILIES = ("swe-bench", "swe-gym", "skyrl", "skyrl-json", "swe-smith", "r2e-gym", "rebench", "rebench-v2", "openswe")

_RUN_TESTS = "PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -rA -p no:cacheprovider"


def family_row(family: str, row: dict[str, Any], new_tests: str) -> dict[str, Any]:
    """`row` in the columns of a dataset. new_tests: the test file of the fix."""
    return _MAKERS[family](row, new_tests)


def _swe_gym(row: dict[str, Any], _new_tests: str) -> dict[str, Any]:
    return {**row, "FAIL_TO_PASS": _names(row, "FAIL_TO_PASS"), "PASS_TO_PASS": _names(row, "PASS_TO_PASS")}


def _skyrl(row: dict[str, Any], new_tests: str) -> dict[str, Any]:
    inner = _swe_gym(row, new_tests)
    return {"prompt": [], "data_source": "SWE-Gym/SWE-Gym", "ability": "coding", "instance": inner}


def _skyrl_json(row: dict[str, Any], new_tests: str) -> dict[str, Any]:
    return {**_skyrl(row, new_tests), "instance": json.dumps(_swe_gym(row, new_tests))}


def _swe_smith(row: dict[str, Any], _new_tests: str) -> dict[str, Any]:
    """Its repository is sound, with the tests in it; the patch breaks it."""
    return {
        "instance_id": "dogs__kennel.01234567.func_basic__abcdefgh",
        "repo": "swesmith/dogs__kennel.01234567",
        "patch": _reversed(row["patch"]),
        "FAIL_TO_PASS": _names(row, "FAIL_TO_PASS"),
        "PASS_TO_PASS": _names(row, "PASS_TO_PASS"),
        "image_name": "swebench/swesmith.x86_64.dogs_1776_kennel.01234567",
        "problem_statement": row["problem_statement"],
    }


def _r2e_gym(row: dict[str, Any], new_tests: str) -> dict[str, Any]:
    return {
        "repo_name": "kennel",
        "docker_image": "namanjain12/kennel_final:" + "ab" * 20,
        "commit_hash": "ab" * 20,
        "problem_statement": row["problem_statement"],
        "parsed_commit_content": json.dumps(_parsed_commit(row["patch"])),
        "execution_result_content": json.dumps(
            {"test_file_names": ["test_1.py"], "test_file_codes": [new_tests], "new_commit_res_stdout": "..."}
        ),
        "expected_output_json": json.dumps({"test_add": "PASSED", "test_double": "PASSED"}),
    }


def _rebench(row: dict[str, Any], _new_tests: str) -> dict[str, Any]:
    return {**_swe_gym(row, ""), "install_config": {"test_cmd": _RUN_TESTS, "log_parser": "parse_log_pytest"}}


def _rebench_v2(row: dict[str, Any], _new_tests: str) -> dict[str, Any]:
    return {
        **_swe_gym(row, ""),
        "image_name": "docker.io/swerebenchv2/dogs-kennel:1",
        "language": "python",
        "install_config": {"test_cmd": [f"{_RUN_TESTS} test_kennel.py"], "log_parser": "parse_log_pytest"},
    }


def _openswe(row: dict[str, Any], _new_tests: str) -> dict[str, Any]:
    script = f"""#!/bin/bash
git apply -v - <<'EOF_114329324912'
{row["test_patch"]}EOF_114329324912
{_RUN_TESTS} test_kennel.py
rc=$?
echo "OPENSWE_EXIT_CODE=$rc"
"""
    return {**row, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]", "image_name": "openswe/k:1", "eval_script": script}


def _swe_bench(row: dict[str, Any], _new_tests: str) -> dict[str, Any]:
    return row


_MAKERS = {
    "swe-bench": _swe_bench,
    "swe-gym": _swe_gym,
    "skyrl": _skyrl,
    "skyrl-json": _skyrl_json,
    "swe-smith": _swe_smith,
    "r2e-gym": _r2e_gym,
    "rebench": _rebench,
    "rebench-v2": _rebench_v2,
    "openswe": _openswe,
}


def _names(row: dict[str, Any], column: str) -> list[str]:
    value = row[column]
    return json.loads(value) if isinstance(value, str) else value


def _reversed(patch: str) -> str:
    """A patch of changed lines only, the other way round."""
    turned = {"-": "+", "+": "-"}
    return "".join(
        line if line.startswith(("---", "+++")) or line[0] not in turned else turned[line[0]] + line[1:]
        for line in patch.splitlines(keepends=True)
    )


def _parsed_commit(patch: str) -> dict[str, Any]:
    """A patch of one file and one hunk as R2E-Gym's `ParsedCommit`."""
    diff, _index, minus, plus, hunk, *lines = patch.splitlines()
    old, new = (
        dict(zip(("start", "length"), map(int, part[1:].split(",")), strict=True)) for part in hunk.split()[1:3]
    )
    kinds = {" ": "context", "+": "added", "-": "deleted"}
    return {
        "file_diffs": [
            {
                "header": {"file": {"path": diff.rpartition(" b/")[2]}, "misc_line": None},
                "minus_file": {"path": minus[4:]},
                "plus_file": {"path": plus[4:]},
                "hunks": [
                    {
                        "descriptor": {
                            "old_range": old,
                            "new_range": new,
                            "section": hunk.split("@@")[2].strip(),
                        },
                        "line_group": {"all_lines": [{"content": line[1:], "type": kinds[line[0]]} for line in lines]},
                    }
                ],
            }
        ]
    }
